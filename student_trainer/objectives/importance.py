"""Importance weights of stale samples; always detached: a differentiable min(ρ, c)·A has no gradient wherever
ρ > c, and a differentiable ρ in the hybrid makes the gradient wrong (docs/objectives.md)."""

from __future__ import annotations

import torch
from torch import Tensor

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
