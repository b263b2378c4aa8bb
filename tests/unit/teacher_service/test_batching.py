"""The queue before an engine: budgets, bounds, and who fails with whom."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from table_engine import GatedEngine, TableEngine, random_table

from sync.base.errors import DataError, Overloaded, TooLarge, Unreachable
from teacher_service.batching import Batcher, Metrics, Outcome, Work, split
from teacher_service.engines.base import (
    EngineCompletion,
    EngineEnded,
    EnginePrompt,
    EngineScores,
    GenerationParams,
    Item,
    ScoreOptions,
    Steps,
)

POISON = 7


class RecordingEngine(GatedEngine):
    """A table teacher that fails on sequences of POISON."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(random_table(11))
        self.error = error or DataError("poisoned")

    def score(self, items: Sequence[Item], options: ScoreOptions) -> EngineScores:
        scores = super().score(items, options)
        if any(item.token_ids_L[0] == POISON for item in items):
            raise self.error
        return scores


def item(length: int, fill: int = 1) -> Item:
    return Item(np.full(length, fill, np.int32), 1)


@asynccontextmanager
async def running(
    engine: Any, batch_tokens: int = 100, queue_tokens: int = 1000
) -> AsyncIterator[tuple[Any, Batcher]]:
    batcher = Batcher(engine, batch_tokens, queue_tokens, Metrics())
    batcher.start()
    try:
        yield engine, batcher
    finally:
        engine.gate.set()
        await batcher.stop()


class Request:
    """A caller that waits until `release`."""

    def __init__(self, batcher: Batcher, work: list[Work]) -> None:
        self._context = batcher.submit(work)
        self.futures = self._context.__enter__()

    async def done(self) -> None:
        await asyncio.wait(self.futures)

    @property
    def outcomes(self) -> list[Outcome]:
        return [future.result() for future in self.futures]

    def release(self) -> None:
        self._context.__exit__(None, None, None)


def submit(batcher: Batcher, items: list[Item], options: ScoreOptions = ScoreOptions()) -> Request:
    return Request(batcher, [Work(one, options) for one in items])


async def all_done(*requests: Request) -> None:
    await asyncio.gather(*(request.done() for request in requests))


async def busy(batcher: Batcher, engine: RecordingEngine) -> Request:
    """Hold the engine in a batch of one sequence of 2 tokens."""
    engine.gate.clear()
    request = submit(batcher, [item(2)])
    await asyncio.to_thread(engine.begun.wait, 600)
    return request


async def test_sequences_share_batches_up_to_the_budget_and_a_longer_one_is_computed_alone() -> None:
    async with running(RecordingEngine(), batch_tokens=30) as (engine, batcher):
        first = await busy(batcher, engine)
        requests = [submit(batcher, [item(12), item(10)]) for _ in range(3)]
        requests.append(submit(batcher, [item(50), item(3)]))
        engine.gate.set()
        await all_done(first, *requests)
    assert [lengths for _, lengths in engine.batches] == [[2], [12, 10], [12, 10], [12, 10], [50], [3]]


async def test_different_options_are_not_mixed_and_the_oldest_goes_first() -> None:
    async with running(RecordingEngine()) as (engine, batcher):
        first = await busy(batcher, engine)
        requests = [submit(batcher, [item(3)], ScoreOptions(topk=k)) for k in (2, 1, 2, 1)]
        engine.gate.set()
        await all_done(first, *requests)
    assert engine.batches[1:] == [(ScoreOptions(topk=2), [3, 3]), (ScoreOptions(topk=1), [3, 3])]


async def test_a_full_queue_says_when_to_come_back_and_takes_work_again_after_release() -> None:
    async with running(RecordingEngine(), queue_tokens=20) as (engine, batcher):
        first = await busy(batcher, engine)
        submit(batcher, [item(18)]).release()
        assert not batcher._waiting, "work whose caller left is forgotten while the engine is busy"
        held = submit(batcher, [item(18)])
        with pytest.raises(Overloaded, match="20 tokens wait and 1 more") as refusal:
            submit(batcher, [item(1)])
        assert refusal.value.retry_after > 0
        engine.gate.set()
        await held.done()
        first.release()
        held.release()
        await submit(batcher, [item(20)]).done()


async def test_a_batch_that_fails_is_computed_request_by_request() -> None:
    """One bad sequence: its request is to be halved, a single one is refused, others are scored."""
    async with running(RecordingEngine()) as (engine, batcher):
        held = await busy(batcher, engine)
        given = [[item(3), item(3, POISON)], [item(4), item(2)], [item(3, POISON)]]
        requests = [submit(batcher, items) for items in given]
        engine.gate.set()
        await all_done(held, *requests)
    several, good, alone = (request.outcomes for request in requests)
    assert [type(outcome) for outcome in several] == [TooLarge, TooLarge]
    assert "the engine failed on 2 sequences: send fewer at once: DataError: poisoned" in str(several[0])
    assert alone == ["the engine failed on this sequence: DataError: poisoned"]
    assert [lengths for _, lengths in engine.batches] == [[2], [3, 3, 4, 2, 3], [3, 3], [4, 2], [3]]
    expected = TableEngine(random_table(11)).score([item(4)], ScoreOptions())
    np.testing.assert_array_equal(good[0].logprob_C, expected.logprob_C)


async def test_an_engine_that_raises_what_no_future_takes_fails_that_sequence_alone() -> None:
    async with running(RecordingEngine(StopIteration())) as (engine, batcher):  # type: ignore[arg-type]
        engine.gate.set()
        bad, good = submit(batcher, [item(3, POISON)]), submit(batcher, [item(4)])
        await all_done(bad, good)
        assert batcher.healthy
    assert "the engine raised StopIteration" in str(bad.outcomes[0])
    assert isinstance(good.outcomes[0], EngineScores)


async def test_an_upstream_that_is_gone_is_no_fault_of_the_sequences() -> None:
    async with running(RecordingEngine(Unreachable("gone"))) as (engine, batcher):
        request = submit(batcher, [item(3), item(3, POISON)])
        await request.done()
        assert batcher.healthy, "it may come back"
    assert all(isinstance(outcome, Unreachable) for outcome in request.outcomes)
    assert len(engine.batches) == 1


async def test_an_engine_that_overlaps_batches_gets_as_many_at_once_as_it_takes() -> None:
    engine = RecordingEngine()
    engine.engine_info = dataclasses.replace(engine.engine_info, concurrency=2)
    async with running(engine, batch_tokens=4) as (_, batcher):
        await busy(batcher, engine)
        engine.begun.clear()
        request = submit(batcher, [item(3), item(4), item(2)])
        assert await asyncio.to_thread(engine.begun.wait, 600)
        assert [lengths for _, lengths in engine.batches] == [[2], [3]]
        assert len(batcher._waiting) == 2
        engine.gate.set()
        await request.done()
    assert sorted(lengths for _, lengths in engine.batches) == [[2], [2], [3], [4]]


async def test_an_engine_that_has_ended_is_not_healthy_and_says_so_to_every_caller() -> None:
    async with running(RecordingEngine(EngineEnded("gone for good"))) as (_, batcher):
        assert batcher.healthy
        request = submit(batcher, [item(3, POISON)])
        await request.done()
        assert isinstance(request.outcomes[0], EngineEnded)
        assert not batcher.healthy
        with pytest.raises(EngineEnded, match="gone for good"):
            submit(batcher, [item(3)])


async def test_completions_and_scores_of_an_engine_that_overlaps_do_not_wait_for_each_other() -> None:
    engine = SteppingEngine()
    engine.engine_info = dataclasses.replace(engine.engine_info, concurrency=2)
    async with running(engine, batch_tokens=1) as (_, batcher):
        completed = submit_prompts(batcher, 1, 2, 3)
        assert await asyncio.to_thread(engine.stepped.wait, 600)
        assert not batcher._waiting, "all prompts are in one batch, whatever batch_tokens"
        held = await busy(batcher, engine)
        engine.finish.set()
        await completed.done()
        assert not held.futures[0].done()


def test_columns_that_do_not_have_a_row_for_each_position_are_cut_for_nobody() -> None:
    scores = EngineScores(np.zeros(4, np.float32), entropy_C=np.zeros(3, np.float32))
    with pytest.raises(DataError, match="entropy_C of 3 rows for 4 positions"):
        split(scores, [2, 1, 1])


class SteppingEngine(RecordingEngine):
    """Generates until `finish` is set, a step at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.finish, self.stepped, self.closed = threading.Event(), threading.Event(), threading.Event()
        self.prompts: list[list[int]] = []

    def generate(self, prompts: Sequence[EnginePrompt], params: GenerationParams) -> Steps:
        self.prompts.append([len(prompt.token_ids_P) for prompt in prompts])
        try:
            while not self.finish.is_set():
                self.stepped.set()
                time.sleep(0.002)
                yield None
            ids = [prompt.token_ids_P for prompt in prompts]
            yield [EngineCompletion(ids_P, np.zeros(len(ids_P), np.float32), True) for ids_P in ids]
        finally:
            self.closed.set()


PARAMS = GenerationParams(4, 1.0, ())


def submit_prompts(batcher: Batcher, *fills: int) -> Request:
    return Request(batcher, [Work(EnginePrompt(np.full(2, fill, np.int32), 0), PARAMS) for fill in fills])


async def test_prompts_of_a_batch_count_as_many_tokens_as_the_longest_of_them() -> None:
    async with running(SteppingEngine(), batch_tokens=30) as (engine, batcher):
        engine.finish.set()
        prompts = [EnginePrompt(np.ones(length, np.int32), 0) for length in (6, 2, 2, 2, 2, 2, 2, 11)]
        await Request(batcher, [Work(one, PARAMS) for one in prompts]).done()
    assert engine.prompts == [[6, 2, 2], [2, 2, 2, 2], [11]], "10 x 3, 6 x 4 (15 x 5 would pass), 15 tokens"


async def test_scores_are_computed_while_a_completion_is_generated() -> None:
    async with running(SteppingEngine(), queue_tokens=30) as (engine, batcher):
        completed = submit_prompts(batcher, 1, 2)
        with pytest.raises(Overloaded, match="12 tokens wait and 24 more"):  # with all they may become
            submit_prompts(batcher, 3, 4, 5, 6)
        for _ in range(3):
            await submit(batcher, [item(3)]).done()
        assert engine.stepped.is_set()
        assert not any(future.done() for future in completed.futures)
        engine.finish.set()
        await completed.done()
        assert all(isinstance(outcome, EngineCompletion) for outcome in completed.outcomes)


async def test_an_engine_that_ends_without_completions_fails_that_request_and_completes_the_others() -> None:
    class Ending(SteppingEngine):
        def generate(self, prompts: Sequence[EnginePrompt], params: GenerationParams) -> Steps:
            if any(prompt.token_ids_P[0] == POISON for prompt in prompts):
                yield None
            else:
                yield from super().generate(prompts, params)

    async with running(Ending()) as (engine, batcher):
        engine.finish.set()
        good, bad = submit_prompts(batcher, 1), submit_prompts(batcher, POISON, 2)
        await all_done(good, bad)
        assert batcher.healthy
    assert isinstance(good.outcomes[0], EngineCompletion)
    why = "failed on 2 prompts: send fewer at once: DataError: the engine's generator ended without"
    assert all(why in str(outcome) for outcome in bad.outcomes)


async def test_generation_that_nobody_waits_for_any_more_is_aborted() -> None:
    async with running(SteppingEngine()) as (engine, batcher):
        request = submit_prompts(batcher, 1)
        await asyncio.to_thread(engine.stepped.wait, 600)
        request.release()
        await submit(batcher, [item(3)]).done()
        assert await asyncio.to_thread(engine.closed.wait, 600)
