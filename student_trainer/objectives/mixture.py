"""A divergence from the teacher and a task's reward, together.

    L      = L_task + λ·L_KL
    L_KL   = (1/N) Σ_t c_t · divergence_t                        c: coefficient of the sample's teacher
    L_task = −(1/M) Σ_t sg[ min(ρ_t, cap) · (R − b) ] · log p(y_t),     ρ = p/μ

Tokens that the teacher wrote have no part in L_task, and cross-entropy (`sft`) in the place of their
divergence: with a share 1 − f of such rollouts the expected loss is f·L + (1 − f)·λ·L_sft.

R is the reward of the token's rollout, b the mean reward of the step's rollouts (REINFORCE with a batch-mean
baseline), N all supervised tokens of the step, M those of rollouts with a reward. What is summed here is
divided by N later: λ·c_t comes as `coefficient_N`, (R − b)·N/M as `advantage_N`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from student_trainer.objectives.importance import ratio, weight
from student_trainer.objectives.sft import sft
from student_trainer.objectives.terms import Objective, Targets, Terms, at


def mixture(logp_NV: Tensor, targets: Targets, divergence: Objective, rho_cap: float | None) -> Terms:
    """Loss of both terms per token; the statistics are the divergence's own, without coefficients."""
    loss_N, stats = divergence(logp_NV, targets)
    written_N = targets.by_teacher_N
    if written_N is not None:
        loss_N = torch.where(written_N, sft(logp_NV, targets)[0], loss_N)
        stats = {name: torch.where(written_N, 0.0, value_N) for name, value_N in stats.items()}
    if targets.coefficient_N is not None:
        loss_N = targets.coefficient_N * loss_N
    if targets.advantage_N is not None:
        logp_N = at(logp_NV, targets.token_N)
        weight_N = weight(ratio(logp_N, targets.behavior_logp_N), rho_cap, None)
        task_N = (weight_N * targets.advantage_N) * logp_N
        loss_N = loss_N - (task_N if written_N is None else torch.where(written_N, 0.0, task_N))
    return loss_N, stats
