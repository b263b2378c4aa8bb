"""An environment's tokens are context alone, from Rollout to gradient.

Letters: N tokens in the loss of a rollout, T tokens behind its prompt, K ids per token, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from plain_step import ALONE, VOCAB, PlainEngine, by_two_ranks, difference, flat_rows, student
from torch import Tensor

from distill.batching.packing import Shape, pack_batch
from distill.buffer import Batch
from distill.record.rollout import Rollout
from student_trainer.engine import Student
from student_trainer.objectives import config as objectives
from student_trainer.objectives.config import Full, ObjectiveConfig, Sampled, TaskReward, TopK, needs
from student_trainer.objectives.divergences import Targets, build
from student_trainer.step import Rewards, advantages, loss_of, train_step
from sync.wire import Scored, TrainBatch, Version, VersionSpan, pack, unpack
from sync.wire.head import HeadShape, OutputHead

TEACHERS = ("a", "b")
STEP, K = 3, 4
TURNS: tuple[list[tuple[int, int]], ...] = ([(0, 2), (4, 6)], [(0, 1), (3, 6)], [], [(0, 1)], [])
"""Of each rollout; the last is a completion by its teacher."""
LENGTHS, REWARDS = (7, 6, 5, 3, 4), (1.0, 0.0, 0.5, 2.0, 1.0)
EARNED = ([0.0, 0.3], [], [], [], [])
"""What the turns before each turn added to the reward."""
OWN = sum(sum(end - start for start, end in turns) for turns in TURNS) + LENGTHS[2] + LENGTHS[4]
CONFIGS: tuple[ObjectiveConfig, ...] = (
    Sampled(rho_cap=1.2, drop_rho_outside=(0.3, 3.0), coefficient=0.5, teacher_coefficients={"b": 3.0}),
    Sampled(task=TaskReward(baseline="group"), discount=0.5),
    TopK(k=K, discount=0.7, task=TaskReward()),
    objectives.StudentTopK(k=K, discount=0.5),
    objectives.ForwardTopK(k=K),
    Full(task=TaskReward(), coefficient=2.0),
    objectives.SkewReverse(alpha=0.2),
    objectives.SFT(),
    Sampled(max_supervised_tokens=3, discount=0.9),
)


def places(rollout: Rollout, most: int | None = None) -> list[int]:
    """Of its tokens in the loss, in T."""
    return [t for start, end in rollout.own or [(0, rollout.length)] for t in range(start, end)][:most]


@torch.no_grad()
def rollouts(teacher: Student, config: ObjectiveConfig, other: bool = False) -> list[Rollout]:
    """Episodes, a plain completion and one by the teacher; `other`: all that is known of an environment's
    tokens, besides their ids, is something else."""
    made = []
    for number, (length, turns) in enumerate(zip(LENGTHS, TURNS, strict=True)):
        g = np.random.default_rng(number)
        prompt, tokens = g.integers(0, VOCAB, 2 + number % 3), g.integers(0, VOCAB, length)
        logprob = g.uniform(-3, -1, length).astype("f4")
        ids = g.permuted(np.tile(np.arange(VOCAB, dtype="i4"), (length, 1)), axis=1)[:, :K]
        sequence = torch.from_numpy(np.concatenate([prompt, tokens]))[None]
        hidden = teacher.model.model(input_ids=sequence).last_hidden_state[0, len(prompt) - 1 : -1]
        logq = (hidden @ teacher.head.weight.t())[:, :VOCAB].log_softmax(1)
        best = logq.topk(K, dim=1)
        written = np.ones(length, bool)
        for start, end in turns or [(0, length)]:
            written[start:end] = False
        arrays = {
            "logprob": logq.numpy()[np.arange(length), tokens],
            "topk_logprob": best.values.numpy(),
            "gathered": np.take_along_axis(logq.numpy(), ids, 1),
            "hidden": hidden.numpy(),
            "entropy": g.uniform(0, 2, length).astype("f4"),
        }
        ids[written], logprob[written], arrays["gathered"][written] = -1, 0.0, 0.0
        topk_ids = best.indices.numpy().astype("i4")
        if other:
            logprob[written], topk_ids[written] = -7.0, np.arange(K)
            for array in arrays.values():
                array[written] = -0.25
        packed = {name: pack(array.copy()) for name, array in arrays.items()}
        if isinstance(config, objectives.StudentTopK):
            del packed["topk_logprob"]
        else:
            del packed["gathered"]
            packed["topk_ids"] = pack(topk_ids)
        by_teacher = number == len(TURNS) - 1
        spans = [VersionSpan(Version(0, 2), 0, 1), VersionSpan(Version(0, STEP), 1, length)]
        made.append(
            Rollout(
                f"{number // 2}:{number}",
                number,
                pack(prompt.astype("i4")),
                pack(tokens.astype("i4")),
                pack(logprob),
                [] if by_teacher else spans,
                teacher=TEACHERS[number % 2],
                scored=Scored(str(number), **packed),
                topk_ids=pack(ids) if isinstance(config, objectives.StudentTopK) else None,
                reward=REWARDS[number],
                by_teacher=by_teacher,
                own=turns,
                earned=EARNED[number],
            )
        )
    return made


def packed(
    made: Sequence[Rollout], config: ObjectiveConfig, ranks: int = 1, weights: Sequence[float] = ()
) -> list[TrainBatch]:
    group = 2 if config.task is not None and config.task.baseline == "group" else 1
    shape = Shape(40, TEACHERS, config.max_supervised_tokens, group)
    batch = Batch(Version(0, STEP), list(made), [0] * len(made), list(weights))
    return pack_batch(batch, ranks, shape, lambda version: version.step)


def heads(config: ObjectiveConfig, teacher: Student) -> tuple[OutputHead, ...]:
    head = OutputHead(teacher.head.weight.detach(), None, HeadShape(VOCAB))
    return (head, head) if needs(config).hidden else ()


def stepped(
    batch: TrainBatch, config: ObjectiveConfig, teacher: Student
) -> tuple[PlainEngine, dict[str, float]]:
    engine = PlainEngine(student(2, chunk=3), 0.1)
    return engine, train_step(engine, batch, loss_of(config, TEACHERS, heads(config, teacher)), ALONE)


def by_hand(
    made: Sequence[Rollout], config: ObjectiveConfig, teacher: Student, weights: Sequence[float]
) -> tuple[float, list[Tensor]]:
    """Loss and gradient of a step, one rollout after the other, each a forward pass of its own."""
    model = student(2)
    count = sum(len(places(one, config.max_supervised_tokens)) for one in made)
    total = torch.zeros(())
    for rollout, weight in zip(made, weights, strict=True):
        prompt, tokens = unpack(rollout.prompt), unpack(rollout.tokens)
        at = places(rollout, config.max_supervised_tokens)
        sequence = torch.from_numpy(np.concatenate([prompt, tokens]).astype("i8"))[None]
        hidden = model.model.model(input_ids=sequence).last_hidden_state[0]
        logp_NV = (hidden[[len(prompt) - 1 + t for t in at]] @ model.head.weight.t())[:, :VOCAB]
        logp_NV = logp_NV.log_softmax(1)
        goal = targets_by_hand(rollout, at, logp_NV.detach(), config, teacher, weight)
        if config.task is not None:
            advantage = advantage_by_hand(made, rollout, config, at) * count * weight
            goal = replace(goal, advantage_N=advantage)
        total = total + build(config)(logp_NV, goal)[0].sum()
    (total / count).backward()
    return float(total.detach()) / count, [p.grad for p in model.parameters() if p.grad is not None]


def targets_by_hand(
    rollout: Rollout, at: list[int], logp_NV: Tensor, config: Any, teacher: Student, weight: float
) -> Targets:
    def known(array: Any) -> Any:
        return None if array is None else torch.tensor(unpack(array))[at]

    scored = rollout.scored
    token, logq = known(rollout.tokens).long(), known(scored.logprob)
    mine = logp_NV.gather(1, token[:, None])[:, 0]
    d, rho = (mine - logq).tolist(), (mine - known(rollout.logprob)).exp().tolist()
    future = torch.zeros(len(at))
    if getattr(config, "discount", 0.0) and not rollout.by_teacher:
        for t in range(len(at)):
            factor = 1.0
            for j in range(t + 1, len(at)):
                factor *= config.discount * min(rho[j], config.rho_cap)
                future[t] += factor * d[j]
    support = scored.topk_ids or rollout.topk_ids
    return Targets(
        token_N=token,
        behavior_logp_N=known(rollout.logprob),
        teacher_logp_N=logq,
        fresh_N=torch.zeros(len(at), dtype=torch.bool),
        support_NK=known(support).long(),
        support_logp_NK=known(scored.topk_logprob or scored.gathered),
        teacher_logp_NV=(known(scored.hidden) @ teacher.head.weight.t())[:, :VOCAB].log_softmax(1).detach(),
        future_N=future if getattr(config, "discount", 0.0) else None,
        coefficient_N=weight
        * config.coefficient
        * config.teacher_coefficients.get(rollout.teacher, 1.0)
        * torch.ones(len(at)),
        by_teacher_N=torch.full((len(at),), rollout.by_teacher),
    )


def advantage_by_hand(
    made: Sequence[Rollout], rollout: Rollout, config: ObjectiveConfig, at: list[int]
) -> Tensor:
    """(R − E − b)/M of the tokens `at`: M counts all tokens in the loss, b the student's rewards alone."""
    group = config.task is not None and config.task.baseline == "group"
    peers = [one for one in made if not group or one.id.split(":")[0] == rollout.id.split(":")[0]]
    rewards = [one.reward for one in peers if not one.by_teacher and one.reward is not None]
    baseline = sum(rewards) / len(rewards) if rewards else 0.0
    count = sum(len(places(one, config.max_supervised_tokens)) for one in made)
    turns = zip(rollout.own, rollout.earned, strict=False)
    earned = {t: value for (start, end), value in turns for t in range(start, end)}
    return torch.tensor([(rollout.reward - earned.get(t, 0.0) - baseline) / count for t in at])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_loss_and_gradient_are_those_of_the_students_tokens_alone(config: ObjectiveConfig) -> None:
    """And what else is known of an environment's tokens changes not a bit."""
    teacher, weights = student(1), [1.0, 0.5, 0.25, 1.0, 0.75]
    made, others = (rollouts(teacher, config, other) for other in (False, True))
    (batch,), (again,) = (packed(some, config, weights=weights) for some in (made, others))
    assert batch.micro_batches[0].teacher_logprob != again.micro_batches[0].teacher_logprob
    (engine, metrics), (other, same) = (stepped(share, config, teacher) for share in (batch, again))
    loss, gradient = by_hand(made, config, teacher, weights)
    size = max(float(g.abs().max()) for g in gradient)
    assert size > 1e-3
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert difference(engine.gradients, gradient) <= 2e-6 * max(1.0, size)
    own = sum(len(places(one, config.max_supervised_tokens)) for one in made)
    assert batch.denominator == metrics["tokens"] == own
    assert own == (OWN if config.max_supervised_tokens is None else 3 + 3 + 3 + 1 + 3)
    assert metrics == same
    assert all(map(torch.equal, engine.gradients, other.gradients))


def test_ranks_share_one_denominator_of_own_tokens() -> None:
    teacher, config = student(1), Full(task=TaskReward())
    made, loss = rollouts(teacher, config), loss_of(config, TEACHERS, heads(config, teacher))
    (whole,), shares = packed(made, config), packed(made, config, ranks=2)
    alone, expected = stepped(whole, config, teacher)
    assert [share.denominator for share in shares] == [OWN, OWN]
    engines = [PlainEngine(student(2), 0.1) for _ in shares]
    found = by_two_ranks(lambda one: train_step(engines[one.rank], shares[one.rank], loss, one))
    assert found[0]["tokens"] == found[1]["tokens"] == expected["tokens"] == OWN
    assert found[0]["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    mean = [(one + two) / 2 for one, two in zip(*(engine.gradients for engine in engines), strict=True)]
    assert difference(mean, alone.gradients) <= 2e-6


def test_rewards_of_turns_are_unbiased_where_a_turn_gets_no_credit_for_those_before_it() -> None:
    """Every episode of two turns of one token; the second's advantage leaves out what the first earned."""
    v, g = 3, torch.Generator().manual_seed(7)
    one, two, first, second = (
        torch.randn(size, generator=g, dtype=torch.float64) for size in ((v,), (v, v), (v,), (v, v))
    )
    reward = first[:, None] + second
    draws = list(itertools.product(range(v), repeat=2))
    rows = flat_rows(
        ["r"] * len(draws),
        [[0]] * len(draws),
        [(y, 9, z) for y, z in draws],
        reward=pack(reward.numpy().astype("f4").ravel()),
        own=pack(np.tile(np.array([1, 0, 1], np.uint8), len(draws))),
        earned=pack(np.array([x for y, _ in draws for x in (0, 0, first[y])], "f4")),
    )
    advantage_D2 = advantages(rows, Rewards(0.4, 2 * len(draws)), 2 * len(draws)).double().reshape(-1, 2)
    assert advantage_D2[:, 1].tolist() == pytest.approx((second - 0.4).flatten().tolist())
    leaf, deep = one.requires_grad_(), two.requires_grad_()
    p, q = leaf.log_softmax(-1)[:, None], deep.log_softmax(-1)
    chance = (p + q).exp()
    of_first, of_second = advantage_D2.T.reshape(2, v, v)
    surrogate = (chance.detach() * (of_first * p + of_second * q)).sum()
    wanted = torch.autograd.grad((chance * reward).sum(), (leaf, deep), retain_graph=True)
    assert difference(torch.autograd.grad(surrogate, (leaf, deep)), wanted) <= 1e-6
