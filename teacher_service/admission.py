"""Which requests may enter: every rule on a ScoreRequest and a TeacherGenerateRequest, as pure functions.

A fault of the whole request raises BadRequest (the caller's status and text); a fault of one sequence gives a
text that goes out as ScoreRefused, and the others go on.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from sync.errors import RemoteError
from sync.wire import DTYPES, Array, ScoreRequest, ScoreSequence, TeacherGenerateRequest, TeacherPrompt, Want
from teacher_service.engines.base import EngineInfo, EnginePrompt, Item, ScoreOptions

MAX_REPLY_BYTES: Final = 1 << 29


class BadRequest(RemoteError):
    """A request that is refused as a whole, with the status it is refused with."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def check_request(request: ScoreRequest, engine_info: EngineInfo) -> None:
    """Raise BadRequest (422) for what no sequence of the request could be marked with."""
    want = request.want
    if not request.sequences:
        raise BadRequest(422, "the request has no sequences: send at least one")
    _check_deadline(request.deadline)
    for name in ("topk", "hidden", "prompt"):
        if getattr(want, name):
            _check_can(name, engine_info)
    _check_temperature(want.temperature)
    if want.temperature != 1.0:
        _check_can("temperature", engine_info)
    if any(sequence.gather_ids is not None for sequence in request.sequences):
        _check_can("gather", engine_info)
    limit = min(engine_info.max_topk, engine_info.vocab_size)
    if not 0 <= want.topk <= limit:
        raise BadRequest(
            422, f"topk is {want.topk}, this teacher gives 0 to {limit}: ask for fewer, or for hidden states"
        )


def check_write(request: TeacherGenerateRequest, engine_info: EngineInfo) -> None:
    """Raise BadRequest (422) for what no prompt of the request could be completed with."""
    _check_can("write", engine_info)
    if not request.prompts:
        raise BadRequest(422, "the request has no prompts: send at least one")
    _check_deadline(request.deadline)
    if not 1 <= request.max_tokens < engine_info.max_length:
        raise BadRequest(
            422,
            f"max_tokens is {request.max_tokens}, this teacher takes 1 to {engine_info.max_length - 1}",
        )
    _check_temperature(request.temperature)
    wrong = [token for token in request.stop_token_ids if not 0 <= token < engine_info.vocab_size]
    if wrong:
        raise BadRequest(
            422,
            f"stop id {wrong[0]} is outside the vocabulary of {engine_info.vocab_size}: check the tokenizer",
        )


def _check_deadline(deadline: float | None) -> None:
    if deadline is not None and not 0 < deadline < math.inf:
        raise BadRequest(422, f"deadline is {deadline}: send seconds > 0, or none")


def _check_temperature(temperature: float) -> None:
    if not 0 < temperature < math.inf:
        raise BadRequest(422, f"temperature is {temperature}, it must be > 0: send 1 for the teacher's own")


def _check_can(name: str, engine_info: EngineInfo) -> None:
    if name not in engine_info.can:
        raise BadRequest(
            422,
            f"engine {engine_info.engine!r} cannot give {name!r}, it gives {list(engine_info.can)}; "
            'choose another objective, or engine = "transformers"',
        )


def check_reply_size(items: list[Item], want: Want, engine_info: EngineInfo) -> None:
    """Raise BadRequest (413) when the answer would be longer than MAX_REPLY_BYTES."""
    row = 8 + 8 * want.topk + (4 * engine_info.hidden_size if want.hidden else 0)
    size = sum(
        i.positions * row + (0 if i.gather_ids_TK is None else 4 * i.gather_ids_TK.size) for i in items
    )
    if size > MAX_REPLY_BYTES:
        raise BadRequest(
            413, f"the answer would take {size} bytes, the limit is {MAX_REPLY_BYTES}: send fewer sequences"
        )


def admit(sequence: ScoreSequence, want: Want, engine_info: EngineInfo) -> Item | str:
    """The item to mark, or why this sequence cannot be marked (value, rule, remedy)."""
    ids = _int_array(sequence.token_ids, "token_ids", 1)
    if isinstance(ids, str):
        return ids
    length = len(ids)
    if not 2 <= length <= engine_info.max_length:
        return (
            f"{length} tokens, this teacher takes 2 to {engine_info.max_length}: cut the sequence or drop it"
        )
    if not 1 <= sequence.start < length:
        return f"start is {sequence.start}, the first completion token must be in 1 … {length - 1}"
    if (wrong := _outside(ids, 0, engine_info.vocab_size)) is not None:
        return f"token id {wrong} is outside the vocabulary of {engine_info.vocab_size}: check the tokenizer"
    first = 1 if want.prompt else sequence.start
    if sequence.gather_ids is None:
        return Item(ids, first)
    gather = _gather(sequence.gather_ids, length - first, engine_info.vocab_size)
    return gather if isinstance(gather, str) else Item(ids, first, gather)


def admit_prompt(prompt: TeacherPrompt, max_tokens: int, engine_info: EngineInfo) -> EnginePrompt | str:
    """The draft to complete, or why this prompt cannot be completed (value, rule, remedy)."""
    ids = _int_array(prompt.token_ids, "token_ids", 1)
    if isinstance(ids, str):
        return ids
    if len(ids) + max_tokens > engine_info.max_length:
        return (
            f"{len(ids)} prompt tokens and max_tokens = {max_tokens} pass this teacher's "
            f"{engine_info.max_length}: cut the prompt, or ask for less"
        )
    if (wrong := _outside(ids, 0, engine_info.vocab_size)) is not None:
        return f"token id {wrong} is outside the vocabulary of {engine_info.vocab_size}: check the tokenizer"
    if not 0 <= prompt.seed < 1 << 32:
        return f"seed is {prompt.seed}, it must be in 0 … 2^32 - 1: take the remainder"
    return EnginePrompt(ids, prompt.seed)


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


def options_of(item: Item, want: Want, engine_info: EngineInfo) -> ScoreOptions:
    """What the engine is asked for; items with the same answer may share a batch."""
    gather = 0 if item.gather_ids_TK is None else item.gather_ids_TK.shape[1]
    return ScoreOptions(
        want.topk, gather, want.entropy and "entropy" in engine_info.can, want.hidden, want.temperature
    )
