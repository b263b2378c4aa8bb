"""Exact reverse KL over the full vocabulary.

    loss_t = Σ_v p(v) d(v),     d = log p − log q;     gradient in the logits: p·(d − KL)

Exact given the prefix: no sampling noise, no importance weight.
"""

from __future__ import annotations

from torch import Tensor

from student_trainer.objectives.terms import Targets, Terms


def full(logp_NV: Tensor, targets: Targets) -> Terms:
    """KL(p‖q) per token."""
    assert targets.teacher_logp_NV is not None
    kl_N = (logp_NV.exp() * (logp_NV - targets.teacher_logp_NV)).sum(1)
    return kl_N, {"reverse_kl": kl_N.detach()}
