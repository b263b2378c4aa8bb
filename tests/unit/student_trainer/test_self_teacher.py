"""Every objective has its optimum at a teacher that equals the student, and a gradient for another one."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from student_trainer.objectives.config import (
    JSD,
    ForwardTopK,
    Full,
    ObjectiveConfig,
    Sampled,
    SkewReverse,
    TopK,
)
from student_trainer.objectives.divergences import Objective, Targets, at, build

V = 40
ARROWS = np.random.default_rng(0).normal(size=(V, V))
TOLERANCE = 1e-4
"""Nats, and gradient norm, per token: what fp32 leaves of an objective whose teacher is the student."""
LEAST_GRADIENT = 1e-6


class SelfAndTeacher(NamedTuple):
    """An objective on real distributions; per token."""

    self_loss: float
    self_gradient: float
    teacher_gradient: float


def objective_figures(
    objective: Objective, live_NV: Tensor, teacher_NV: Tensor, token_N: Tensor, k: int = 0
) -> SelfAndTeacher:
    """The objective with the student as its own teacher, and the change of its gradient with the real one.

    `k`: size of S for objectives that have one: the teacher's top-k.
    """
    own_loss, own_NV = _gradient(objective, live_NV, live_NV, token_N, k)
    _, other_NV = _gradient(objective, live_NV, teacher_NV, token_N, k)
    tokens = len(token_N)
    return SelfAndTeacher(
        abs(own_loss) / tokens, float(own_NV.norm()) / tokens, float((other_NV - own_NV).norm()) / tokens
    )


def _gradient(
    objective: Objective, live_NV: Tensor, teacher_NV: Tensor, token_N: Tensor, k: int
) -> tuple[float, Tensor]:
    """Summed loss of fresh tokens, and its gradient in the student's logits."""
    best = teacher_NV.topk(min(k, teacher_NV.shape[1]), dim=1) if k else None
    targets = Targets(
        token_N=token_N,
        behavior_logp_N=at(live_NV, token_N),
        teacher_logp_N=at(teacher_NV, token_N),
        fresh_N=torch.ones_like(token_N, dtype=torch.bool),
        support_NK=None if best is None else best.indices,
        support_logp_NK=None if best is None else best.values,
        teacher_logp_NV=teacher_NV,
    )
    logits_NV = live_NV.clone().requires_grad_()
    loss_N, _ = objective(logits_NV.log_softmax(1), targets)
    (gradient_NV,) = torch.autograd.grad(loss_N.sum(), logits_NV)
    return float(loss_N.detach().sum()), gradient_NV


TOKENS = torch.arange(12) % V
STUDENT = torch.from_numpy(ARROWS[:12]).float().log_softmax(1)
TEACHER = torch.from_numpy(ARROWS[12:24]).float().log_softmax(1)
OBJECTIVES: list[ObjectiveConfig] = [
    Full(), Sampled(), TopK(k=5), ForwardTopK(k=5), JSD(), SkewReverse()
]  # fmt: skip


@pytest.mark.parametrize("config", OBJECTIVES, ids=lambda config: config.type)
def test_objectives_rest_at_a_self_teacher_and_feel_a_real_one(config: ObjectiveConfig) -> None:
    found = objective_figures(build(config), STUDENT, TEACHER, TOKENS, getattr(config, "k", 0))
    assert max(found.self_loss, found.self_gradient) <= TOLERANCE
    assert found.teacher_gradient >= LEAST_GRADIENT


def test_the_gradient_of_the_full_objective_is_its_closed_form() -> None:
    d, p = STUDENT - TEACHER, STUDENT.exp()
    wanted = (p * (d - (p * d).sum(1, keepdim=True))).norm() / len(TOKENS)
    found = objective_figures(build(Full()), STUDENT, TEACHER, TOKENS)
    assert found.teacher_gradient == pytest.approx(float(wanted), rel=1e-4)


def test_an_objective_that_leaves_every_fresh_token_out_is_seen() -> None:
    deaf = build(Sampled(drop_rho_outside=(2.0, 5.0)))
    found = objective_figures(deaf, STUDENT, TEACHER, TOKENS)
    assert found.teacher_gradient == 0.0


def test_an_objective_that_does_not_rest_at_its_teacher_is_seen() -> None:
    def truncated(logp: torch.Tensor, goal: Any) -> Any:
        own = logp.gather(1, goal.support_NK)
        return (own.exp() * (own - goal.support_logp_NK)).sum(1), {}

    found = objective_figures(truncated, STUDENT, TEACHER, TOKENS, 5)
    assert found.self_loss < 1e-6
    assert found.self_gradient > TOLERANCE
