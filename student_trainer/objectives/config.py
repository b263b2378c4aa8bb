"""Which objective is optimised; formulas and sources are in docs/objectives.md."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sync.settings import Settings


class PolicyGradientTerms(Settings):
    """Fields of every objective that corrects for stale samples."""

    rho_cap: float | None = Field(5.0, gt=0)
    """Cap c of the importance weight min(ρ, c), ρ = p(y)/μ(y); None: uncapped."""
    drop_rho_outside: tuple[float, float] | None = None
    """Tokens whose ρ is outside [low, high] give no gradient (they stay in the denominator); None: none."""
    discount: float = Field(0.0, ge=0, lt=1)
    """γ: how much of the later tokens' d = log p − log q is credited to a token; 0: immediate credit."""


class Sampled(PolicyGradientTerms):
    """Reverse KL by policy gradient on the sampled token."""

    type: Literal["sampled"] = "sampled"


class TopK(PolicyGradientTerms):
    """Unbiased hybrid: exact on the teacher's top-k, policy gradient outside."""

    type: Literal["topk"] = "topk"
    k: int = Field(64, ge=1)
    """Ids per position that the teacher returns."""


class StudentTopK(PolicyGradientTerms):
    """The hybrid on the student's top-k at sampling time, scored by the teacher at those ids."""

    type: Literal["student_topk"] = "student_topk"
    k: int = Field(64, ge=1)
    """Ids per position that the replica returns and the teacher marks."""


class ForwardTopK(Settings):
    """Forward KL on the teacher's top-k and one bucket for the rest."""

    type: Literal["forward_topk"] = "forward_topk"
    k: int = Field(64, ge=1)
    """Ids per position that the teacher returns."""


class Full(Settings):
    """Exact reverse KL over the full vocabulary, from the teacher's hidden states and head."""

    type: Literal["full"] = "full"


class JSD(Settings):
    """Generalised Jensen-Shannon divergence over the full vocabulary, optionally skewed."""

    type: Literal["jsd"] = "jsd"
    beta: float = Field(0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture."""


class SkewReverse(Settings):
    """Reverse KL against the mixture (1 − alpha)·q + alpha·p over the full vocabulary."""

    type: Literal["skew"] = "skew"
    alpha: float = Field(0.1, ge=0, lt=1)
    """Weight of the student in the mixture."""


class SFT(Settings):
    """Cross-entropy on the teacher's own samples: cold start and baseline."""

    type: Literal["sft"] = "sft"


ObjectiveConfig = Annotated[
    Sampled | TopK | StudentTopK | ForwardTopK | Full | JSD | SkewReverse | SFT, Field(discriminator="type")
]
