"""Waits of a run's parties for one another: who, for what, since when, and what is known of it now.

    with waits.on("scoring", "teacher t", lambda: f"{count} rollouts"):
        await …

The controller's stages wait for other parties in no other way. The parties that can end a wait (`of`) may
wait too: `chain` follows the longest wait of each to the root, which waits for nobody. Timeline counts waits
that have a `cause`. A controller calls `use` before it starts its tasks, which inherit its `Waits`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from distill.aio import until_stalled
from sync.base import durable

_log = logging.getLogger(__name__)
T = TypeVar("T")

TRAINER: Final = "trainer"
BATCHER: Final = "batcher"  # forms batches
END: Final = "the run's end"  # shows the last version, once the trainer has left
DISPATCHER: Final = "dispatcher"  # sends prompts and turns to replicas
GENERATION: Final = "generation"  # a request to a replica
TEACHER_GENERATION: Final = "the teacher's generation"
SCORING: Final = "scoring"  # a request to a teacher
PLAY: Final = "play"  # a call of an environment
EVALUATION: Final = "evaluation"
REWARD: Final = "reward"
RECORD: Final = "record"  # the commits of the record
DISK: Final = "disk space"
PUBLISHER: Final = "publisher"  # the trainer's publication of a version
STORE: Final = "the store"  # of published versions
UNDER_WAY: Final = (GENERATION, TEACHER_GENERATION, PLAY, REWARD, SCORING, RECORD)
"""Who waits for what a rollout needs next, once it is under way."""
MOST_LINES: Final = 12
ROOT_SECONDS: Final = 900.0
"""Longest that the root of the trainer's chain stays the same before people are told, and a server of ours
that it waits for is started again."""
CONTINUED_SECONDS: Final = 1.0
"""A wait that is entered again after at most so long, without progress between, has gone on."""


def _nothing(*_: object) -> str:
    """The default of every callback."""
    return ""


@dataclass(eq=False, slots=True)
class Wait:
    """One party's wait; it lasts while this is entered as a context."""

    waits: Waits
    who: str
    what: str
    """In words; where `of` is left out, a party."""
    detail: Callable[[], str] = _nothing
    of: Callable[[], Collection[str]] = _nothing
    """Parties that can end it now."""
    cause: str | None = None
    """What `Timeline` counts it as, for `who`; None: as nothing."""
    progress: Hashable = None
    """Entered again with the same, it has gone on; None: it is another wait."""
    idle: bool = False
    """It has no work, so that nobody waits for it: no chain follows this."""
    since: float = field(init=False)

    def __post_init__(self) -> None:
        self.since = time.monotonic()
        if self.of is _nothing:
            what = self.what  # alone: this would refer to itself, and lasts until garbage is collected
            self.of = lambda: (what,)

    def __enter__(self) -> Wait:
        self.waits.enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.waits.leave(self)

    def __str__(self) -> str:
        detail = self.detail()
        seconds = time.monotonic() - self.since
        return f"{self.who} waits {seconds:.0f} s for {self.what}{': ' if detail else ''}{detail}"


class Waits:
    """All waits of one run. `blocked(who, cause, begins)` is told of those with a cause."""

    def __init__(self, blocked: Callable[[str, str, bool], object] = _nothing) -> None:
        self._blocked = blocked
        self._open: dict[Wait, None] = {}
        self.does: dict[str, tuple[str, float]] = {}
        """Party of which reports come → what it does, in words, and since when."""
        self._left: dict[tuple[str, str], tuple[Hashable, float, float]] = {}
        """(who, what) → progress, since and end of the last such wait that declared progress."""

    def enter(self, wait: Wait) -> None:
        if wait.progress is not None and (left := self._left.get((wait.who, wait.what))):
            progress, since, end = left
            if progress == wait.progress and wait.since - end <= CONTINUED_SECONDS:
                wait.since = since
        self._open[wait] = None
        if wait.cause is not None:
            self._blocked(wait.who, wait.cause, True)

    def leave(self, wait: Wait) -> None:
        del self._open[wait]
        if wait.progress is not None:
            now = time.monotonic()
            for key in [key for key, (*_, end) in self._left.items() if now - end > CONTINUED_SECONDS]:
                del self._left[key]
            self._left[wait.who, wait.what] = wait.progress, wait.since, now
        if wait.cause is not None:
            self._blocked(wait.who, wait.cause, False)

    def of(self, who: Collection[str]) -> list[Wait]:
        """The waits of these parties but for want of work, the longest first."""
        waiting = (wait for wait in self._open if wait.who in who and not wait.idle)
        return sorted(waiting, key=lambda wait: wait.since)

    def chain(self, who: str) -> list[Wait]:
        """From the wait of `who` to the root's; empty: it waits for nothing. The last is the first again
        where they wait for one another."""
        chain, parties = list[Wait](), {who}
        while waiting := self.of(parties):
            chain.append(waiting[0])
            if chain[-1] in chain[:-1]:
                break
            parties = set(chain[-1].of())
        return chain

    def _main(self) -> list[Wait]:
        """The chain of the trainer, or of what comes after it; else the wait for a trainer."""
        return self.chain(TRAINER) or self.chain(END) or self.chain(BATCHER)

    def report(self, does: Mapping[str, tuple[str, float]]) -> None:
        """Note what parties elsewhere do, and for how many seconds."""
        self.does |= {who: (what, time.monotonic() - seconds) for who, (what, seconds) in does.items()}

    def root(self) -> str:
        """The root of the main chain, in words; empty: nothing waits."""
        chain = self._main()
        return next(iter(self._doing(chain[-1].of())), str(chain[-1])) if chain else ""

    def why(self) -> list[str]:
        """The main chain, down to the root; then what else waits, the longest first."""
        alike: dict[tuple[str, str], list[Wait]] = {}
        for wait in self.of({wait.who for wait in self._open} - {BATCHER}):
            alike.setdefault((wait.who, wait.what), []).append(wait)

        def line(wait: Wait) -> str:
            others = len(alike.pop((wait.who, wait.what), [wait])) - 1
            return f"{wait}{f' (and {others} more)' if others else ''}"

        chain = self._main()
        if chain and chain[0].who != BATCHER:
            lines = [f"{'  ← ' if place else ''}{line(wait)}" for place, wait in enumerate(chain)]
        else:
            said = "trainer waits for nothing", *(wait.detail() for wait in chain)
            lines = [": ".join(filter(None, said))]
        if chain and chain[-1] in chain[:-1]:
            lines.append("  … and so on: they wait for one another")
        root = self._doing(chain[-1].of()) if chain else []
        lines += [f"  ← {words}" for words in root]
        beside = [line(waiting[0]) for waiting in [*alike.values()][:MOST_LINES]]
        beside += [words for words in self._doing(self.does) if words not in root]
        return [*lines, *(f"beside it, {words}" for words in beside)]

    async def watch(self, stalled: Callable[[list[Wait]], None], seconds: float = ROOT_SECONDS) -> None:
        """Call `stalled` with the main chain whenever its root has not changed for `seconds`."""
        root: list[tuple[object, ...]] = []

        async def progresses() -> bool:
            nonlocal root
            before, chain = root, self._main()
            root = [(chain[0].what, wait.who, wait.since, wait.detail()) for wait in chain[-1:]]
            return not root or root != before

        while True:
            await until_stalled(progresses, seconds)
            if chain := self._main():
                stalled(chain)

    def _doing(self, parties: Iterable[str]) -> list[str]:
        """What these do, as far as it was reported."""
        does, now = [(party, *self.does[party]) for party in parties if party in self.does], time.monotonic()
        return [f"{party}: {what}, for {now - since:.0f} s" for party, what, since in does]


_OUTSIDE = Waits()
_current: ContextVar[Waits] = ContextVar("waits", default=_OUTSIDE)


def use(waits: Waits) -> None:
    """Note the waits of this task, and of those it starts from now on, in `waits`."""
    _current.set(waits)


def on(who: str, what: str, detail: Callable[[], str] = _nothing, **more: Any) -> Wait:
    """`who` waits for `what` while the context lasts, in the run whose task this is; `more`: of `Wait`."""
    return Wait(_current.get(), who, what, detail, **more)


async def for_space(
    who: str,
    what: str,
    work: Callable[[], Awaitable[T]],
    paused: str = "the run",
    retry_seconds: float | None = None,
) -> T:
    """What `work` returns, begun again for as long as the disk is full, which is said once. It is all or
    nothing; `what` it writes, `paused` what waits with it."""
    waiting = False
    with on(who, DISK, lambda: f"{what} {'does not fit' if waiting else 'is written'}"):
        while True:
            try:
                result = await work()
                break
            except Exception as error:
                if not durable.is_full(error):
                    raise
                if not waiting:
                    _log.error("disk full: %s waits for space, %s pauses (%s)", what, paused, error)
            waiting = True
            await asyncio.sleep(retry_seconds or durable.RETRY_SECONDS)
    if waiting:
        _log.warning("%s has space again, %s continues", what, paused)
    return result
