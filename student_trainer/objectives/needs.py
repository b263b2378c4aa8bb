"""What an objective needs from the teacher and from the rollout engine. No torch here."""

from __future__ import annotations

from student_trainer.objectives.config import (
    JSD,
    ForwardTopK,
    Full,
    ObjectiveConfig,
    SkewReverse,
    StudentTopK,
    TopK,
)
from sync.wire import Want


def teacher_temperature(objective: ObjectiveConfig, rollouts: float) -> float:
    """At which q is taken where the rollouts are sampled at temperature `rollouts`."""
    return rollouts if objective.teacher_temperature == "rollout" else 1.0


def needs(objective: ObjectiveConfig, rollouts: float = 1.0) -> Want:
    """What the teacher is asked for at each completion position; `rollouts`: their temperature.

    `student_topk` gathers at ids that the request carries (ScoreSequence.gather_ids): it wants no more here.
    Entropy comes from the teacher unless its whole distribution is rebuilt here from hidden states.
    """
    temperature = teacher_temperature(objective, rollouts)
    if isinstance(objective, Full | JSD | SkewReverse):
        return Want(hidden=True, temperature=temperature)
    topk = objective.k if isinstance(objective, TopK | ForwardTopK) else 0
    return Want(topk=topk, entropy=True, temperature=temperature)


def student_topk(objective: ObjectiveConfig) -> int:
    """Ids per position that the rollout engine returns (Sampling.student_topk); 0: none."""
    return objective.k if isinstance(objective, StudentTopK) else 0
