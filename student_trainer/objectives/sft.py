"""Supervised training on the teacher's own samples: cold start and baseline.

    loss_t = log q(y_t) − log p(y_t),     y ~ q

The cross-entropy shifted by a constant, so that its mean estimates KL(q‖p) and vanishes at p = q.
"""

from __future__ import annotations

from torch import Tensor

from student_trainer.objectives.terms import Targets, Terms, at


def sft(logp_NV: Tensor, targets: Targets) -> Terms:
    """Forward-KL estimate of the samples; no reverse KL can be said from them."""
    return targets.teacher_logp_N - at(logp_NV, targets.token_N), {}
