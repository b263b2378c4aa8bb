"""Reverse KL by policy gradient on the sampled token.

    loss_t = sg[ w_t · (d_t + Σ_{j≥1} γ^j w_{t+1} ⋯ w_{t+j} d_{t+j}) ] · log p(y_t)

with d = log p − log q, w = min(ρ, c), ρ = p/μ. Given the prefix, E_{y~μ}[ρ·d(y)·∇log p(y)] = ∇KL(p‖q), and
a later d carries the ρ of every token up to its own: unbiased for any μ when uncapped. The cap bounds each
factor, not their product.
d is that of the live student, never of μ: an advantage built from μ does not vanish at p = q.
"""

from __future__ import annotations

from torch import Tensor

from student_trainer.objectives.importance import ratio, weight
from student_trainer.objectives.terms import Targets, Terms, at


def sampled(
    logp_NV: Tensor, targets: Targets, rho_cap: float | None, drop_rho_outside: tuple[float, float] | None
) -> Terms:
    """Surrogate loss of the sampled tokens; `reverse_kl` is the estimate Σ w·d."""
    logp_N = at(logp_NV, targets.token_N)
    rho_N = ratio(logp_N, targets.behavior_logp_N)
    weight_N = weight(rho_N, rho_cap, drop_rho_outside)
    d_N = logp_N.detach() - targets.teacher_logp_N
    credit_N = d_N if targets.future_N is None else d_N + targets.future_N
    return (weight_N * credit_N) * logp_N, {"reverse_kl": weight_N * d_N}
