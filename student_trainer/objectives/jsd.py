"""Generalised Jensen-Shannon divergence over the full vocabulary.

    loss_t = β KL(q‖m) + (1 − β) KL(p‖m),     m = β q + (1 − β) p

Bounded; β → 0 behaves like the forward KL and β → 1 like the reverse KL, after division by β(1 − β).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from student_trainer.objectives.terms import Targets, Terms


def jsd(logp_NV: Tensor, targets: Targets, beta: float) -> Terms:
    """Generalised JSD per token; `reverse_kl` is exact."""
    assert targets.teacher_logp_NV is not None
    logq_NV = targets.teacher_logp_NV
    logm_NV = torch.logaddexp(logq_NV + math.log(beta), logp_NV + math.log1p(-beta))
    q_NV, p_NV = logq_NV.exp(), logp_NV.exp()
    loss_N = (beta * q_NV * (logq_NV - logm_NV) + (1.0 - beta) * p_NV * (logp_NV - logm_NV)).sum(1)
    with torch.no_grad():
        reverse_N = (p_NV * (logp_NV - logq_NV)).sum(1)
    return loss_N, {"reverse_kl": reverse_N}
