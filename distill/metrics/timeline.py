"""Busy and waiting time per role, in seconds, and who was blocked on whom.

A role is busy while the level of any of its activities is above zero.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

REPLICAS, TEACHERS, TRAINER, LATE = "replicas", "teachers", "trainer", "late rollouts"
"""What a role can be blocked on."""


class Span(msgspec.Struct, frozen=True):
    """One interval of work or waiting of a role, a line of timeline.jsonl; seconds since the epoch."""

    role: str
    what: str
    start: float
    end: float


@dataclass(slots=True)
class _Activity:
    level: int = 0
    since: float = 0.0


@dataclass(slots=True)
class _Role:
    busy: float = 0.0
    since: float | None = None
    """Start of the current busy interval; None: it is idle."""
    activities: dict[str, _Activity] = field(default_factory=dict)


class Timeline:
    """Sums per role. `sink` receives each span when it ends."""

    def __init__(
        self, sink: Callable[[Span], None] | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._sink = sink
        self._clock = clock
        self._began = clock()
        self._roles: dict[str, _Role] = defaultdict(_Role)
        self._waits: dict[str, tuple[str, float]] = {}
        """Who is blocked now → on whom, since when."""
        self._waited: dict[tuple[str, str], float] = defaultdict(float)

    def waits(self, who: str, whom: str | None) -> None:
        """`who` is blocked on `whom` from now on; None: on nobody."""
        waiting = self._waits.get(who)
        if (waiting[0] if waiting else None) == whom:
            return
        now = self._clock()
        if waiting:
            self._waited[who, waiting[0]] += now - waiting[1]
            del self._waits[who]
        if whom is not None:
            self._waits[who] = whom, now

    def waited_seconds(self) -> dict[str, dict[str, float]]:
        """Who → on whom → seconds."""
        now, seconds = self._clock(), dict(self._waited)
        for who, (whom, since) in self._waits.items():
            seconds[who, whom] = seconds.get((who, whom), 0.0) + now - since
        found: dict[str, dict[str, float]] = {}
        for (who, whom), value in seconds.items():
            found.setdefault(who, {})[whom] = value
        return found

    def level(self, role: str, what: str, level: int) -> None:
        """Set how many tasks of kind `what` the role has under way from now on."""
        now, state = self._clock(), self._roles[role]
        activity = state.activities.setdefault(what, _Activity())
        if level and not activity.level:
            activity.since = now
            state.since = now if state.since is None else state.since
        if activity.level and not level:
            self._emit(Span(role, what, activity.since, now))
            if not any(other.level for other in state.activities.values() if other is not activity):
                state.busy += now - (state.since or now)
                state.since = None
        activity.level = level

    def add(self, role: str, what: str, start: float, end: float, *, busy: bool) -> None:
        """Add an interval that another process measured."""
        self._roles[role].busy += (end - start) if busy else 0.0
        self._emit(Span(role, what, start, end))

    def step(self, role: str, seconds: Mapping[str, float], parts: Sequence[str]) -> None:
        """Add the `parts` of a step that ends now, in order; the part "wait" does not count as busy."""
        end = time.time()
        for what in reversed(parts):
            start = end - seconds.get(what, 0.0)
            self.add(role, what, start, end, busy=what != "wait")
            end = start

    def _emit(self, span: Span) -> None:
        if self._sink is not None and span.end > span.start:
            self._sink(span)

    def seconds(self) -> float:
        """Since the timeline began."""
        return self._clock() - self._began

    def restart(self) -> None:
        """Reset all sums: start-up is left out."""
        self._began = now = self._clock()
        self._waited.clear()
        self._waits = {who: (whom, now) for who, (whom, _) in self._waits.items()}
        for role in self._roles.values():
            role.busy = 0.0
            role.since = None if role.since is None else now

    def busy_seconds(self) -> dict[str, float]:
        """By role."""
        now = self._clock()
        return {
            name: role.busy + (0.0 if role.since is None else now - role.since)
            for name, role in self._roles.items()
        }

    def idle_seconds(self) -> dict[str, float]:
        """By role: the time it was not busy."""
        total = self.seconds()
        return {name: max(0.0, total - busy) for name, busy in self.busy_seconds().items()}
