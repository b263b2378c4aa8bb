"""Whole runs in one process."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from audited import check
from in_memory import (
    MemoryEvaluator,
    MemoryPrompts,
    MemoryReplica,
    MemoryTeacher,
    MemoryTrainer,
    fetching,
    rows_in,
)
from started import ended, killed_after, to_the_end
from virtual_time import LONG

from distill import events
from distill.aio import cancel
from distill.interfaces import Hooks
from distill.metrics.results import Summary
from distill.metrics.samples import Quarantine
from distill.metrics.summary import complete as completed
from distill.prompts.stream import Prompt, PromptStream, group_of
from distill.record.changes import Checkpointed
from distill.record.store import Store
from distill.scoring import seed_of
from sync import wire
from sync.base.errors import DataError
from sync.wire import Generated, GeneratePrompt, GenerateRequest, Published, Version, Want, pack, unpack

pytestmark = pytest.mark.virtual_time
LEARNED = 50
"""Steps in which an adaptive depth has found its level."""


async def test_every_event_has_a_handler(controller) -> None:
    public = [one for name, one in vars(events).items() if not name.startswith("_")]
    kinds = {kind for kind in public if isinstance(kind, type) and hasattr(kind, "_fields")}
    run = controller()
    assert {kind.__name__ for kind in kinds} <= {kind.__name__ for kind in run.events._handlers}


async def test_an_asynchronous_run_trains_every_step_and_accounts_for_every_rollout(controller) -> None:
    teacher = MemoryTeacher()
    run = controller(teachers={"t": teacher})
    summary, trainer = await ended(run, ranks=2)

    assert [version.step for version in trainer.batches] == [0, 1, 2, 3, 4, 5]
    assert len(trainer.trained) == len({*trainer.trained}) == 6 * 8
    assert summary["steps"] == 6
    assert summary["stop_reason"] == "all steps are done"
    assert summary["rollout"]["batched"] == 48
    assert summary["buffer"]["age_max"] <= 2 == summary["buffer"]["age_limit"]
    assert summary["weights_identical"] is True
    assert 0 < summary["train"]["tokens_share"] <= 1
    figures = completed(run.config, summary, 1.0, {})
    assert figures.keys() == Summary.__annotations__.keys(), "what summary.json holds is declared"
    rollouts = summary["rollout"]
    assert rollouts["issued"] == 48 + rollouts["open"] + sum(rollouts["dropped"].values())
    metrics, newest = run.metrics(), run.record.state.applied[-1]
    assert metrics["teacher/t/sequences"] == sum(teacher.requests) >= 48
    assert (metrics["sync/step"], metrics["sync/bytes"]) == (newest.version.step, newest.bytes)


@pytest.mark.parametrize(
    ("steps", "step_seconds", "oldest_mean"),
    [(150, 0.6, 1.5), (150, 0.36, 2.0), (400, 0.02, 4.0)],
    ids=["the trainer is the bottleneck", "balanced", "the replicas are"],
)
async def test_an_adaptive_depth_gives_younger_rollouts_at_the_speed_of_a_full_one(
    controller, config, tmp_path: Path, steps: int, step_seconds: float, oldest_mean: float
) -> None:
    asyncio.get_running_loop().threads = False  # type: ignore[attr-defined]
    found = {}
    for depth in ("full", "adaptive"):
        run = controller(
            config(run={"steps": steps}, buffer={"max_staleness": 4, "depth": depth}),
            replicas={f"r{n}": MemoryReplica(seed=n, longest=12, token_seconds=0.04) for n in range(4)},
            store=Store(tmp_path / depth, "never"),
        )
        trainer, ends = MemoryTrainer(run.session, step_seconds=step_seconds), list[float]()
        trainer.record = lambda version, shares, ends=ends: ends.append(time.monotonic())  # type: ignore[misc]
        summary = await to_the_end(run, trainer)
        found[depth] = ends[-1] - ends[LEARNED], summary["buffer"]["age_mean"]
    (full_seconds, full_age), (seconds, age) = found["full"], found["adaptive"]
    assert age <= min(oldest_mean, full_age + 0.05)
    assert full_seconds / seconds >= 0.98


async def test_the_only_replica_may_come_back_in_the_middle_of_a_run_that_broadcasts(controller) -> None:
    replica = MemoryReplica(token_seconds=0.0005)
    run = controller(replicas={"r0": replica})
    run.pool.retry_seconds = 0.02
    trainer = MemoryTrainer(run.session, broadcasts=True)

    async def restart() -> None:
        while replica.version is None or replica.version.step < 2:
            await trainer.stepped.wait()
        replica.die()
        await asyncio.sleep(0.02)
        replica.revive()

    summary, _ = await asyncio.gather(to_the_end(run, trainer), restart())
    assert summary["completed"]
    assert summary["weights_identical"] is True
    assert run.pool.replicas["r0"].joined == 2


async def test_a_version_that_was_broadcast_is_recorded_again_when_it_is_in_the_store_too(controller) -> None:
    run = controller()
    hello = wire.TrainerHello(world_size=1, checkpoint=None, fingerprint="model", run=run.session.run.name)
    version, state = (await run.session.hello(hello)).version, run.record.state
    run.request_stop("announcements need no replica from now on")
    sent = Published(version=version, kind="broadcast", bytes=5, full_bytes=5, seconds=0.1, rendezvous="h:1")
    stored = Published(version=version, kind="full", bytes=5, full_bytes=5, seconds=0.1)
    for event in (sent, sent, stored, stored):
        await run.session.event(event)
    assert [(one.version, one.kind) for one in state.published] == [(version, "broadcast"), (version, "full")]
    assert state.target == state.published[-1]
    assert state.counters.published == 1


async def test_a_trainer_without_a_checkpoint_though_one_is_on_record_is_told_of(controller, caplog) -> None:
    run, hello = controller(), wire.TrainerHello(1, None, "model", "test")
    await run.session.hello(hello)
    run.record.write(Checkpointed(Version(0, 2), "c"))
    await run.session.hello(hello)
    assert "no checkpoint is left, though L000-v00000002 is on record" in caplog.text


HALF_AND_KEPT = {"objective": {"type": "sft", "on_policy": 0.5}, "buffer": {"scores": "reference"}}


@pytest.mark.parametrize(("with_controller", "sections"), [(False, {}), (True, {}), (True, HALF_AND_KEPT)])
async def test_a_restarted_trainer_gets_the_same_batches(
    controller, config, with_controller: bool, sections: dict[str, Any]
) -> None:
    """From a controller that went on, or that was killed with it and goes on from its record; also the
    teacher's half, and where the teacher keeps its scores."""
    settings = config(run={"steps": 12}, **sections)
    want = Want(topk=2, entropy=True)
    run = controller(settings, want=want)
    trainer = MemoryTrainer(run.session, ranks=2, checkpoint_every=4, step_seconds=0.005)
    running, first = asyncio.create_task(run.run()), asyncio.create_task(trainer.run())
    await trainer.reached(7)
    await cancel([first, running] if with_controller else [first])
    assert trainer.checkpoint == Version(0, 4)
    if with_controller:
        run = controller(settings, want=want)
        running, trainer.session = asyncio.create_task(run.run()), run.session

    await asyncio.wait_for(trainer.run(), 60)
    summary = await asyncio.wait_for(running, 60)
    assert (trainer.welcomes[1].version, trainer.welcomes[1].parent) == (Version(1, 4), Version(0, 4))
    for step in range(4, 7):
        old, new = trainer.batches[Version(0, step)], trainer.batches[Version(1, step)]
        assert [share.micro_batches for share in new] == [share.micro_batches for share in old]
    assert summary["steps"] == 12
    assert summary["buffer"]["age_max"] <= 2
    assert not with_controller or summary["rollout"]["batched"] == 12 * 8


async def test_a_trainer_that_replaces_one_whose_end_nobody_saw_gets_the_batch_that_was_asked_for(
    controller, config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its beginning waits for disk space, the other stages go on."""
    run = controller(config(run={"steps": 12}), replicas={"r0": MemoryReplica(token_seconds=0.05)})
    trainer = MemoryTrainer(run.session)
    running, first = asyncio.create_task(run.run()), asyncio.create_task(trainer.run())
    await trainer.reached(3)
    while run.session.ready >= run.session.requested:
        await run.events.changed.wait(0.01)
    await cancel([first])
    open_lineage = run.record.open_lineage

    async def slowly(*begins: Any) -> Any:
        opening = await open_lineage(*begins)
        await asyncio.sleep(LONG)
        return opening

    monkeypatch.setattr(run.record, "open_lineage", slowly)
    await asyncio.wait_for(trainer.run(), 600)
    assert (await asyncio.wait_for(running, 60))["steps"] == 12


async def test_evaluations_name_the_best_and_patience_ends_a_run_that_gets_no_better(
    controller, config
) -> None:
    seen: list[tuple[int, bool]] = []
    hooks = Hooks(evaluated=lambda report, best: seen.append((report.version.step, best)))
    evaluator = MemoryEvaluator(kl=lambda version: 1.0 + abs(version.step - 1))
    settings = config(run={"steps": 1000}, evaluation={"every": 1, "patience": 3})
    run = controller(settings, hooks, evaluator=evaluator)
    summary = await to_the_end(run, MemoryTrainer(run.session, step_seconds=0.005))
    assert seen[:3] == [(0, True), (1, True), (2, False)]
    assert summary["best"]["reverse_kl"] == 1.0
    assert summary["steps"] < 1000
    assert "no better reverse_kl" in summary["stop_reason"]


# --- policies ---------------------------------------------------------------------------------------------


class OneSlow(MemoryReplica):
    """The completion of one prompt waits for `release`."""

    release: asyncio.Event

    async def _complete(self, prompt: GeneratePrompt, request: GenerateRequest) -> Generated:
        if prompt.id != "0:5:0":
            return await super()._complete(prompt, request)
        begun = self.version or Version(0, 0)
        await self.release.wait()
        answer = await super()._complete(prompt, request)
        return msgspec.structs.replace(answer, spans=[wire.VersionSpan(begun, 0, answer.token_ids.shape[0])])


async def test_a_batch_waits_for_a_late_rollout_that_is_trained_within_the_bound(controller, config) -> None:
    """Prompt 0:5:0, begun at version 0, is written once it is waited for."""
    sections = {"buffer": {"late": {"type": "wait", "seconds": 15}}, "rollout": {"request_size": 1}}
    replica = OneSlow()
    replica.release = asyncio.Event()
    run = controller(config(run={"steps": 12}, evaluation={"every": 0}, **sections), replicas={"r0": replica})
    trainer = MemoryTrainer(run.session, step_seconds=0.02)

    async def watch() -> None:
        while not run.batcher.late.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        replica.release.set()

    summary, _ = await asyncio.gather(to_the_end(run, trainer), watch())
    (step,) = [step for step, ids in trainer.ledger[0].items() if "0:5:0" in ids]
    assert step - 1 == 2  # the last batch that may take what was begun at version 0
    assert summary["rollout"]["dropped"] == {}
    assert summary["buffer"]["age_max"] == 2
    assert summary["steps"] == 12
    assert summary["perf"]["waited_seconds"]["trainer"]["late rollouts"] > 0
    assert check(run.record.store.folder, trainer.ledger).ok


async def test_every_row_has_the_mean_reward_of_its_whole_group(controller, config) -> None:
    run = controller(
        config(objective={"type": "sampled", "task": {"baseline": "group"}}, rollout={"per_prompt": 4}),
        prompts=PromptStream(MemoryPrompts(), seed=0, per_prompt=4),
        reward_fn=lambda prompt, tokens: float(len(tokens) % 3),
    )
    _, trainer = await ended(run, ranks=2)
    for shares in trainer.batches.values():
        groups = defaultdict[str, list[tuple[float, float]]](list)
        for rows in rows_in(shares):
            assert unpack(rows.reward).tolist() == (unpack(rows.completion_lens) % 3).tolist()
            for name, *of in zip(rows.ids, unpack(rows.reward), unpack(rows.baseline), strict=True):
                groups[group_of(name)].append(tuple(of))
        for pairs in groups.values():
            assert len(pairs) == 4
            assert {baseline for _, baseline in pairs} == {sum(reward for reward, _ in pairs) / 4}


async def test_half_of_a_run_is_the_teachers_and_all_is_accounted_for(controller, config, tmp_path) -> None:
    replica, teacher = MemoryReplica(), MemoryTeacher()
    run = controller(
        config(objective={"type": "sft", "on_policy": 0.5}, buffer={"max_staleness": 0}),
        replicas={"r0": replica},
        teachers={"t": teacher},
    )
    summary, trainer = await ended(run, ranks=2)

    assert replica.generated == len(teacher.completed) == 24
    written = set(teacher.completed)
    for (version, _), ids in zip(trainer.batches, trainer.ledger[0].values(), strict=True):
        assert version == 0
        assert len(written.intersection(ids)) == 4, "without drops every synchronous batch has its share"
    flags = [(rows.ids, unpack(rows.by_teacher)) for rows in trainer.rows if rows.by_teacher is not None]
    assert {i for ids, flag in flags for i, by in zip(ids, flag, strict=True) if by} == written
    assert summary["buffer"]["age_max"] == 0

    report = check(tmp_path, trainer.ledger)
    assert report.ok, report
    assert report.tokens_by_teacher == summary["rollout"]["tokens_total_by_teacher"]
    assert 0 < summary["train"]["tokens_total_by_teacher"] < summary["train"]["tokens_total"] == report.tokens


async def test_a_run_on_the_teachers_completions_needs_the_replicas_for_their_versions_alone(
    controller, config
) -> None:
    replica = MemoryReplica()
    run = controller(config(objective={"type": "sft"}), replicas={"r0": replica})
    summary = await to_the_end(run)
    assert (summary["steps"], replica.generated) == (6, 0)
    assert summary["train"]["tokens_total_by_teacher"] == summary["train"]["tokens_total"]


async def test_a_prompt_that_its_teacher_refuses_is_dropped_and_another_issued(controller, config) -> None:
    teacher = MemoryTeacher(refuses=lambda name: name.startswith("0:1"))
    run = controller(config(objective={"type": "sft"}), teachers={"t": teacher})
    summary = await to_the_end(run)
    assert summary["completed"]
    assert summary["rollout"]["dropped"]["teacher_refused"] > 0


async def test_a_resumed_run_has_the_teacher_write_the_same_again(controller, config) -> None:
    """Each of its texts in a batch, before the kill and after, is what it writes for its number."""
    settings = config(objective={"type": "sft", "on_policy": 0.5}, run={"steps": 12})
    run = controller(settings)
    trainers = [MemoryTrainer(run.session)]
    await killed_after(5, run, trainers[0])
    run = controller(settings)
    trainers.append(MemoryTrainer(run.session))
    await to_the_end(run, trainers[1])
    teacher = MemoryTeacher()
    for trainer in trainers:
        texts = 0
        for rows in (rows for rows in trainer.rows if rows.by_teacher is not None):
            lens = np.stack([unpack(rows.prompt_lens), unpack(rows.completion_lens)], axis=1)
            parts = np.split(unpack(rows.tokens), lens.cumsum()[:-1])
            for id, prompt, text, by_teacher in zip(
                rows.ids, parts[::2], parts[1::2], unpack(rows.by_teacher), strict=True
            ):
                if by_teacher:
                    texts += 1
                    seed = seed_of(settings.run.seed, int(id.split(":")[1]))
                    answer = await teacher.generate([wire.TeacherPrompt(id, pack(prompt), seed)], 8, [])
                    assert unpack(answer.results[0].token_ids).tolist() == text.tolist()
        assert texts


async def test_scores_are_released_when_a_checkpoint_makes_their_step_safe(controller, config) -> None:
    want, teacher = Want(topk=2), MemoryTeacher()
    settings = config(buffer={"scores": "reference"}, run={"steps": 10})
    run = controller(settings, teachers={"t": teacher}, want=want)
    scores = fetching(teacher, want)
    trainer = MemoryTrainer(run.session, checkpoint_every=2, step_seconds=1.0, scores=scores)
    await to_the_end(run, trainer)
    trained = {
        kept.key: version.step
        for version, shares in trainer.batches.items()
        for rows in rows_in(shares)
        for kept in rows.kept
    }
    released = Counter(step for key, step in trained.items() if key not in teacher.kept)
    assert released == dict.fromkeys(range(8), 8), "all rows of the steps before the last checkpoint but one"


async def test_the_error_of_a_part_is_raised_as_it_is_not_in_a_group(controller) -> None:
    def route(source: str) -> str:
        raise DataError(f"no teacher has data source {source}")

    run = controller(route=route)
    with pytest.raises(DataError, match="no teacher has data source default"):
        await to_the_end(run)


async def test_a_reward_fn_that_fails_costs_the_rollout_and_not_the_run(controller) -> None:
    failed: list[tuple[list[int], list[int]]] = []

    def reward_fn(prompt: Prompt, completion: list[int]) -> float:
        if prompt.id == "0:3:0":
            failed.append((prompt.token_ids, completion))
            raise DataError(f"the reward_fn cannot read {prompt.id}")
        return 1.0

    quarantine: list[Quarantine] = []
    run = controller(reward_fn=reward_fn, hooks=Hooks(quarantined=quarantine.append))
    summary = await to_the_end(run)
    assert (summary["completed"], summary["error"]) == (True, None)
    told = [(one.id, one.reason, (one.prompt, one.tokens)) for one in quarantine]
    assert told == [("0:3:0", "function_failed", *failed)]


async def test_a_reward_fn_that_always_fails_ends_the_run_with_its_words(controller, config) -> None:
    def reward_fn(prompt: Prompt, completion: list[int]) -> float:
        raise DataError(f"the reward_fn cannot read {prompt.id}")

    run = controller(config(guard={"bad_answers": 3}), reward_fn=reward_fn)
    summary = await to_the_end(run)
    assert not summary["completed"]
    assert summary["error"].startswith("the reward_fn gave 3 unusable answers")
    assert "the reward_fn cannot read" in summary["error"]


async def test_what_a_user_wrote_and_fails_in_an_evaluation_ends_the_run_with_a_checkpoint(
    controller, config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: Any) -> None:
        raise DataError("ZeroDivisionError; the last of 8 completions in a row: mend the reward function")

    run = controller(config(run={"steps": 1000}), evaluator=MemoryEvaluator())
    monkeypatch.setattr(run.evaluations.generation, "completions", fails)
    trainer = MemoryTrainer(run.session)
    summary = await to_the_end(run, trainer)
    assert summary["error"].startswith("ZeroDivisionError")
    assert trainer.checkpoint == Version(0, summary["steps"])


async def test_a_run_that_the_guard_paused_stays_paused_when_the_disk_has_room(controller, config) -> None:
    run = controller(config(guard={"max_grad_norm": 1.0, "patience": 1}))
    run._bad_steps("step 3: grad_norm is 9")
    run.pause("disk", "runs has less than run.min_free_disk_gib = 1 GiB free")
    run.resume("disk")
    assert run.dispatcher.paused == {"guard"}
