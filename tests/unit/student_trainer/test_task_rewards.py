"""The policy gradient of a task's reward against closed forms, by enumerating what is sampled.

Letters: V vocabulary, G completions of a group, D groups that are enumerated.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from plain_step import ALONE
from pydantic import ValidationError
from torch import Tensor

from student_trainer.objectives import config
from student_trainer.objectives.config import Sampled, TaskReward
from student_trainer.objectives.divergences import Targets, build, rewarded
from student_trainer.step import Rewards, advantages, rewards_of
from sync.wire import Rows, TrainBatch, Version, pack

V, G = 3, 3
THETA = torch.tensor([0.4, -1.1, 0.6], dtype=torch.float64)
MU = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
REWARD = np.array([0.0, 2.0, 0.5])


def rows_of(lengths: Any, **arrays: Any) -> Rows:
    """`own` and `by_teacher` are flags, all other arrays numbers."""
    nothing, lens = pack(np.zeros(0, "i4")), pack(np.array(lengths, "i4"))
    kinds = {"own": "u1", "by_teacher": "u1"}
    packed = {name: pack(np.array(values, kinds.get(name, "f4"))) for name, values in arrays.items()}
    return Rows(["r"] * len(lengths), nothing, nothing, lens, *[nothing] * 4, **packed)


def rewards_in(tokens: int, *rows: Rows) -> Rewards:
    return rewards_of(TrainBatch(version=Version(0, 0), denominator=tokens, micro_batches=[*rows]), ALONE)


def credited(rows: Rows, tokens: int, task: TaskReward) -> Tensor:
    """A·w of every token: what `advantages` gives, less the N that the loss is divided by later."""
    return advantages(rows, rewards_in(tokens, rows), tokens, task).double() / tokens


def gradient(token: Tensor, advantage: Tensor, chance: Tensor, task: TaskReward) -> Tensor:
    """Of Σ chance·rewarded in the logits."""
    leaf = THETA.clone().requires_grad_()
    logp_NV = leaf.log_softmax(0).expand(len(token), V)
    goal = Targets(token, MU[token], MU[token], token > 9, advantage_N=advantage)
    loss_N, _ = build(config.Rewards(task=task))(logp_NV, goal)
    (found,) = torch.autograd.grad(-(chance * loss_N).sum(), leaf)
    return found


@pytest.mark.parametrize("scale", ["none", "std"])
def test_a_group_gives_the_gradient_of_the_expected_reward(scale: Any) -> None:
    """With its own mean as baseline (1 − 1/G)·∇E[R], whatever μ; divided by the deviation, of each group's
    advantage as it is by hand."""
    draws = torch.tensor([*itertools.product(range(V), repeat=G)])
    chance, reward = MU[draws].sum(1).exp(), REWARD[draws.numpy()]
    mean, deviation = reward.mean(1, keepdims=True), reward.std(1, ddof=1, keepdims=True)
    count = draws.numel()
    both = {"baseline": np.repeat(mean, G, 1).ravel(), "deviation": np.repeat(deviation, G, 1).ravel()}
    task = TaskReward(baseline="group", scale=scale, rho_cap=None)
    advantage = credited(rows_of([1] * count, reward=reward.ravel(), **both), count, task) * count
    # what a group says of each of its tokens, μ of the others and ρ of its own: ρ·Π μ
    found = gradient(draws.ravel(), advantage, chance.repeat_interleave(G), task) / G
    leaf = THETA.clone().requires_grad_()
    p = leaf.softmax(0)
    if scale == "none":
        (wanted,) = torch.autograd.grad((p * torch.tensor(REWARD)).sum() * (1 - 1 / G), leaf)
    else:
        by_hand = np.where(deviation > 0, (reward - mean) / np.where(deviation > 0, deviation, 1.0), 0.0)
        others = torch.tensor(by_hand) * (chance[:, None] / MU[draws].exp())
        (wanted,) = torch.autograd.grad((p[draws] * others).sum() / G, leaf)
    assert float((found - wanted).abs().max()) <= 1e-7


def test_a_clipped_ratio_is_that_of_ppo_inside_and_outside_of_its_interval() -> None:
    token = torch.arange(V).repeat(2)
    advantage = torch.tensor([1.0] * V + [-1.0] * V, dtype=torch.float64)
    rho = (THETA.log_softmax(0) - MU).exp()[token]
    assert [round(float(value), 2) for value in rho[:V]] == [2.05, 0.18, 1.67]
    task = TaskReward(clip=(0.2, 0.8), rho_cap=2.0)
    leaf = THETA.clone().requires_grad_()
    logp = leaf.log_softmax(0)[token]
    goal = Targets(token, MU[token], MU[token], token > 9, advantage_N=advantage)
    value = rewarded(logp, goal, task.rho_cap, task.clip)
    wanted = [1.8, rho[1], rho[2], -2.0, -0.8, -rho[2]]
    assert value.tolist() == pytest.approx([float(x) for x in wanted])
    kept = torch.tensor([0, 1, 1, 0, 0, 1], dtype=torch.float64)  # the rest has moved far enough, or too far
    found = gradient(token, advantage, torch.ones(2 * V), task)
    by_hand = sum(
        k * r * a * (torch.nn.functional.one_hot(y, V) - THETA.softmax(0))
        for k, r, a, y in zip(kept, rho, advantage, token, strict=True)
    )
    assert float((found - by_hand).abs().max()) <= 1e-12


def test_each_rollout_counts_the_same_or_each_of_its_tokens_does() -> None:
    """Rollouts of 1 and 3 tokens of the student's, one of an environment's between them; b = 0.5."""
    rows = rows_of([1, 4], reward=[1.0, 0.0], own=[1, 1, 0, 1, 1])
    tokens = credited(rows, 7, TaskReward())
    assert tokens.tolist() == pytest.approx([0.5 / 4, *[-0.5 / 4] * 3])
    rollouts = credited(rows, 7, TaskReward(average="rollouts"))
    assert rollouts.tolist() == pytest.approx([0.5 / 2, *[-0.5 / 6] * 3])


def test_rewards_of_a_step_are_divided_by_its_deviation_and_equal_ones_teach_nothing() -> None:
    std = TaskReward(scale="std")
    deviation = float(np.std([1.0, 0.0, 0.5], ddof=1))
    scaled = credited(rows_of([1, 1, 1], reward=[1.0, 0.0, 0.5]), 3, std)
    assert scaled.tolist() == pytest.approx([0.5 / deviation / 3, -0.5 / deviation / 3, 0.0])
    # what earlier turns earned is no difference between rollouts
    same = rows_of([2] * 3, reward=[0.1] * 3, earned=[0.0, 0.1] * 3)
    assert credited(same, 6, std).tolist() == [0.0] * 6
    assert credited(same, 6, TaskReward())[1] == pytest.approx(-0.1 / 6)


def test_rewards_are_centred_and_divided_by_their_own_tokens() -> None:
    """Three rewards of mean 2 over 1 + 2 + 3 tokens, beside four tokens without one: N = 10, M = 6."""
    two, none, one = rows_of([1, 2], reward=[0.0, 5.0]), rows_of([4]), rows_of([3], reward=[1.0])
    rewards = rewards_in(10, two, none, one)
    assert (rewards.mean, rewards.tokens) == (2.0, 6.0)
    assert advantages(none, rewards, 10) is None
    own = rows_of([1, 2], reward=[0.0, 5.0], baseline=[0.5, 4.0])
    for rows, centred in ((two, [-2.0, 3.0, 3.0]), (one, [-1.0] * 3), (own, [-0.5, 1.0, 1.0])):
        assert advantages(rows, rewards, 10).tolist() == pytest.approx([a * 10 / 6 for a in centred])


def test_rewards_of_the_teachers_completions_change_nothing() -> None:
    """They are not in the mean; their tokens count in M, and `mixture` leaves them out."""
    written, reward = [0] * 4 + [1] * 4, [3.0, -1.0, -1.0, 2.0]
    for teachers in ([0.0] * 4, [50.0, -7.0, 9.0, 1.0]):
        rows = rows_of([1] * 8, reward=[*reward, *teachers], by_teacher=written)
        rewards = rewards_in(8, rows)
        assert (rewards.mean, rewards.deviation) == pytest.approx((0.75, np.std(reward, ddof=1)))
        assert advantages(rows, rewards, 8)[:4].tolist() == [2.25, -1.75, -1.75, 1.25]
    rows = rows_of([1] * 8, reward=[1.0] * 8, by_teacher=[1] * 8)
    assert rewards_in(8, rows).mean is None
    assert bool(advantages(rows, rewards_in(8, rows), 8).isfinite().all())


def test_a_cap_below_the_clip_is_refused() -> None:
    why = r"rho_cap is 1\.2 and clip \[0\.2, 0\.3\]: the cap must lie above"
    with pytest.raises(ValidationError, match=why):
        TaskReward(clip=(0.2, 0.3), rho_cap=1.2)
    assert Sampled(task={"clip": [0.2, 0.28]}).task == TaskReward(clip=(0.2, 0.28))
