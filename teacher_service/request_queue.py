"""One caller's work on its way through a teacher: what waits, for whom, and what became of it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sync.errors import Unreachable
from teacher_service.engines.base import EngineCompletion, EngineScores

Outcome = EngineScores | EngineCompletion | str | Unreachable
"""Of one item or draft: its marks or its text, or why it has none; Unreachable: what computes is gone."""
W = TypeVar("W")
K = TypeVar("K", bound=Hashable)


@dataclass(eq=False)
class QueuedRequest:
    """One caller's work; `done` fires when every outcome is there."""

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
        """Note one outcome."""
        self.outcomes[index] = outcome
        self.missing -= 1
        if not self.missing:
            self.done.set()


@dataclass(eq=False, slots=True)
class QueuedItem(Generic[W]):
    """One item to mark, or one draft to complete, in a queue."""

    ticket: QueuedRequest
    index: int
    """Of its outcome in the ticket."""
    work: W
    tokens: int
    """What it counts towards the budget of a batch."""
    arrived: float


class RequestQueue(Generic[K, W]):
    """What waits, the oldest first; only what is of one kind shares a batch."""

    def __init__(self, dropped: Callable[[int], None]) -> None:
        """`dropped` hears how many were let go because nobody waited for them any more."""
        self._queues: dict[K, deque[QueuedItem[W]]] = {}
        self._dropped = dropped

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def put(self, kind: K, waiting: QueuedItem[W]) -> None:
        """Queue it."""
        self._queues.setdefault(kind, deque()).append(waiting)

    def forget_dead(self) -> None:
        """Let go of everything whose caller has left."""
        for kind, queue in list(self._queues.items()):
            live = deque(waiting for waiting in queue if not waiting.ticket.gone)
            self._dropped(len(queue) - len(live))
            self._queues[kind] = live
            if not live:
                del self._queues[kind]

    def take(self, budget: int) -> tuple[K, list[QueuedItem[W]]] | None:
        """The oldest that somebody waits for, and those behind it of its kind, up to `budget` tokens.

        At least one whatever its tokens; None: nobody waits.
        """
        now = time.monotonic()
        for kind, queue in list(self._queues.items()):
            self._dropped(_skip_dead(queue, now))
            if not queue:
                del self._queues[kind]
        if not self._queues:
            return None
        kind = min(self._queues, key=lambda k: self._queues[k][0].arrived)
        queue, tokens = self._queues[kind], 0
        batch: list[QueuedItem[W]] = []
        while queue and (not batch or tokens + queue[0].tokens <= budget):
            tokens += queue[0].tokens
            batch.append(queue.popleft())
            self._dropped(_skip_dead(queue, now))
        return kind, batch


def _skip_dead(queue: deque[QueuedItem[W]], now: float) -> int:
    """Take what nobody waits for off the front of `queue`; how many there were."""
    count = 0
    while queue and not queue[0].ticket.live(now):
        queue.popleft()
        count += 1
    return count
