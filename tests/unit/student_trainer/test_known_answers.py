"""Objectives against closed forms, by enumerating the sampled token.

Letters: V vocabulary = rows of an enumeration (one per sampled token), K ids of S, M ids of a sampling mask =
rows of an enumeration within it. Everything in float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from student_trainer.head import Loss, chunked_loss
from student_trainer.objectives import config
from student_trainer.objectives import divergences as lib
from student_trainer.objectives.config import Full, Sampled, TaskReward, TopK
from student_trainer.objectives.divergences import Discount, Targets, build, future_credit
from student_trainer.objectives.token_statistics import token_sums
from sync.wire.head import HeadShape, OutputHead

V = 6
EXACT = 1e-12


# --- a small softmax, enumerated --------------------------------------------------------------------------


def logits(seed: int) -> Tensor:
    return 1.5 * torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


THETA, TEACHER, STALE = logits(1), logits(2).log_softmax(0), logits(3).log_softmax(0)
FUTURE = logits(4)


def targets(teacher: Tensor, behavior: Tensor, support: Sequence[int], **more: Any) -> Any:
    """Row y of V rows: token y was sampled from `behavior`; the same S in every row."""
    ids = torch.tensor(support, dtype=torch.int64).expand(V, len(support))
    return Targets(
        token_N=torch.arange(V),
        behavior_logp_N=behavior,
        teacher_logp_N=teacher,
        fresh_N=torch.zeros(V, dtype=torch.bool),
        support_NK=ids,
        support_logp_NK=teacher[ids.clamp(min=0)],
        teacher_logp_NV=teacher.expand(V, V),
        **more,
    )


def expected(
    loss: Callable, goal: Any, draws: Tensor, theta: Tensor = THETA
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, gradient in the logits, reverse_kl statistic) under y ~ `draws` (log-probabilities)."""
    leaf = theta.clone().requires_grad_()
    loss_V, stats = loss(leaf.log_softmax(0).expand(len(draws), V), goal)
    value = (draws.exp() * loss_V).sum()
    (gradient,) = torch.autograd.grad(value, leaf)
    reverse = stats.get("reverse_kl", torch.full_like(draws, torch.nan))
    assert not reverse.requires_grad
    return value.detach(), gradient, (draws.exp() * reverse).sum()


def only(y: int, count: int = V) -> Tensor:
    """Log-probabilities of that row alone."""
    return torch.full((count,), -torch.inf, dtype=torch.float64).index_fill(0, torch.tensor(y), 0.0)


def through_softmax(g: Tensor, theta: Tensor = THETA) -> Tensor:
    """Gradient in the logits of a function whose gradient in the probabilities is `g`."""
    p = theta.softmax(0)
    return p * (g - (p * g).sum())


def d_of(teacher: Tensor = TEACHER, theta: Tensor = THETA) -> Tensor:
    return theta.log_softmax(0) - teacher


def kl_of(teacher: Tensor = TEACHER, theta: Tensor = THETA) -> Tensor:
    return (theta.softmax(0) * d_of(teacher, theta)).sum()


def tail_ratio(support: list[int]) -> Tensor:
    """log of the student's mass outside the support over the teacher's."""
    outside = torch.ones(V, dtype=torch.float64).index_fill(0, torch.tensor(support), 0.0)
    return ((outside * THETA.softmax(0)).sum() / (outside * TEACHER.exp()).sum()).log()


def same(left: Tensor, right: Tensor, tolerance: float = EXACT) -> None:
    assert left.shape == right.shape
    assert float((left - right).abs().max()) <= tolerance, (left, right)


SUPPORTS = [
    list(ids) for k in range(V + 1) for ids in itertools.islice(itertools.combinations(range(V), k), 4)
]


# --- checks -----------------------------------------------------------------------------------------------


def test_policy_gradients_and_credit_of_later_tokens_are_unbiased_for_every_behavior_and_support() -> None:
    behaviors, supports = (THETA.log_softmax(0), STALE, logits(7).log_softmax(0)), [*SUPPORTS, [2, -1, 4, -1]]
    losses, zero = (lib.sampled, lib.hybrid), torch.zeros_like(FUTURE)
    for loss, behavior, support, later in itertools.product(losses, behaviors, supports, (zero, FUTURE)):
        goal = targets(TEACHER, behavior, support, future_N=later)
        _, gradient, reverse = expected(lambda p, t, f=loss: f(p, t, None, None), goal, behavior)
        same(gradient, through_softmax(d_of() + later))
        same(reverse, kl_of())


def test_capped_and_dropped_tokens_keep_their_part_of_the_gradient() -> None:
    rho = (THETA.log_softmax(0) - STALE).exp()
    cap, window = float(rho.median()), (float(rho.min()) + 1e-9, float(rho.max()) - 1e-9)
    for weight, arguments in (
        (rho.clamp(max=cap), (cap, None)),
        (torch.where((rho < window[0]) | (rho > window[1]), 0.0, rho), (None, window)),
    ):
        mass = STALE.exp() * weight * d_of()
        goal = targets(TEACHER, STALE, [])
        _, gradient, _ = expected(lambda p, t, a=arguments: lib.sampled(p, t, *a), goal, STALE)
        same(gradient, mass - THETA.softmax(0) * mass.sum())
        support = targets(TEACHER, STALE, [0, 3])
        _, gradient, _ = expected(lambda p, t, a=arguments: lib.hybrid(p, t, *a), support, STALE)
        inside = torch.zeros(V, dtype=torch.float64).index_fill(0, torch.tensor([0, 3]), 1.0)
        exact = THETA.softmax(0) * torch.where(inside > 0, d_of(), tail_ratio([0, 3]))
        sampled = (1 - inside) * STALE.exp() * weight * (d_of() - tail_ratio([0, 3]))
        mass = exact + sampled
        same(gradient, mass - THETA.softmax(0) * mass.sum())


def test_a_tail_of_the_teachers_shape_gives_no_noise() -> None:
    """Where p/q is one ratio outside S, every sampled token gives the exact gradient and the exact KL."""
    shift = torch.tensor([0.7, -0.3, 0.7, 0.7, 0.2, 0.7], dtype=torch.float64)
    teacher = (THETA.log_softmax(0) + shift).log_softmax(0)
    goal = targets(teacher, STALE, [1, -1, 4])
    for y in range(V):
        _, gradient, reverse = expected(lambda p, t: lib.hybrid(p, t, None, None), goal, only(y))
        same(gradient, through_softmax(d_of(teacher)))
        same(reverse, kl_of(teacher))


def test_a_rounded_tail_costs_no_bias() -> None:
    """Log-probabilities of S that add up to nearly nothing outside, as rounding may make them."""
    support = list(range(V - 1))
    goal = targets(TEACHER, STALE, support)
    own = goal.support_logp_NK
    rounded = replace(goal, support_logp_NK=own - own.exp().sum(1, keepdim=True).log())
    _, gradient, _ = expected(lambda p, t: lib.hybrid(p, t, None, None), rounded, STALE)
    shifted = d_of().clone()
    shifted[:-1] += own[0].exp().sum().log()
    same(gradient, through_softmax(shifted))


def test_future_credit_is_the_discounted_sum_of_the_rest_of_the_row() -> None:
    lengths = [1, 7, 2, 5]
    d_C = torch.cat([logits(seed)[:6] for seed in range(3)])[: sum(lengths)]
    row_C = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    for factor_C in (torch.zeros_like(d_C), torch.full_like(d_C, 0.95), logits(7).exp().repeat(3)[:15]):
        want = [
            sum(
                float(factor_C[t + 1 : t + j + 1].prod() * d_C[t + j])
                for j in range(1, 15 - t)
                if row_C[t + j] == row_C[t]
            )
            for t in range(15)
        ]
        same(future_credit(d_C, factor_C, row_C), torch.tensor(want, dtype=torch.float64))


ACTIONS, END, STEPS = 3, 2, 3
"""Of a decision process whose states are prefixes: a token, the one that ends, the longest completion."""
PREFIXES = [prefix for n in range(STEPS) for prefix in itertools.product(range(END), repeat=n)]
TRAJECTORIES = [
    (*prefix, y) for prefix in PREFIXES for y in range(ACTIONS) if y == END or len(prefix) + 1 == STEPS
]


def table(seed: int) -> Tensor:
    """Logits [prefix, token] of an arbitrary policy."""
    random = torch.Generator().manual_seed(seed)
    return 1.2 * torch.randn(len(PREFIXES), ACTIONS, generator=random, dtype=torch.float64)


def every_trajectory(behavior: Tensor, teacher: Tensor) -> tuple[Tensor, ...]:
    """(state, row, probability of the row under `behavior`, targets), of all tokens of all trajectories."""
    steps = [(row, t, whole) for row, whole in enumerate(TRAJECTORIES) for t in range(len(whole))]
    state_C = torch.tensor([PREFIXES.index(whole[:t]) for _, t, whole in steps])
    token_C = torch.tensor([whole[t] for _, t, whole in steps])
    row_C = torch.tensor([row for row, _, _ in steps])
    behavior_C, teacher_C = behavior[state_C, token_C], teacher[state_C, token_C]
    chance_R = torch.zeros(len(TRAJECTORIES), dtype=torch.float64).index_add_(0, row_C, behavior_C).exp()
    fresh_C, ids_C1 = torch.zeros(len(steps), dtype=torch.bool), torch.tensor([[0]]).expand(len(steps), 1)
    support = {"support_NK": ids_C1, "support_logp_NK": teacher[state_C, :1]}
    goal = Targets(token_C, behavior_C, teacher_C, fresh_C, **support)
    return state_C, row_C, chance_R[row_C], goal


def exact_gradient(live: Tensor, behavior: Tensor, teacher: Tensor, gamma: float) -> Tensor:
    """Σ over prefixes of P_μ(prefix)·∇ cost to go Σ_j γ^j d, each in the logits of that prefix alone."""
    costs: dict[tuple[int, ...], Tensor] = {}
    for prefix in reversed(PREFIXES):
        logp = live[PREFIXES.index(prefix)].log_softmax(0)
        later = torch.stack([costs.get((*prefix, y), torch.tensor(0.0)).double() for y in range(ACTIONS)])
        costs[prefix] = (logp.exp() * (logp - teacher[PREFIXES.index(prefix)] + gamma * later.detach())).sum()
    chances = {(): torch.zeros((), dtype=torch.float64)}
    for prefix in PREFIXES[1:]:
        chances[prefix] = chances[prefix[:-1]] + behavior[PREFIXES.index(prefix[:-1]), prefix[-1]]
    expected_cost = torch.stack([chances[prefix].exp() * costs[prefix] for prefix in PREFIXES]).sum()
    return torch.autograd.grad(expected_cost, live)[0]


def test_stale_trajectories_with_discount_give_the_exact_gradient() -> None:
    """E_μ of the surrogate's gradient in the logits of every state is P_μ(state)·∇ of its cost to go."""
    teacher = table(2).log_softmax(1)
    for gamma, mu in itertools.product((0.3, 0.95, 1.0), (table(1), table(3))):
        live, behavior = table(1).requires_grad_(), mu.log_softmax(1)
        exact = exact_gradient(live, behavior, teacher, gamma)
        for loss in (lib.sampled, lib.hybrid):
            state_C, row_C, chance_C, goal = every_trajectory(behavior, teacher)
            logp_CV = live.log_softmax(1)[state_C]
            logp_C = lib.at(logp_CV.detach(), goal.token_N)
            factor_C = Discount(gamma, None, None).factor(logp_C, goal)
            future_C = future_credit(logp_C - goal.teacher_logp_N, factor_C, row_C)
            loss_C, _ = loss(logp_CV, replace(goal, future_N=future_C), None, None)
            (gradient,) = torch.autograd.grad((chance_C * loss_C).sum(), live)
            same(gradient, exact)


def test_a_later_tokens_factor_is_capped_dropped_and_never_the_teachers() -> None:
    rho, written = (THETA.log_softmax(0) - STALE).exp(), torch.arange(V) < 2
    goal = targets(TEACHER, STALE, [], by_teacher_N=written)
    cap, low = float(rho.median()), float(rho[2:].min()) + 1e-9
    found = Discount(0.7, cap, (low, 1e9)).factor(THETA.log_softmax(0), goal)
    same(found, 0.7 * torch.where(written | (rho < low), 0.0, rho.clamp(max=cap)))


def test_objectives_rest_at_a_teacher_of_the_rollouts_temperature() -> None:
    """θ is the teacher's own logits and p stands at 0.6: with q there too loss and gradient are 0, with q
    at 1 the student would still move, away from its teacher."""
    heat, hidden, zeros = 0.6, torch.eye(V), torch.zeros(V, dtype=torch.int64)
    weight = THETA.float().expand(V, V).t()
    p = (THETA / heat).log_softmax(0).float()
    for name, loss in offered().items():
        for temperature in (heat, 1.0):
            q = (THETA / temperature).log_softmax(0).float()
            teacher = OutputHead(weight, None, HeadShape(V, temperature=temperature))
            leaf, total = weight.clone().requires_grad_(), torch.zeros(V, V)
            student = OutputHead(leaf, None, HeadShape(V, temperature=heat))
            for y in range(V):  # in every row, weighed by its probability
                goal = replace(targets(q, p[[y] * V], [0, 3]), token_N=zeros + y, teacher_logp_N=q[[y] * V])
                goal = replace(goal, teacher_N=zeros, teacher_hidden_NG=hidden)
                value, _ = chunked_loss(hidden, student, goal, Loss(loss, heads=(teacher,)), 4)
                total += (q if name == "sft" else p)[y].exp() * torch.autograd.grad(value, leaf)[0]
                assert temperature != heat or float(value.detach().abs()) < 1e-5, name
            assert (float(total.abs().max()) < 1e-5) == (temperature == heat), name


def test_full_skew_and_jsd_have_their_closed_form_values_and_gradients() -> None:
    p, q, known = THETA.softmax(0), TEACHER.exp(), [(lib.full, kl_of(), d_of())]
    for alpha in (0.0, 0.1, 0.6):
        m = (1 - alpha) * q + alpha * p
        value, slope = (p * (p / m).log()).sum(), (p / m).log() - alpha * p / m
        known.append((partial(lib.skew, alpha=alpha), value, slope))
    for beta in (0.2, 0.5, 0.9):
        m = beta * q + (1 - beta) * p
        value = beta * (q * (q / m).log()).sum() + (1 - beta) * (p * (p / m).log()).sum()
        known.append((partial(lib.jsd, beta=beta), value, (1 - beta) * (p / m).log()))
    for loss, value, slope in known:
        found, gradient, reverse = expected(loss, targets(TEACHER, STALE, []), STALE)
        same(found, value)
        same(gradient, through_softmax(slope))
        same(reverse, kl_of())


def test_a_forward_term_adds_p_minus_q_whatever_the_student_has_lost() -> None:
    p, q = THETA.softmax(0), TEACHER.exp()
    goal = targets(TEACHER, STALE, [0, 2, 5])
    for weight in (0.1, 1.0):
        loss = build(Full(forward=weight))
        value, gradient, reverse = expected(loss, goal, STALE)
        same(value, kl_of() + weight * (q * (TEACHER - THETA.log_softmax(0))).sum())
        same(gradient, through_softmax(d_of()) + weight * (p - q))
        same(reverse, kl_of())
        bucketed = replace(goal, teacher_logp_NV=None)
        value, gradient, reverse = expected(build(TopK(forward=weight, rho_cap=None)), bucketed, STALE)
        alone = [expected(loss, bucketed, STALE) for loss in (build(TopK(rho_cap=None)), lib.forward_topk)]
        same(value, alone[0][0] + weight * alone[1][0])
        same(gradient, alone[0][1] + weight * alone[1][1])
        same(reverse, alone[0][2])
    lost = torch.where(torch.arange(V) == 3, THETA - 20.0, THETA)  # p(3) ~ 1e-9 of what the teacher keeps
    pull = [expected(build(Full(forward=w)), goal, STALE, lost)[1][3] for w in (0.0, 0.1)]
    assert abs(float(pull[0])) < 1e-6 * float(q[3])
    assert abs(float(pull[1]) + 0.1 * float(q[3])) < 1e-6


def test_a_term_of_the_ends_pulls_by_what_the_student_has_lost_of_them() -> None:
    q, weight = TEACHER.exp(), 4.0

    def term(ends: list[int], theta: Tensor = THETA) -> tuple[Tensor, Tensor]:
        """Value and gradient in the logits."""
        p, member = theta.softmax(0), torch.zeros(V, dtype=torch.float64)
        member[ends] = 1.0
        student, teacher = (member * p).sum(), (member * q).sum()
        apart = (student / teacher).log()
        near = apart.clamp(-3.0, 3.0)
        value = weight * teacher * (near.square() / 2 + (apart - near).abs() * 3.0)
        return value, weight * teacher * near * p * (member / student - 1)

    goal = targets(TEACHER, STALE, [0, 2, 5])
    bucketed = replace(goal, teacher_logp_NV=None)
    for ends, sent in (([3], []), ([2], [2]), ([3, 5], [5])):
        loss = build(Full(ends=weight), ends)
        value, gradient, reverse = expected(loss, goal, STALE)
        same(value, kl_of() + term(ends)[0])
        same(gradient, through_softmax(d_of()) + term(ends)[1])
        same(reverse, kl_of())
        loss, alone = build(TopK(ends=weight, rho_cap=None), ends), build(TopK(rho_cap=None))
        value, gradient, reverse = expected(loss, bucketed, STALE)
        without = expected(alone, bucketed, STALE)
        same(value, without[0] + (term(sent)[0] if sent else 0.0))
        same(gradient, without[1] + (term(sent)[1] if sent else 0.0))
        same(reverse, without[2])
    lost = torch.where(torch.arange(V) == 3, THETA - 20.0, THETA)
    *_, gradient, _ = expected(build(Full(ends=weight), [3]), goal, STALE, lost)
    same(gradient[3], term([3], lost)[1][3], 1e-6)
    same(gradient[3], -3.0 * weight * q[3], 1e-6)
    same(expected(build(Full(ends=weight)), goal, STALE)[1], through_softmax(d_of()))


def test_forward_topk_is_the_bucketed_forward_kl() -> None:
    p, q = THETA.softmax(0), TEACHER.exp()
    for support in ([0, 2, 5], [1], list(range(V))):
        inside = torch.zeros(V, dtype=torch.float64).index_fill(0, torch.tensor(support), 1.0)
        rest, tail = ((1 - inside) * p).sum(), ((1 - inside) * q).sum()
        bucket = tail * (tail / rest).log() if tail > 0 else torch.tensor(0.0, dtype=torch.float64)
        value, gradient, reverse = expected(lib.forward_topk, targets(TEACHER, STALE, support), STALE)
        same(value, (inside * q * (q / p).log()).sum() + bucket)
        share = torch.where(inside > 0, q, p * tail / rest if tail > 0 else torch.zeros_like(p))
        same(gradient, p - share, 1e-9)
        back = rest * (rest / tail).log() if tail > 0 else torch.tensor(0.0, dtype=torch.float64)
        same(reverse, (inside * p * (p / q).log()).sum() + back)


def test_a_tail_that_is_rounding_costs_nothing_where_the_teacher_sent_everything() -> None:
    """Sent as fp16 the whole distribution no longer sums to 1, and nothing is left to give the rest to."""
    for seed in range(8):
        whole = logits(seed).log_softmax(0)
        goal = targets(whole.half().double(), STALE, list(range(V)))
        value, gradient, reverse = expected(lib.forward_topk, goal, STALE)
        same(value, (whole.exp() * -d_of(whole)).sum(), 2e-3)
        same(gradient, THETA.softmax(0) - whole.exp(), 2e-3)
        same(reverse, kl_of(whole), 2e-3)


def test_sft_is_the_forward_kl_on_teacher_samples() -> None:
    value, gradient, _ = expected(lib.sft, targets(TEACHER, TEACHER, []), TEACHER)
    same(gradient, THETA.softmax(0) - TEACHER.exp())
    same(value, (TEACHER.exp() * -d_of()).sum())


def test_token_sums_are_their_definitions() -> None:
    """Two of the V rows are a teacher's: importance is of the student's tokens."""
    p, rho = THETA.softmax(0), (THETA.log_softmax(0) - STALE).exp()
    live, fresh = THETA.log_softmax(0).expand(V, V), torch.tensor([True, False, True, False, False, True])
    goal = replace(targets(TEACHER, STALE, [0, 3, -1], by_teacher_N=torch.arange(V) < 2), fresh_N=fresh)
    sums = token_sums(live, goal)
    same(sums["student_entropy"], -V * (p * p.log()).sum())
    same(sums["teacher_entropy"], -V * (TEACHER.exp() * TEACHER).sum())
    same(sums["rho"], rho[2:].sum())
    same(sums["rho_squared"], (rho[2:] ** 2).sum())
    same(sums["rho_max"], rho[2:].max())
    same(sums["fresh_kl"], (rho - 1 - rho.log())[fresh].sum())
    assert (int(sums["own_tokens"]), int(sums["fresh_tokens"])) == (V - 2, 3)
    same(sums["student_mass"], V * p[[0, 3]].sum())
    same(sums["teacher_mass"], V * TEACHER.exp()[[0, 3]].sum())
    ends = token_sums(live, goal, (1, 3))
    same(ends["student_end"], V * p[[1, 3]].sum())
    same(ends["teacher_end"], V * TEACHER.exp()[[1, 3]].sum())
    ends = token_sums(live, replace(goal, teacher_logp_NV=None), (1, 3))
    same(ends["teacher_end"], V * TEACHER.exp()[3].sum())  # 1 is not in S
    assert (int(ends["end_tokens"]), int(ends["teacher_end_tokens"])) == (V, V)
    assert "student_end" not in sums
    top = set(p.topk(3).indices.tolist())
    assert float(sums["overlap"]) == pytest.approx(V * len(top & {0, 3}) / 2)
    one = token_sums(live, goal, (), 1)
    assert (float(one["overlap"]), int(one["overlap_tokens"])) == (len(top & {0, 3}) / 2, 1)


def test_a_mixture_is_its_two_terms() -> None:
    """λ·∇KL − ∇E[R − b] for any μ; with a cap, what it leaves of each sampled token."""
    rho, cap = (THETA.log_softmax(0) - STALE).exp(), 1.1
    weights = torch.full((V,), 0.3, dtype=torch.float64)
    for mixed in (None, cap):
        loss = partial(lib.mixture, divergence=lambda p, t: lib.sampled(p, t, None, None), rho_cap=mixed)
        mass = STALE.exp() * (rho if mixed is None else rho.clamp(max=mixed)) * FUTURE
        task = mass - THETA.softmax(0) * mass.sum()
        goal = targets(TEACHER, STALE, [], coefficient_N=weights, advantage_N=FUTURE)
        _, gradient, reverse = expected(loss, goal, STALE)
        same(gradient, 0.3 * through_softmax(d_of()) - task)
        same(reverse, kl_of())
        _, gradient, _ = expected(loss, targets(TEACHER, STALE, [], advantage_N=FUTURE), STALE)
        same(gradient, through_softmax(d_of()) - task)
        _, gradient, _ = expected(loss, targets(TEACHER, STALE, [], coefficient_N=weights), STALE)
        same(gradient, 0.3 * through_softmax(d_of()))


def test_tokens_of_the_teacher_are_learned_by_cross_entropy() -> None:
    """With y ~ q in every row the divergence and the task have no say: the gradient is that of λ·KL(q‖p)."""
    weights, every = torch.full((V,), 0.3, dtype=torch.float64), torch.ones(V, dtype=torch.bool)
    loss = partial(lib.mixture, divergence=lambda p, t: lib.sampled(p, t, None, None), rho_cap=None)
    more = {"coefficient_N": weights, "advantage_N": FUTURE}
    _, gradient, _ = expected(loss, targets(TEACHER, TEACHER, [], by_teacher_N=every, **more), TEACHER)
    same(gradient, 0.3 * (THETA.softmax(0) - TEACHER.exp()))
    one = every & (torch.arange(V) == 2)
    mixed = expected(loss, targets(TEACHER, STALE, [], by_teacher_N=one, **more), STALE)[1]
    alone = expected(loss, targets(TEACHER, STALE, [], **more), STALE)[1]
    p, hot = THETA.softmax(0), one.double()
    rho = (THETA.log_softmax(0) - STALE)[2].exp()
    taken = (0.3 * rho * d_of()[2] - rho * FUTURE[2]) * (hot - p)
    same(mixed - alone, STALE[2].exp() * (0.3 * (p - hot) - taken))
    _, stats = loss(THETA.log_softmax(0).expand(V, V), targets(TEACHER, STALE, [], by_teacher_N=one, **more))
    same(stats["reverse_kl"], torch.where(one, 0.0, (THETA.log_softmax(0) - STALE).exp() * d_of()))


def test_a_score_gap_shows_dense_scores_of_another_position() -> None:
    live = THETA.log_softmax(0).expand(V, V)
    sound = targets(TEACHER, STALE, [0, 3, -1])
    for goal in (sound, replace(sound, teacher_logp_NV=None)):
        sums = token_sums(live, goal)
        same(sums["score_gap"], torch.zeros((), dtype=torch.float64))
        assert int(sums["score_gap_tokens"]) == (V if goal.teacher_logp_NV is not None else 2)
        sent = replace(goal, teacher_logp_N=TEACHER.roll(1))
        gap, asked = (TEACHER - TEACHER.roll(1)).abs(), [0, 3] if goal.teacher_logp_NV is None else range(V)
        same(token_sums(live, sent)["score_gap"], gap[list(asked)].sum())


def offered() -> dict[str, Callable]:
    return {
        "sampled": lambda p, t: lib.sampled(p, t, 5.0, None),
        "hybrid": lambda p, t: lib.hybrid(p, t, 5.0, None),
        "forward_topk": lib.forward_topk,
        "full": lib.full,
        "both ways": build(Full(forward=0.1)),
        "ends": build(Full(ends=4.0), [1, 3]),
        "jsd": lambda p, t: lib.jsd(p, t, 0.5),
        "skew": lambda p, t: lib.skew(p, t, 0.1),
        "sft": lib.sft,
    }


# --- within sampling masks ----------------------------------------------------------------------------------


MASKS = [[0], [1, 4], [3, 0, 5], [2, 1, 0, 4], list(range(V))]
every_mask = pytest.mark.parametrize("mask", MASKS, ids=str)
SAMPLED, HYBRID = build(Sampled(rho_cap=None)), build(config.StudentTopK(rho_cap=None))


def within(logits: Tensor, mask: list[int]) -> Tensor:
    """log-probabilities [M] of what is left of a softmax."""
    return logits[mask].log_softmax(0)


def masked(mask: list[int], support: Sequence[int] = (), teacher: Tensor = TEACHER, **more: Any) -> Any:
    """Row i of as many as M has ids: M's i-th was sampled from the stale policy."""
    rows, mask_MK = targets(teacher, STALE, support), torch.tensor([*mask, -1]).expand(len(mask), -1)
    rows = rows.each(lambda values: values[mask])
    return replace(rows, behavior_logp_N=within(STALE, mask), mask_NK=mask_MK, **more)


def exact(value: Callable[[Tensor], Tensor]) -> Tensor:
    """Gradient in the logits."""
    leaf = THETA.clone().requires_grad_()
    return torch.autograd.grad(value(leaf), leaf)[0]


def kl_within(mask: list[int]) -> Callable[[Tensor], Tensor]:
    """KL(p_M‖q_M) of some logits."""

    def value(theta: Tensor) -> Tensor:
        logp_M = within(theta, mask)
        return (logp_M.exp() * (logp_M - within(TEACHER, mask))).sum()

    return value


@every_mask
def test_the_expected_gradient_is_that_of_the_reverse_kl_within_the_mask(mask: list[int]) -> None:
    draws, wanted = within(STALE, mask), exact(kl_within(mask))
    same(expected(SAMPLED, masked(mask), draws)[1], wanted)
    for support in ([], [0], [1, 4, -1], [5, 3, 2], list(range(V))):
        same(expected(HYBRID, masked(mask, support), draws)[1], wanted)
    for row in range(len(mask)):  # S holds the mask: exact for every sample
        same(expected(HYBRID, masked(mask, list(range(V))), only(row, len(mask)))[1], wanted)


@every_mask
def test_a_student_that_is_its_teacher_rests_whatever_was_sampled(mask: list[int]) -> None:
    goal = masked(mask, [0, 3], teacher=THETA.log_softmax(0))
    for loss, row in itertools.product((SAMPLED, HYBRID), range(len(mask))):
        same(expected(loss, goal, only(row, len(mask)))[1], torch.zeros(V, dtype=torch.float64))


@every_mask
def test_a_reward_is_learned_within_the_mask_whatever_the_divergence(mask: list[int]) -> None:
    """L_task alone: what `advantage_N` adds to the gradient of each objective."""
    draws, reward = within(STALE, mask), FUTURE[mask]
    wanted = exact(lambda theta: -(within(theta, mask).exp() * reward).sum())
    for objective in (Sampled(rho_cap=None), Full()):
        loss = build(objective.model_copy(update={"task": TaskReward(rho_cap=None)}))
        goals = masked(mask), masked(mask, advantage_N=reward)
        without, rewarded = (expected(loss, goal, draws)[1] for goal in goals)
        same(rewarded - without, wanted)


@pytest.mark.parametrize(
    "objective", [Full(), config.ForwardTopK(), TopK(rho_cap=None), config.JSD()], ids=str
)
def test_divergences_that_take_no_sample_are_of_the_whole_vocabulary(objective: Any) -> None:
    goal = masked([1, 4], range(V))
    loss, draws = build(objective), within(STALE, [1, 4])
    same(expected(loss, goal, draws)[1], expected(loss, replace(goal, mask_NK=None), draws)[1])


def test_a_token_without_a_mask_is_of_the_whole_vocabulary() -> None:
    goal = replace(targets(TEACHER, STALE, []), mask_NK=torch.full((V, 3), -1))
    same(expected(SAMPLED, goal, STALE)[1], exact(kl_within(list(range(V)))))


@every_mask
def test_ratios_are_one_where_the_student_sampled_and_the_mass_is_the_students(mask: list[int]) -> None:
    fresh = torch.ones(len(mask), dtype=torch.bool)
    goal = replace(masked(mask), behavior_logp_N=within(THETA, mask), fresh_N=fresh)
    sums = token_sums(THETA.log_softmax(0).expand(len(mask), V), goal)
    same(sums["rho"] / len(mask), torch.tensor(1.0, dtype=torch.float64))
    same(sums["fresh_kl"], torch.tensor(0.0, dtype=torch.float64))
    same(sums["mask_mass"] / sums["mask_tokens"], THETA.softmax(0)[mask].sum())
