"""Skewed reverse KL over the full vocabulary.

    loss_t = KL(p ‖ (1 − α) q + α p)

α = 0 is the reverse KL; a small α bounds d where the teacher gives almost no mass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from student_trainer.objectives.terms import Targets, Terms


def skew(logp_NV: Tensor, targets: Targets, alpha: float) -> Terms:
    """Skewed reverse KL per token; `reverse_kl` is the unskewed one, exact."""
    assert targets.teacher_logp_NV is not None
    logq_NV, p_NV = targets.teacher_logp_NV, logp_NV.exp()
    logm_NV = logq_NV
    if alpha > 0.0:
        logm_NV = torch.logaddexp(logq_NV + math.log1p(-alpha), logp_NV + math.log(alpha))
    loss_N = (p_NV * (logp_NV - logm_NV)).sum(1)
    with torch.no_grad():
        reverse_N = (p_NV * (logp_NV - logq_NV)).sum(1)
    return loss_N, {"reverse_kl": reverse_N}
