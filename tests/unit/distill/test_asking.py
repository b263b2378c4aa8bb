"""Requests to a teacher: cut, sent again and halved in one place; counted against real services."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from in_memory import MemoryTeacher
from ports import free_port
from served_teacher import serving
from table_engine import TABLE, GatedEngine, V, right, sequences

from distill import scoring
from distill.scoring import Asked, ask, until_answered
from sync import wire
from sync.base.errors import DataError, Overloaded, RemoteError, Unreachable
from sync.wire import ScoreRefused, TeacherPrompt, Want, pack
from sync.wire.client import Peer
from teacher_service import client as client_module
from teacher_service.client import TeacherClient
from teacher_service.engines import base
from teacher_service.engines.base import EngineScores, Item, ScoreOptions

FIRST = 7


class Failing(GatedEngine):
    """A table teacher that raises for sequences that begin with FIRST."""

    def score(self, items: Sequence[Item], options: ScoreOptions) -> EngineScores:
        scores = super().score(items, options)
        if any(item.token_ids_L[0] == FIRST for item in items):
            raise DataError("it cannot be computed")
        return scores


class Counting(TeacherClient):
    """Notes how many messages each request carries, answered or not."""

    def __init__(self, *urls: str) -> None:
        super().__init__("t", urls)
        self.sizes: list[int] = []

    async def score(self, sequences: Any, want: Want = Want(), limit: float | None = None) -> Any:
        self.sizes.append(len(sequences))
        return await super().score(sequences, want, limit)


def with_bad(count: int, *places: int) -> list[wire.ScoreSequence]:
    """Sequences of which those at `places` cannot be computed, and no other."""
    ids = np.random.default_rng(0).integers(0, V, (count, 6)).astype(np.int32)
    ids[ids[:, 0] == FIRST, 0] = 1
    ids[[*places], 0] = FIRST
    return [wire.ScoreSequence(f"{i}", pack(ids[i]), 2) for i in range(count)]


async def ask_scores(
    client: TeacherClient, sequences: Any, want: Want = Want(), within: float = 60.0, isolate: bool = False
) -> list[Asked]:
    return await ask(client, sequences, partial(client.score, want=want), within, isolate=isolate)


async def ask_completions(
    client: TeacherClient, prompts: Any, max_tokens: int, within: float = math.inf
) -> list[Asked]:
    request = partial(client.generate, max_tokens=max_tokens, stop_token_ids=[5])
    return await ask(client, prompts, request, within, extra=max_tokens)


def refused(asked: list[Asked]) -> list[str]:
    return [one.result.id for one in asked if isinstance(one.result, ScoreRefused)]


async def test_long_work_is_cut_into_bounded_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "REQUEST_TOKENS", 20)
    async with serving(GatedEngine(TABLE)) as url, Counting(url) as client:
        assert await ask_scores(client, []) == []
        assert client.sizes == []
        asked = await ask_scores(client, sequences(10))
        assert right(sequences(10), (answer for answer, _ in asked))
        assert sorted(client.sizes) == [1, 3, 3, 3]
        prompts = [TeacherPrompt(f"{i}", pack(np.array([1, 2], "i4")), i) for i in range(10)]
        completions = await ask_completions(client, prompts, 6)
        assert client.counters.requests == 4 + 5
    assert [answer.id for answer, _ in completions] == [prompt.id for prompt in prompts]
    assert not refused(completions)


async def test_what_a_teacher_does_not_queue_at_once_is_sent_in_halves() -> None:
    """8 × 6 tokens, of which 15 may wait: 8, 4 + 4, and 2 + 2 of each."""
    async with serving(GatedEngine(TABLE), queue_tokens=15) as url, Counting(url) as client:
        asked = await ask_scores(client, sequences(8))
        assert right(sequences(8), (answer for answer, _ in asked))
    assert client.sizes == [8, 4, 2, 2, 4, 2, 2]


@pytest.mark.parametrize(
    ("bad", "requests"),
    [([9], 1 + 2 * 4), ([*range(16)], 2 * 16 - 1)],
)
async def test_sequences_that_the_engine_fails_on_cost_two_requests_for_each_halving(
    bad: list[int], requests: int
) -> None:
    """One bad of B = 16: a request, and two for each of log2 B halvings. All: 2 B − 1, the most there is."""
    async with serving(Failing(TABLE)) as url, Counting(url) as client:
        asked = await ask_scores(client, with_bad(16, *bad), isolate=True)
    assert len(client.sizes) == requests
    assert refused(asked) == [f"{place}" for place in bad]
    error = "the engine failed on this sequence: DataError: it cannot be computed"
    assert {(asked[place].result.error, asked[place].server) for place in bad} == {(error, url)}


async def test_a_request_of_another_run_costs_nothing_when_a_batch_of_both_fails() -> None:
    """Both wait while the engine is busy, and so share its next batch."""
    engine = Failing(TABLE)
    async with serving(engine) as url, Counting(url) as one, Counting(url) as other, Peer(url) as peer:
        engine.gate.clear()
        first = asyncio.create_task(ask_scores(one, sequences(1, seed=3)))
        await asyncio.to_thread(engine.begun.wait, 600)
        bad = asyncio.create_task(ask_scores(one, with_bad(2, 0), isolate=True))
        good = asyncio.create_task(ask_scores(other, sequences(3)))
        while b"_held_tokens 36.0" not in bytes(await peer.once("/metrics", None, 60)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        engine.gate.set()
        assert refused(await bad) == ["0"]
        assert right(sequences(3), (answer for answer, _ in await good))
        await first
    assert other.sizes == [3]


async def test_work_goes_to_the_process_with_the_least_outstanding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "REQUEST_TOKENS", 6)
    one, two = GatedEngine(TABLE), GatedEngine(TABLE)
    async with serving(one) as first, serving(two) as second, Counting(first, second) as client:
        assert right(sequences(40), (answer for answer, _ in await ask_scores(client, sequences(40))))
    assert one.sequences == two.sequences == 20


async def test_a_dead_process_is_passed_over_and_used_again_when_it_is_back() -> None:
    one, two, port = GatedEngine(TABLE), GatedEngine(TABLE), free_port()
    async with serving(one) as living, Counting(f"http://127.0.0.1:{port}", living) as client:
        await ask_scores(client, sequences(8))
        assert one.sequences == 8
        async with serving(two, port=port):
            for seed in range(200):
                both = [ask_scores(client, sequences(2, seed=seed)) for _ in range(2)]
                await asyncio.gather(*both)
                if two.sequences:
                    break
                await asyncio.sleep(0.02)
    assert two.sequences


async def test_a_completion_may_take_longer_than_any_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(GatedEngine):
        begun_prompts = 0

        def generate(self, prompts: Sequence[base.EnginePrompt], params: base.GenerationParams) -> base.Steps:
            self.begun_prompts += len(prompts)
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                yield None
            yield from super().generate(prompts, params)

    monkeypatch.setattr(client_module, "REQUEST_SECONDS", 0.1)
    engine, gone = Slow(TABLE), f"http://127.0.0.1:{free_port()}"
    prompts = [TeacherPrompt(f"{seed}", pack(np.array([1, 2], np.int32)), seed) for seed in range(3)]
    async with serving(engine) as url, Counting(gone, url) as client:
        completions = await ask_completions(client, prompts, 4)
        assert [answer.id for answer, _ in completions] == ["0", "1", "2"]
        assert engine.begun_prompts == 3
        with pytest.raises(Unreachable):
            await ask_completions(client, prompts, 4, within=0.1)


async def test_a_teacher_that_is_gone_or_stays_full_is_a_typed_error_at_the_deadline() -> None:
    async with Counting(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(Unreachable):
            await ask_scores(client, sequences(1), within=0.5)
        with pytest.raises(Unreachable):
            await until_answered(client, client.head, within=0.2)
    engine = GatedEngine(TABLE)
    async with serving(engine, queue_tokens=10) as url, Counting(url) as client:
        engine.gate.clear()
        first = asyncio.create_task(ask_scores(client, sequences(1)))
        await asyncio.to_thread(engine.begun.wait, 600)
        with pytest.raises((Overloaded, Unreachable)):
            await ask_scores(client, sequences(1), within=0.3)
        engine.gate.set()
        assert right(sequences(1), (answer for answer, _ in await first))


async def test_what_a_teacher_cannot_do_is_asked_once() -> None:
    async with serving(GatedEngine(TABLE)) as url, Counting(url) as client:
        with pytest.raises(RemoteError, match="topk is 12"):
            await ask_scores(client, sequences(4), Want(topk=12))
    assert client.sizes == [4]


async def test_a_request_leaves_no_garbage_that_only_a_look_at_all_of_memory_finds() -> None:
    teacher = MemoryTeacher()
    await ask_scores(teacher, sequences(2))  # type: ignore[arg-type]
    gc.collect()
    gc.disable()
    try:
        for _ in range(30):
            await ask_scores(teacher, sequences(2))  # type: ignore[arg-type]
        assert gc.collect() < 30
    finally:
        gc.enable()
