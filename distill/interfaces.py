"""What a controller is made of: its servers, its other parts, and the hooks of the launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from distill.buffer import Batch
from distill.config import RunConfig
from distill.environments.episode import Environment, Limits
from distill.evaluation.sets import PromptSet
from distill.events import ErrorBudget, Events
from distill.metrics.samples import Quarantine
from distill.metrics.timeline import Span, Timeline
from distill.prompts.rewards import Reward
from distill.prompts.stream import Prompt, PromptStream
from distill.record.record import Record
from distill.record.store import Store
from distill.rollout.replica_client import ReplicaEngine
from sync import wire
from sync.base.address import Address
from sync.wire import (
    EvalReport,
    Kept,
    Routing,
    Sampling,
    Scored,
    ScoreRefused,
    TeacherCompletion,
    TrainerWelcome,
    Version,
    Want,
)
from sync.wire.checks import ANY_ID
from sync.wire.claims import Claim
from teacher_service.client import Counters, Reply

Transform = Callable[[Prompt], Sequence[int]]  # what a teacher sees instead of the prompt


class Evaluator(Protocol):
    """Loads a published version, to compare it with the teachers, or to keep it as the best one; step 0 of a
    lineage is the model folder.

    Both may raise Unreachable (retried) and RemoteError (skipped).
    """

    async def evaluate(self, request: wire.EvalRequest) -> wire.EvalReply: ...
    async def keep(self, report: EvalReport) -> None: ...


class Teacher(Protocol):
    """What the controller needs of a teacher: teacher_service.client has it over HTTP.

    It raises what that client raises. Requests are made once: `distill.scoring.ask` repeats and halves them.
    """

    @property
    def counters(self) -> Counters: ...
    @property
    def processes(self) -> int: ...  # in use
    @property
    def pause(self) -> float: ...  # seconds until one of its processes may be asked
    async def score(
        self, sequences: Sequence[wire.ScoreSequence], want: Want, limit: float | None = None
    ) -> Reply[Scored | ScoreRefused]: ...
    async def generate(
        self,
        prompts: Sequence[wire.TeacherPrompt],
        max_tokens: int,
        stop_token_ids: Sequence[int],
        *,
        temperature: float = 1.0,
        limit: float | None = None,
    ) -> Reply[TeacherCompletion | ScoreRefused]: ...
    async def release(self, kept: Sequence[Kept]) -> None: ...  # have it forget these, if it can be told
    def servers(self) -> wire.TeacherServers: ...
    async def head(self) -> wire.Head: ...
    async def first_info(self) -> wire.TeacherInfo: ...  # of one of its processes
    def leave_out(self, server: str) -> bool:
        """Send this process nothing more; whether another is left."""
        ...


class Rewards(Protocol):
    """Rewards of completions: distill.prompts.reward_pool computes them in processes of its own."""

    async def reward(self, prompt: Prompt, token_ids: Sequence[int]) -> Reward:
        """Reward of a completion, end token included. Raises DistillError when its function fails."""
        ...


def _ignore(*_: Any) -> None:
    """The default of every hook."""


@dataclass(frozen=True)
class Hooks:
    """Callbacks of the launcher; called in the controller's loop, must not block."""

    step: Callable[[Version, dict[str, float]], None] = _ignore
    """After each optimizer step, with the trainer's and the controller's metrics."""
    evaluated: Callable[[EvalReport, bool], None] = _ignore  # a report, and whether it is the best so far
    opened: Callable[[TrainerWelcome], None] = _ignore  # a trainer has said hello
    batch: Callable[[Batch], None] = _ignore  # a batch was packed; its rollouts have their arrays
    quarantined: Callable[[Quarantine], None] = _ignore  # a line of quarantine.jsonl
    set_back: Callable[[Version | None], None] | None = None
    """Have the next trainer resume from this checkpoint, None: from the model folder; without it the guard
    cannot roll back."""
    stalled: Callable[[str], None] = _ignore
    """A replica's or the trainer's process hangs: kill it and start it again, if it is ours."""
    alert: Callable[[str, str], None] = _ignore  # title and text of what a person should know now
    say: Callable[[str], None] = _ignore  # a line for whoever watches: a replica serves, or has left
    span: Callable[[Span], None] = _ignore  # a stretch of work or waiting has ended: a line of timeline.jsonl


@dataclass(frozen=True)
class Components:
    """Everything the controller works with; each can be replaced by one in memory."""

    replicas: dict[str, ReplicaEngine]
    teachers: dict[str, Teacher]  # in the order of their index in Rows.teacher; empty: rewards alone
    route: Callable[[str], str]  # data source → teacher; empty: there are none
    prompts: PromptStream
    store: Store
    want: Want  # what the objective needs from the teacher
    connect: Callable[[Address], ReplicaEngine] | None = None
    """A replica by its address; None: none can join while the run goes on."""
    expected: Mapping[str, Address] = field(default_factory=dict)
    """Servers of the configuration that register, by name; the clients above hold the same addresses."""
    student_topk: int = 0  # ids per position that the objective needs from the replicas
    routing: Routing | None = None  # of a student whose routes are recorded; None: they are not
    vocab_size: int = ANY_ID  # of the student's tokenizer: every id is below it
    evaluator: Evaluator | None = None
    sets: Mapping[str, PromptSet] = field(default_factory=dict)  # of an evaluation, by name
    rewards: Rewards | None = None  # gives every rollout its reward; None: they have none
    environments: dict[str, Environment] = field(default_factory=dict)
    context: int = ANY_ID
    """Longest sequence, in tokens, that student and teachers take."""
    transforms: dict[str, Transform] = field(default_factory=dict)  # by teacher
    claim: Claim = field(default_factory=Claim)
    """Sent with all requests to other servers; the controller sets the run in it."""


@dataclass(frozen=True)
class Common:
    """What all stages of a run work with; a constructor names beside it the stages that it needs."""

    config: RunConfig
    parts: Components
    record: Record
    sampling: Sampling  # of completions that are trained on
    timeline: Timeline
    budget: ErrorBudget
    events: Events

    @property
    def limits(self) -> dict[str, Limits]:
        """Of the episodes of each environment: a turn of the student's fits behind their tokens."""
        longest, turn, limits = self.parts.context, self.config.rollout.max_tokens, dict[str, Limits]()
        for name, each in self.config.environments.items():
            tokens, seconds = min(longest, each.max_tokens or longest) - turn, each.episode_timeout_seconds
            limits[name] = Limits(each.max_turns, tokens, seconds, self.parts.vocab_size)
        return limits
