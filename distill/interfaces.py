"""What the launcher gives to a controller, and what it hears from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from distill.evaluation.schedule import Evaluator
from distill.metrics.timeline import Span
from distill.prompts.rewards import RewardFn
from distill.prompts.stream import Prompt, PromptStream
from distill.rollout.replica_client import ReplicaEngine
from distill.run_log.journal import Journal
from distill.run_log.records import DropReason
from distill.scoring.scorer import Teacher, Transform
from sync.claims import Claim
from sync.wire import EvalReport, TrainerWelcome, Version, Want
from sync.wire.checks import ANY_ID


def _ignore(*_: Any) -> None:
    """The default of every hook."""


@dataclass(frozen=True)
class Quarantined:
    """A completion that was not trained on, for a look."""

    prompt: Prompt
    reason: DropReason
    detail: str
    tokens: list[int]
    """Of the completion."""


@dataclass(frozen=True)
class Hooks:
    """What the launcher hears of; called in the controller's loop, must not block."""

    step: Callable[[Version, dict[str, float]], None] = _ignore
    """After each optimizer step, with the trainer's and the controller's metrics."""
    evaluated: Callable[[EvalReport, bool], None] = _ignore
    """A report, and whether it is the best so far."""
    opened: Callable[[TrainerWelcome], None] = _ignore
    """A trainer has said hello."""
    quarantined: Callable[[Quarantined], None] = _ignore
    """A completion was put aside: a line of quarantine.jsonl."""
    set_back: Callable[[Version | None], None] | None = None
    """Have the next trainer resume from this checkpoint, None: from the model folder; without it the guard
    cannot roll back."""
    stuck: Callable[[str], None] = _ignore
    """A replica's or the trainer's process hangs: kill it and start it again, if it is ours."""
    span: Callable[[Span], None] = _ignore
    """A stretch of work or waiting has ended: a line of timeline.jsonl."""


@dataclass(frozen=True)
class Components:
    """Everything the controller works with; each can be replaced by one in memory."""

    replicas: dict[str, ReplicaEngine]
    teachers: dict[str, Teacher]
    """In the order of their index in Rows.teacher."""
    route: Callable[[str], str]
    """Data source → teacher."""
    prompts: PromptStream
    journal: Journal
    want: Want
    """What the objective needs from the teacher."""
    connect: Callable[[str], ReplicaEngine] | None = None
    """A replica by its URL; None: none can join while the run goes on."""
    student_topk: int = 0
    """What it needs from the replicas: ids per position."""
    vocab_size: int = ANY_ID
    """Of the student's tokenizer: every id is below it."""
    evaluator: Evaluator | None = None
    reward_fn: RewardFn | None = None
    """Gives every rollout its reward; None: they have none."""
    transforms: dict[str, Transform] | None = None
    """Per teacher: what it sees instead of the prompt."""
    claim: Claim = field(default_factory=Claim)
    """Named by all requests to replicas, teachers and evaluator; the controller says which run it is."""
