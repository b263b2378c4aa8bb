"""Importance weights of stale samples; always detached: a differentiable min(ρ, c)·A has no gradient wherever
ρ > c, and a differentiable ρ in the hybrid makes the gradient wrong (docs/objectives.md)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from student_trainer.objectives.terms import Targets, own

_MAX_LOG_RHO = 20.0
"""exp of it still has finite squares in fp32; beyond it a sample says nothing anyway."""


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
    """How later tokens' d is credited to a token: see `sampled`."""

    gamma: float
    """γ, above 0"""
    rho_cap: float | None
    drop_rho_outside: tuple[float, float] | None

    def factor(self, logp_C: Tensor, targets: Targets) -> Tensor:
        """γ·min(ρ, c) of every token, which its d and all behind it are multiplied by; 0 where ρ is dropped,
        and for tokens of the teacher, which have no ρ."""
        weight_C = weight(ratio(logp_C, targets.behavior_logp_N), self.rho_cap, self.drop_rho_outside)
        return torch.where(own(targets), self.gamma * weight_C, 0.0)
