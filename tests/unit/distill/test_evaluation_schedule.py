"""When to evaluate, what is best, when to stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_memory import HELD_OUT_SET, MemoryEvaluator, MemoryPrompts
from msgspec.structs import replace
from pydantic import ValidationError
from small_config import make_config
from started import begun, common_of
from virtual_time import LONG

from distill.aio import cancel
from distill.buffer import Bound, Rules
from distill.config.evaluation import EvaluationConfig
from distill.evaluation.completions import Completion
from distill.evaluation.generation import Generation
from distill.evaluation.schedule import Evaluations, best, due_sets, unbettered
from distill.prompts.stream import PromptStream
from distill.record.record import Record
from distill.record.store import Store
from distill.rollout.dispatcher import Dispatcher
from distill.rollout.replica_pool import ReplicaPool
from sync.base.errors import RemoteError, Unreachable
from sync.wire import Estimate, EvalReport, SetReport, Version, pack

pytestmark = pytest.mark.virtual_time


def report(step: int, kl: float, rate: float | None = None) -> EvalReport:
    return EvalReport(Version(0, step), kl, rate, completions=1, tokens=1, truncated=0.0, seconds=0.0)


def test_the_best_is_the_lowest_kl_or_the_highest_pass_rate() -> None:
    reports = [report(0, 1.0, 0.5), report(2, 0.3, 0.4), report(4, 0.3, 0.9), report(6, 0.5, None)]
    assert best(reports, "reverse_kl") is reports[1]
    assert best(reports, "pass_rate") is reports[2]
    assert best([], "reverse_kl") is None
    graded = [replace(one, reward=reward) for one, reward in zip(reports[:3], (0.2, 0.7, None), strict=True)]
    assert best(graded, "reward") is graded[1]


@pytest.mark.parametrize(("patience", "over"), [(None, False), (2, True), (3, False)])
def test_patience_counts_reports_after_the_best(patience: int | None, over: bool) -> None:
    reports = [report(0, 1.0), report(2, 0.3), report(4, 0.4), report(6, 0.3)]
    assert unbettered(reports, "reverse_kl", patience) is (reports[1] if over else None)


class Completed(Generation):
    """Completions that are there at once; `asked` are the sets of every evaluation."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.asked: list[list[str]] = []

    async def completions(self, version: Version, names: Sequence[str]) -> dict[str, list[Completion]]:
        self.asked.append([*names])
        await asyncio.sleep(0)
        ids = pack(np.array([1, 2], "i4"))
        prompts = enumerate(HELD_OUT_SET.prompts)
        made = [Completion.of(i, prompt.token_ids, ids, "stop") for i, prompt in prompts]
        return dict.fromkeys(names, made)

    async def reference(self) -> None:
        return None


@asynccontextmanager
async def running(
    folder: Path, evaluator: MemoryEvaluator, every: int, **more: Any
) -> AsyncIterator[tuple[Evaluations, Record]]:
    record = begun(Store(folder, "never"), PromptStream(MemoryPrompts(), 0), Rules(1, Bound(0, 0)))
    config = make_config(evaluation={"every": every, **more}, run={"steps": 100, "folder": folder})
    sets = dict.fromkeys(["held_out", *more.get("sets", ())], HELD_OUT_SET)
    common = common_of(config, record, bad_answers=8, evaluator=evaluator, sets=sets)
    pool = ReplicaPool(common)
    generation = Completed(common, pool, Dispatcher(common, pool))
    evaluations = Evaluations(common, generation, lambda *_: None, lambda _: None)
    evaluations.retry_seconds = 0.005
    task = asyncio.create_task(evaluations.run())
    yield evaluations, record
    await cancel([task])
    record.store.close()


async def settle(evaluations: Evaluations) -> None:
    """Until nothing is due and nothing is under way."""
    await asyncio.sleep(0)
    while evaluations._pending is not None or evaluations._turn.locked():
        async with evaluations._turn:
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("every", "published", "seen"),
    [
        (4, [range(10)], [(0, 0), (0, 4), (0, 8)]),
        (4, [(0, 3, 6, 9)], [(0, 0), (0, 6), (0, 9)]),
        (0, [range(4)], [(0, 0)]),
        (4, [(5, 6)], [(0, 5)]),
        (4, [(0, 4, 8), (0, 4)], [(0, 0), (0, 4), (0, 8), (1, 4)]),
    ],
)
async def test_versions_are_evaluated_every_so_many_steps_and_at_the_same_ones_after_a_rollback(
    tmp_path: Path, every: int, published: list[Iterable[int]], seen: list[tuple[int, int]]
) -> None:
    """`published`: steps of each lineage."""
    evaluator = MemoryEvaluator()
    async with running(tmp_path, evaluator, every) as (evaluations, record):
        for lineage, steps in enumerate(published):
            await record.open_lineage(None, "model", without=[])
            for step in steps:
                evaluations.due(Version(lineage, step))
                await settle(evaluations)
    assert evaluator.seen == seen


async def test_after_a_rollback_patience_and_sets_look_at_what_is_left_alone(tmp_path: Path) -> None:
    """The best version is rolled back; the two after it are worse, and the second set is due again. What was
    not bettered is named with its sign."""
    kl = {Version(0, 4): -0.9, Version(1, 2): -0.1, Version(1, 4): -0.2}
    evaluator = MemoryEvaluator(kl=lambda version: kl.get(version, 0.0))
    source = {"type": "task", "task": "sort_letters"}
    sets = {"fourth": {"source": source, "every": 4}}
    stops: list[str] = []
    async with running(tmp_path, evaluator, 2, patience=2, sets=sets) as (evaluations, record):
        evaluations._stop = stops.append
        await record.open_lineage(None, "model")
        for step in (0, 4):
            await evaluations.now(Version(0, step))
        await record.open_lineage(None, "model", without=[])
        for step in (2, 4):
            await evaluations.now(Version(1, step))
        assert not stops
        asked = [names[1:] for names in evaluations.generation.asked]
        assert asked == [["fourth"], ["fourth"], [], ["fourth"]]
        for step in (6, 7):
            await evaluations.now(Version(1, step))
    assert [report.version for report in evaluator.best] == [Version(0, 0), Version(0, 4)]
    assert stops == ["2 evaluations brought no better reverse_kl than -0.2 of L001-v00000004"]


async def test_a_version_that_is_under_way_is_not_evaluated_again(tmp_path: Path) -> None:
    evaluator = MemoryEvaluator(seconds=0.01)
    async with running(tmp_path, evaluator, every=4) as (evaluations, record):
        evaluations.due(Version(0, 4))
        await asyncio.sleep(0)
        last = await evaluations.now(Version(0, 4))
    assert evaluator.seen == [Version(0, 4)]
    assert record.state.evaluations == [last]


@pytest.mark.parametrize(("error", "times"), [(Unreachable("gone"), 2), (RemoteError("no such version"), 1)])
async def test_a_lost_evaluator_is_retried_and_a_refusal_is_final(
    tmp_path: Path, error: Exception, times: int
) -> None:
    asked: list[Version] = []

    def fails(version: Version) -> Exception | None:
        asked.append(version)
        return error if len(asked) == 1 else None

    async with running(tmp_path, MemoryEvaluator(trouble=fails), 1) as (evaluations, _):
        evaluations.due(Version(0, 1))
        await asyncio.sleep(LONG)
    assert asked == [Version(0, 1)] * times


def test_named_sets_are_due_at_their_own_intervals_at_the_start_and_at_the_end() -> None:
    source = {"type": "task", "task": "sort_letters"}
    every = {"each": None, "fourth": 4, "ends": 0}
    sets = {name: {"source": source, "every": value} for name, value in every.items()}
    config = EvaluationConfig.model_validate({"every": 2, "sets": sets})
    one = Estimate(0.5, 0.4, 0.6)
    figures = SetReport(1, 1, 1, 0.0, 0, one, one, None)
    reports: list[EvalReport] = []
    all_, some = ["each", "fourth", "ends"], ["each", "fourth"]
    for step, due in {0: all_, 2: ["each"], 5: some, 6: ["each"], 8: some, 10: all_}.items():
        assert due_sets(config, reports, step, last=step == 10) == due, step
        reports.append(replace(report(step, 1.0), sets=dict.fromkeys(due, figures)))


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"every": 2, "sets": {"x": {"every": 3}}}, r"sets\.x\.every is 3 .* give a multiple of"),
        ({"sets": {"x": {"every": 3}}}, r"sets\.x\.every is 3 .* give a multiple of"),
        ({"sets": {"held_out": {}}}, r"sets\.held_out: not a name of a set"),
        ({"sets": {"../x": {}}}, "String should match pattern"),
    ],
)
def test_sets_that_cannot_be_are_refused(evaluation: dict[str, Any], message: str) -> None:
    for one in evaluation["sets"].values():
        one["source"] = {"type": "task", "task": "sort_letters"}
    with pytest.raises(ValidationError, match=message):
        EvaluationConfig.model_validate(evaluation)
