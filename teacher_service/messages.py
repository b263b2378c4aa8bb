"""Wire messages to engine types and back: every rule on a request, as pure functions.

A fault of the whole request raises BadRequest; a fault of one sequence or prompt gives a text that goes out
as ScoreRefused, and the others go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from blake3 import blake3
from msgspec.structs import replace

from sync import wire
from sync.base import tokenizers
from sync.base.errors import RemoteError, TooLarge
from sync.wire import Array, Scored, TeacherCompletion, Want, checks, pack
from sync.wire.checks import Problem
from teacher_service.batching import Work, split
from teacher_service.engines import base
from teacher_service.engines.base import EngineInfo, EnginePrompt, EngineScores, Item, ScoreOptions

COLDEST: Final = 1e-3
"""Least temperature: far below, logits that are divided by it are beyond float32."""
FRAME_BYTES: Final = 1 << 22
HalfOrSingle = Literal["f2", "f4"]
"""Wire type of top-k and gathered log-probabilities."""
_SAMPLES: Final = 64
"""Blocks read of each weight file for a fingerprint, evenly spaced: other weights differ in all of them."""
_BLOCK_BYTES: Final = 4096


class BadRequest(RemoteError):
    """A request that is refused as a whole, with the HTTP status of the refusal."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ToKeep(NamedTuple):
    """The scores of one sequence, in the form in which they are kept."""

    logprob: Array
    """f4 [T]: what is answered"""
    frames: list[bytes]
    """See `wire.Kept`; FRAME_BYTES each, about."""


class Call(NamedTuple):
    """A request that was read and checked."""

    ids: list[str]
    admitted: list[Work | str]
    """What to compute for each id, or why nothing is."""
    deadline: float | None
    result: Callable[[str, Any, Any], Scored | ToKeep | TeacherCompletion | Problem]
    """(id, item or prompt, the engine's outcome) → the result."""
    reply: type[wire.ScoreReply] | type[wire.TeacherGenerateReply]


def read_score(body: bytes, info: EngineInfo, dtype: HalfOrSingle, limit_bytes: int) -> Call:
    """A ScoreRequest; its answer to several sequences has at most `limit_bytes`.

    Raises WireError, TooLarge or BadRequest.
    """
    message = wire.decode(body, wire.ScoreRequest)
    check_score(message, info)
    want, plain = message.want, replace(message.want, keep=False)
    items = [admit(sequence, want, info) for sequence in message.sequences]
    check_reply_size([item for item in items if isinstance(item, Item)], want, info, limit_bytes)
    checked = to_keep if want.keep else checked_scores
    return Call(
        [sequence.id for sequence in message.sequences],
        [item if isinstance(item, str) else Work(item, score_options(item, want, info)) for item in items],
        message.deadline,
        lambda id_, item, scores: checked(id_, item, scores, plain, info, dtype),
        wire.ScoreReply,
    )


def read_generate(body: bytes, info: EngineInfo, end_ids: set[int]) -> Call:
    """A TeacherGenerateRequest; `end_ids` end a completion, besides those that the engine has itself.

    Raises WireError, or BadRequest (422) for what no prompt of the request could be completed with.
    """
    message = wire.decode(body, wire.TeacherGenerateRequest)
    _check_can({"generate": True, "temperature": message.temperature != 1.0}, info)
    _check_common("prompts", message.prompts, message.deadline, message.temperature)
    _require(
        1 <= message.max_tokens < info.max_length,
        f"max_tokens is {message.max_tokens}, this teacher takes 1 to {info.max_length - 1}",
    )
    for token in message.stop_token_ids:
        _require(
            0 <= token < info.vocab_size,
            f"stop id {token} is outside the vocabulary of {info.vocab_size}: check the tokenizer",
        )
    ends = tuple(sorted({*end_ids, *message.stop_token_ids}))
    params = base.GenerationParams(message.max_tokens, message.temperature, ends)
    prompts = [admit_prompt(prompt, message.max_tokens, info) for prompt in message.prompts]
    return Call(
        [prompt.id for prompt in message.prompts],
        [prompt if isinstance(prompt, str) else Work(prompt, params) for prompt in prompts],
        message.deadline,
        lambda id_, _, completion: checked_completion(id_, completion, message.max_tokens, info),
        wire.TeacherGenerateReply,
    )


def check_score(request: wire.ScoreRequest, info: EngineInfo) -> None:
    """Raise BadRequest (422) for what no sequence of the request could be scored with."""
    want = request.want
    _check_common("sequences", request.sequences, request.deadline, want.temperature)
    gather = any(sequence.gather_ids is not None for sequence in request.sequences)
    needed = {"topk": want.topk, "hidden": want.hidden, "prompt": want.prompt, "gather": gather}
    _check_can({**needed, "temperature": want.temperature != 1.0}, info)
    limit = min(info.max_topk, info.vocab_size)
    _require(
        0 <= want.topk <= limit,
        f"topk is {want.topk}, this teacher gives 0 to {limit}: ask for fewer, or for hidden states",
    )


def _check_common(what: str, parts: list[Any], deadline: float | None, temperature: float) -> None:
    _require(bool(parts), f"the request has no {what}: send at least one")
    in_time = deadline is None or 0 < deadline < math.inf
    _require(in_time, f"deadline is {deadline}: send seconds > 0, or none")
    warm = COLDEST <= temperature < math.inf
    _require(warm, f"temperature is {temperature}, it must be >= {COLDEST}: send 1 for the teacher's own")


def _check_can(needed: Mapping[str, Any], info: EngineInfo) -> None:
    for name in (name for name, needs in needed.items() if needs):
        _require(
            name in info.can,
            f"engine {info.engine!r} cannot give {name!r}, it gives {list(info.can)}; "
            'choose another objective, or engine = "transformers"',
        )


def _require(good: bool, text: str) -> None:
    if not good:
        raise BadRequest(422, text)


def check_reply_size(items: list[Item], want: Want, info: EngineInfo, limit_bytes: int) -> None:
    """Raise TooLarge for several whose scores pass `limit_bytes`; one is served whatever it takes."""
    row = 8 + 8 * want.topk + (4 * info.hidden_size if want.hidden else 0)
    gathered = sum(4 * item.gather_ids_TK.size for item in items if item.gather_ids_TK is not None)
    size = gathered + row * sum(item.positions for item in items)
    if size > limit_bytes and len(items) > 1:
        raise TooLarge(f"the answer would take {size} bytes, the limit is {limit_bytes}: send fewer at once")


def admit(sequence: wire.ScoreSequence, want: Want, info: EngineInfo) -> Item | str:
    """The item to score, or why this sequence cannot be scored (value, rule, remedy)."""
    ids = _ids(sequence.token_ids, "token", 1, info.vocab_size)
    if isinstance(ids, str):
        return ids
    length = len(ids)
    if not 2 <= length <= info.max_length:
        return f"{length} tokens, this teacher takes 2 to {info.max_length}: cut the sequence or drop it"
    if not 1 <= sequence.start < length:
        return f"start is {sequence.start}, the first completion token must be in 1 … {length - 1}"
    first = 1 if want.prompt else sequence.start
    if sequence.gather_ids is None:
        return Item(ids, first)
    gather = _ids(sequence.gather_ids, "gather", 2, info.vocab_size, low=-1)
    if isinstance(gather, str):
        return gather
    if len(gather) != length - first:
        shape, expected = list(gather.shape), f"[{length - first}, K >= 1]"
        return f"gather_ids has shape {shape}, expected {expected}: one row per position"
    return Item(ids, first, gather)


def admit_prompt(prompt: wire.TeacherPrompt, max_tokens: int, info: EngineInfo) -> EnginePrompt | str:
    """The prompt to complete, or why it cannot be completed (value, rule, remedy)."""
    ids = _ids(prompt.token_ids, "token", 1, info.vocab_size)
    if isinstance(ids, str):
        return ids
    if len(ids) + max_tokens > info.max_length:
        return (
            f"{len(ids)} prompt tokens and max_tokens = {max_tokens} pass this teacher's "
            f"{info.max_length}: cut the prompt, or ask for less"
        )
    if not 0 <= prompt.seed < 1 << 32:
        return f"seed is {prompt.seed}, it must be in 0 … 2^32 - 1: take the remainder"
    return EnginePrompt(ids, prompt.seed)


def _ids(array: Array, name: str, dimensions: int, vocab_size: int, low: int = 0) -> np.ndarray | str:
    """int32 ids in [low, vocab_size), or what is wrong with them; exact for any shape a peer may claim."""
    field, within = f"{name}_ids", checks.ids(vocab_size, low)
    if problem := checks.array(field, array, checks.I4, (None,) * dimensions, within):
        return f"{problem}: {'check the tokenizer' if problem.rule == within.name else 'convert it'}"
    return wire.unpack(array) if array.data else f"{field} is empty: send at least one id"


def score_options(item: Item, want: Want, info: EngineInfo) -> ScoreOptions:
    """What to compute; items with the same options may share a batch."""
    gather = 0 if item.gather_ids_TK is None else item.gather_ids_TK.shape[1]
    entropy = want.entropy and "entropy" in info.can
    return ScoreOptions(want.topk, gather, entropy, want.hidden, want.temperature)


def checked_scores(
    id_: str, item: Item, scores: EngineScores, want: Want, info: EngineInfo, dtype: HalfOrSingle
) -> Scored | Problem:
    """Wire form of one item's scores, or what is wrong with them."""
    gather, count = score_options(item, want, info).gather, len(scores.logprob_C)
    answer = scored(id_, scores, dtype)
    problem = checks.scored(answer, count, gather, want, info.vocab_size, info.hidden_size)
    return problem or checks.without_bad_entropy(answer, count)


def to_keep(
    id_: str, item: Item, scores: EngineScores, want: Want, info: EngineInfo, dtype: HalfOrSingle
) -> ToKeep | Problem:
    """One item's scores as they are kept, or what is wrong with them.

    They are checked and encoded a frame at a time: whoever copies gigabytes at once holds the interpreter.
    """
    size = sum(getattr(getattr(scores, name), "nbytes", 0) for name in EngineScores.__slots__)
    positions = item.positions
    block = max(1, positions * FRAME_BYTES // size)
    counts = [min(block, positions - start) for start in range(0, positions, block)]
    frames, ids = list[bytes](), item.gather_ids_TK
    for number, part in enumerate(split(scores, counts)):
        checked = checked_scores(id_, item, part, want, info, dtype)
        if isinstance(checked, Problem):
            return checked
        if ids is not None:
            checked = replace(checked, gather_ids=pack(ids[number * block : (number + 1) * block], "i4"))
        frames.append(wire.frame(wire.ScoreReply(results=[checked])))
    return ToKeep(pack(scores.logprob_C, "f4"), frames)


def scored(id_: str, scores: EngineScores, dtype: HalfOrSingle) -> Scored:
    """Wire form of one sequence's scores."""

    def packed(array: np.ndarray | None, dtype: str) -> Array | None:
        return None if array is None else pack(array, dtype)

    hidden = scores.hidden_CH
    with np.errstate(over="ignore"):  # what half precision cannot hold becomes inf, which the checks refuse
        return Scored(
            id=id_,
            logprob=pack(scores.logprob_C, "f4"),
            topk_ids=packed(scores.topk_ids_CK, "i4"),
            topk_logprob=packed(scores.topk_logprob_CK, dtype),
            gathered=packed(scores.gathered_CK, dtype),
            entropy=packed(scores.entropy_C, "f4"),
            hidden=packed(hidden, "bf16" if hidden is not None and hidden.dtype == np.uint16 else "f4"),
        )


def checked_completion(
    id_: str, completion: base.EngineCompletion, max_tokens: int, info: EngineInfo
) -> TeacherCompletion | Problem:
    """Wire form of one completion, or what is wrong with it."""
    reason: Literal["stop", "length"] = "stop" if completion.ended else "length"
    tokens, logprob = pack(completion.token_ids_T, "i4"), pack(completion.logprob_T, "f4")
    answer = TeacherCompletion(id_, tokens, logprob, reason)
    return checks.teacher_completion(answer, max_tokens, info.vocab_size) or answer


def describe(
    name: str, engine_info: EngineInfo, tokenizer: Any, known_ids: int | None = None
) -> wire.TeacherInfo:
    """TeacherInfo of the teacher called `name`, whose model folder is read for its fingerprint."""
    shared = ("model", "revision", "dtype", "engine", "vocab_size", "hidden_size", "max_length", "max_topk")
    return wire.TeacherInfo(
        name=name,
        tokenizer_fingerprint=tokenizers.fingerprint(tokenizer, known_ids),
        chat_template_fingerprint=tokenizers.chat_template_fingerprint(tokenizer),
        fingerprint=model_fingerprint(engine_info),
        can=list(engine_info.can),
        **{field: getattr(engine_info, field) for field in shared},
    )


def model_fingerprint(engine_info: EngineInfo) -> str:
    """BLAKE3 hex over the model's name and samples of its weight files, where it is a folder here."""
    names = (engine_info.model, engine_info.revision, engine_info.dtype, engine_info.engine)
    hasher = blake3(repr(names).encode())
    folder = Path(engine_info.model)
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = path.stat().st_size
        hasher.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(sample * max(0, size - _BLOCK_BYTES) // (_SAMPLES - 1))
                hasher.update(file.read(_BLOCK_BYTES))
    return hasher.hexdigest()
