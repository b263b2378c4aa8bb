"""What goes out: one sequence's marks, or one prompt's completion, as wire arrays."""

from __future__ import annotations

from typing import Literal

import numpy as np

from sync.wire import Array, Scored, Written, pack
from teacher_service.engines.base import Marks, Text

Small = Literal["f2", "f4"]
"""Wire type of top-k and gathered log-probabilities."""


def scored(id_: str, marks: Marks, small: Small) -> Scored:
    """Wire form of one sequence's marks."""
    return Scored(
        id=id_,
        logprob=pack(marks.logprob_C, "f4"),
        topk_ids=_packed(marks.topk_ids_CK, "i4"),
        topk_logprob=_packed(marks.topk_logprob_CK, small),
        tail=_packed(marks.tail_C, "f4"),
        gathered=_packed(marks.gathered_CK, small),
        entropy=_packed(marks.entropy_C, "f4"),
        hidden=_hidden(marks.hidden_CH),
    )


def written(id_: str, text: Text) -> Written:
    """Wire form of one completion."""
    reason: Literal["stop", "length"] = "stop" if text.ended else "length"
    return Written(id_, pack(text.token_ids_T, "i4"), pack(text.logprob_T, "f4"), reason)


def _packed(array: np.ndarray | None, dtype: str) -> Array | None:
    if array is None:
        return None
    with np.errstate(over="ignore"):  # what half precision cannot hold becomes inf, which the checks refuse
        return pack(array, dtype)


def _hidden(array: np.ndarray | None) -> Array | None:
    if array is None:
        return None
    return pack(array, "bf16" if array.dtype == np.uint16 else "f4")
