"""A server that another run left up is refused by name, and what is not shown at the end is loud."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import pytest
from audited import check
from in_memory import MemoryEvaluator, MemoryReplica, MemoryTeacher, MemoryTrainer
from recorded import rows_of
from rich.console import Console
from served_app import at_url, replica_app
from started import to_the_end

from distill.aio import cancel
from distill.cli.main import MADE, show
from distill.cli.options import guarded
from distill.controller import end_problems
from distill.evaluation.schedule import HttpEvaluator
from distill.evaluation.service import app
from distill.interfaces import Hooks
from distill.launch.preflight import claim_of
from distill.metrics.samples import Quarantine
from distill.metrics.summary import complete
from distill.rollout.replica_client import HttpReplica
from sync import wire
from sync.base.errors import RemoteError, WrongServer
from sync.wire import EvalReply, EvalRequest, Generated, ReplicaState, RunIdentity, Version
from sync.wire.claims import Claim
from sync.wire.client import BlockingPeer
from sync.wire.server import Gate

OTHER = RunIdentity("test", "0123", "model")


def replica(engine: MemoryReplica, claim: Claim) -> AbstractAsyncContextManager[str]:
    return at_url(Gate(replica_app(engine), "", claim, ("/distill/v1/generate", "/distill/v1/update")))


async def whole(run: Any, trainer: MemoryTrainer | None = None) -> dict[str, Any]:
    """The summary of a run to its end, after which nothing is connected to its replicas."""
    try:
        return await to_the_end(run, trainer)
    finally:
        await asyncio.gather(*(one.engine.aclose() for one in run.pool.replicas.values()))


# --- servers of another run -------------------------------------------------------------------------------


async def test_a_replica_left_up_from_another_run_ends_the_run_with_its_name(controller) -> None:
    left = MemoryReplica(version=Version(0, 120))
    async with replica(left, Claim(OTHER)) as url:
        claim = Claim()
        run = controller(replicas={"r0": HttpReplica(url, claim=claim), "r1": MemoryReplica()}, claim=claim)
        with pytest.raises(WrongServer, match=r"replica r0: .*it serves run 'test' \(id 0123, model"):
            await whole(run)
    assert left.generated == 0
    assert left.updates == []


async def test_a_run_claims_its_replicas_and_finds_them_again_when_it_resumes(controller, config) -> None:
    held, engine = Claim(RunIdentity("test")), MemoryReplica()
    async with replica(engine, held) as url:
        for steps in (2, 3):
            claim = Claim()
            replicas = {"r0": HttpReplica(url, claim=claim)}
            run = controller(config(run={"steps": steps}), replicas=replicas, claim=claim)
            summary = await whole(run, MemoryTrainer(run.session))
            assert summary["problems"] == []
            assert summary["run"] == {"name": "test", "id": held.run_id, "model": "model"}
            assert held.run == run.record.run


async def test_an_evaluator_left_up_from_another_run_ends_the_run(controller) -> None:
    nothing: Any = None
    async with at_url(app(MemoryEvaluator().evaluate, nothing, nothing, "", Claim(OTHER))) as url:
        claim = Claim()
        evaluator = HttpEvaluator(url, claim=claim)
        run = controller(evaluator=evaluator, claim=claim)
        with pytest.raises(WrongServer, match=r"it serves run 'test' \(id 0123"):
            await whole(run)
        await evaluator.aclose()
    assert run.record.state.evaluations == []


async def test_a_teacher_of_another_model_ends_the_run_and_costs_no_rollout(controller) -> None:
    class Swapped(MemoryTeacher):
        async def score(self, sequences: Any, want: Any, limit: float) -> Any:
            if len(self.requests) >= 2:
                raise WrongServer("http://t answers with model b, and a was checked when the run started")
            return await super().score(sequences, want, limit)

    run = controller(teachers={"t": Swapped()})
    with pytest.raises(WrongServer, match="answers with model b"):
        await whole(run)
    assert not run.record.state.counters.dropped


class Stolen(MemoryReplica):
    """From its second life on it serves another run."""

    lives = 0

    def revive(self) -> None:
        super().revive()
        self.lives += 1

    async def state(self, digests: bool = False) -> ReplicaState:
        if self.lives:
            raise WrongServer("it serves run 'other' (id 77) and was asked for run 'test'")
        return await super().state(digests)


@pytest.mark.virtual_time
async def test_a_replica_that_another_run_took_over_is_taken_out_and_the_others_go_on(controller) -> None:
    stolen = Stolen(seed=1, token_seconds=0.0005)
    run = controller(replicas={"r0": MemoryReplica(token_seconds=0.0005), "r1": stolen})
    run.pool.retry_seconds = 0.02
    trainer = MemoryTrainer(run.session, step_seconds=0.01)

    async def steal() -> None:
        while stolen.generated == 0:
            await trainer.stepped.wait(0.01)
        stolen.die()
        stolen.revive()

    summary, _ = await asyncio.gather(whole(run, trainer), steal())
    assert summary["weights_identical_by_replica"] == {"r0": True}
    assert stolen.closed
    assert summary["problems"] == []
    assert not set(run.record.state.counters.dropped) & {"engine_failed", "impossible_version"}


async def test_a_replica_of_another_run_cannot_be_added(controller, config) -> None:
    async with replica(MemoryReplica(), Claim(OTHER)) as url:
        claim = Claim()
        engine = HttpReplica(url, claim=claim)
        run = controller(config(run={"steps": 1000}), connect=lambda _: engine, claim=claim)
        task, call = asyncio.create_task(run.run()), BlockingPeer(run.url).call
        with pytest.raises(RemoteError, match=r"it serves run 'test' \(id 0123"):
            await asyncio.to_thread(call, "/v1/servers", wire.ServerRegisters(None, url), wire.ServerLease)
        assert list(run.pool.replicas) == ["r0"]
        assert engine._closed
        await cancel([task])


@pytest.mark.parametrize(
    ("name", "run_id", "accepted"),
    [("test", None, True), ("test", "its own", True), ("test", "0123", False), ("words", None, False)],
)
async def test_a_trainer_of_another_run_is_not_welcomed(controller, name, run_id, accepted) -> None:
    run = controller()
    mine = run.record.run
    hello = wire.TrainerHello(1, None, "model", name, mine.id if run_id == "its own" else run_id)
    if accepted:
        assert (await run.session.hello(hello)).run == RunIdentity("test", mine.id, "model")
    else:
        with pytest.raises(RemoteError, match=rf"\(id {mine.id}\), the trainer is of run '{name}'"):
            await run.session.hello(hello)
        assert len(run.record.state.lineages) == 0
    run.close()


async def test_a_trainer_that_talks_to_the_controller_of_another_run_is_refused(controller) -> None:
    run = controller()
    task, client = asyncio.create_task(run.run()), BlockingPeer(run.url, claim=Claim(OTHER))
    with pytest.raises(WrongServer, match=rf"it serves run 'test' \(id {run.record.run.id}\)"):
        await asyncio.to_thread(client.call, "/v1/servers", None, wire.Servers)
    await cancel([task])


# --- versions that cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (Version(0, 120), r"L000-v00000120, and this run published L000-v00000000 to L000-v0000000\d"),
        (Version(7, 1), "L007-v00000001, and this run published nothing of lineage 7: "),
        (Version(0, -3), "L000-v-0000003, and this run published"),
    ],
)
async def test_a_version_that_was_never_published_costs_its_completion_and_enters_no_figure(
    controller, version: Version, words: str, tmp_path
) -> None:
    """Every third one names it."""
    aside: list[Quarantine] = []
    engine = MemoryReplica()

    def spoil(answer: Generated) -> Generated:
        spans = [msgspec.structs.replace(span, version=version) for span in answer.spans]
        return msgspec.structs.replace(answer, spans=spans) if engine.generated % 3 == 0 else answer

    engine.spoil = spoil
    run = controller(hooks=Hooks(quarantined=aside.append), replicas={"r0": engine})
    trainer = MemoryTrainer(run.session)
    summary = await whole(run, trainer)
    assert summary["completed"]
    assert summary["rollout"]["dropped"]["impossible_version"] == len(aside) >= 6
    assert 0 <= summary["buffer"]["age_mean"] <= summary["buffer"]["age_max"] <= 2
    assert {one.reason for one in aside} == {"impossible_version"}
    assert all(re.search(f"are of {words}", one.detail) for one in aside[-3:]), aside[-1].detail
    assert check(tmp_path, trainer.ledger).ok


async def test_a_replica_whose_version_is_not_on_record_is_brought_to_the_newest(controller) -> None:
    ahead = MemoryReplica(version=Version(0, 120))
    run = controller(replicas={"r0": ahead})
    summary = await whole(run)
    assert summary["problems"] == []
    assert ahead.updates[0].step < 6
    assert "impossible_version" not in summary["rollout"]["dropped"]


# --- the end of a run -------------------------------------------------------------------------------------


class Asked(MemoryReplica):
    digests = 0
    """How often it was asked for them."""

    async def state(self, digests: bool = False) -> ReplicaState:
        self.digests += digests
        return await super().state(digests)


class Altered(Asked):
    async def state(self, digests: bool = False) -> ReplicaState:
        state = await super().state(digests)
        return msgspec.structs.replace(state, digests={"model.weight": "other"}) if digests else state


def failing(error: Exception = RemoteError("disk full")) -> MemoryEvaluator:
    """The evaluation of the last version fails."""
    return MemoryEvaluator(trouble=lambda version: error if version.step == 6 else None)


class Stale(MemoryEvaluator):
    async def evaluate(self, request: EvalRequest) -> EvalReply:
        return msgspec.structs.replace(await super().evaluate(request), version=Version(0, 120))


TAKEN = WrongServer("it serves run 'other' (id 77)")


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"replicas": {"r0": Altered()}}, "r0 holds other weights than the trainer at L000-v00000006"),
        ({"replicas": {"r0": MemoryReplica(), "r1": MemoryReplica(up=False)}}, "not compared with those of"),
        ({"evaluator": failing()}, 'L000-v00000006 could not be evaluated, so "after" is empty: disk full'),
        ({"evaluator": failing(TAKEN)}, "\"after\" is empty: it serves run 'other'"),
        ({"evaluator": Stale()}, "L000-v00000006 and reports L000-v00000120: it serves another run"),
    ],
)
async def test_what_is_not_shown_at_the_end_is_in_the_summary_the_record_and_the_audit(
    controller, config, tmp_path, parts: dict[str, Any], words: str
) -> None:
    settings = config(weights={"timeout_seconds": 0.3})
    run = controller(settings, **parts)
    trainer = MemoryTrainer(run.session)
    summary = await whole(run, trainer)
    assert summary["completed"]
    (problem,) = summary["problems"]
    assert words in problem
    weights, problems = map(json.loads, rows_of(tmp_path, "SELECT weights, problems FROM conclusion")[-1])
    assert problems == [problem]
    assert check(tmp_path, trainer.ledger).violations == {"unproven": [problem]}
    assert (weights == {"r0": True}) is ("evaluator" in parts)
    figures = complete(settings, summary, 1.0, {})
    if "evaluator" in parts:
        evaluated = [one["version"][-1] for one in summary["evaluations"]]  # a busy evaluator skips versions
        assert "6" not in evaluated
        assert evaluated[:1] == ([] if isinstance(parts["evaluator"], Stale) else ["0"])
        assert evaluated == [] or figures["before"]["reverse_kl"] == 1.0
    assert figures["after"] is None


async def test_a_run_that_is_resumed_makes_up_for_what_was_not_shown(controller, config, tmp_path) -> None:
    ledger = dict[int, dict[int, list[str]]]()
    for evaluator, problems in ((failing(), 1), (MemoryEvaluator(), 0)):
        run = controller(evaluator=evaluator)
        trainer = MemoryTrainer(run.session)
        summary = await whole(run, trainer)
        assert len(summary["problems"]) == problems
        ledger |= trainer.ledger
    assert "unproven" not in check(tmp_path, ledger).violations
    figures = complete(config(), summary, 1.0, {})
    assert figures["after"]["version"] == figures["version"] == "L001-v00000006"


@pytest.mark.parametrize(("engine", "problems"), [(Asked(), 0), (Altered(), 1)])
async def test_a_run_that_was_interrupted_owes_no_proof_but_tells_what_differs(
    controller, config, tmp_path, engine: Asked, problems: int
) -> None:
    run = controller(config(run={"steps": 1000}), replicas={"r0": engine, "away": MemoryReplica(up=False)})
    trainer = MemoryTrainer(run.session)

    async def stop() -> None:
        await trainer.reached(2)
        run.request_stop("enough")

    summary, _ = await asyncio.gather(whole(run, trainer), stop())
    assert summary["weights_missing"] == ["away"]
    assert len(summary["problems"]) == problems
    assert engine.digests == 1
    run = controller()
    run.request_stop("before its trainer has begun")
    assert (await run.run())["problems"] == []
    recorded = map(json.loads, rows_of(tmp_path, "SELECT problems FROM conclusion"))
    assert [*recorded] == [summary["problems"], []], "of each start"


async def test_a_run_that_is_interrupted_once_all_is_shown_is_complete(controller, monkeypatch) -> None:
    run = controller()
    close = run.broadcasts.close

    async def interrupted() -> None:
        run.request_stop("a person said so")
        await close()

    monkeypatch.setattr(run.broadcasts, "close", interrupted)
    assert (await whole(run))["completed"]


async def test_a_run_that_is_interrupted_in_its_last_evaluation_ends(controller: Any) -> None:
    evaluating = asyncio.Event()

    class Slow(MemoryEvaluator):
        async def evaluate(self, request: EvalRequest) -> EvalReply:
            if request.version.step == 6:
                evaluating.set()
                await asyncio.Event().wait()
            return await super().evaluate(request)

    run = controller(evaluator=Slow())

    async def stop() -> None:
        await evaluating.wait()
        run.request_stop("a person said so")

    summary, _ = await asyncio.gather(whole(run), stop())
    assert (summary["steps"], summary["completed"], summary["problems"]) == (6, False, [])


def test_a_run_shows_what_it_made_and_fails_with_a_line_for_each_problem(tmp_path, capsys) -> None:
    summary = {
        "warnings": ["every completion was cut off"],
        "problems": ["replica r0 holds other weights", "L000-v00000006 could not be evaluated"],
        "train": {"tokens_share": 1.0},
        "rollout": {"dropped": {}, "tokens_total": 8},
        "perf": {"waited_seconds": {}, "busy_seconds": {}, "idle_seconds": {}},
        "model": "final",
    }
    for name in ("final", "report.html"):
        (tmp_path / name).mkdir()
    models = {"tiny/teacher": "the teacher"}
    assert guarded(lambda: show(Console(), tmp_path, summary, models)) == 1
    first, second = summary["problems"]
    assert capsys.readouterr().err.splitlines() == [f"distill: {first}", second]
    assert guarded(lambda: show(Console(), tmp_path, {**summary, "problems": []})) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "warning: every completion was cut off" in printed
    files = [line for line in printed if line.startswith(str(tmp_path))]
    assert [line.split()[0].removeprefix(f"{tmp_path}/") for line in files] == ["final", "report.html"]
    assert files[1].endswith(MADE["report.html"])


def test_a_preflight_names_the_run_of_its_folder_if_one_has_begun(controller, config, tmp_path) -> None:
    settings = config(run={"folder": tmp_path, "name": "toy"})
    assert claim_of(settings).run == RunIdentity("toy")
    run = controller()
    asyncio.run(run.record.store.commit())
    run.close()
    (tmp_path / "toy").mkdir()
    (tmp_path / "run.db").rename(tmp_path / "toy" / "run.db")
    assert claim_of(settings).run == RunIdentity("toy", run.record.run.id)


def test_a_trainer_without_a_last_message_and_an_empty_pool_are_reported() -> None:
    assert "left without its last word" in end_problems(None, {}, None, 300.0)[0]
    (problem,) = end_problems(Version(0, 3), {}, None, 300.0)
    assert "not compared with those of any replica, which had 300 s" in problem
    assert end_problems(Version(0, 3), {"r0": True}, None, 300.0) == []
