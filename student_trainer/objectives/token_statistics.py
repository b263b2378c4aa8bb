"""Sums over the tokens of a step, whatever the objective, and the metrics that are their quotients.

ρ = p(y)/μ(y) of the tokens that the student generated
fresh: tokens sampled from these very weights, where ρ should be 1
fresh_kl = ρ − 1 − log ρ, an unbiased, never negative estimate of KL(μ‖p): the rollout engine's mismatch
score_gap = |log q(y) of the teacher's dense scores − log q(y) as sent|: rounding, when both are right
student_end, teacher_end: mass on the ids that end a completion; of a teacher that sends S, what of it is in S
student_mass, teacher_mass: mass inside S;  overlap: share of S that is in the student's own top-K
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from student_trainer.objectives.divergences import Targets, at, mask_log_mass, own, ratio
from sync.wire.head import probabilities

COUNTS: Final = ("rows", "tokens", "truncated", "age", "filled", "slots", "rescored")
"""Sums that a micro-batch brings along: R, C, rows cut off at the token limit, Σ over tokens of the trained
version's step − the token's step, tokens of prompts and completions, positions computed (these and padding),
rows whose kept scores were gone."""
MEANS: Final = {
    "loss": ("loss", "denominator"),
    "reverse_kl": ("reverse_kl", "own_tokens"),
    "student_entropy": ("student_entropy", "tokens"),
    "teacher_entropy": ("teacher_entropy", "teacher_entropy_tokens"),
    "student_end": ("student_end", "end_tokens"),
    "teacher_end": ("teacher_end", "teacher_end_tokens"),
    "rho_mean": ("rho", "own_tokens"),
    "rho_squared_mean": ("rho_squared", "own_tokens"),
    "mismatch_kl": ("fresh_kl", "fresh_tokens"),
    "score_gap": ("score_gap", "score_gap_tokens"),
    "student_mass": ("student_mass", "support_tokens"),
    "teacher_mass": ("teacher_mass", "support_tokens"),
    "mask_mass": ("mask_mass", "mask_tokens"),
    "topk_overlap": ("overlap", "overlap_tokens"),
    "truncation_rate": ("truncated", "rows"),
    "age_mean": ("age", "tokens"),
    "tokens_per_slot": ("filled", "slots"),
}
"""Metric of a step (a run's figure `train/NAME`) → (sum, count) over all ranks whose quotient it is; left out
where the count is 0. A new metric is a row here, and its sums in `token_sums`."""
_SUMS = (name for pair in MEANS.values() for name in pair)
STATS: Final = tuple(name for name in dict.fromkeys(_SUMS) if name not in (*COUNTS, "denominator"))
"""Sums over the tokens of a chunk, "loss" first. `own_tokens` counts those that the student generated:
`reverse_kl`, `rho` and `rho_squared` are of them alone."""
OVERLAP_TOKENS: Final = 64
"""First tokens of a chunk whose overlap is computed: a top-k over the vocabulary is expensive."""


@torch.no_grad()
def token_sums(
    logp_NV: Tensor, targets: Targets, ends: Sequence[int] = (), overlap_tokens: int = OVERLAP_TOKENS
) -> dict[str, Tensor]:
    """Sums (scalars) over N tokens, named as in STATS, and `rho_max`. N must not be 0.

    `ends`: ids that end a completion; without any, their mass is left out.
    `overlap_tokens`: of how many of the first tokens the overlap is computed.
    """
    logp_N, masked = at(logp_NV, targets.token_N), dict[str, Tensor]()
    if targets.mask_NK is not None:
        mass_N, some_N = mask_log_mass(logp_NV, targets.mask_NK), (targets.mask_NK >= 0).any(1)
        logp_N = logp_N - mass_N
        masked = {"mask_mass": torch.where(some_N, mass_N.exp(), 0.0).sum(), "mask_tokens": some_N.sum()}
    rho_N, own_N = ratio(logp_N, targets.behavior_logp_N), own(targets)
    mismatch_N = rho_N - 1.0 - (logp_N - targets.behavior_logp_N)
    rho_N = torch.where(own_N, rho_N, 0.0)
    sums = {
        "own_tokens": own_N.sum(),
        "student_entropy": _entropy(logp_NV).sum(),
        "rho": rho_N.sum(),
        "rho_squared": rho_N.square().sum(),
        "rho_max": rho_N.max(),
        "fresh_kl": torch.where(targets.fresh_N, mismatch_N, 0.0).sum(),
        "fresh_tokens": targets.fresh_N.sum(),
        **masked,
    }
    if targets.support_NK is not None and targets.support_logp_NK is not None:
        sums |= _support(logp_NV, targets, targets.support_NK, targets.support_logp_NK, overlap_tokens)
    entropy_N, logq_NV = targets.teacher_entropy_N, targets.teacher_logp_NV
    if logq_NV is not None:
        entropy_N = _entropy(logq_NV)
        gap_N = (at(logq_NV, targets.token_N) - targets.teacher_logp_N).abs()
        sums |= {"score_gap": gap_N.sum(), "score_gap_tokens": torch.ones_like(gap_N).sum()}
    if entropy_N is not None:
        sums |= {"teacher_entropy": entropy_N.sum()}
        sums |= {"teacher_entropy_tokens": torch.ones_like(entropy_N).sum()}
    return sums | (_ends(logp_NV, targets, logp_NV.new_tensor(ends, dtype=torch.int64)) if ends else {})


def _ends(logp_NV: Tensor, targets: Targets, ends_E: Tensor) -> dict[str, Tensor]:
    """Mass of the student on the ids that end a completion, and the teacher's where its scores say."""
    count = torch.ones_like(targets.token_N).sum()
    sums = {"student_end": logp_NV[:, ends_E].exp().sum(), "end_tokens": count}
    if targets.teacher_logp_NV is not None:
        sums |= {"teacher_end": targets.teacher_logp_NV[:, ends_E].exp().sum(), "teacher_end_tokens": count}
    elif targets.support_NK is not None and targets.support_logp_NK is not None:
        ends_NK = torch.isin(targets.support_NK, ends_E)
        sums |= {"teacher_end": torch.where(ends_NK, targets.support_logp_NK.exp(), 0.0).sum()}
        sums |= {"teacher_end_tokens": (targets.support_NK >= 0).any(1).sum()}
    return sums


def _entropy(logp_NV: Tensor) -> Tensor:
    """−Σ p·log p [N]."""
    return -torch.linalg.vecdot(probabilities(logp_NV), logp_NV)


def _support(
    logp_NV: Tensor, targets: Targets, ids_NK: Tensor, logq_NK: Tensor, overlap_tokens: int
) -> dict[str, Tensor]:
    """Sums that compare student and teacher on S. The score gap is that of tokens inside S, but for those of
    text, which the teacher may have scored with others."""
    member_NK, hit_NK = ids_NK >= 0, ids_NK == targets.token_N.unsqueeze(1)
    ids_NK = ids_NK.clamp(min=0)
    gap_NK = (logq_NK - targets.teacher_logp_N.unsqueeze(1)).abs()
    read_NK = hit_NK if targets.by_text_N is None else hit_NK & ~targets.by_text_N.unsqueeze(1)
    some_PV, members_PK = logp_NV[:overlap_tokens], member_NK[:overlap_tokens]
    own_PK = some_PV.topk(min(ids_NK.shape[1], logp_NV.shape[1]), dim=1).indices
    own_PV = torch.zeros_like(some_PV, dtype=torch.bool).scatter_(1, own_PK, True)
    shared_P = (own_PV.gather(1, ids_NK[:overlap_tokens]) & members_PK).sum(1)
    return {
        "score_gap": torch.where(read_NK, gap_NK, 0.0).sum(),
        "score_gap_tokens": read_NK.sum(),
        "student_mass": torch.where(member_NK, logp_NV.gather(1, ids_NK).exp(), 0.0).sum(),
        "teacher_mass": torch.where(member_NK, logq_NK.exp(), 0.0).sum(),
        "support_tokens": member_NK.any(1).sum(),
        "overlap": (shared_P / members_PK.sum(1).clamp(min=1)).sum(),
        "overlap_tokens": members_PK.any(1).sum(),
    }
