"""Unbiased hybrid: exact on a set S of tokens and on the mass outside it, policy gradient within that mass.

    loss_t = Σ_{v∈S} [ p(v) d(v) − p(v) + q(v) ] + b·P
           + sg[ min(ρ_t, c) · ( 1[y_t∉S]·(d(y_t) − b) + Σ_{j≥1} γ^j d_{t+j} ) ] · log p(y_t)

    d = log p − log q,     P = 1 − Σ_S p,     b = sg[ log P − log(1 − Σ_S q) ]

The first line needs no importance weight: given the prefix it is exact. Its sum has gradient Σ_S p·d·∇log p
(without −p + q it would not be stationary at p = q), and b·P moves the mass outside S as a whole to what
the teacher leaves there. The second line adds in expectation how that mass is spread, so all of it is
∇KL(p‖q) for every S that does not depend on y: S = ∅ is `sampled`, S = V is exact. That holds for any b: a
rounded one costs variance, not bias. S is the teacher's top-k (`topk`) or the student's top-k at sampling
time (`student_topk`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from student_trainer.objectives.importance import ratio, weight
from student_trainer.objectives.terms import Targets, Terms, at

_LEAST_MASS = 1e-4
"""Mass outside S is known no better than this: the teacher's log-probabilities travel as fp16."""


def hybrid(
    logp_NV: Tensor, targets: Targets, rho_cap: float | None, drop_rho_outside: tuple[float, float] | None
) -> Terms:
    """Surrogate loss over S and outside it; `reverse_kl` is Σ_S p·d + b·P + 1[y∉S]·w·(d(y) − b)."""
    assert targets.support_NK is not None
    assert targets.support_logp_NK is not None
    member_NK = targets.support_NK >= 0
    logp_NK = logp_NV.gather(1, targets.support_NK.clamp(min=0))
    p_NK, q_NK = logp_NK.exp(), targets.support_logp_NK.exp()
    pd_NK = p_NK * (logp_NK - targets.support_logp_NK)
    inside_N = torch.where(member_NK, pd_NK - p_NK + q_NK, 0.0).sum(1)
    rest_N = 1.0 - torch.where(member_NK, p_NK, 0.0).sum(1)
    tail_N = 1.0 - torch.where(member_NK, q_NK, 0.0).sum(1)
    baseline_N = (rest_N.detach().clamp(min=_LEAST_MASS) / tail_N.clamp(min=_LEAST_MASS)).log()

    logp_N = at(logp_NV, targets.token_N)
    weight_N = weight(ratio(logp_N, targets.behavior_logp_N), rho_cap, drop_rho_outside)
    outside_N = (targets.support_NK != targets.token_N.unsqueeze(1)).all(1)
    d_N = torch.where(outside_N, logp_N.detach() - targets.teacher_logp_N - baseline_N, 0.0)
    credit_N = d_N if targets.future_N is None else d_N + targets.future_N
    exact_N = torch.where(member_NK, pd_NK.detach(), 0.0).sum(1) + baseline_N * rest_N.detach()
    loss_N = inside_N + baseline_N * rest_N + (weight_N * credit_N) * logp_N
    return loss_N, {"reverse_kl": exact_N + weight_N * d_N}
