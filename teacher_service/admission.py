"""Which requests may enter: every rule on a ScoreRequest, as pure functions.

A fault of the whole request raises BadRequest (the caller's status and text); a fault of one sequence gives a
text that goes out as ScoreRefused, and the others go on.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from sync.errors import RemoteError
from sync.wire import DTYPES, Array, ScoreRequest, ScoreSequence, Want
from teacher_service.engines.base import Asked, Facts, Item

MAX_REPLY_BYTES: Final = 1 << 29


class BadRequest(RemoteError):
    """A request that is refused as a whole, with the status it is refused with."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def check_request(request: ScoreRequest, facts: Facts) -> None:
    """Raise BadRequest (422) for what no sequence of the request could be marked with."""
    want = request.want
    if not request.sequences:
        raise BadRequest(422, "the request has no sequences: send at least one")
    if request.deadline is not None and not 0 < request.deadline < math.inf:
        raise BadRequest(422, f"deadline is {request.deadline}: send seconds > 0, or none")
    for name in ("topk", "entropy", "hidden", "prompt"):
        if getattr(want, name):
            _check_can(name, facts)
    if any(sequence.gather_ids is not None for sequence in request.sequences):
        _check_can("gather", facts)
    limit = min(facts.max_topk, facts.vocab_size)
    if not 0 <= want.topk <= limit:
        raise BadRequest(
            422, f"topk is {want.topk}, this teacher gives 0 to {limit}: ask for fewer, or for hidden states"
        )


def _check_can(name: str, facts: Facts) -> None:
    if name not in facts.can:
        raise BadRequest(
            422,
            f"engine {facts.engine!r} cannot give {name!r}, it gives {list(facts.can)}; "
            'choose another objective, or engine = "transformers"',
        )


def check_reply_size(items: list[Item], want: Want, facts: Facts) -> None:
    """Raise BadRequest (413) when the answer would be longer than MAX_REPLY_BYTES."""
    row = 8 + 8 * want.topk + (4 * facts.hidden_size if want.hidden else 0)
    size = sum(
        i.positions * row + (0 if i.gather_ids_TK is None else 4 * i.gather_ids_TK.size) for i in items
    )
    if size > MAX_REPLY_BYTES:
        raise BadRequest(
            413, f"the answer would take {size} bytes, the limit is {MAX_REPLY_BYTES}: send fewer sequences"
        )


def admit(sequence: ScoreSequence, want: Want, facts: Facts) -> Item | str:
    """The item to mark, or why this sequence cannot be marked (value, rule, remedy)."""
    ids = _int_array(sequence.token_ids, "token_ids", 1)
    if isinstance(ids, str):
        return ids
    length = len(ids)
    if not 2 <= length <= facts.max_length:
        return f"sequence has {length} tokens, this teacher takes 2 to {facts.max_length}: cut it or drop it"
    if not 1 <= sequence.start < length:
        return f"start is {sequence.start}, the first completion token must be in 1 … {length - 1}"
    if (wrong := _outside(ids, 0, facts.vocab_size)) is not None:
        return f"token id {wrong} is outside the vocabulary 0 … {facts.vocab_size - 1}: check the tokenizer"
    first = 1 if want.prompt else sequence.start
    if sequence.gather_ids is None:
        return Item(ids, first)
    gather = _gather(sequence.gather_ids, length - first, facts.vocab_size)
    return gather if isinstance(gather, str) else Item(ids, first, gather)


def _gather(array: Array, positions: int, vocab_size: int) -> np.ndarray | str:
    """int32 [T, K] ids, K >= 1, or what is wrong with them."""
    ids = _int_array(array, "gather_ids", 2)
    if isinstance(ids, str):
        return ids
    if ids.shape[0] != positions or ids.shape[1] < 1:
        return f"gather_ids has shape {list(ids.shape)}, expected [{positions}, K >= 1]: one row per position"
    if (wrong := _outside(ids, -1, vocab_size)) is not None:
        return f"gather id {wrong} is outside 0 … {vocab_size - 1} (-1: skip): check the tokenizer"
    return ids


def _int_array(array: Array, name: str, dimensions: int) -> np.ndarray | str:
    """The i4 array, or what is wrong with it; exact for any shape a peer may claim."""
    if array.dtype != "i4":
        return f"{name} has dtype {array.dtype}, expected i4: convert it"
    if len(array.shape) != dimensions or min(array.shape) < 0:
        return f"{name} has shape {list(array.shape)}, expected {dimensions} dimensions"
    if (needed := math.prod(array.shape) * 4) != len(array.data):
        return f"{name} of shape {list(array.shape)} needs {needed} bytes, got {len(array.data)}"
    if not array.data:
        return f"{name} is empty: send at least one id"
    return np.frombuffer(array.data, DTYPES["i4"]).reshape(array.shape)


def _outside(ids: np.ndarray, low: int, high: int) -> int | None:
    """An id outside [low, high), or None."""
    smallest, largest = int(ids.min()), int(ids.max())
    if smallest < low:
        return smallest
    return largest if largest >= high else None


def asked_of(item: Item, want: Want) -> Asked:
    """What the engine is asked for; items with the same answer may share a batch."""
    gather = 0 if item.gather_ids_TK is None else item.gather_ids_TK.shape[1]
    return Asked(want.topk, gather, want.entropy, want.hidden)
