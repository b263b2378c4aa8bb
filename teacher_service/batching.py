"""Dynamic batching: sequences of all callers share forward passes, up to a token budget each.

    submit ──▶ queue of items   ──▶ batch (≤ batch_tokens, one ScoreOptions)     ──▶ one call    ─┐ engine
           └─▶ queue of prompts ──▶ batch (≤ batch_tokens, one GenerationParams) ──▶ many slices ─┘ thread

Both queues together are bounded in tokens. One call runs at a time, in one worker thread, so the event loop
stays free; a batch of scores waits for one slice of generation at most, and the other way round. A batch
starts with the oldest item. What nobody waits for any more (deadline passed, caller gone) is not computed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sync.errors import DataError, Overloaded, Unreachable
from teacher_service.engines.base import (
    Engine,
    EngineCompletion,
    EnginePrompt,
    EngineScores,
    GenerationParams,
    Item,
    ScoreOptions,
    Steps,
)

log = logging.getLogger(__name__)
RETRY_AFTER_SECONDS: Final = 0.5
"""What a refused caller is told to wait."""
STUCK_SECONDS: Final = 1800.0
"""Longest time of one call of the engine, loading included; after it /health fails."""
STOP_SECONDS: Final = 2.0
"""How long the call under way is waited for at the end."""
SLICE_SECONDS: Final = 0.1
"""Time slice of generation before queued scores may run; at least one step."""

Outcome = EngineScores | EngineCompletion | str | Unreachable
"""Of one item or prompt; str: why it has none, Unreachable: the server that computes is gone."""
W = TypeVar("W")
A = TypeVar("A")


class Metrics:
    """Prometheus metrics of one process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"teacher_{name}", text, labels, registry=registry)

        self.requests = counter("requests", "Answers by HTTP status", ("status",))
        self.sequences = counter("sequences", "Sequences scored")
        self.refused = counter("refused_sequences", "Sequences that could not be scored")
        self.tokens = counter("tokens", "Tokens of scored sequences, prompt and completion")
        self.generated = counter("generated_tokens", "Completion tokens generated")
        self.busy = counter("busy_seconds", "Time the engine computed")
        self.held_tokens = Gauge(
            "teacher_held_tokens", "Tokens queued or not yet answered", registry=registry
        )
        self.latency = Histogram("teacher_request_seconds", "From arrival to answer", registry=registry)


class Work(NamedTuple):
    """One item to score or prompt to complete."""

    item: Item | EnginePrompt
    options: ScoreOptions | GenerationParams
    """Only work with the same options shares a batch."""

    @property
    def tokens(self) -> int:
        """What it counts towards `batch_tokens` and `queue_tokens`; for a prompt, including max_tokens."""
        if isinstance(self.item, Item):
            return len(self.item.token_ids_L)
        assert isinstance(self.options, GenerationParams), "prompts come with them"
        return len(self.item.token_ids_P) + self.options.max_tokens


@dataclass(eq=False)
class _Queued:
    """`outcome` is cancelled once nobody waits for it."""

    work: Work
    outcome: asyncio.Future[Outcome] = field(default_factory=asyncio.Future)


class _Queue:
    """Items or prompts, the oldest first."""

    def __init__(self) -> None:
        self._waiting: dict[_Queued, None] = {}
        self._added = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, queued: _Queued) -> None:
        self._waiting[queued] = None
        self._added.set()

    def discard(self, queued: _Queued) -> None:
        self._waiting.pop(queued, None)

    async def take(self, budget: int) -> list[_Queued]:
        """The oldest work and what follows it with the same options, up to `budget` tokens.

        At least one, whatever its tokens; waits for it.
        """
        while not self._waiting:
            self._added.clear()
            await self._added.wait()
        batch: list[_Queued] = []
        for queued in self._waiting:
            if batch and queued.work.options != batch[0].work.options:
                continue
            budget -= queued.work.tokens
            if batch and budget < 0:
                break
            batch.append(queued)
        for queued in batch:
            del self._waiting[queued]
        return batch


class Batcher:
    """The queues before one engine. Order of use: `start`, then `submit`, then `stop`."""

    def __init__(self, engine: Engine, batch_tokens: int, queue_tokens: int, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._batch_tokens, self._queue_tokens = batch_tokens, queue_tokens
        self._items, self._prompts = _Queue(), _Queue()
        self._held = 0
        """Tokens of requests that are queued or not yet answered."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._calls: set[Future[Any]] = set()
        self._began: float | None = None
        """time.monotonic() at which the engine was called; None: it is idle."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to compute; needs a running event loop."""
        serving = (self._serve(self._items, self._score), self._serve(self._prompts, self._generate))
        self._tasks = [asyncio.create_task(one) for one in serving]

    @property
    def healthy(self) -> bool:
        """Whether batches are computed, each call within STUCK_SECONDS."""
        began = self._began
        stuck = began is not None and time.monotonic() - began > STUCK_SECONDS
        return bool(self._tasks) and not any(task.done() for task in self._tasks) and not stuck

    async def stop(self) -> bool:
        """Compute no more, and wait STOP_SECONDS for the call under way; whether it has ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)
        calls = [asyncio.wrap_future(call) for call in self._calls]
        return not calls or not (await asyncio.wait(calls, timeout=STOP_SECONDS))[1]

    async def in_engine_thread(self, function: Callable[[], A]) -> A:
        """Run `function` between two calls of the engine."""

        def call() -> A:
            began = self._began = time.monotonic()
            try:
                return function()
            finally:
                self._began = None
                self._metrics.busy.inc(time.monotonic() - began)

        future = self._thread.submit(call)
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return await asyncio.wrap_future(future)

    @contextmanager
    def submit(self, work: Sequence[Work]) -> Iterator[list[asyncio.Future[Outcome]]]:
        """Queue `work` for as long as the context lasts; yields a future for each.

        Its tokens count against `queue_tokens` until the end of the context, so that neither queued sequences
        nor answers that are not yet sent can grow beyond the bound. Raises Overloaded when there is no room.
        """
        tokens = sum(one.tokens for one in work)
        if self._held and self._held + tokens > self._queue_tokens:
            raise Overloaded(
                f"{self._held} tokens wait and {tokens} more would pass queue_tokens = {self._queue_tokens}: "
                "come back later, send less, or add a replica",
                RETRY_AFTER_SECONDS,
            )
        all_queued = [_Queued(one) for one in work]
        try:
            self._hold(tokens)
            for queued in all_queued:
                self._queue_of(queued).put(queued)
            yield [queued.outcome for queued in all_queued]
        finally:
            self._hold(-tokens)
            for queued in all_queued:
                queued.outcome.cancel()
                self._queue_of(queued).discard(queued)

    def _hold(self, tokens: int) -> None:
        self._held += tokens
        self._metrics.held_tokens.set(self._held)

    def _queue_of(self, queued: _Queued) -> _Queue:
        return self._items if isinstance(queued.work.item, Item) else self._prompts

    async def _serve(
        self, queue: _Queue, run: Callable[[Sequence[_Queued]], Awaitable[Sequence[Outcome]]]
    ) -> None:
        """Compute batch after batch; an item that the engine fails on fails alone."""
        while True:
            batch = await queue.take(self._batch_tokens)
            try:
                outcomes = await isolate(batch, run, _failed, never=(Unreachable,))
            except Unreachable as error:
                outcomes = [error] * len(batch)
            for queued, outcome in zip(batch, outcomes, strict=True):
                if not queued.outcome.done():
                    queued.outcome.set_result(outcome)

    async def _score(self, batch: Sequence[_Queued]) -> list[EngineScores]:
        items, options = _items(batch)
        counts = [item.positions for item in items]
        scores = await self.in_engine_thread(lambda: split(self._engine.score(items, options), counts))
        self._metrics.sequences.inc(len(batch))
        self._metrics.tokens.inc(sum(one.work.tokens for one in batch))
        return scores

    async def _generate(self, batch: Sequence[_Queued]) -> Sequence[EngineCompletion | str]:
        """Generate in slices of SLICE_SECONDS; stop when nobody waits for any of the batch."""
        steps = self._engine.generate(*_items(batch))
        while not all(one.outcome.done() for one in batch):
            completions = await self.in_engine_thread(lambda: _slice(steps))
            if completions is None:
                continue
            if len(completions) != len(batch):
                raise DataError(f"the engine gave {len(completions)} completions for {len(batch)} prompts")
            self._metrics.generated.inc(sum(len(one.token_ids_T) for one in completions))
            return completions
        return ["cancelled: no caller is waiting"] * len(batch)


def _items(batch: Sequence[_Queued]) -> tuple[list[Any], Any]:
    """What the engine gets: items or prompts, and the options that they share."""
    return [queued.work.item for queued in batch], batch[0].work.options


def _failed(queued: _Queued, error: Exception) -> Outcome:
    what = "sequence" if isinstance(queued.work.item, Item) else "prompt"
    log.error("a %s of %d tokens failed", what, queued.work.tokens, exc_info=error)
    return f"the engine failed on this {what}: {type(error).__name__}: {error}"


def _slice(steps: Steps) -> list[EngineCompletion] | None:
    """The completions if generation finished in this slice, else None."""
    end = time.monotonic() + SLICE_SECONDS
    while (completions := next(steps)) is None and time.monotonic() < end:
        pass
    return completions


def split(scores: EngineScores, counts: Sequence[int]) -> list[EngineScores]:
    """Scores of a batch cut into those of its items. Raises DataError for columns of another length."""
    ends = np.cumsum(counts)
    columns = {name: value for name in EngineScores.__slots__ if (value := getattr(scores, name)) is not None}
    for name, value in columns.items():
        if len(value) != ends[-1]:
            raise DataError(f"the engine gave {name} of {len(value)} rows for {ends[-1]} positions")
    parts = {name: np.split(value, ends[:-1]) for name, value in columns.items()}
    return [EngineScores(**{name: part[i] for name, part in parts.items()}) for i in range(len(counts))]


async def isolate(
    items: Sequence[W],
    run: Callable[[Sequence[W]], Awaitable[Sequence[A]]],
    failed: Callable[[W, Exception], A],
    *,
    on: tuple[type[Exception], ...] = (Exception,),
    never: tuple[type[Exception], ...] = (),
) -> list[A]:
    """Answers of `run`, one per item, in order; each half of a batch that fails runs again on its own.

    `failed` gives the answer for an item that fails alone. `on`: exceptions that may be an item's fault;
    `never`: those of them that are not. Every other exception is raised at once.
    """
    try:
        return list(await run(items))
    except never:
        raise
    except on as error:
        if len(items) == 1:
            return [failed(items[0], error)]
    middle = len(items) // 2
    halves = [
        await isolate(half, run, failed, on=on, never=never) for half in (items[:middle], items[middle:])
    ]
    return [*halves[0], *halves[1]]
