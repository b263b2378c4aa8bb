"""The task's rewards of one step: their mean over all ranks, and what each token is credited with.

Letters: R rows, C completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from student_trainer.ranks import Ranks
from sync.errors import DataError
from sync.wire import Rows, TrainBatch, unpack


@dataclass(frozen=True)
class Rewards:
    """Of one step, all ranks together."""

    mean: float | None
    """b: over the student's rollouts with a reward; None: there are none, the teacher wrote them all"""
    tokens: float
    """M: supervised tokens of rollouts with a reward"""


def rewards_of(batch: TrainBatch, ranks: Ranks) -> Rewards:
    """Rewards of the whole step, from this rank's share of it. Collective.

    Raises DataError when no rollout has a reward, or one is not finite.
    """
    own = np.zeros(3)
    for rows in batch.micro_batches:
        if rows.reward is not None:
            reward_R, student_R = unpack(rows.reward), np.ones(rows.reward.shape[0], bool)
            if rows.by_teacher is not None:
                student_R = unpack(rows.by_teacher) == 0
            own += reward_R[student_R].sum(), student_R.sum(), unpack(rows.completion_lens).sum()
    total, rollouts, tokens = ranks.gather(torch.from_numpy(own)).sum(0).tolist()
    if tokens == 0 or not np.isfinite(total):
        raise DataError(
            f"the batch of {batch.version} has {rollouts:.0f} rollouts with a reward, their sum is {total}: "
            "objective.task needs a finite reward; set prompts.judge, take prompts of a task, or leave it out"
        )
    return Rewards(total / rollouts if rollouts else None, tokens)


def advantages(rows: Rows, rewards: Rewards, denominator: int) -> Tensor | None:
    """(R − b)·N/M of every completion token [C]; None: these rows have no reward.

    b is the rows' own baseline where they carry one, else the mean of the step.
    """
    if rows.reward is None:
        return None
    baseline_R = rewards.mean or 0.0 if rows.baseline is None else unpack(rows.baseline).astype(np.float64)
    advantage_R = (unpack(rows.reward).astype(np.float64) - baseline_R) * denominator / rewards.tokens
    return torch.from_numpy(np.repeat(advantage_R, unpack(rows.completion_lens)).astype(np.float32))
