"""Wire messages to engine types and back: every rule on a request, as pure functions.

A fault of the whole request raises BadRequest; a fault of one sequence or prompt gives a text that goes out
as ScoreRefused, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
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

FRAME_BYTES: Final = 1 << 22
HalfOrSingle = Literal["f2", "f4"]
"""Wire type of top-k and gathered log-probabilities."""
Keep = Callable[[list[bytes]], wire.Kept]
"""Keeps a body that is given in parts."""
_SAMPLES: Final = 64
"""Blocks read of each weight file for a fingerprint, evenly spaced: other weights differ in all of them."""
_BLOCK_BYTES: Final = 4096


class BadRequest(RemoteError):
    """A request that is refused as a whole, before the engine has it."""

    status = 422


class Call(NamedTuple):
    """A request that was read and checked."""

    ids: list[str]
    admitted: list[Work | str]
    """What to compute for each id, or why nothing is."""
    result: Callable[[str, Any, Any], Scored | TeacherCompletion | Problem]
    """(id, item or prompt, the engine's outcome) → the result."""
    reply: type[wire.ScoreReply] | type[wire.TeacherGenerateReply]


def read_score(
    body: bytes, info: EngineInfo, dtype: HalfOrSingle, limit_bytes: int, keep: Keep | None = None
) -> Call:
    """A ScoreRequest; its answer to several sequences has at most `limit_bytes`. `keep`: for `Want.keep`.

    Raises WireError, TooLarge or BadRequest.
    """
    message = wire.decode(body, wire.ScoreRequest)
    check_score(message, info)
    want = message.want
    items = [admit(sequence, info) for sequence in message.sequences]
    check_reply_size([item for item in items if isinstance(item, Item)], want, info, limit_bytes)
    result = partial(checked_scores, want=replace(want, keep=False), info=info, dtype=dtype)
    return Call(
        [sequence.id for sequence in message.sequences],
        [item if isinstance(item, str) else Work(item, score_options(item, want, info)) for item in items],
        partial(kept_scores, result, keep) if want.keep and keep else result,
        wire.ScoreReply,
    )


def read_generate(body: bytes, info: EngineInfo, end_ids: set[int]) -> Call:
    """A TeacherGenerateRequest; `end_ids` end a completion, besides those that the engine has itself.

    Raises WireError, or BadRequest for what no prompt of the request could be completed with.
    """
    message = wire.decode(body, wire.TeacherGenerateRequest)
    _check_can({"generate": True, "temperature": message.temperature != 1.0}, info)
    if message.max_tokens >= info.max_length:
        raise BadRequest(f"max_tokens is {message.max_tokens}, this teacher takes 1 to {info.max_length - 1}")
    if outside := [token for token in message.stop_token_ids if not 0 <= token < info.vocab_size]:
        raise BadRequest(
            f"stop id {outside[0]} is outside the vocabulary of {info.vocab_size}: check the tokenizer"
        )
    ends = tuple(sorted({*end_ids, *message.stop_token_ids}))
    params = base.GenerationParams(message.max_tokens, message.temperature, ends)
    prompts = [admit_prompt(prompt, message.max_tokens, info) for prompt in message.prompts]
    return Call(
        [prompt.id for prompt in message.prompts],
        [prompt if isinstance(prompt, str) else Work(prompt, params) for prompt in prompts],
        completed,
        wire.TeacherGenerateReply,
    )


def check_score(request: wire.ScoreRequest, info: EngineInfo) -> None:
    """Raise BadRequest for what no sequence of the request could be scored with."""
    want = request.want
    gather = any(sequence.gather_ids is not None for sequence in request.sequences)
    warmer = want.temperature != 1.0
    _check_can({"topk": want.topk, "hidden": want.hidden, "gather": gather, "temperature": warmer}, info)
    limit = min(info.max_topk, info.vocab_size)
    if want.topk > limit:
        raise BadRequest(
            f"topk is {want.topk}, this teacher gives 0 to {limit}: ask for fewer, or for hidden states"
        )


def _check_can(needed: Mapping[str, Any], info: EngineInfo) -> None:
    if lacking := [name for name, needs in needed.items() if needs and name not in info.can]:
        raise BadRequest(
            f"engine {info.engine!r} cannot give {lacking[0]!r}, it gives {list(info.can)}; choose another "
            'objective, or engine = "transformers"'
        )


def check_reply_size(items: list[Item], want: Want, info: EngineInfo, limit_bytes: int) -> None:
    """Raise TooLarge for several whose scores pass `limit_bytes`; one is served whatever it takes."""
    row = 8 + 8 * want.topk + (4 * info.hidden_size if want.hidden else 0)
    gathered = sum(4 * item.gather_ids_TK.size for item in items if item.gather_ids_TK is not None)
    size = gathered + row * sum(item.positions for item in items)
    if size > limit_bytes and len(items) > 1:
        raise TooLarge(f"the answer would take {size} bytes, the limit is {limit_bytes}: send fewer at once")


def admit(sequence: wire.ScoreSequence, info: EngineInfo) -> Item | str:
    """The item to score, or why this sequence cannot be scored (value, rule, remedy)."""
    ids = _ids(sequence.token_ids, "token", 1, info.vocab_size)
    if isinstance(ids, str):
        return ids
    length = len(ids)
    if not 2 <= length <= info.max_length:
        return f"{length} tokens, this teacher takes 2 to {info.max_length}: cut the sequence or drop it"
    if not 1 <= sequence.start < length:
        return f"start is {sequence.start}, the first completion token must be in 1 … {length - 1}"
    if sequence.gather_ids is None:
        return Item(ids, sequence.start)
    gather = _ids(sequence.gather_ids, "gather", 2, info.vocab_size, low=-1)
    if isinstance(gather, str):
        return gather
    if len(gather) != length - sequence.start:
        shape, expected = list(gather.shape), f"[{length - sequence.start}, K >= 1]"
        return f"gather_ids has shape {shape}, expected {expected}: one row per position"
    return Item(ids, sequence.start, gather)


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


def kept_scores(
    checked: Callable[..., Scored | Problem], keep: Keep, id_: str, item: Item, scores: EngineScores
) -> Scored | Problem:
    """The log-probabilities and where all scores are kept, in frames of about FRAME_BYTES, or what is wrong.

    They are `checked` and encoded a frame at a time: whoever copies gigabytes at once holds the interpreter.
    """
    size = sum(getattr(getattr(scores, name), "nbytes", 0) for name in EngineScores.__slots__)
    positions = item.positions
    block = max(1, positions * FRAME_BYTES // size)
    starts, frames, ids = range(0, positions, block), list[bytes](), item.gather_ids_TK
    for start, part in zip(starts, split(scores, [min(block, positions - i) for i in starts]), strict=True):
        result = checked(id_, item, part)
        if isinstance(result, Problem):
            return result
        if ids is not None:
            result = replace(result, gather_ids=pack(ids[start : start + block], "i4"))
        frames.append(wire.frame(wire.ScoreReply(results=[result])))
    return Scored(id_, pack(scores.logprob_C, "f4"), kept=keep(frames))


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


def completed(id_: str, _: EnginePrompt, completion: base.EngineCompletion) -> TeacherCompletion:
    """Wire form of one completion; whoever asked for it checks it."""
    reason: Literal["stop", "length"] = "stop" if completion.ended else "length"
    tokens, logprob = pack(completion.token_ids_T, "i4"), pack(completion.logprob_T, "f4")
    return TeacherCompletion(id_, tokens, logprob, reason)


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
