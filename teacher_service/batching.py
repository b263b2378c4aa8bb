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
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from teacher_service.isolate import isolate

log = logging.getLogger(__name__)
RETRY_SECONDS: Final = (0.05, 10.0)
"""Least and most that a refused caller is told to wait."""
STUCK_SECONDS: Final = 1800.0
"""Longest time of one call of the engine, loading included; after it /health fails."""
STOP_SECONDS: Final = 2.0
"""How long the call under way is waited for at the end."""
SLICE_SECONDS: Final = 0.1
"""Time slice of generation before queued scores may run; at least one step."""

Outcome = EngineScores | EngineCompletion | str | Unreachable
"""Of one item or prompt; str: why it has none, Unreachable: the server that computes is gone."""
R = TypeVar("R")


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
        self.positions = counter("positions", "Positions scored")
        self.generated = counter("generated_tokens", "Completion tokens generated")
        self.dropped = counter("dropped_sequences", "Sequences and prompts dropped: nobody waited any more")
        self.busy = counter("busy_seconds", "Time the engine computed")
        self.held_tokens = Gauge(
            "teacher_held_tokens", "Tokens queued or not yet answered", registry=registry
        )
        self.latency = Histogram("teacher_request_seconds", "From arrival to answer", registry=registry)


class Work(NamedTuple):
    """One item to score or prompt to complete."""

    slot: int
    """Of its outcome in the request."""
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
class QueuedRequest:
    """One caller's work; `done` is set once every outcome is there."""

    outcomes: list[Outcome | None]
    missing: int
    tokens: int
    deadline: float | None
    """Seconds from arrival; None: none."""
    arrived: float = field(default_factory=time.monotonic)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    released: bool = False

    def __post_init__(self) -> None:
        if not self.missing:
            self.done.set()

    @property
    def live(self) -> bool:
        """Whether somebody still waits."""
        in_time = self.deadline is None or time.monotonic() < self.arrived + self.deadline
        return in_time and not self.released

    def settle(self, slot: int, outcome: Outcome) -> None:
        """Store one outcome."""
        self.outcomes[slot] = outcome
        self.missing -= 1
        if not self.missing:
            self.done.set()


class _Queued(NamedTuple):
    request: QueuedRequest
    work: Work


class _Queue:
    """Items or prompts, the oldest first; only work with the same options shares a batch."""

    def __init__(self, dropped: Counter) -> None:
        self._queues: dict[Any, deque[_Queued]] = {}
        self._dropped = dropped
        self._added = asyncio.Event()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def put(self, queued: _Queued) -> None:
        self._queues.setdefault(queued.work.options, deque()).append(queued)
        self._added.set()

    def drop_released(self) -> None:
        """Drop everything whose caller has left."""
        before = len(self)
        queues = {key: deque(one for one in q if not one.request.released) for key, q in self._queues.items()}
        self._queues = {options: queue for options, queue in queues.items() if queue}
        self._dropped.inc(before - len(self))

    async def take(self, budget: int) -> list[_Queued]:
        """The oldest live work and what follows it with the same options, up to `budget` tokens.

        At least one, whatever its tokens; waits for it.
        """
        while not self._drop_dead():
            self._added.clear()
            await self._added.wait()
        queue = min(self._queues.values(), key=lambda queue: queue[0].request.arrived)
        batch: list[_Queued] = []
        while (first := self._first(queue)) and (not batch or first.work.tokens <= budget):
            budget -= first.work.tokens
            batch.append(queue.popleft())
        return batch

    def _drop_dead(self) -> bool:
        """Drop dead work from the head of every queue; whether any is left."""
        self._queues = {options: queue for options, queue in self._queues.items() if self._first(queue)}
        return bool(self._queues)

    def _first(self, queue: deque[_Queued]) -> _Queued | None:
        while queue and not queue[0].request.live:
            queue.popleft()
            self._dropped.inc()
        return queue[0] if queue else None


class Batcher:
    """The queues before one engine. Order of use: `start`, then `submit` and `release`, then `stop`.

    A request's tokens count against `queue_tokens` from `submit` until `release`, so that neither queued
    sequences nor answers that are not yet sent can grow beyond the bound.
    """

    def __init__(self, engine: Engine, batch_tokens: int, queue_tokens: int, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._batch_tokens, self._queue_tokens = batch_tokens, queue_tokens
        self._items, self._prompts = _Queue(metrics.dropped), _Queue(metrics.dropped)
        self._held = self._dead = 0
        self._rate = 0.0
        """Tokens per second of recent batches."""
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

    async def stop(self, seconds: float = STOP_SECONDS) -> bool:
        """Compute no more, and wait `seconds` for the call under way; whether it has ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)
        calls = [asyncio.wrap_future(call) for call in self._calls]
        return not calls or not (await asyncio.wait(calls, timeout=seconds))[1]

    async def in_engine_thread(self, function: Callable[[], R]) -> R:
        """Run `function` between two calls of the engine."""

        def call() -> R:
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

    def submit(self, work: Sequence[Work], slots: int, deadline: float | None) -> QueuedRequest:
        """Queue `work`; `slots` counts the outcomes of the request, those of no work included.

        Raises Overloaded when there is no room for it.
        """
        tokens = sum(one.tokens for one in work)
        if self._held and self._held + tokens > self._queue_tokens:
            raise Overloaded(
                f"{self._held} tokens wait and {tokens} more would pass queue_tokens = {self._queue_tokens}: "
                "come back later, send less, or add a replica",
                self._retry_after(tokens),
            )
        self._held += tokens
        self._metrics.held_tokens.set(self._held)
        request = QueuedRequest([None] * slots, len(work), tokens, deadline)
        for one in work:
            queue = self._items if isinstance(one.item, Item) else self._prompts
            queue.put(_Queued(request, one))
        return request

    def release(self, request: QueuedRequest) -> None:
        """The caller has its answer, or has left: exactly once per request."""
        request.released = True
        self._held -= request.tokens
        self._metrics.held_tokens.set(self._held)
        self._dead += request.missing
        if 2 * self._dead > len(self._items) + len(self._prompts):  # amortised: a storm of them costs little
            self._dead = 0
            self._items.drop_released()
            self._prompts.drop_released()

    def _retry_after(self, tokens: int) -> float:
        over = self._held + tokens - self._queue_tokens
        low, high = RETRY_SECONDS
        return min(high, max(low, over / self._rate)) if self._rate else 1.0

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
                queued.request.settle(queued.work.slot, outcome)

    async def _score(self, batch: Sequence[_Queued]) -> list[EngineScores]:
        items, options = _items(batch)
        counts, tokens = [item.positions for item in items], sum(one.work.tokens for one in batch)
        started = time.monotonic()
        scores = await self.in_engine_thread(lambda: split(self._engine.score(items, options), counts))
        rate = tokens / max(time.monotonic() - started, 1e-6)
        self._rate = rate if not self._rate else 0.8 * self._rate + 0.2 * rate
        self._metrics.sequences.inc(len(batch))
        self._metrics.tokens.inc(tokens)
        self._metrics.positions.inc(sum(counts))
        return scores

    async def _generate(self, batch: Sequence[_Queued]) -> Sequence[EngineCompletion | str]:
        """Generate in slices of SLICE_SECONDS; stop when no live request remains."""
        steps = self._engine.generate(*_items(batch))
        while any(one.request.live for one in batch):
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
    ends = np.cumsum(counts, dtype=np.int64).tolist()
    columns = {name: value for name in EngineScores.__slots__ if (value := getattr(scores, name)) is not None}
    for name, value in columns.items():
        if len(value) != ends[-1]:
            raise DataError(f"the engine gave {name} of {len(value)} rows for {ends[-1]} positions")
    return [
        EngineScores(**{name: value[end - count : end] for name, value in columns.items()})
        for end, count in zip(ends, counts, strict=True)
    ]
