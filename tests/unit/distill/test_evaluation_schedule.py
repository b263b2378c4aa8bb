"""When to evaluate, what is best, when to stop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from in_memory import MemoryEvaluator, MemoryPrompts
from virtual_time import LONG

from distill.buffer import Bound, Rules
from distill.config import EvaluationConfig
from distill.evaluation.schedule import Evaluations, best, exhausted
from distill.metrics.timeline import Timeline
from distill.prompts.stream import PromptStream
from distill.run_log.journal import Journal
from distill.run_log.run_log import RunLog
from sync.errors import RemoteError, Unreachable
from sync.wire import EvalReport, Version

pytestmark = pytest.mark.virtual_time


def report(step: int, kl: float, rate: float | None = None) -> EvalReport:
    return EvalReport(
        version=Version(0, step),
        reverse_kl=kl,
        pass_rate=rate,
        completions=1,
        tokens=1,
        truncated=0.0,
        seconds=0.0,
    )


def test_the_best_is_the_lowest_kl_or_the_highest_pass_rate() -> None:
    reports = [report(0, 1.0, 0.5), report(2, 0.3, 0.4), report(4, 0.3, 0.9), report(6, 0.5, None)]
    assert best(reports, "reverse_kl") is reports[1]
    assert best(reports, "pass_rate") is reports[2]
    assert best([], "reverse_kl") is None


@pytest.mark.parametrize(("patience", "over"), [(None, False), (2, True), (3, False)])
def test_patience_counts_reports_after_the_best(patience: int | None, over: bool) -> None:
    reports = [report(0, 1.0), report(2, 0.3), report(4, 0.4), report(6, 0.3)]
    assert exhausted(reports, "reverse_kl", patience) is over


def bench(folder: Path, evaluator: MemoryEvaluator, every: int) -> tuple[Evaluations, RunLog]:
    run_log = RunLog(
        Journal(folder, "never"),
        PromptStream(MemoryPrompts(), 0),
        run="r",
        seed=0,
        rules=Rules(1, Bound(0, 0)),
    )
    config = EvaluationConfig(every=every)
    silent = Evaluations(evaluator, config, run_log, Timeline(), lambda *_: None, lambda _: None, 0.005)
    return silent, run_log


async def settle(evaluations: Evaluations) -> None:
    """Until nothing is due and nothing is under way."""
    await asyncio.sleep(0)
    while evaluations._pending is not None or evaluations._turn.locked():
        async with evaluations._turn:
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("every", "published", "seen"),
    [
        (4, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 4, 8]),
        (4, [0, 3, 6, 9], [0, 6, 9]),
        (0, [0, 1, 2, 3], [0]),
        (4, [5, 6], [5]),
    ],
)
async def test_versions_are_evaluated_every_so_many_steps(
    tmp_path: Path, every: int, published: list[int], seen: list[int]
) -> None:
    evaluator = MemoryEvaluator()
    evaluations, run_log = bench(tmp_path, evaluator, every)
    task = asyncio.create_task(evaluations.run())
    for step in published:
        evaluations.due(Version(0, step))
        await settle(evaluations)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    run_log.journal.close()
    assert [version.step for version in evaluator.seen] == seen


async def test_after_a_rollback_versions_are_evaluated_at_the_same_steps_again(tmp_path: Path) -> None:
    evaluator = MemoryEvaluator()
    evaluations, run_log = bench(tmp_path, evaluator, 4)
    task = asyncio.create_task(evaluations.run())
    await run_log.open_lineage(None, "model")
    published = [Version(0, step) for step in (0, 4, 8)]
    for version in published:
        evaluations.due(version)
        await settle(evaluations)
    await run_log.open_lineage(None, "model", without=[])
    for step in (0, 4):
        evaluations.due(Version(1, step))
        await settle(evaluations)
    assert evaluator.seen == [*published, Version(1, 4)]
    task.cancel()
    run_log.journal.close()


async def test_a_version_that_is_under_way_is_not_evaluated_again(tmp_path: Path) -> None:
    class Slow(MemoryEvaluator):
        async def evaluate(self, version: Version) -> EvalReport:
            await asyncio.sleep(0.01)
            return await super().evaluate(version)

    evaluator = Slow()
    evaluations, run_log = bench(tmp_path, evaluator, every=4)
    task = asyncio.create_task(evaluations.run())
    evaluations.due(Version(0, 4))
    await asyncio.sleep(0)
    last = await evaluations.now(Version(0, 4))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    run_log.journal.close()
    assert evaluator.seen == [Version(0, 4)]
    assert run_log.state.evaluations == [last]


@pytest.mark.parametrize(("error", "times"), [(Unreachable("gone"), 2), (RemoteError("no such version"), 1)])
async def test_a_lost_evaluator_is_retried_and_a_refusal_is_final(
    tmp_path: Path, error: Exception, times: int
) -> None:
    requested = asyncio.Queue[Version]()

    class Failing(MemoryEvaluator):
        async def evaluate(self, version: Version) -> EvalReport:
            requested.put_nowait(version)
            if not self.seen:
                self.seen.append(version)
                raise error
            return await super().evaluate(version)

    evaluator = Failing()
    evaluations, run_log = bench(tmp_path, evaluator, 1)
    task = asyncio.create_task(evaluations.run())
    evaluations.due(Version(0, 1))
    for _ in range(times):
        await asyncio.wait_for(requested.get(), 60)
    await asyncio.sleep(LONG)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    run_log.journal.close()
    assert len(evaluator.seen) == times
