"""Busy and waiting time per role, in seconds, and what each role was blocked on.

A role is busy while the level of any of its activities is above zero.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sync.wire import StepReport

REPLICAS, TEACHERS, LATE = "replicas", "teachers", "late rollouts"
"""What a role can be blocked on."""
CUT_SECONDS = 5.0
"""Longest that work is under way at a step's end without a span: a run that goes on can be measured."""
JOINED_SECONDS = 0.01
"""Longest pause between two waits of a role for the same that are one."""


class Span(msgspec.Struct, frozen=True):
    """One interval of work or waiting of a role, a line of timeline.jsonl; seconds since the epoch.

    The trainer's "wait for …" is its next batch's: while it trains, its own "wait" has not begun.
    """

    role: str
    what: str
    start: float
    end: float


@dataclass(slots=True)
class _Role:
    busy: float = 0.0
    since: float | None = None
    """Start of the current busy interval; None: it is idle."""
    active: dict[str, float] = field(default_factory=dict)
    """Kind of work under way → since when."""


@dataclass(slots=True)
class _Blocked:
    """A role's waits for the same cause, without a break between them."""

    since: float
    level: int = 1
    """Waits now."""
    until: float = 0.0
    """End of the last one, at level 0."""


def steady_clock() -> Callable[[], float]:
    """Seconds since the epoch that go on when the system's clock is set."""
    epoch = time.time() - time.monotonic()
    return lambda: epoch + time.monotonic()


class Timeline:
    """Sums per role, of all starts of the controller. `sink` receives each span when it ends."""

    def __init__(
        self,
        sink: Callable[[Span], None] = lambda span: None,
        clock: Callable[[], float] | None = None,
        earlier: Mapping[str, Any] = {},
    ) -> None:
        """`clock`: None: `steady_clock`. `earlier`: `figures` of the starts before this one."""
        self._sink = sink
        self.clock = clock or steady_clock()
        self._earlier = earlier
        self._began = self.clock()
        self._roles: dict[str, _Role] = defaultdict(_Role)
        self._blocked: dict[tuple[str, str], _Blocked] = {}
        """Role and cause of the newest waits."""
        self._waited: dict[tuple[str, str], float] = defaultdict(float)

    def blocked(self, role: str, cause: str, begins: bool) -> None:
        """One of the waits of `role` that count as `cause` begins or ends; see `distill.waits`."""
        now, blocked = self.clock(), self._blocked.get((role, cause))
        if not begins:
            assert blocked is not None, "a wait ends that began"
            blocked.level -= 1
            blocked.until = now
        elif blocked is not None and (blocked.level or now - blocked.until <= JOINED_SECONDS):
            blocked.level += 1
        else:
            self._close(role, cause)
            self._blocked[role, cause] = _Blocked(now)

    def _close(self, role: str, cause: str) -> None:
        """Count waits that have ended."""
        if (blocked := self._blocked.pop((role, cause), None)) is not None:
            self._waited[role, cause] += blocked.until - blocked.since
            self._emit(Span(role, f"wait for {cause}", blocked.since, blocked.until))

    def figures(self) -> dict[str, Any]:
        """Seconds of all starts: in all, and by role those with work, without, and blocked by each cause."""
        now = self.clock()
        busy = {
            name: role.busy + (0.0 if role.since is None else now - role.since)
            for name, role in self._roles.items()
        }
        waited: dict[str, dict[str, float]] = defaultdict(dict)
        for (role, cause), seconds in self._waited.items():
            waited[role][cause] = seconds
        for (role, cause), blocked in self._blocked.items():
            seconds = (now if blocked.level else blocked.until) - blocked.since
            waited[role][cause] = waited[role].get(cause, 0.0) + seconds
        run = now - self._began
        idle = {name: max(0.0, run - seconds) for name, seconds in busy.items()}
        present = {"run_seconds": run, "busy_seconds": busy, "idle_seconds": idle, "waited_seconds": waited}
        return _sum(self._earlier, present)

    def level(self, role: str, what: str, level: int) -> None:
        """Set how many tasks of kind `what` the role has under way from now on."""
        now, state = self.clock(), self._roles[role]
        if level and what not in state.active:
            state.active[what] = now
            state.since = now if state.since is None else state.since
        elif not level and what in state.active:
            self._emit(Span(role, what, state.active.pop(what), now))
            if not state.active:
                state.busy += now - (state.since or now)
                state.since = None

    def add(self, role: str, what: str, start: float, end: float, *, busy: bool) -> None:
        """Add an interval that another process measured."""
        self._roles[role].busy += (end - start) if busy else 0.0
        self._emit(Span(role, what, start, end))

    def step(self, role: str, report: StepReport) -> None:
        """Add the parts of a step that ends now, in order; the part "wait" does not count as busy.

        Those of "train" are sums over micro-batches and stand one after the other from its beginning.
        """
        end = self.clock()
        for what in ("checkpoint", "publish", "train", "wait"):
            start = end - report.seconds.get(what, 0.0)
            self.add(role, what, start, end, busy=what != "wait")
            if what == "train":
                self.follow(role, start, report.parts)
            end = start
        self.cut(CUT_SECONDS)

    def follow(self, role: str, start: float, parts: Mapping[str, float]) -> None:
        """Add `parts`, name → seconds, of work that is counted already, one after the other."""
        for what, seconds in parts.items():
            self.add(role, what, start, start + seconds, busy=False)
            start += seconds

    def cut(self, seconds: float = 0.0) -> None:
        """Emit what has been under way for so long, as if it ended now; its rest is a span of its own."""
        now = self.clock()
        for role, state in self._roles.items():
            for what, start in state.active.items():
                if now - start >= seconds:
                    self._emit(Span(role, what, start, now))
                    state.active[what] = now
        for role, cause in [key for key, blocked in self._blocked.items() if not blocked.level]:
            self._close(role, cause)

    def _emit(self, span: Span) -> None:
        if span.end > span.start:
            self._sink(span)

    def restart(self) -> None:
        """Reset the sums of this start: its start-up is left out."""
        self._began = now = self.clock()
        self._waited.clear()
        for blocked in self._blocked.values():
            blocked.since, blocked.until = now, max(now, blocked.until)
        for role in self._roles.values():
            role.busy = 0.0
            role.since = None if role.since is None else now


def _sum(earlier: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """Nested figures added up, name by name."""
    added = dict(earlier)
    for name, value in present.items():
        if isinstance(value, Mapping):
            added[name] = _sum(earlier.get(name, {}), value)
        else:
            added[name] = earlier.get(name, 0.0) + value
    return added
