"""What is told to observers of a run. Docstrings start with the emitters; controller.py subscribes handlers.

Some messages and records are emitted as they are: Batch, TrainerWelcome, StepReport, Published and Heartbeat
by the TrainerSession, VersionApplied by the ReplicaPool, Quarantine by the Dispatcher and the Record, with
the drop or requeue that they record.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any, Final, NamedTuple, TypeVar

from distill.aio import Signal
from distill.prompts.stream import group_of
from distill.record.rollout import Rollout
from sync.base.errors import DistillError

logger = logging.getLogger(__name__)
E = TypeVar("E")
AT_FAULT: Final = "if the prompts are at fault, correct or drop them, otherwise see the server's log"
"""What to do about refusals one after the other."""


class ScoresUnneeded(NamedTuple):
    """Record: no trainer will be given these rollouts again."""

    rollouts: list[Rollout]


class Stalled(NamedTuple):
    """ReplicaPool, Heartbeats, Controller: the process of a role makes no progress."""

    role: str  # a server's name, or "trainer"


class Membership(NamedTuple):
    """ReplicaPool: a replica begins to serve, or leaves; a loss is a warning of the pool's."""

    replica: str
    what: str  # in words


class Stranded(NamedTuple):
    """ReplicaPool: a replica waits for a version that only another broadcast can bring."""

    replica: str


class NoServerLeft(NamedTuple):
    """ErrorBudget, Evaluations: all servers of a kind, or what a user wrote, gave too many bad answers."""

    problem: str


class Events:
    """Handlers by type of event. `emit` calls them at once, in the order of subscription, in the event loop.

    `changed` is woken by every event, after its handlers: for tasks that depend on the state of the run.
    """

    def __init__(self) -> None:
        self.changed = Signal()
        self._handlers: defaultdict[type, list[Callable[[Any], object]]] = defaultdict(list)

    def on(self, kind: type[E], *handlers: Callable[[E], object]) -> None:
        """Call these with every event of exactly this type."""
        self._handlers[kind] += handlers

    def emit(self, event: object) -> None:
        """Call the handlers; what one raises is raised."""
        for handler in self._handlers[type(event)]:
            handler(event)
        self.changed.wake()


class ErrorBudget:
    """Consecutive bad answers of every server (a replica, a teacher's URL, the evaluator, a user's function).

        in use ──bad answers to `limit` requests, none good between them──▶ excluded until the run ends
                                                     (none of its kind is left ──▶ NoServerLeft)

    Answers to the same request count once: a prompt that no server can answer excludes none of them.
    """

    def __init__(self, limit: int, events: Events) -> None:
        self._limit, self._events = limit, events
        self._bad: defaultdict[str, set[Hashable]] = defaultdict(set)
        self._excluded: set[str] = set()

    def good(self, server: str) -> None:
        self._bad.pop(server, None)

    def bad(self, server: str, request: Hashable, problem: str, exclude: Callable[[], bool]) -> None:
        """Count an unusable answer; at the limit call `exclude`, which returns whether another is left."""
        self._bad[server].add(request)
        if len(self._bad[server]) < self._limit or server in self._excluded:
            return
        self._excluded.add(server)
        told = f"{server} gave {self._limit} unusable answers one after the other, the last one: {problem}"
        logger.error("%s; it is excluded until the run ends", told)
        if not exclude():
            self._events.emit(NoServerLeft(f"{told}; none of its kind is left in use"))

    def function_failed(self, function: str, rollout: str, error: DistillError) -> None:
        """Count that a function of the user's raised for a rollout: too often in a row ends the run.

        Completions of one prompt count once, as of a prompt that no checker has a verdict on.
        """
        self.bad(function, group_of(rollout) or rollout, str(error), lambda: False)
