"""Whole runs whose servers lie: every run ends, nothing unchecked is on record, no rollout is lost.

DISTILL_MUTANTS says how many answers are changed in all; the default keeps the suite fast.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from audited import check
from corrupted_messages import SpoiledEvaluator, SpoiledReplica, SpoiledSession, SpoiledTeacher, Spoiler
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from in_memory import (
    HELD_OUT_SET,
    ROUTING,
    MemoryEvaluator,
    MemoryPrompts,
    MemoryReplica,
    MemoryTeacher,
    MemoryTrainer,
    fetching,
    rows_in,
    with_nan,
    without_tokens,
)
from started import controlled, ended, to_the_end

from distill.config import RunConfig
from distill.events import AT_FAULT
from distill.interfaces import Components
from distill.prompts.stream import PromptStream
from distill.record.store import Store
from sync import wire
from sync.wire import Generated, GenerateFailed, Scored, ScoreRefused, Want, pack, unpack

MUTANTS = int(os.environ.get("DISTILL_MUTANTS", "1000"))
OF_A_RUN = 200
"""Answers that are changed in each run, at least."""
SEEN: Counter[tuple[str, str, str]] = Counter()
MESSAGES: tuple[type[msgspec.Struct], ...] = (
    *(Generated, wire.SamplingMask, wire.UpdateReply, wire.ReplicaState),
    *(Scored, wire.Kept, wire.TeacherCompletion, wire.ScoreReply, wire.TeacherGenerateReply),
    *(wire.EvalReply, wire.Divergence),
    *(wire.BatchRequest, wire.StepReport, wire.Published, wire.CheckpointSaved),
)


async def spoiled_run(
    config: RunConfig, folder: Path, seed: int
) -> tuple[dict[str, Any], MemoryTrainer, Spoiler]:
    """One run with every kind of server, a quarter of whose answers is changed."""
    inline = config.buffer.scores == "inline"
    k, own = (3, 2) if inline else (3 * (seed % 2), 2 * (1 - seed % 2))  # no objective needs both
    want = Want(topk=k, entropy=True, hidden=True)
    spoiler = Spoiler(random.Random(seed), 0.25)
    replicas = {"r0": SpoiledReplica(seed=1), "r1": SpoiledReplica(seed=2)}
    teacher, evaluator = SpoiledTeacher(), SpoiledEvaluator()
    for server in (*replicas.values(), teacher, evaluator):
        server.spoiler = spoiler
    run = controlled(
        config.with_(run={"folder": folder}),
        Components(
            replicas=dict(replicas),
            teachers={"t": teacher},
            route=lambda source: "t",
            prompts=PromptStream(MemoryPrompts(), seed=0),
            store=Store(folder, "never"),
            want=want,
            student_topk=own,
            routing=ROUTING if config.rollout.routing_replay else None,
            vocab_size=50,
            evaluator=evaluator,
            sets={"held_out": HELD_OUT_SET},
        ),
    )
    run.pool.retry_seconds = run.pool.poll_seconds = 0.02
    scores = fetching(teacher, want, own)
    trainer = MemoryTrainer(SpoiledSession(run.session, spoiler), checkpoint_every=7, scores=scores)
    return await to_the_end(run, trainer), trainer, spoiler


def arrays(rows: wire.Rows) -> dict[str, np.ndarray]:
    """Every array of some rows; raises where its bytes do not fill its shape."""
    found = {name: getattr(rows, name) for name in rows.__struct_fields__}
    return {name: unpack(array) for name, array in found.items() if isinstance(array, wire.Array)}


NONE = np.zeros(0)


def check_trained(shares: list[wire.TrainBatch]) -> None:
    """Whatever a trainer is given can be trained on."""
    for rows in rows_in(shares):
        found, count = arrays(rows), int(unpack(rows.completion_lens).sum())
        for name, least in (("tokens", 0), ("teacher_topk_ids", 0), ("student_topk_ids", -1)):
            assert found.get(name, NONE).min(initial=0) >= least
            assert found.get(name, NONE).max(initial=0) < 50
        for name in ("behavior_logprob", "teacher_logprob", "teacher_topk_logprob"):
            assert np.isfinite(found.get(name, NONE)).all()
            assert found.get(name, NONE).max(initial=0) <= 0.02
            assert len(found.get(name, found["tokens"][:count])) == count
        assert "teacher_topk_logprob" in found or len(found["student_topk_ids"]) == count or count == 0
        assert np.isfinite(found.get("student_topk_teacher_logprob", NONE)).all()
        assert (found["teacher_hidden"] & 0x7F80 != 0x7F80).all()
        assert found["teacher_hidden"].shape == (count, 4)
        assert np.isfinite(found.get("teacher_entropy", np.zeros(1))).all()
        if rows.mask is not None:
            ids_CK = rows.mask.padded()
            lengths = np.stack([found["prompt_lens"], found["completion_lens"]], 1)
            generated = np.repeat(np.tile([False, True], len(rows.ids)), lengths.ravel())
            by_teacher_C = np.repeat(found.get("by_teacher", np.zeros(len(rows.ids))), lengths[:, 1]) > 0
            assert ids_CK.max(initial=-1) < 50
            held_C = (ids_CK == found["tokens"][generated][:, None]).any(1)
            assert (held_C != by_teacher_C).all()
        if rows.route_lens is not None:
            tokens_R, routed_R = found["prompt_lens"] + found["completion_lens"], found["route_lens"]
            assert (routed_R == np.where(found.get("by_teacher", 0), 0, tokens_R - 1)).all()
            assert found["routes"].shape == (routed_R.sum(), ROUTING.layers, ROUTING.chosen)
            assert found["routes"].max(initial=0) < ROUTING.experts
        assert (found["token_step"] <= shares[0].version.step).all()


@settings(
    max_examples=math.ceil(MUTANTS / OF_A_RUN),
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(seed=st.integers(0, 1 << 32), scores=st.sampled_from(["inline", "reference"]), more=st.booleans())
def test_a_run_whose_servers_lie_ends_with_every_rollout_accounted_for(
    config, tmp_path_factory: pytest.TempPathFactory, seed: int, scores: str, more: bool
) -> None:
    rollout = {"batch": 16, "max_in_flight": 32, "request_size": 2}
    settings = config(
        run={"steps": 30},
        rollout=rollout | {"top_k": 4 * more, "routing_replay": more},
        objective={"type": "sampled", "on_policy": 0.75},
        buffer={"score_batch": 2, "scores": scores},
        guard={"bad_answers": 1_000_000},
    )
    folder = tmp_path_factory.mktemp("run")
    summary, trainer, spoiler = asyncio.run(spoiled_run(settings, folder, seed))
    SEEN.update(spoiler.hits)
    assert spoiler.hits.total() >= OF_A_RUN
    assert (summary["completed"], summary["error"]) == (True, None)
    report = check(folder, trainer.ledger)
    report.violations.pop("unproven", None)  # a lie in the proof itself is told as what it is
    assert report.ok, report
    rollouts = summary["rollout"]
    assert rollouts["issued"] == rollouts["batched"] + rollouts["open"] + sum(rollouts["dropped"].values())
    for shares in trainer.batches.values():
        check_trained(shares)


@pytest.mark.skipif(MUTANTS < 10_000, reason="a few runs do not reach every field: DISTILL_MUTANTS=10000")
def test_every_field_of_every_message_was_changed() -> None:
    """After the runs above: which fields they reached."""
    print(f"{SEEN.total()} mutants, {len(SEEN)} kinds")  # noqa: T201
    assert SEEN.total() >= MUTANTS
    reached = {(message, name) for message, name, _ in SEEN}
    fields = {(one.__name__, name) for one in MESSAGES for name in one.__struct_fields__ if name != "schema"}
    assert not fields - reached
    assert {"TrainerHello", "FinalDigests"} <= {message for message, _ in reached}, "each once in a run"


async def test_a_replica_whose_answers_cannot_be_used_is_left_out_and_the_run_goes_on(
    controller, caplog: pytest.LogCaptureFixture
) -> None:
    lying = MemoryReplica(spoil=with_nan)
    run = controller(replicas={"good": MemoryReplica(seed=1, token_seconds=0.001), "lying": lying})
    summary = await to_the_end(run)
    assert (summary["completed"], summary["error"]) == (True, None)
    assert run.pool.replicas["lying"].excluded
    (told,) = [text for text in caplog.messages if "excluded until the run ends" in text]
    assert "replica lying at memory gave 8 unusable answers" in told
    assert "logprob is nan" in told
    assert summary["rollout"]["requeued"]["unusable"] >= 8


def failing(error: str, unusable: bool) -> MemoryReplica:
    return MemoryReplica(spoil=lambda answer: GenerateFailed(id=answer.id, error=error, unusable=unusable))


class Lying(MemoryTeacher):
    def _scores(self, sequence: wire.ScoreSequence, want: Want) -> Scored | ScoreRefused:
        scores = super()._scores(sequence, want)
        return msgspec.structs.replace(scores, logprob=pack(np.full(scores.logprob.shape, np.nan, "f4")))


class Failing(MemoryTeacher):
    def _scores(self, sequence: wire.ScoreSequence, want: Want) -> Scored | ScoreRefused:
        return ScoreRefused(sequence.id, "the engine's answer: logprob is nan", unusable=True)


REPLICA, TEACHER, EVALUATOR = "replica r0 at memory", "teacher t at memory", "the evaluator"


@pytest.mark.parametrize(
    ("part", "server", "who", "says"),
    [
        ("replicas", {"r0": MemoryReplica(spoil=with_nan)}, REPLICA, " is nan"),
        ("replicas", {"r0": failing("out of memory", False)}, REPLICA, f"out of memory ({AT_FAULT})"),
        ("replicas", {"r0": failing("no routes", True)}, REPLICA, "the last one: no routes"),
        ("replicas", {"r0": MemoryReplica(spoil=without_tokens)}, REPLICA, f"without a token ({AT_FAULT})"),
        ("teachers", {"t": Lying()}, TEACHER, " is nan"),
        ("teachers", {"t": Failing()}, TEACHER, "the engine's answer: logprob is nan"),
        ("teachers", {"t": MemoryTeacher(refuses=lambda _: True)}, TEACHER, f"this teacher ({AT_FAULT})"),
        ("teachers", {"t": MemoryTeacher(rejects=lambda _: True)}, "teacher t", "sequence cannot be read"),
        ("evaluator", MemoryEvaluator(kl=lambda _: math.nan), EVALUATOR, ".sums[0]"),
    ],
)
async def test_when_no_server_of_a_kind_is_left_the_run_ends_with_an_error_and_a_resume_goes_on(
    controller, config, part: str, server: Any, who: str, says: str
) -> None:
    """Instead of using up prompts."""
    settings = config(guard={"bad_answers": 3}, evaluation={"every": 1}, run={"steps": 8})
    run = controller(settings, **{"evaluator": MemoryEvaluator(), part: server})
    summary, trainer = await ended(run)
    assert not summary["completed"]
    assert summary["error"].startswith(who)
    assert "gave 3 unusable answers one after the other" in summary["error"]
    assert says in summary["error"]
    assert sum(summary["rollout"]["dropped"].values()) < 100

    mended = controller(settings, evaluator=MemoryEvaluator())
    trainer.session = mended.session
    summary = await to_the_end(mended, trainer)
    assert (summary["completed"], summary["error"]) == (True, None)
