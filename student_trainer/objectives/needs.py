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


def needs(objective: ObjectiveConfig) -> Want:
    """What the teacher is asked for at each completion position.

    `student_topk` gathers at ids that the request carries (ScoreSequence.gather_ids): it wants no more here.
    Entropy comes from the teacher unless its whole distribution is rebuilt here from hidden states.
    """
    if isinstance(objective, Full | JSD | SkewReverse):
        return Want(hidden=True)
    topk = objective.k if isinstance(objective, TopK | ForwardTopK) else 0
    return Want(topk=topk, entropy=True)


def student_topk(objective: ObjectiveConfig) -> int:
    """Ids per position that the rollout engine returns (Sampling.student_topk); 0: none."""
    return objective.k if isinstance(objective, StudentTopK) else 0
