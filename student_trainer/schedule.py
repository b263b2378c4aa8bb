"""The learning rate of each step, from [trainer] alone: DeepSpeed's JSON and checkpoints have no say in it.

    warm-up   step n < W            rate · n / W
    constant  from W on             rate
    linear    from W to the end N   rate · (N − n) / (N − W)
    cosine    from W to the end N   rate · (1 + cos(π (n − W) / (N − W))) / 2

n counts the steps before; W is trainer.warmup_steps, N is run.steps. linear and cosine are the schedules of
transformers.get_linear_schedule_with_warmup and get_cosine_schedule_with_warmup.
"""

from __future__ import annotations

import math
from typing import Any

from student_trainer.config import TrainerSettings

Groups = list[dict[str, Any]]
"""An optimizer's param_groups."""


def share(settings: TrainerSettings, step: int, steps: int) -> float:
    """Share of trainer.lr that the step after `step` others uses, in a run of `steps`."""
    warmup = settings.warmup_steps
    if step < warmup:
        return step / warmup
    if settings.lr_schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 1.0 - done if settings.lr_schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2


def hyperparameters(groups: Groups) -> Groups:
    """What a fresh optimizer was given for each group: the rate before any schedule, betas, weight decay."""
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def apply(groups: Groups, given: Groups, share: float) -> None:
    """Give every group its hyperparameters again, the rate times `share`; a checkpoint's are overwritten."""
    for group, own in zip(groups, given, strict=True):
        group.update(own, lr=own["lr"] * share)
