"""From configuration to the function that is optimised."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import assert_never

from student_trainer.objectives.config import (
    JSD,
    SFT,
    ForwardTopK,
    Full,
    ObjectiveConfig,
    PolicyGradientTerms,
    Sampled,
    SkewReverse,
    StudentTopK,
    TopK,
)
from student_trainer.objectives.forward_topk import forward_topk
from student_trainer.objectives.full import full
from student_trainer.objectives.hybrid import hybrid
from student_trainer.objectives.importance import Discount
from student_trainer.objectives.jsd import jsd
from student_trainer.objectives.mixture import mixture
from student_trainer.objectives.sampled import sampled
from student_trainer.objectives.skew import skew
from student_trainer.objectives.terms import Objective


def build(config: ObjectiveConfig) -> Objective:
    """The function of (live log p [N, V], Targets) that is optimised, mixing included."""
    rho_cap = None if config.task is None else config.task.rho_cap
    return partial(mixture, divergence=_divergence(config), rho_cap=rho_cap)


def _divergence(config: ObjectiveConfig) -> Objective:
    match config:
        case Sampled() | SFT():  # what the teacher wrote is learned by cross-entropy: see mixture
            return partial(sampled, rho_cap=config.rho_cap, drop_rho_outside=config.drop_rho_outside)
        case TopK() | StudentTopK():
            return partial(hybrid, rho_cap=config.rho_cap, drop_rho_outside=config.drop_rho_outside)
        case ForwardTopK():
            return forward_topk
        case Full():
            return full
        case JSD():
            return partial(jsd, beta=config.beta)
        case SkewReverse():
            return partial(skew, alpha=config.alpha)
        case _:
            assert_never(config)


def discount(config: ObjectiveConfig) -> Discount | None:
    """How later tokens are credited; None: credit is immediate."""
    if not isinstance(config, PolicyGradientTerms) or not config.discount:
        return None
    return Discount(config.discount, config.rho_cap, config.drop_rho_outside)


def coefficients(config: ObjectiveConfig, teachers: Sequence[str]) -> tuple[float, ...]:
    """λ·c of each teacher, in their order; empty where all are 1."""
    values = tuple(config.coefficient * config.teacher_coefficients.get(name, 1.0) for name in teachers)
    return values if any(value != 1.0 for value in values) else ()
