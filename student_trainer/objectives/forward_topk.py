"""Forward KL on the teacher's top-k and one bucket for the rest.

    loss_t = Σ_{v∈S} q(v) log(q(v)/p(v)) + Q log(Q/P),     Q = 1 − Σ_S q,  P = Σ_{v∉S} p(v)

It is KL(q‖p) after merging everything outside S into one event: zero exactly when p and q agree on S. It
does not depend on the sampled token, so stale samples need no weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from student_trainer.objectives.terms import Targets, Terms

_NO_TAIL = 1e-6
"""Teacher mass outside S below which it is rounding, not a tail; where S is everything, all of it is."""


def forward_topk(logp_NV: Tensor, targets: Targets) -> Terms:
    """Bucketed forward KL; `reverse_kl` is bucketed too, Σ_S p·d + P log(P/Q): a lower bound."""
    assert targets.support_NK is not None
    assert targets.support_logp_NK is not None
    logq_NK, logp_NK = targets.support_logp_NK, logp_NV.gather(1, targets.support_NK)
    q_NK = logq_NK.exp()
    tail_N = (1.0 - q_NK.sum(1)).clamp(min=0.0)
    has_tail_N = (tail_N > _NO_TAIL) & (logq_NK.shape[1] < logp_NV.shape[1])
    outside_NV = logp_NV.scatter(1, targets.support_NK, -torch.inf)
    log_rest_N = torch.where(has_tail_N.unsqueeze(1), outside_NV, logp_NV).logsumexp(1)
    log_tail_N = tail_N.clamp(min=_NO_TAIL).log()
    bucket_N = torch.where(has_tail_N, tail_N * (log_tail_N - log_rest_N), 0.0)
    loss_N = (q_NK * (logq_NK - logp_NK)).sum(1) + bucket_N
    with torch.no_grad():
        rest_N = torch.where(has_tail_N, log_rest_N.exp() * (log_rest_N - log_tail_N), 0.0)
        reverse_N = (logp_NK.exp() * (logp_NK - logq_NK)).sum(1) + rest_N
    return loss_N, {"reverse_kl": reverse_N}
