"""Events between the stages of a run. Docstrings start with the emitters; controller.py subscribes handlers.

Some messages and records are emitted as they are: Batch, TrainerWelcome, StepReport, Published, Heartbeat and
Checkpointed by the TrainerSession, VersionApplied by the ReplicaPool.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any, Final, NamedTuple, TypeVar

from distill.aio import Signal
from distill.prompts.stream import Prompt, group_of
from distill.record.rollout import DropReason, Rollout
from sync.base.errors import DistillError
from sync.wire import Generated

logger = logging.getLogger(__name__)
E = TypeVar("E")
AT_FAULT: Final = "if the prompts are at fault, correct or drop them, otherwise see the server's log"
"""What to do about refusals one after the other."""


class _OfRollout(NamedTuple):
    """Base of events that are about one rollout."""

    rollout: Rollout


class TeacherIssued(_OfRollout):
    """Dispatcher: the teacher is to complete this rollout, as issued."""


class TeacherCompleted(_OfRollout):
    """TeacherGeneration: a teacher has completed it."""


class EpisodeIssued(_OfRollout):
    """Dispatcher: the student is to play this rollout against its environment, as issued."""


class TurnReady(_OfRollout):
    """Episodes: a replica is to complete this rollout's context, which stands in place of its prompt."""


class TurnGenerated(NamedTuple):
    """Dispatcher: a replica has."""

    answer: Generated


class EpisodeBroken(NamedTuple):
    """Dispatcher: no replica will; the rollout was dropped."""

    id: str


class EpisodePlayed(NamedTuple):
    """Episodes: an episode has ended; the rollout has the first prompt, `own` and the reward."""

    rollout: Rollout
    answer: Generated  # all tokens behind the prompt
    more: list[Rollout]  # completed: what it said behind contexts that its environment rewrote


class EpisodeLost(_OfRollout):
    """Episodes: its environment is gone; it may begin again."""


class EpisodeTooOld(NamedTuple):
    """Episodes: it is left, because no batch would take it; the student's tokens that it has."""

    rollout: Rollout
    tokens: int


class CompletionReady(_OfRollout):
    """Dispatcher: a completion of student or teacher that may be trained on."""


class CompletionRewarded(_OfRollout):
    """Rewarding: its reward is in it, where the run has a reward function."""


class RolloutScored(_OfRollout):
    """Scoring: scores and prompt tokens are in it."""


class ScoresUnneeded(NamedTuple):
    """RunLog: no trainer will be given these rollouts again."""

    rollouts: list[Rollout]


class RolloutRejected(NamedTuple):
    """Dispatcher, Episodes, TeacherQueue, ErrorBudget: a rollout that must not be trained on."""

    rollout: Rollout
    reason: DropReason
    detail: str


class Quarantined(NamedTuple):
    """Dispatcher, RunLog: a line of quarantine.jsonl; a drop or requeue is recorded with it."""

    prompt: Prompt  # only its id, for a rollout on record
    reason: DropReason
    detail: str
    tokens: list[int]  # of the completion; empty: they cannot be read


class Stalled(NamedTuple):
    """ReplicaPool, Heartbeats: the process of a role makes no progress."""

    role: str  # a replica's name, or "trainer"


class Membership(NamedTuple):
    """ReplicaPool: a replica begins to serve, or leaves; a loss is a warning of the pool's."""

    replica: str
    what: str  # in words


class Stranded(NamedTuple):
    """ReplicaPool: a replica waits for a version that only another broadcast can bring."""

    replica: str


class NoServerLeft(NamedTuple):
    """ErrorBudget: all servers of a kind, or a function of the user's, gave too many bad answers."""

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
        """Reset the count of `server`, after a usable answer."""
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

    def function_failed(
        self, function: str, rollout: Rollout, error: DistillError, reason: DropReason = "function_failed"
    ) -> None:
        """A function of the user's raised: it costs the rollout; too often in a row it ends the run.

        Completions of one prompt count once, as of a prompt that no checker has a verdict on.
        """
        self._events.emit(RolloutRejected(rollout, reason, str(error)))
        self.bad(function, group_of(rollout.id) or rollout.id, str(error), lambda: False)
