"""Controller ↔ evaluator: held-out marks, and plain forward passes for the preflight."""

from __future__ import annotations

import msgspec

from sync.wire.base import Array, Message, Version
from sync.wire.teacher import ScoreSequence


class EvalRequest(Message, frozen=True):
    """Evaluate a published version on the held-out prompts."""

    version: Version


class EvalReport(Message, frozen=True):
    """How good one version is."""

    version: Version
    reverse_kl: float
    """Nats per token: full vocabulary, fp32, over the student's own temperature-1 completions, with EOS."""
    pass_rate: float | None
    """Share of completions that the judge accepts; None: nobody judges."""
    completions: int
    tokens: int
    truncated: float
    """Share of completions that ended at the token limit."""
    seconds: float


class ProbeRequest(Message, frozen=True):
    """What plain forward passes give for these sequences, before the first step; `gather_ids` are ignored."""

    student: list[ScoreSequence]
    """Completions of the student itself; may be empty."""
    teachers: dict[str, list[ScoreSequence]]
    """Teacher's name → what it was asked to mark."""


class ReferenceScores(msgspec.Struct, frozen=True):
    """One teacher by a plain forward pass, and what the run's objective makes of it."""

    logprob: list[Array]
    """f4 [T] for each sequence: log q(y_t), temperature 1"""
    self_loss: float | None
    """|loss| per token with the student in the teacher's place; None: the objective is `sft`."""
    self_gradient: float | None
    """Norm of the gradient in the logits, per token, of the same."""
    teacher_gradient: float | None
    """Norm of how much that gradient changes when the teacher takes its place."""


class ProbeReply(Message, frozen=True):
    """Figures of fp32 forward passes of the folders that the configuration names."""

    student: list[Array]
    """f4 [T] for each of `ProbeRequest.student`: log p(y_t) at the rollouts' temperature"""
    teachers: dict[str, ReferenceScores]
