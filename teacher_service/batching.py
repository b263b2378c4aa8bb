"""Continuous batching: sequences of all callers share forward passes, up to a token budget each.

    submit ──▶ waiting (bounded, tokens) ──▶ batch (≤ batch_tokens, one `Asked`) ──▶ engine thread ──▶ results

One batch is computed at a time, in one worker thread, so the event loop stays free. A batch starts with the
sequence that waited longest. What nobody waits for any more (deadline passed, caller gone) is not computed.
Prompts to complete (`writing`) wait within the same bound and take turns with batches of scores.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

import numpy as np

from sync.errors import DataError, Overloaded, Unreachable
from teacher_service.engines.base import (
    Engine,
    EnginePrompt,
    EngineScores,
    GenerationParams,
    Item,
    ScoreOptions,
    Writer,
)
from teacher_service.metrics import Metrics
from teacher_service.request_queue import Outcome, QueuedItem, QueuedRequest, RequestQueue
from teacher_service.writing import GenerationQueue

log = logging.getLogger(__name__)
RETRY_SECONDS: Final = (0.05, 10.0)
"""Least and most a caller is told to wait."""

STUCK_SECONDS: Final = 1800.0
"""Longest time of one call of the engine, loading included; after it /health fails."""
STOP_SECONDS: Final = 2.0
"""How long a batch under way is waited for at the end."""

R = TypeVar("R")


class Batcher:
    """The queue before one engine. Order of use: `start`, then `submit` and `release`, then `stop`.

    A ticket's tokens count against `queue_tokens` from `submit` until `release`, so that neither waiting
    sequences nor answers that are not yet sent can grow beyond the bound.
    """

    def __init__(self, engine: Engine, batch_tokens: int, queue_tokens: int, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._batch_tokens, self._queue_tokens = batch_tokens, queue_tokens
        self._items: RequestQueue[ScoreOptions, Item] = RequestQueue(metrics.dropped.inc)
        self._drafts: RequestQueue[GenerationParams, EnginePrompt] = RequestQueue(metrics.dropped.inc)
        self._generation_queue = GenerationQueue(engine, batch_tokens) if isinstance(engine, Writer) else None
        self._held = 0
        self._dead = 0
        self._rate = 0.0
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._began: float | None = None
        """time.monotonic() at which the engine was called; None: it is idle."""
        self._last: Future[Any] | None = None
        """What was given to the engine's thread last."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to compute; needs a running event loop."""
        self._task = asyncio.create_task(self._run(), name="batcher")

    @property
    def healthy(self) -> bool:
        """Whether batches are being computed, each within STUCK_SECONDS."""
        began = self._began
        stuck = began is not None and time.monotonic() - began > STUCK_SECONDS
        return self._task is not None and not self._task.done() and not stuck

    async def stop(self, patience: float = STOP_SECONDS) -> bool:
        """Compute no more, and wait `patience` seconds for the batch under way; whether it has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._last is None:
            return True
        await asyncio.wait({asyncio.wrap_future(self._last)}, timeout=patience)
        return self._last.done()

    async def in_engine_thread(self, function: Callable[[], R]) -> R:
        """Run `function` between two batches."""

        def call() -> R:
            self._began = time.monotonic()
            try:
                return function()
            finally:
                self._began = None

        last = self._thread.submit(call)
        self._last = last
        return await asyncio.wrap_future(last)

    def submit(
        self, items: Sequence[tuple[int, Item, ScoreOptions]], slots: int, deadline: float | None
    ) -> QueuedRequest:
        """Queue `items`: (index of the outcome, item, what is asked); `slots` counts the outcomes in all.

        Raises Overloaded when the queue has no room for them.
        """
        sizes = [len(item.token_ids_L) for _, item, _ in items]
        ticket, now = self._enter(sizes, slots, deadline), time.monotonic()
        for (index, item, options), size in zip(items, sizes, strict=True):
            self._items.put(options, QueuedItem(ticket, index, item, size, now))
        self._wake.set()
        return ticket

    def submit_engine_prompts(
        self,
        engine_prompts: Sequence[tuple[int, EnginePrompt]],
        generation: GenerationParams,
        slots: int,
        deadline: float | None,
    ) -> QueuedRequest:
        """Queue `drafts`: (index of the outcome, draft), counted with all it may become; see `submit`."""
        assert self._generation_queue is not None, "the engine cannot write"
        sizes = [
            len(engine_prompt.token_ids_P) + generation.max_tokens for _, engine_prompt in engine_prompts
        ]
        ticket, now = self._enter(sizes, slots, deadline), time.monotonic()
        for (index, engine_prompt), size in zip(engine_prompts, sizes, strict=True):
            self._drafts.put(generation, QueuedItem(ticket, index, engine_prompt, size, now))
        self._wake.set()
        return ticket

    def _enter(self, sizes: Sequence[int], slots: int, deadline: float | None) -> QueuedRequest:
        """A ticket for work of these sizes, in tokens. Raises Overloaded when there is no room for it."""
        tokens = sum(sizes)
        if self._held and self._held + tokens > self._queue_tokens:
            raise Overloaded(
                f"{self._held} tokens wait and {tokens} more would pass queue_tokens = {self._queue_tokens}: "
                "come back later, send less, or add a replica",
                self._retry_after(tokens),
            )
        self._held += tokens
        self._metrics.held_tokens.set(self._held)
        expires = time.monotonic() + (deadline or float("inf"))
        return QueuedRequest([None] * slots, len(sizes), expires, tokens)

    def release(self, ticket: QueuedRequest) -> None:
        """The caller has its answer, or has left: exactly once per ticket."""
        ticket.gone = True
        self._held -= ticket.tokens
        self._dead += ticket.missing
        if 2 * self._dead > len(self._items) + len(self._drafts):  # amortised: a storm of them costs little
            self._dead = 0
            self._items.forget_dead()
            self._drafts.forget_dead()
        self._metrics.held_tokens.set(self._held)

    def _retry_after(self, tokens: int) -> float:
        over = self._held + tokens - self._queue_tokens
        low, high = RETRY_SECONDS
        return min(high, max(low, over / self._rate)) if self._rate else 1.0

    async def _run(self) -> None:
        while True:
            scored = await self._score_batch()
            written = await self._write_slice()
            if not scored and not written:
                self._wake.clear()
                await self._wake.wait()

    async def _score_batch(self) -> bool:
        """Mark the next batch; whether there was one."""
        if (taken := self._items.take(self._batch_tokens)) is None:
            return False
        options, batch = taken
        started = time.monotonic()
        outcomes = await self.in_engine_thread(functools.partial(self._compute, batch, options))
        for waiting, outcome in zip(batch, outcomes, strict=True):
            waiting.ticket.settle(waiting.index, outcome)
        self._observe(batch, time.monotonic() - started)
        return True

    async def _write_slice(self) -> bool:
        """Write on for a while; whether there was anything to write."""
        if self._generation_queue is None or not self._generation_queue.ready(self._drafts):
            return False
        started = time.monotonic()
        outcomes = await self.in_engine_thread(self._generation_queue.advance)
        self._metrics.busy.inc(time.monotonic() - started)
        if outcomes is not None:
            self._metrics.written.inc(self._generation_queue.settle(outcomes))
        return True

    def _compute(self, batch: list[QueuedItem[Item]], options: ScoreOptions) -> list[Outcome]:
        """Outcomes of a batch, in order; runs in the engine's thread."""
        try:
            scores = self._engine.score([w.work for w in batch], options)
            return split(scores, [w.work.positions for w in batch])
        except Unreachable as error:
            return [error] * len(batch)
        except Exception as error:  # noqa: BLE001 (an engine may fail in any way: the batch is halved, the cause told)
            return self._after_failure(batch, options, error)

    def _after_failure(
        self, batch: list[QueuedItem[Item]], options: ScoreOptions, error: Exception
    ) -> list[Outcome]:
        """Each half on its own, so that a sequence that cannot be marked fails alone."""
        if len(batch) > 1:
            middle = len(batch) // 2
            return self._compute(batch[:middle], options) + self._compute(batch[middle:], options)
        log.error("a sequence of %d tokens failed", len(batch[0].work.token_ids_L), exc_info=error)
        return [f"the engine failed on this sequence: {type(error).__name__}: {error}"]

    def _observe(self, batch: list[QueuedItem[Item]], seconds: float) -> None:
        tokens = sum(w.tokens for w in batch)
        rate = tokens / max(seconds, 1e-6)
        self._rate = rate if not self._rate else 0.8 * self._rate + 0.2 * rate
        self._metrics.batch(len(batch), tokens, sum(w.work.positions for w in batch), seconds)


def split(scores: EngineScores, counts: Sequence[int]) -> list[Outcome]:
    """Marks of a batch cut into those of its items. Raises DataError for columns of another length."""
    ends = np.cumsum(counts, dtype=np.int64).tolist()
    columns = {name: value for name in EngineScores.__slots__ if (value := getattr(scores, name)) is not None}
    for name, value in columns.items():
        if len(value) != ends[-1]:
            raise DataError(f"the engine gave {name} of {len(value)} rows for {ends[-1]} positions")
    return [
        EngineScores(**{name: value[end - count : end] for name, value in columns.items()})
        for end, count in zip(ends, counts, strict=True)
    ]
