"""What the loss of completion tokens is computed from, and the importance weights of stale samples.

Letters: N tokens of a micro-batch or of a chunk of it, K ids per token, V vocabulary, G hidden size of the
teacher. p: live student, q: teacher, μ: the policy that sampled. Log-probabilities are nats, fp32.

ρ = p(y)/μ(y) is always detached: a differentiable min(ρ, c)·A has no gradient wherever ρ > c, and a
differentiable ρ in the hybrid makes the gradient wrong (docs/objectives.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_MAX_LOG_RHO = 20.0
"""exp of it still has finite squares in fp32; beyond it a sample carries no information."""


@dataclass(frozen=True)
class Targets:
    """Everything that a token's loss depends on besides the live student; nothing here carries a gradient.

    Made by `batch.collate`, completed by `step.weighted`, cut into chunks by the head, read by objectives.
    """

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
    """log q, whole distribution; made chunk by chunk from `teacher_hidden_NG`"""
    teacher_entropy_N: Tensor | None = None
    """nats; None: not sent"""
    future_N: Tensor | None = None
    """Σ_{j≥1} γ^j (Π_{i=1…j} min(ρ_{t+i}, c))·d_{t+j} over the rest of the row; None: γ = 0"""
    coefficient_N: Tensor | None = None
    """λ·c of the token's teacher, times the row's weight; None: 1"""
    advantage_N: Tensor | None = None
    """(R − b)·N/M of the token's rollout, times the row's weight; None: no task reward"""
    by_teacher_N: Tensor | None = None
    """bool: the teacher generated the token; None: the student generated all"""
    teacher_N: Tensor | None = None
    """int64: index of the teacher that scored the token; None: there is only one"""
    teacher_hidden_NG: Tensor | None = None
    """the teacher's hidden state that predicts the token; None: not sent"""
    row_N: Tensor | None = None
    """int64: row of the micro-batch, ascending; None where nothing is credited across tokens"""

    def to(self, device: torch.device) -> Targets:
        """The same on `device`."""
        return self._each(lambda values: values.to(device))

    def part(self, tokens: slice) -> Targets:
        """Of some of the tokens."""
        return self._each(lambda values: values[tokens])

    def _each(self, change: Callable[[Tensor], Tensor]) -> Targets:
        return replace(self, **{k: change(v) for k, v in vars(self).items() if isinstance(v, Tensor)})


def own(targets: Targets) -> Tensor:
    """bool [N]: the student generated the token."""
    by_teacher_N = targets.by_teacher_N
    return torch.ones_like(targets.fresh_N) if by_teacher_N is None else ~by_teacher_N


def at(logp_NV: Tensor, token_N: Tensor) -> Tensor:
    """log p(y) [N]."""
    return logp_NV.gather(1, token_N.unsqueeze(1)).squeeze(1)


def ratio(logp_N: Tensor, behavior_logp_N: Tensor) -> Tensor:
    """ρ = p(y)/μ(y), without gradient."""
    return (logp_N.detach() - behavior_logp_N).clamp(max=_MAX_LOG_RHO).exp()


def weight(rho_N: Tensor, cap: float | None, drop_outside: tuple[float, float] | None) -> Tensor:
    """min(ρ, cap), and 0 where ρ is outside `drop_outside` = (low, high)."""
    weight_N = rho_N if cap is None else rho_N.clamp(max=cap)
    if drop_outside is None:
        return weight_N
    low, high = drop_outside
    return torch.where((rho_N < low) | (rho_N > high), 0.0, weight_N)


@dataclass(frozen=True)
class Discount:
    """How later tokens' d is credited to a token: see `divergences.sampled`."""

    gamma: float
    """γ, above 0"""
    rho_cap: float | None
    drop_rho_outside: tuple[float, float] | None

    def factor(self, logp_N: Tensor, targets: Targets) -> Tensor:
        """γ·min(ρ, c) of every token, which its d and all behind it are multiplied by; 0 where ρ is dropped,
        and for tokens of the teacher, which have no ρ."""
        weight_N = weight(ratio(logp_N, targets.behavior_logp_N), self.rho_cap, self.drop_rho_outside)
        return torch.where(own(targets), self.gamma * weight_N, 0.0)


def future_credit(d_N: Tensor, factor_N: Tensor, row_N: Tensor) -> Tensor:
    """Σ_{j≥1} (Π_{i=1…j} factor_{t+i})·d_{t+j} over the rest of each row, [N]; a row's tokens stand together.

    Doubling: after i rounds every token holds its next 2^i terms, so log2(longest row) rounds do.
    """
    total_N, next_N, reach = d_N, torch.zeros_like(d_N), 1
    next_N[:-1] = torch.where(row_N[1:] == row_N[:-1], factor_N[1:], 0.0)
    while reach < d_N.shape[0] and bool(next_N.any()):
        total_N = total_N + next_N * _shifted(total_N, reach)
        next_N, reach = next_N * _shifted(next_N, reach), reach * 2
    return total_N - d_N


def _shifted(values_N: Tensor, reach: int) -> Tensor:
    """The value `reach` tokens later, 0 beyond the end."""
    return torch.cat([values_N[reach:], torch.zeros_like(values_N[:reach])])
