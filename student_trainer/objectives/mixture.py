"""A divergence from the teacher and a task's reward, together.

    L      = L_task + λ·L_KL
    L_KL   = (1/N) Σ_t c_t · divergence_t                        c: coefficient of the sample's teacher
    L_task = −(1/M) Σ_t sg[ min(ρ_t, cap) · (R − b) ] · log p(y_t),     ρ = p/μ

R is the reward of the token's rollout, b the mean reward of the step's rollouts (REINFORCE with a batch-mean
baseline), N all supervised tokens of the step, M those of rollouts with a reward. What is summed here is
divided by N later: λ·c_t comes as `coefficient_N`, (R − b)·N/M as `advantage_N`.
"""

from __future__ import annotations

from torch import Tensor

from student_trainer.objectives.importance import ratio, weight
from student_trainer.objectives.terms import Objective, Targets, Terms, at


def mixture(logp_NV: Tensor, targets: Targets, divergence: Objective, rho_cap: float | None) -> Terms:
    """Loss of both terms per token; the statistics are the divergence's own, without coefficients."""
    loss_N, stats = divergence(logp_NV, targets)
    if targets.coefficient_N is not None:
        loss_N = targets.coefficient_N * loss_N
    if targets.advantage_N is not None:
        logp_N = at(logp_NV, targets.token_N)
        weight_N = weight(ratio(logp_N, targets.behavior_logp_N), rho_cap, None)
        loss_N = loss_N - (weight_N * targets.advantage_N) * logp_N
    return loss_N, stats
