"""What goes out: one sequence's marks, or one prompt's completion, as wire arrays."""

from __future__ import annotations

from typing import Literal

import numpy as np

from sync.wire import Array, Scored, TeacherCompletion, pack
from teacher_service.engines.base import EngineCompletion, EngineScores

Small = Literal["f2", "f4"]
"""Wire type of top-k and gathered log-probabilities."""


def scored(id_: str, scores: EngineScores, small: Small) -> Scored:
    """Wire form of one sequence's marks."""
    return Scored(
        id=id_,
        logprob=pack(scores.logprob_C, "f4"),
        topk_ids=_packed(scores.topk_ids_CK, "i4"),
        topk_logprob=_packed(scores.topk_logprob_CK, small),
        tail=_packed(scores.tail_C, "f4"),
        gathered=_packed(scores.gathered_CK, small),
        entropy=_packed(scores.entropy_C, "f4"),
        hidden=_hidden(scores.hidden_CH),
    )


def written(id_: str, text: EngineCompletion) -> TeacherCompletion:
    """Wire form of one completion."""
    reason: Literal["stop", "length"] = "stop" if text.ended else "length"
    return TeacherCompletion(id_, pack(text.token_ids_T, "i4"), pack(text.logprob_T, "f4"), reason)


def _packed(array: np.ndarray | None, dtype: str) -> Array | None:
    if array is None:
        return None
    with np.errstate(over="ignore"):  # what half precision cannot hold becomes inf, which the checks refuse
        return pack(array, dtype)


def _hidden(array: np.ndarray | None) -> Array | None:
    if array is None:
        return None
    return pack(array, "bf16" if array.dtype == np.uint16 else "f4")
