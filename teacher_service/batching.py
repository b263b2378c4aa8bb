"""Continuous batching: sequences of all callers share forward passes, up to a token budget each.

    submit ──▶ waiting (bounded, tokens) ──▶ batch (≤ batch_tokens, one `Asked`) ──▶ engine thread ──▶ results

One batch is computed at a time, in one worker thread, so the event loop stays free. A batch starts with the
sequence that waited longest. What nobody waits for any more (deadline passed, caller gone) is not computed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np

from sync.errors import Overloaded, Unreachable
from teacher_service.engines.base import Asked, Engine, Item, Marks
from teacher_service.metrics import Metrics

log = logging.getLogger(__name__)
RETRY_SECONDS: Final = (0.05, 10.0)
"""Least and most a caller is told to wait."""

R = TypeVar("R")
Outcome = Marks | str | Unreachable
"""Marks of one item (arrays over its T positions), or why it has none; Unreachable: what computes is gone."""


@dataclass(eq=False)
class Ticket:
    """One caller's sequences on their way; `done` fires when every outcome is there."""

    outcomes: list[Outcome | None]
    missing: int
    expires: float
    """time.monotonic() after which nobody waits."""
    tokens: int
    done: asyncio.Event = field(default_factory=asyncio.Event)
    gone: bool = False

    def live(self, now: float) -> bool:
        """Whether somebody still waits."""
        return not self.gone and now < self.expires

    def settle(self, index: int, outcome: Outcome) -> None:
        """Note one item's outcome."""
        self.outcomes[index] = outcome
        self.missing -= 1
        if not self.missing:
            self.done.set()


@dataclass(eq=False, slots=True)
class _Waiting:
    ticket: Ticket
    index: int
    item: Item
    arrived: float


class Batcher:
    """The queue before one engine. Order of use: `start`, then `submit` and `release`, then `stop`.

    A ticket's tokens count against `queue_tokens` from `submit` until `release`, so that neither waiting
    sequences nor answers that are not yet sent can grow beyond the bound.
    """

    def __init__(self, engine: Engine, batch_tokens: int, queue_tokens: int, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._batch_tokens, self._queue_tokens = batch_tokens, queue_tokens
        self._waiting: dict[Asked, deque[_Waiting]] = {}
        self._held = 0
        self._dead = 0
        self._rate = 0.0
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to compute; needs a running event loop."""
        self._task = asyncio.create_task(self._run(), name="batcher")

    @property
    def healthy(self) -> bool:
        """Whether batches are being computed."""
        return self._task is not None and not self._task.done()

    async def stop(self) -> None:
        """Finish the batch under way, and compute no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)

    async def in_engine_thread(self, function: Callable[[], R]) -> R:
        """Run `function` between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def submit(self, items: Sequence[tuple[int, Item, Asked]], slots: int, deadline: float | None) -> Ticket:
        """Queue `items`: (index of the outcome, item, what is asked); `slots` counts the outcomes in all.

        Raises Overloaded when the queue has no room for them.
        """
        tokens = sum(len(item.token_ids_L) for _, item, _ in items)
        if self._held and self._held + tokens > self._queue_tokens:
            raise Overloaded(
                f"{self._held} tokens wait and {tokens} more would pass queue_tokens = {self._queue_tokens}: "
                "come back later, send less, or add a replica",
                self._retry_after(tokens),
            )
        now = time.monotonic()
        ticket = Ticket([None] * slots, len(items), now + (deadline or float("inf")), tokens)
        self._held += tokens
        for index, item, asked in items:
            self._waiting.setdefault(asked, deque()).append(_Waiting(ticket, index, item, now))
        self._metrics.held_tokens.set(self._held)
        self._wake.set()
        return ticket

    def release(self, ticket: Ticket) -> None:
        """The caller has its answer, or has left: exactly once per ticket."""
        ticket.gone = True
        self._held -= ticket.tokens
        self._dead += ticket.missing
        if 2 * self._dead > sum(map(len, self._waiting.values())):
            self._forget_dead()
        self._metrics.held_tokens.set(self._held)

    def _forget_dead(self) -> None:
        """Let go of sequences whose callers have left; amortised, so that a storm of them costs little."""
        self._dead = 0
        for asked, queue in list(self._waiting.items()):
            live = deque(waiting for waiting in queue if not waiting.ticket.gone)
            self._metrics.dropped.inc(len(queue) - len(live))
            self._waiting[asked] = live
            if not live:
                del self._waiting[asked]

    def _retry_after(self, tokens: int) -> float:
        over = self._held + tokens - self._queue_tokens
        low, high = RETRY_SECONDS
        return min(high, max(low, over / self._rate)) if self._rate else 1.0

    async def _run(self) -> None:
        while True:
            asked, batch = self._next_batch()
            if not batch:
                self._wake.clear()
                await self._wake.wait()
                continue
            started = time.monotonic()
            outcomes = await self.in_engine_thread(functools.partial(self._compute, batch, asked))
            for waiting, outcome in zip(batch, outcomes, strict=True):
                waiting.ticket.settle(waiting.index, outcome)
            self._observe(batch, time.monotonic() - started)

    def _next_batch(self) -> tuple[Asked, list[_Waiting]]:
        """The oldest live sequence and those behind it that ask for the same, up to the budget."""
        now, dropped = time.monotonic(), 0
        for asked, queue in list(self._waiting.items()):
            while queue and not queue[0].ticket.live(now):
                queue.popleft()
                dropped += 1
            if not queue:
                del self._waiting[asked]
        batch: list[_Waiting] = []
        asked = min(self._waiting, key=lambda a: self._waiting[a][0].arrived, default=Asked())
        queue, tokens = self._waiting.get(asked, deque()), 0
        while queue:
            if not queue[0].ticket.live(now):
                queue.popleft()
                dropped += 1
                continue
            tokens += len(queue[0].item.token_ids_L)
            if batch and tokens > self._batch_tokens:
                break
            batch.append(queue.popleft())
        self._metrics.dropped.inc(dropped)
        return asked, batch

    def _compute(self, batch: list[_Waiting], asked: Asked) -> list[Outcome]:
        """Outcomes of a batch, in order; runs in the engine's thread."""
        try:
            marks = self._engine.score([w.item for w in batch], asked)
        except Unreachable as error:
            return [error] * len(batch)
        except Exception as error:  # noqa: BLE001 (an engine may fail in any way: the batch is halved, the cause told)
            return self._after_failure(batch, asked, error)
        return split(marks, [w.item.positions for w in batch])

    def _after_failure(self, batch: list[_Waiting], asked: Asked, error: Exception) -> list[Outcome]:
        """Each half on its own, so that a sequence that cannot be marked fails alone."""
        if len(batch) > 1:
            middle = len(batch) // 2
            return self._compute(batch[:middle], asked) + self._compute(batch[middle:], asked)
        log.error("a sequence of %d tokens failed", len(batch[0].item.token_ids_L), exc_info=error)
        return [f"the engine failed on this sequence: {type(error).__name__}: {error}"]

    def _observe(self, batch: list[_Waiting], seconds: float) -> None:
        tokens = sum(len(w.item.token_ids_L) for w in batch)
        rate = tokens / max(seconds, 1e-6)
        self._rate = rate if not self._rate else 0.8 * self._rate + 0.2 * rate
        self._metrics.batch(len(batch), tokens, sum(w.item.positions for w in batch), seconds)


def split(marks: Marks, counts: Sequence[int]) -> list[Outcome]:
    """Marks of a batch cut into those of its items; an item with a non-finite log-probability has none."""
    ends = np.cumsum(counts, dtype=np.int64)
    finite = np.logical_and.reduceat(np.isfinite(marks.logprob_C), ends - counts)
    columns = {name: value for name in Marks.__slots__ if (value := getattr(marks, name)) is not None}
    result: list[Outcome] = []
    for end, count, good in zip(ends.tolist(), counts, finite.tolist(), strict=True):
        if good:
            result.append(Marks(**{name: value[end - count : end] for name, value in columns.items()}))
        else:
            result.append("the teacher's log-probabilities are not finite here: check its weights and dtype")
    return result
