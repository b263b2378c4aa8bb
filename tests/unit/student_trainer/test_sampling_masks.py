"""Objectives within sampling masks against closed forms, by enumerating the sampled token. float64.

Letters: V vocabulary, M the mask, N rows: one for each id of M, which was sampled there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from student_trainer.objectives import config
from student_trainer.objectives.divergences import Targets, build
from student_trainer.objectives.token_statistics import token_sums

V = 6
MASKS = [[0], [1, 4], [3, 0, 5], [2, 1, 0, 4], list(range(V))]
SUPPORTS = [[], [0], [1, 4, -1], [5, 3, 2], list(range(V))]


def logits(seed: int) -> Tensor:
    return 1.5 * torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


THETA, TEACHER, STALE, REWARD = logits(1), logits(2).log_softmax(0), logits(3), logits(4)


def within(theta: Tensor, mask: list[int]) -> Tensor:
    """log-probabilities [M] of what is left of a softmax."""
    return theta[mask].log_softmax(0)


def goal(
    mask: list[int], support: list[int] | None = None, teacher: Tensor = TEACHER, **more: Any
) -> Targets:
    """Row i of as many as M has ids: M's i-th was sampled from the stale policy."""
    count, token_N = len(mask), torch.tensor(mask)
    ids = None if support is None else torch.tensor(support, dtype=torch.int64).expand(count, len(support))
    padded_NK = torch.tensor([*mask, -1]).expand(count, len(mask) + 1)
    return Targets(
        token_N=token_N,
        behavior_logp_N=within(STALE, mask),
        teacher_logp_N=teacher[token_N],
        fresh_N=torch.zeros(count, dtype=torch.bool),
        support_NK=ids,
        support_logp_NK=None if ids is None else teacher[ids.clamp(min=0)],
        mask_NK=padded_NK,
        **more,
    )


def gradient(loss: Callable[..., Any], targets: Targets, draws_N: Tensor) -> Tensor:
    """[V] in the logits, of the loss expected under `draws_N`."""
    leaf = THETA.clone().requires_grad_()
    loss_N, _ = loss(leaf.log_softmax(0).expand(len(draws_N), V), targets)
    return torch.autograd.grad((draws_N * loss_N).sum(), leaf)[0]


def exact(value: Callable[[Tensor], Tensor]) -> Tensor:
    leaf = THETA.clone().requires_grad_()
    return torch.autograd.grad(value(leaf), leaf)[0]


def kl_within(mask: list[int], teacher: Tensor = TEACHER) -> Callable[[Tensor], Tensor]:
    """KL(p_M‖q_M) of some logits."""

    def value(theta: Tensor) -> Tensor:
        logp_M = within(theta, mask)
        return (logp_M.exp() * (logp_M - teacher[mask].log_softmax(0))).sum()

    return value


def only(row: int, count: int) -> Tensor:
    """Draws of that row alone."""
    return torch.zeros(count, dtype=torch.float64).index_fill_(0, torch.tensor(row), 1.0)


def same(one: Tensor, other: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(one, other, atol=tolerance, rtol=0)


SAMPLED = config.Sampled(rho_cap=None)
HYBRID = config.StudentTopK(rho_cap=None)


@pytest.mark.parametrize("mask", MASKS)
def test_the_expected_gradient_is_that_of_the_reverse_kl_within_the_mask(mask: list[int]) -> None:
    draws, wanted = within(STALE, mask).exp(), exact(kl_within(mask))
    same(gradient(build(SAMPLED), goal(mask), draws), wanted)
    for support in SUPPORTS:
        same(gradient(build(HYBRID), goal(mask, support), draws), wanted)


@pytest.mark.parametrize("mask", MASKS)
def test_a_support_that_holds_the_mask_gives_the_exact_gradient_for_every_sample(mask: list[int]) -> None:
    for row in range(len(mask)):
        found = gradient(build(HYBRID), goal(mask, list(range(V))), only(row, len(mask)))
        same(found, exact(kl_within(mask)))


@pytest.mark.parametrize("loss", [SAMPLED, HYBRID])
def test_a_student_that_is_its_teacher_rests_whatever_was_sampled(loss: Any) -> None:
    for mask in MASKS:
        targets = goal(mask, [0, 3], teacher=THETA.log_softmax(0))
        for row in range(len(mask)):
            same(gradient(build(loss), targets, only(row, len(mask))), torch.zeros(V, dtype=torch.float64))


@pytest.mark.parametrize("mask", MASKS)
def test_a_reward_is_learned_within_the_mask_whatever_the_divergence(mask: list[int]) -> None:
    """L_task alone: what `advantage_N` adds to the gradient of each objective."""
    draws, kept = within(STALE, mask).exp(), REWARD[mask]
    wanted = exact(lambda theta: -(within(theta, mask).exp() * kept).sum())
    full = {"teacher_logp_NV": TEACHER.expand(len(mask), V)}
    for objective, more in ((SAMPLED, {}), (config.Full(), full)):
        loss = build(objective.model_copy(update={"task": config.TaskReward(rho_cap=None)}))
        targets = goal(mask, **more)
        rewarded = gradient(loss, replace(targets, advantage_N=kept), draws)
        same(rewarded - gradient(loss, targets, draws), wanted)


@pytest.mark.parametrize(
    "objective", [config.Full(), config.ForwardTopK(), config.TopK(rho_cap=None), config.JSD()]
)
def test_divergences_that_take_no_sample_are_of_the_whole_vocabulary(objective: Any) -> None:
    every = {"support": list(range(V)), "teacher_logp_NV": TEACHER.expand(2, V)}
    targets, draws = goal([1, 4], **every), torch.tensor([0.5, 0.5], dtype=torch.float64)
    unmasked = gradient(build(objective), replace(targets, mask_NK=None), draws)
    same(gradient(build(objective), targets, draws), unmasked)


def test_a_token_without_a_mask_is_of_the_whole_vocabulary() -> None:
    behavior = STALE.log_softmax(0)
    unmasked = {"token_N": torch.arange(V), "mask_NK": torch.full((V, 3), -1)}
    targets = replace(goal(list(range(V))), behavior_logp_N=behavior, **unmasked)
    same(gradient(build(SAMPLED), targets, behavior.exp()), exact(kl_within(list(range(V)))))


def test_ratios_are_one_where_the_student_sampled_and_the_mass_is_the_students() -> None:
    for mask in MASKS[1:]:
        live = THETA.log_softmax(0).expand(len(mask), V)
        targets = replace(goal(mask), behavior_logp_N=within(THETA, mask))
        targets = replace(targets, fresh_N=torch.ones(len(mask), dtype=torch.bool))
        sums = token_sums(live, targets)
        same(sums["rho"] / len(mask), torch.tensor(1.0, dtype=torch.float64))
        same(sums["fresh_kl"], torch.tensor(0.0, dtype=torch.float64))
        same(sums["mask_mass"] / sums["mask_tokens"], THETA.softmax(0)[mask].sum())
