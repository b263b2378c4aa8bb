"""From configuration to the function that is optimised."""

from __future__ import annotations

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
from student_trainer.objectives.jsd import jsd
from student_trainer.objectives.sampled import sampled
from student_trainer.objectives.sft import sft
from student_trainer.objectives.skew import skew
from student_trainer.objectives.terms import Objective


def build(config: ObjectiveConfig) -> Objective:
    """The objective's function of (live log p [N, V], Targets)."""
    match config:
        case Sampled():
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
        case SFT():
            return sft
        case _:
            assert_never(config)


def discount(config: ObjectiveConfig) -> float:
    """γ of the objective; 0 where credit is always immediate."""
    return config.discount if isinstance(config, PolicyGradientTerms) else 0.0
