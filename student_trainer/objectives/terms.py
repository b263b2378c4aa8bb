"""What goes into an objective and what comes out: one chunk of completion tokens.

Letters: N tokens of the chunk, K ids per token, V vocabulary. All log-probabilities are nats, fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

STATS: Final = (
    "loss",
    "reverse_kl",
    "own_tokens",
    "student_entropy",
    "teacher_entropy",
    "teacher_entropy_tokens",
    "rho",
    "rho_squared",
    "fresh_kl",
    "fresh_tokens",
    "student_mass",
    "teacher_mass",
    "support_tokens",
    "overlap",
    "overlap_tokens",
    "score_gap",
    "score_gap_tokens",
)
"""Sums over tokens that an objective may report; each is 0 where it has nothing to say. `own_tokens` counts
those that the student wrote: `reverse_kl`, `rho` and `rho_squared` are of them alone."""


@dataclass(frozen=True)
class Targets:
    """Everything a chunk's loss depends on besides the live student; nothing here carries a gradient."""

    token_N: Tensor
    """int64: the sampled token y"""
    behavior_logp_N: Tensor
    """log μ(y)"""
    teacher_logp_N: Tensor
    """log q(y)"""
    fresh_N: Tensor
    """bool: y was sampled from exactly the weights that are trained now (age 0)"""
    support_NK: Tensor | None = None
    """int64: ids of S, -1 where there are fewer than K; S must not depend on y"""
    support_logp_NK: Tensor | None = None
    """log q at support_NK"""
    teacher_logp_NV: Tensor | None = None
    """log q, whole distribution"""
    teacher_entropy_N: Tensor | None = None
    future_N: Tensor | None = None
    """Σ_{j≥1} γ^j (Π_{i=1…j} min(ρ_{t+i}, c))·d_{t+j} over the rest of the row; None: γ = 0"""
    coefficient_N: Tensor | None = None
    """λ·c of the token's teacher, times the row's weight; None: 1"""
    advantage_N: Tensor | None = None
    """(R − b)·N/M of the token's rollout, times the row's weight; None: no task reward"""
    by_teacher_N: Tensor | None = None
    """bool: the teacher wrote the token; None: the student wrote all"""


Terms = tuple[Tensor, dict[str, Tensor]]
"""Surrogate loss per token [N], with gradient, and per-token statistics [N] named in STATS, without."""
Objective = Callable[[Tensor, Targets], Terms]
"""(live log p [N, V], targets) → terms."""


def own(targets: Targets) -> Tensor:
    """bool [N]: the student wrote the token."""
    written_N = targets.by_teacher_N
    return torch.ones_like(targets.fresh_N) if written_N is None else ~written_N


def at(logp_NV: Tensor, token_N: Tensor) -> Tensor:
    """log p(y) [N]."""
    return logp_NV.gather(1, token_N.unsqueeze(1)).squeeze(1)
