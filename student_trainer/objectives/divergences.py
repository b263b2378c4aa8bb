"""The divergences between student and teacher, how they are mixed, and what they are computed from.

Letters: N tokens of a micro-batch or of a chunk of it, K ids per token, V vocabulary, G hidden size of the
teacher. p: live student, q: teacher, μ: the policy that sampled y, d = log p − log q, ρ = p(y)/μ(y), sg:
without gradient. Log-probabilities are nats, fp32. A divergence returns a surrogate loss for each token,
whose gradient is the one wanted, and statistics named in `token_statistics.STATS`.

ρ is detached: a differentiable min(ρ, c)·A has no gradient wherever ρ > c, and a differentiable ρ in the
hybrid makes the gradient wrong (docs/objectives.md). The task's clipped ratio alone is meant to have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from student_trainer.objectives import config
from sync.base.errors import DataError
from sync.base.own_code import load_function, own_code
from sync.wire.head import probabilities

Terms = tuple[Tensor, dict[str, Tensor]]
"""Surrogate loss per token [N], with gradient, and per-token statistics [N] named in STATS, without."""
Objective = Callable[[Tensor, "Targets"], Terms]
"""(live log p [N, V], targets) → terms."""

_LEAST_MASS = 1e-4
"""Mass outside S is known no better than this: the teacher's log-probabilities travel as fp16."""
_NO_TAIL = 1e-6
"""Teacher mass outside S below which it is rounding, not a tail; where S is everything, all of it is."""
_TINY = 1e-30
"""Mass of G by which is divided: at least p(y), which only rounding makes 0."""
_FAR = 3.0
"""Nats between log P and log Q from which on the pull of an end grows no more: one new to the student would
else take over a step."""
_MAX_LOG_RHO = 20.0
"""exp of it still has finite squares in fp32; beyond it a sample carries no information."""


@dataclass(frozen=True)
class Targets:
    """Everything that a token's loss depends on besides the live student; nothing here carries a gradient.

    Made by `step.collate`, completed by `step.weighted`, cut into chunks by the head.
    """

    token_N: Tensor
    """int64: the sampled token y"""
    behavior_logp_N: Tensor
    """log μ(y)"""
    teacher_logp_N: Tensor
    """log q(y)"""
    fresh_N: Tensor
    """bool: y was sampled from exactly the weights that are trained now: age 0, on this lineage's path"""
    support_NK: Tensor | None = None
    """int64: ids of S, -1 where there are fewer than K; S must not depend on y"""
    support_logp_NK: Tensor | None = None
    """log q at support_NK"""
    teacher_logp_NV: Tensor | None = None
    """log q, whole distribution; made block by block from `teacher_hidden_NG`"""
    teacher_entropy_N: Tensor | None = None
    """nats; None: not sent"""
    future_N: Tensor | None = None
    """Σ_{j≥1} γ^j (Π_{i=1…j} min(ρ_{t+i}, c))·d_{t+j} over the rest of the row; None: γ = 0"""
    coefficient_N: Tensor | None = None
    """λ·c of the token's teacher, times the row's weight; None: 1"""
    advantage_N: Tensor | None = None
    """A·w·N of the token (see `mixture`), times the row's weight; None: no task reward"""
    by_teacher_N: Tensor | None = None
    """bool: the teacher generated the token; None: the student generated all"""
    teacher_N: Tensor | None = None
    """int64: index of the teacher that scored the token; None: there is only one"""
    teacher_hidden_NG: Tensor | None = None
    """the teacher's hidden state that predicts the token; None: not sent"""
    mask_NK: Tensor | None = None
    """int64: ids of M, the sampling mask that y was sampled from, -1 where there are fewer than K; none: the
    whole vocabulary. None: of every token"""
    row_N: Tensor | None = None
    """int64: row of the micro-batch, ascending; None where nothing is credited across tokens"""
    goes_on_N: Tensor | None = None
    """bool: the token goes on the segment of text that the one before it is in: log q of a segment stands at
    its last token, 0 at the others; None: every token is a segment"""
    by_text_N: Tensor | None = None
    """bool: a teacher with another tokenizer scored the token; None: of no token"""
    parted_NB: Tensor | None = None
    """bool: the first bytes of the tokens G, among which is y, for any of which S and q would be known and
    the same; none where there is no such G. Only of tokens `by_text_N`"""
    first_V: Tensor | None = None
    """int64: the first byte of each id (`tokenizers.first_bytes`), set block by block with `parted_NB`"""

    def each(self, change: Callable[[Tensor], Tensor]) -> Targets:
        """The same with every tensor changed: moved, or cut to some of the tokens."""
        return replace(self, **{k: change(v) for k, v in vars(self).items() if isinstance(v, Tensor)})


def own(targets: Targets) -> Tensor:
    """bool [N]: the student generated the token."""
    by_teacher_N = targets.by_teacher_N
    return torch.ones_like(targets.fresh_N) if by_teacher_N is None else ~by_teacher_N


def at(logp_NV: Tensor, token_N: Tensor) -> Tensor:
    """log p(y) [N]."""
    return logp_NV.gather(1, token_N.unsqueeze(1)).squeeze(1)


def ratio(logp_N: Tensor, behavior_logp_N: Tensor) -> Tensor:
    """ρ = p(y)/μ(y), without gradient."""
    return (logp_N.detach() - behavior_logp_N).clamp(max=_MAX_LOG_RHO).exp()


def mask_log_mass(logp_NV: Tensor, mask_NK: Tensor) -> Tensor:
    """log Σ_M p [N] of each token's sampling mask (`Targets.mask_NK`), 0 where it has none."""
    member_NK = mask_NK >= 0
    logp_NK = logp_NV.gather(1, mask_NK.clamp(min=0)).masked_fill(~member_NK, -torch.inf)
    some_N = member_NK.any(1)
    # without ids: rows of -inf, whose logsumexp has no gradient
    logp_NK = torch.where(some_N.unsqueeze(1), logp_NK, 0.0)
    return torch.where(some_N, logp_NK.logsumexp(1), 0.0)


def within_mask(logp_NV: Tensor, targets: Targets) -> tuple[Tensor, Targets]:
    """Student and teacher as distributions over the sampling mask M of each token, of which y ~ μ is one.

        log p_M(v) = log p(v) − log Σ_M p,     log q(v) − sg[log Σ_M p]   in the teacher's place

    Only ids of M may be read of what is returned; those of S outside M become -1. Subtracting the same from
    both leaves d as it was, and so 0 where p = q: given M, d may be shifted by anything that does not depend
    on y, so that the gradient is that of KL(p_M‖q_M) though the teacher's mass of M is not known.
    """
    mask_NK = targets.mask_NK
    if mask_NK is None:
        return logp_NV, targets
    mass_N = mask_log_mass(logp_NV, mask_NK)
    shift_N = mass_N.detach()
    targets = replace(targets, teacher_logp_N=targets.teacher_logp_N - shift_N)
    if targets.support_NK is not None and targets.support_logp_NK is not None:
        shared_NK = (targets.support_NK.unsqueeze(2) == mask_NK.unsqueeze(1)).any(2)
        shared_NK = shared_NK | (mask_NK < 0).all(1, keepdim=True)
        targets = replace(
            targets,
            support_NK=torch.where(shared_NK, targets.support_NK, -1),
            support_logp_NK=targets.support_logp_NK - shift_N.unsqueeze(1),
        )
    return logp_NV - mass_N.unsqueeze(1), targets


def weight(rho_N: Tensor, cap: float | None, drop_outside: tuple[float, float] | None) -> Tensor:
    """min(ρ, cap), and 0 where ρ is outside `drop_outside` = (low, high)."""
    weight_N = rho_N if cap is None else rho_N.clamp(max=cap)
    if drop_outside is None:
        return weight_N
    low, high = drop_outside
    return torch.where((rho_N < low) | (rho_N > high), 0.0, weight_N)


# --- divergences --------------------------------------------------------------------------------------------


def sft(logp_NV: Tensor, targets: Targets) -> Terms:
    """Cross-entropy on the teacher's own samples: an estimate of the forward KL.

        loss_t = log q(y_t) − log p(y_t),     y ~ q

    Shifted by a constant, so that its mean estimates KL(q‖p) and vanishes at p = q. It gives no reverse KL.
    """
    return targets.teacher_logp_N - at(logp_NV, targets.token_N), {}


def sampled(
    logp_NV: Tensor, targets: Targets, rho_cap: float | None, drop_rho_outside: tuple[float, float] | None
) -> Terms:
    """Reverse KL by policy gradient on the sampled token.

        loss_t = sg[ w_t · (d_t + Σ_{j≥1} γ^j w_{t+1} ⋯ w_{t+j} d_{t+j}) ] · log p(y_t),     w = min(ρ, c)

    Given the prefix, E_{y~μ}[ρ·d(y)·∇log p(y)] = ∇KL(p‖q), and a later d carries the ρ of every token up to
    its own: unbiased for any μ when uncapped. The cap bounds each factor, not their product. d is that of the
    live student, never of μ: an advantage built from μ does not vanish at p = q. `reverse_kl` is the estimate
    Σ w·d.
    """
    logp_N = at(logp_NV, targets.token_N)
    rho_N = ratio(logp_N, targets.behavior_logp_N)
    weight_N = weight(rho_N, rho_cap, drop_rho_outside)
    d_N = logp_N.detach() - targets.teacher_logp_N
    credit_N = d_N if targets.future_N is None else d_N + targets.future_N
    return (weight_N * credit_N) * logp_N, {"reverse_kl": weight_N * d_N}


def hybrid(
    logp_NV: Tensor, targets: Targets, rho_cap: float | None, drop_rho_outside: tuple[float, float] | None
) -> Terms:
    """Exact on a set S of tokens and on the mass outside it, policy gradient within that mass; unbiased.

        loss_t = Σ_{v∈S} [ p(v) c(v) − p(v) + q(v) ] + b·P
               + sg[ min(ρ_t, c) · ( d(y_t) − c(y_t) + Σ_{j≥1} γ^j d_{t+j} ) ] · log p(y_t)

        c(v) = log p(v) − log q(v) on S,  b outside;     P = 1 − Σ_S p,     b = sg[ log P − log(1 − Σ_S q) ]

    The first line needs no importance weight: given the prefix it is exact. Its sum has gradient
    Σ_S p·d·∇log p (without −p + q it would not be stationary at p = q), and b·P moves the mass outside S as
    a whole to what the teacher leaves there. The second line adds in expectation how that mass is spread, so
    all of it is ∇KL(p‖q) for every S that does not depend on y: S = ∅ is `sampled`, S = V is exact. That
    holds for any b: a rounded one costs variance, not bias. S is the teacher's top-k (`topk`) or the
    student's top-k at sampling time (`student_topk`). `reverse_kl` is Σ_S p·c + b·P + w·(d(y) − c(y)).

    Of a teacher with another tokenizer, S and q on it are known only if y is of a set G of tokens, S ⊂ G:

        1[y_t∈G]·sg[w_t/Σ_G p] · { Σ_{v∈S} [ p(v) c(v) − p(v) + q(v) ] + b·(Σ_G p − Σ_S p) }

    is the first line then, and c is 0 outside G. G follows from the prefix, and for any y of it so do S, q
    and b (`distill/translation.py`). So E[1[y∈G]·w·c(y)·∇log p(y)] = Σ_G p·c·∇log p is its expectation,
    whatever c, and the second keeps what y and its segment add to c(y): nothing where y of S is one token to
    the teacher too. All tokens as G need no weight, and G = ∅ is `sampled`.
    """
    assert targets.support_NK is not None
    assert targets.support_logp_NK is not None
    member_NK, hit_NK = targets.support_NK >= 0, targets.support_NK == targets.token_N.unsqueeze(1)
    logp_N, logp_NK = at(logp_NV, targets.token_N), logp_NV.gather(1, targets.support_NK.clamp(min=0))
    weight_N = weight(ratio(logp_N, targets.behavior_logp_N), rho_cap, drop_rho_outside)
    p_NK, q_NK, c_NK = logp_NK.exp(), targets.support_logp_NK.exp(), logp_NK - targets.support_logp_NK
    sent_NK, mass_N, share_N = member_NK, torch.ones_like(logp_N), torch.ones_like(logp_N)
    by_text_N, parted_NB, first_V = targets.by_text_N, targets.parted_NB, targets.first_V
    if by_text_N is not None and parted_NB is not None:
        assert first_V is not None
        sent_NK = member_NK | by_text_N.unsqueeze(1)  # its ids that the student lacks, too
        parted_NV = parted_NB[:, first_V]
        within_N = torch.where(parted_NV, logp_NV.exp(), 0.0).sum(1)
        weighed_N = weight_N / within_N.detach().clamp(min=_TINY)
        weighed_N = torch.where(parted_NV.all(1), 1.0, weighed_N)
        mass_N = torch.where(by_text_N, within_N, mass_N)
        share_N = torch.where(by_text_N, torch.where(parted_NB.any(1), weighed_N, 0.0), share_N)
    inside_N = torch.where(member_NK, p_NK * c_NK - p_NK + q_NK, 0.0).sum(1)
    rest_N = mass_N - torch.where(member_NK, p_NK, 0.0).sum(1)
    tail_N = 1.0 - torch.where(sent_NK, q_NK, 0.0).sum(1)
    baseline_N = (rest_N.detach().clamp(min=_LEAST_MASS) / tail_N.clamp(min=_LEAST_MASS)).log()

    d_N, hit_N = logp_N.detach() - targets.teacher_logp_N, hit_NK.any(1)
    c_N = torch.where(hit_N, d_N, baseline_N)
    if by_text_N is not None and parted_NB is not None:
        inside_c_N = torch.where(hit_NK, c_NK.detach(), 0.0).sum(1)
        text_c_N = torch.where(hit_N, inside_c_N, baseline_N)
        c_N = torch.where(by_text_N, torch.where(parted_NB.any(1), text_c_N, 0.0), c_N)
    d_N = d_N - c_N
    credit_N = d_N if targets.future_N is None else d_N + targets.future_N
    exact_N = torch.where(member_NK, (p_NK * c_NK).detach(), 0.0).sum(1) + baseline_N * rest_N.detach()
    loss_N = share_N * (inside_N + baseline_N * rest_N) + (weight_N * credit_N) * logp_N
    return loss_N, {"reverse_kl": share_N * exact_N + weight_N * d_N}


def forward_topk(logp_NV: Tensor, targets: Targets) -> Terms:
    """Forward KL on the teacher's top-k and one bucket for the rest.

        loss_t = Σ_{v∈S} q(v) log(q(v)/p(v)) + Q log(Q/P),     Q = 1 − Σ_S q,  P = Σ_{v∉S} p(v)

    It is KL(q‖p) after merging everything outside S into one event: zero exactly when p and q agree on S. It
    does not depend on the sampled token, so stale samples need no weight. `reverse_kl` is bucketed too,
    Σ_S p·d + P log(P/Q): a lower bound.
    """
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


class _Sloped(torch.autograd.Function):
    """Values [N] whose gradient in log p [N, V] is known: one tensor of the vocabulary's size, not one for
    every operation."""

    @staticmethod
    def forward(ctx: Any, logp_NV: Tensor, value_N: Tensor, slope_NV: Tensor) -> Tensor:
        ctx.save_for_backward(slope_NV)
        return value_N.clone()

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:
        (slope_NV,) = ctx.saved_tensors
        return grad_N.unsqueeze(1) * slope_NV, None, None


def full(logp_NV: Tensor, targets: Targets) -> Terms:
    """Exact reverse KL over the full vocabulary: no sampling noise, no importance weight.

    loss_t = Σ_v p(v) d(v);     gradient in the logits: p·(d − KL)
    """
    assert targets.teacher_logp_NV is not None
    with torch.no_grad():
        # p·(d + 1), of which the softmax takes the second p away
        slope_NV = (logp_NV - targets.teacher_logp_NV).mul_(probabilities(logp_NV))
        kl_N = slope_NV.sum(1)
    return _Sloped.apply(logp_NV, kl_N, slope_NV), {"reverse_kl": kl_N}


def forward(logp_NV: Tensor, targets: Targets) -> Tensor:
    """Exact forward KL over the full vocabulary [N].

    loss_t = Σ_v q(v) (log q(v) − log p(v));     gradient in the logits: p − q
    """
    assert targets.teacher_logp_NV is not None
    logq_NV = targets.teacher_logp_NV
    with torch.no_grad():
        q_NV = probabilities(logq_NV)
        kl_N = (logq_NV - logp_NV).mul_(q_NV).sum(1)
    value_N: Tensor = _Sloped.apply(logp_NV, kl_N, q_NV.neg_())
    return value_N


def jsd(logp_NV: Tensor, targets: Targets, beta: float) -> Terms:
    """Generalised Jensen-Shannon divergence over the full vocabulary.

        loss_t = β KL(q‖m) + (1 − β) KL(p‖m),     m = β q + (1 − β) p

    Bounded; β → 0 behaves like the forward KL and β → 1 like the reverse KL, after division by β(1 − β).
    """
    assert targets.teacher_logp_NV is not None
    logq_NV = targets.teacher_logp_NV
    logm_NV = torch.logaddexp(logq_NV + math.log(beta), logp_NV + math.log1p(-beta))
    q_NV, p_NV = probabilities(logq_NV), logp_NV.exp()
    loss_N = (beta * q_NV * (logq_NV - logm_NV) + (1.0 - beta) * p_NV * (logp_NV - logm_NV)).sum(1)
    return loss_N, full(logp_NV.detach(), targets)[1]


def skew(logp_NV: Tensor, targets: Targets, alpha: float) -> Terms:
    """Skewed reverse KL over the full vocabulary.

        loss_t = KL(p ‖ (1 − α) q + α p)

    α = 0 is the reverse KL; a small α bounds d where the teacher gives almost no mass. `reverse_kl` is the
    unskewed one.
    """
    assert targets.teacher_logp_NV is not None
    logm_NV = targets.teacher_logp_NV
    if alpha > 0.0:
        logm_NV = torch.logaddexp(logm_NV + math.log1p(-alpha), logp_NV + math.log(alpha))
    loss_N = (logp_NV.exp() * (logp_NV - logm_NV)).sum(1)
    return loss_N, full(logp_NV.detach(), targets)[1]


def nothing(logp_NV: Tensor, targets: Targets) -> Terms:
    """No divergence: 0, whose gradient is 0. It gives no reverse KL."""
    return 0.0 * at(logp_NV, targets.token_N), {}


def both_ways(logp_NV: Tensor, targets: Targets, reverse: Objective, weight: float) -> Terms:
    """A reverse divergence and φ times the forward KL: over the full vocabulary, else bucketed on S.

        loss_t = reverse_t + φ·KL(q‖p)

    The reverse KL's gradient in the logit of v is p(v)·(d(v) − KL): where p(v) is small it says nothing,
    whatever q(v) is. The forward term adds φ·(p(v) − q(v)). The statistics are the reverse divergence's.
    """
    loss_N, stats = reverse(logp_NV, targets)
    dense = targets.teacher_logp_NV is not None
    forward_N = forward(logp_NV, targets) if dense else forward_topk(logp_NV, targets)[0]
    return loss_N + weight * forward_N, stats


def ending(
    logp_NV: Tensor, targets: Targets, divergence: Objective, weight: float, ends: Sequence[int]
) -> Terms:
    """A divergence and η times how far the student's end of a completion is from the teacher's.

        loss_t = divergence_t + η·Q·h(log P − log Q),     h(x) = ½x², beyond ±3 a line

    P and Q are the mass of student and teacher on the ids E that end a completion; of a teacher that sends S,
    that on E ∩ S, and 0 where it is empty. The term's gradient in the logit of an end v is
    η·Q·clip(log(P/Q), ±3)·p(v)·(1/P − 1). Both KLs push an end that is too likely by about p, and the forward
    one pulls one that is lost by no more than q; this one pulls the more, the more is lost, up to 3·η·Q.
    """
    loss_N, stats = divergence(logp_NV, targets)
    ends_E, logq_NV = targets.token_N.new_tensor(ends), targets.teacher_logp_NV
    if logq_NV is not None:
        student_N, teacher_N = (each_NV[:, ends_E].logsumexp(1) for each_NV in (logp_NV, logq_NV))
    else:
        assert targets.support_NK is not None
        assert targets.support_logp_NK is not None
        ends_NK = torch.isin(targets.support_NK, ends_E)
        student_N = mask_log_mass(logp_NV, torch.where(ends_NK, targets.support_NK, -1))
        teacher_N = targets.support_logp_NK.masked_fill(~ends_NK, -torch.inf).logsumexp(1)
        teacher_N = torch.where(ends_NK.any(1), teacher_N, 0.0)
    apart_N = functional.huber_loss(student_N, teacher_N, reduction="none", delta=_FAR)
    return loss_N + weight * teacher_N.exp() * apart_N, stats


# --- what is minimised --------------------------------------------------------------------------------------


def rewarded(
    logp_N: Tensor, targets: Targets, rho_cap: float | None, clip: tuple[float, float] | None = None
) -> Tensor:
    """Policy gradient of a task's reward, to be maximised [N]; A is `advantage_N`.

        sg[ min(ρ, c)·A ] · log p(y)
        with clip = (l, h):  min( ρ'·A, clip(ρ', 1 − l, 1 + h)·A ),     ρ' = min(ρ, c)

    The clipped one has the gradient ρ·A·∇log p, and none where A > 0 and ρ > 1 + h, or A < 0 and ρ < 1 − l,
    or ρ > c: the clip of PPO, and a cap for A < 0, which it leaves open.
    """
    assert targets.advantage_N is not None
    if clip is None:
        weight_N = weight(ratio(logp_N, targets.behavior_logp_N), rho_cap, None)
        return (weight_N * targets.advantage_N) * logp_N
    rho_N = (logp_N - targets.behavior_logp_N).clamp(max=_MAX_LOG_RHO).exp()
    rho_N = rho_N if rho_cap is None else rho_N.clamp(max=rho_cap)
    inside_N = rho_N.clamp(1.0 - clip[0], 1.0 + clip[1])
    return torch.minimum(rho_N * targets.advantage_N, inside_N * targets.advantage_N)


def mixture(
    logp_NV: Tensor,
    targets: Targets,
    divergence: Objective,
    rho_cap: float | None,
    estimated: bool = True,
    clip: tuple[float, float] | None = None,
) -> Terms:
    """A divergence from the teacher and a task's reward, together.

        L      = L_task + λ·L_KL
        L_KL   = (1/N) Σ_t c_t · divergence_t                        c: coefficient of the sample's teacher
        L_task = −Σ_t w_t · rewarded_t                               with A = (R − b)/s of the token's rollout

    Tokens that the teacher generated have no part in L_task, and cross-entropy (`sft`) in the place of their
    divergence: with a share 1 − f of such rollouts the expected loss is f·L + (1 − f)·λ·L_sft.

    R is the reward of the token's rollout, b its baseline, s its scale, w its share in the average, N all
    supervised tokens of the step. What is summed here is divided by N later: λ·c_t comes as `coefficient_N`,
    A·w·N as `advantage_N`. The statistics are the divergence's own.

    What is estimated at y, the policy gradient of a reward or, with `estimated`, of the divergence, is of the
    distributions within the sampling mask (`within_mask`): μ is one of these.
    """
    masked = within_mask(logp_NV, targets) if estimated or targets.advantage_N is not None else None
    loss_N, stats = divergence(*(masked if masked and estimated else (logp_NV, targets)))
    by_teacher_N = targets.by_teacher_N
    if by_teacher_N is not None:
        loss_N = torch.where(by_teacher_N, sft(logp_NV, targets)[0], loss_N)
        stats = {name: torch.where(by_teacher_N, 0.0, value_N) for name, value_N in stats.items()}
    if targets.coefficient_N is not None:
        loss_N = targets.coefficient_N * loss_N
    if targets.advantage_N is not None and masked is not None:
        task_N = rewarded(at(masked[0], targets.token_N), targets, rho_cap, clip)
        loss_N = loss_N - (task_N if by_teacher_N is None else torch.where(by_teacher_N, 0.0, task_N))
    return loss_N, stats


def _weighted(divergence: Callable[..., Terms]) -> Callable[[Any], Objective]:
    return lambda c: partial(divergence, rho_cap=c.rho_cap, drop_rho_outside=c.drop_rho_outside)


def own_objective(objective: config.Own) -> Objective:
    """The function of an objective of the user's, called as function(live log p [N, V], Targets, **options).

    Raises ConfigError when it cannot be loaded. What is returned raises DataError when the function fails or
    gives something else than a loss with gradient and `reverse_kl`, both [N].
    """
    field = f"objective.type = {objective.name!r}"
    function = load_function(objective.name, "objective.type")

    def checked(logp_NV: Tensor, targets: Targets) -> Terms:
        count = targets.token_N.shape[0]
        with own_code(field, f"{count} tokens", "mend the function, or its objective.options"):
            loss_N, stats = function(logp_NV, targets, **objective.options)
            shapes = {"loss": tuple(loss_N.shape)} | {name: tuple(v.shape) for name, v in stats.items()}
            follows = bool(loss_N.requires_grad)
        if shapes != {"loss": (count,), "reverse_kl": (count,)} or not follows:
            raise DataError(
                f"{field} returned {shapes} for {count} tokens, the loss {'with' if follows else 'without'} "
                'gradient: it must return (loss, {"reverse_kl": values}), both of shape [tokens], the loss '
                "with gradient"
            )
        return loss_N, {"reverse_kl": stats["reverse_kl"].detach()}

    return checked


DIVERGENCES: Final[Mapping[type, Callable[[Any], Objective]]] = {
    config.Rewards: lambda _: nothing,
    config.Sampled: _weighted(sampled),
    config.TopK: _weighted(hybrid),
    config.StudentTopK: _weighted(hybrid),
    config.ForwardTopK: lambda _: forward_topk,
    config.Full: lambda _: full,
    config.JSD: lambda c: partial(jsd, beta=c.beta),
    config.SkewReverse: lambda c: partial(skew, alpha=c.alpha),
    config.SFT: _weighted(sampled),  # samples of the teacher are learned by `sft`: see `mixture`
    config.Own: own_objective,
}
"""Configuration → its divergence. A new objective is a row here, a function above, a class in `config.py` and
what it needs from the teacher in `config.needs`."""


def build(objective: config.ObjectiveConfig, ends: Sequence[int] = ()) -> Objective:
    """The function of (live log p [N, V], Targets) that is minimised, mixing included. `ends`: ids that end a
    completion."""
    divergence, estimated = DIVERGENCES[type(objective)](objective), config.estimated(objective)
    if isinstance(objective, config.FurtherTerms):
        if objective.forward:
            divergence = partial(both_ways, reverse=divergence, weight=objective.forward)
        if objective.ends and ends:
            divergence = partial(ending, divergence=divergence, weight=objective.ends, ends=ends)
    cap, clip = (None, None) if (task := objective.task) is None else (task.rho_cap, task.clip)
    return partial(mixture, divergence=divergence, rho_cap=cap, estimated=estimated, clip=clip)


def discount(objective: config.ObjectiveConfig) -> Discount | None:
    """How later tokens are credited; None: the objective credits none. γ = 0: those of a segment alone."""
    if not isinstance(objective, config.PolicyGradientTerms):
        return None
    return Discount(objective.discount, objective.rho_cap, objective.drop_rho_outside)


# --- credit of later tokens ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Discount:
    """How later tokens' d is credited to a token: see `sampled`.

    γ is 1 within a segment of text that the teacher scores as one. With log q of the segment at its last
    token, Σ d over the segment is log p − log q of all of it, and each of its tokens is credited with what it
    and those behind it contribute: by the chain rule the gradient of the segment's KL.
    """

    gamma: float
    rho_cap: float | None
    drop_rho_outside: tuple[float, float] | None

    def applies(self, targets: Targets) -> bool:
        """Whether a token may be credited with more than its own d."""
        return self.gamma > 0 or targets.goes_on_N is not None

    def factor(self, logp_N: Tensor, targets: Targets) -> Tensor:
        """γ·min(ρ, c) of every token, which its d and all behind it are multiplied by; 0 where ρ is dropped,
        and for tokens of the teacher, which have no ρ."""
        weight_N = weight(ratio(logp_N, targets.behavior_logp_N), self.rho_cap, self.drop_rho_outside)
        factor_N = self.gamma * weight_N
        if targets.goes_on_N is not None:
            factor_N = torch.where(targets.goes_on_N, weight_N, factor_N)
        return torch.where(own(targets), factor_N, 0.0)


def future_credit(d_N: Tensor, factor_N: Tensor, row_N: Tensor) -> Tensor:
    """Σ_{j≥1} (Π_{i=1…j} factor_{t+i})·d_{t+j} over the rest of each row, [N]; a row's tokens stand together.

    Doubling: after i rounds every token holds its next 2^i terms, so log2(longest row) rounds do.
    """

    def later(values_N: Tensor) -> Tensor:
        return torch.cat([values_N[reach:], torch.zeros_like(values_N[:reach])])

    total_N, next_N, reach = d_N, torch.zeros_like(d_N), 1
    next_N[:-1] = torch.where(row_N[1:] == row_N[:-1], factor_N[1:], 0.0)
    while reach < d_N.shape[0] and bool(next_N.any()):
        total_N = total_N + next_N * later(total_N)
        next_N, reach = next_N * later(next_N), reach * 2
    return total_N - d_N
