"""Controller ↔ evaluator: divergences, evaluations, and the preflight's reference values."""

from __future__ import annotations

import msgspec

from sync.wire.base import Amount, Array, Count, Message, Number, Share, Version
from sync.wire.replica import SamplingMask
from sync.wire.teacher import ScoreSequence


class OwnTokens(msgspec.Struct, frozen=True):
    """A sequence of a held-out completion, and which of its tokens the student sampled."""

    token_ids: Array
    """i4 [L], the prompt's first"""
    own: list[tuple[int, int]]
    """Start and end, in L, of those that are compared; at least one, the first behind the prompt."""
    shown: Array | None = None
    """i4: the prompt as a teacher with a tokenizer of its own sees it; None: as the student does."""

    @property
    def count(self) -> int:
        """Tokens that are compared."""
        return sum(end - start for start, end in self.own)


class EvalRequest(Message, frozen=True):
    """Compare a version with the teachers on its completions. Controller → evaluator."""

    version: Version
    teachers: dict[str, list[OwnTokens]] = {}
    """By the teacher that they are routed to."""


class Divergence(msgspec.Struct, frozen=True):
    """How far a version is from one teacher, on the sequences of a request."""

    exact: bool
    """The sums are of the full-vocabulary divergence at each token; False: of log p − log q of the token."""
    sums: list[Number]
    """Of each sequence, over the tokens that are compared; nats."""


class EvalReply(Message, frozen=True):
    """Evaluator → controller: a divergence for each teacher of the request."""

    version: Version
    teachers: dict[str, Divergence]


class Estimate(msgspec.Struct, frozen=True):
    """A mean over prompts, with its 95 % confidence interval (`distill.evaluation.report`)."""

    value: Number
    low: Number
    high: Number


class SetReport(msgspec.Struct, frozen=True):
    """Figures of one named set."""

    prompts: Count
    completions: Count
    """Completions of all prompts together."""
    tokens: Count
    truncated: Share
    """Share of completions that ended at the token limit."""
    failed: Count
    """Completions whose reward function failed: they count as reward 0."""
    pass_at_1: Estimate
    """Share of completions whose reward is at least the threshold of their prompts, averaged per prompt."""
    average: Estimate
    """avg@k: mean reward of a prompt's k completions."""
    majority: Estimate | None
    """maj@k: share of prompts whose most frequent answer passes; None: the reward function names none."""


class PartReport(msgspec.Struct, frozen=True):
    """Figures of the held-out completions of one data source, or of one teacher; as those of all."""

    completions: Count
    tokens: Count
    reverse_kl: Number | None
    reverse_kl_error: Amount | None
    pass_rate: Share | None
    reward: Number | None


class Behaviour(msgspec.Struct, frozen=True):
    """How held-out completions read (`distill.evaluation.completions`)."""

    ended: Share
    """Share that ended by themselves."""
    length_mean: Amount
    """Tokens."""
    length_p90: Amount
    looping: Share
    """Share whose end repeats itself."""
    distinct: Share
    """Share of the runs of four tokens that differ."""


class EvalReport(Message, frozen=True):
    """The figures of one version, for record and metrics. Controller → evaluator: keep it as the best."""

    version: Version
    reverse_kl: Number | None
    """Nats per token, of the student's own temperature-1 completions, with EOS: over the full vocabulary
    where the teacher gives hidden states, else the mean of log p − log q. Rounding and sampling may take it
    below 0. None: there is no teacher."""
    pass_rate: Share | None
    """Share of held-out completions whose reward reaches the threshold of their prompts; None: no reward."""
    completions: Count
    tokens: Count
    truncated: Share
    """Share of completions that ended at the token limit."""
    seconds: Amount
    reverse_kl_error: Amount | None = None
    """Standard error of an estimated reverse_kl, over completions; None: it is exact for them."""
    pass_rate_interval: tuple[Share, Share] | None = None
    """95 % confidence interval; None: no pass rate."""
    reward: Number | None = None
    """Mean reward of held-out completions, 0 where the function failed; None: no pass rate."""
    sets: dict[str, SetReport] = {}
    """Named sets that were evaluated with this version."""
    sources: dict[str, PartReport] = {}
    """Figures by data source; empty: there is one."""
    teachers: dict[str, PartReport] = {}
    """Figures by the teacher that scored them; empty: there is one."""
    behaviour: Behaviour | None = None
    """How the held-out completions read; None: an earlier release did not record it."""
    reference: Behaviour | None = None
    """How the teachers' own completions of the same prompts read; None: they make none."""


class ProbeRequest(Message, frozen=True):
    """Preflight → evaluator: run plain forward passes over these sequences; `gather_ids` are ignored."""

    student: list[ScoreSequence]
    """Completions of the student itself; may be empty."""
    teachers: dict[str, list[ScoreSequence]]
    """Teacher's name → the sequences that it scored."""
    masks: list[SamplingMask] = []
    """One mask for each of `student`; empty: they were sampled from the whole vocabulary."""


class ReferenceScores(msgspec.Struct, frozen=True):
    """One teacher's scores by a plain forward pass, and the run's objective on them."""

    logprob: list[Array] | None
    """f4 [T] for each sequence: log q(y_t), temperature 1; None: the teacher was not loaded"""
    not_shown: str | None
    """Why the teacher was not loaded; None: it was."""
    self_loss: float | None
    """|loss| per token with the student in the teacher's place; None: the objective is `sft`."""
    self_gradient: float | None
    """Norm of the gradient in the logits, per token, of the same."""
    teacher_gradient: float | None
    """Norm of its change when the teacher takes its place; None also: its distributions are not known."""


class ProbeReply(Message, frozen=True):
    """Evaluator → preflight: figures of fp32 forward passes of the folders that the configuration names."""

    student: list[Array]
    """f4 [T] for each of `ProbeRequest.student`: log p(y_t) at the rollouts' temperature, of its mask"""
    teachers: dict[str, ReferenceScores]
