"""Packing of a batch into the shares of ranks and micro-batches. Pure and vectorised.

Rows go to ranks by length, longest first, to and fro (0 1 2 2 1 0 …): every rank gets rows of the same
lengths, so that the same micro-batch of all ranks, which run in lockstep under ZeRO-3, costs the same.
Flat arrays are joined as bytes; no token is touched in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec
import numpy as np

from distill.prompts.stream import group_of
from distill.run_log.records import Rollout
from distill.run_log.state import Batch
from sync.errors import DataError
from sync.wire import DTYPES, Array, Rows, Scored, TrainBatch, Version, VersionSpan, pack, unpack

StepOf = Callable[[Version], int]


@dataclass(frozen=True)
class Shape:
    """How every batch of a run is split into shares."""

    micro_batch_tokens: int
    """Padded tokens (rows × longest) of one micro-batch; a longer row gets one of its own."""
    teachers: Sequence[str]
    """In the order in which Rows.teacher counts them."""
    supervised: int | None = None
    """Tokens of each completion that are trained on, from its beginning; None: all."""
    group: int = 1
    """Completions of a prompt whose mean reward is the baseline; 1: that of the step."""


def group_means(rollouts: Sequence[Rollout], group_of: Callable[[str], str]) -> dict[str, float]:
    """Mean reward of the student's rollouts of every rollout's group, by the rollout's id, of those that have
    a reward; 0 where the teacher generated the whole group."""
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.reward is not None and not rollout.by_teacher:
            rewards.setdefault(group_of(rollout.id), []).append(rollout.reward)
    means = {group: sum(found) / len(found) for group, found in rewards.items()}
    return {one.id: means.get(group_of(one.id), 0.0) for one in rollouts if one.reward is not None}


def pack_batch(batch: Batch, world_size: int, shape: Shape, step_of: StepOf) -> list[TrainBatch]:
    """One TrainBatch per rank; the same batch gives the same bytes. Its rollouts have their arrays.

    `step_of`: a token's version as a step of the trainer's lineage.
    """
    weights = dict(zip((one.id for one in batch.rollouts), batch.weights, strict=False))
    baselines = group_means(batch.rollouts, group_of) if shape.group > 1 else {}
    rollouts = [_cut(rollout, shape.supervised) for rollout in batch.rollouts]
    shares = [_micro_batches(share, shape.micro_batch_tokens) for share in _shard(rollouts, world_size)]
    count = max(len(share) for share in shares)
    index = {name: i for i, name in enumerate(shape.teachers)}
    denominator, step = sum(rollout.length for rollout in rollouts), batch.version.step
    return [
        TrainBatch(
            version=batch.version,
            denominator=denominator,
            micro_batches=[
                rows_of(micro, rollouts[0], index, step_of, step, weights, baselines)
                for micro in share + [[]] * (count - len(share))
            ],
        )
        for share in shares
    ]


def _cut(rollout: Rollout, tokens: int | None) -> Rollout:
    """The rollout with no more than `tokens` tokens of its completion; its reward stays that of the whole."""
    if tokens is None or rollout.length <= tokens:
        return rollout
    scores = scores_of(rollout)
    arrays = {
        name: _first(array, tokens)
        for name in scores.__struct_fields__
        if isinstance(array := getattr(scores, name), Array)
    }
    spans = [
        VersionSpan(span.version, span.start, min(span.end, tokens))
        for span in rollout.spans
        if span.start < tokens
    ]
    return msgspec.structs.replace(
        rollout,
        tokens=_first(rollout.tokens, tokens),
        logprob=_first(rollout.logprob, tokens),
        spans=spans,
        scored=msgspec.structs.replace(scores, **arrays),
        topk_ids=None if rollout.topk_ids is None else _first(rollout.topk_ids, tokens),
    )


def scores_of(rollout: Rollout) -> Scored:
    """Of a rollout that is scored and not released."""
    assert rollout.scored is not None, f"{rollout.id} has its scores"
    return rollout.scored


def _first(array: Array, count: int) -> Array:
    """The first `count` rows of an array."""
    row = len(array.data) // array.shape[0]
    return Array(array.dtype, (count, *array.shape[1:]), array.data[: row * count])


def _tokens(rollout: Rollout) -> int:
    return rollout.prompt.shape[0] + rollout.length


def _widths(rollout: Rollout) -> tuple[int, ...]:
    """Trailing sizes of the optional arrays, and whether there is a reward: rows of a micro-batch must agree.

    A run may be taken up with a reward_fn that it began without.
    """
    sizes = (0 if array is None else array.shape[-1] for array in _optional(rollout))
    return (*sizes, int(rollout.reward is not None))


def _optional(rollout: Rollout) -> tuple[Array | None, ...]:
    scores = scores_of(rollout)
    return scores.topk_ids, scores.topk_logprob, rollout.topk_ids, scores.gathered, scores.hidden


def _shard(rollouts: Sequence[Rollout], ranks: int) -> list[list[Rollout]]:
    """Rollouts of each rank, longest first within equal widths."""
    ordered = sorted(rollouts, key=lambda rollout: (_widths(rollout), -_tokens(rollout)))
    shares: list[list[Rollout]] = [[] for _ in range(ranks)]
    for place, rollout in enumerate(ordered):
        lap, rank = divmod(place, ranks)
        shares[rank if lap % 2 == 0 else ranks - 1 - rank].append(rollout)
    return shares


def _micro_batches(share: list[Rollout], tokens: int) -> list[list[Rollout]]:
    """As many neighbours together as fit."""
    micro: list[list[Rollout]] = []
    for _, same in groupby(share, key=_widths):
        room = 0
        for rollout in same:
            length = _tokens(rollout)
            if room < 1:
                micro.append([])
                room = max(1, tokens // length)
            micro[-1].append(rollout)
            room -= 1
    return micro


def rows_of(
    rollouts: Sequence[Rollout],
    template: Rollout,
    teachers: dict[str, int],
    step_of: StepOf,
    step: int,
    weights: Mapping[str, float] = {},
    baselines: Mapping[str, float] = {},
) -> Rows:
    """Rows of rollouts, in order, trained on top of `step`.

    `template` says which optional arrays there are when there are no rollouts. By rollout's id: its loss
    weight (empty: 1 for all), and what its reward is compared with (empty: the mean of the step).
    """
    scores = [scores_of(rollout) for rollout in rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    assert len(rewards) in (0, len(rollouts)), "rows of one micro-batch all have a reward or none has"
    rewarded = (rollouts[0] if rollouts else template).reward is not None
    kind = scores_of(template)
    return Rows(
        ids=[rollout.id for rollout in rollouts],
        tokens=_tokens_array(rollouts),
        prompt_lens=_i4([rollout.prompt.shape[0] for rollout in rollouts]),
        completion_lens=_i4([rollout.length for rollout in rollouts]),
        behavior_logprob=_join([r.logprob for r in rollouts], template.logprob),
        token_step=_token_steps(rollouts, step_of, step),
        teacher=_i4([teachers[rollout.teacher] for rollout in rollouts]),
        teacher_logprob=_join([m.logprob for m in scores], kind.logprob),
        teacher_topk_ids=_join_optional([m.topk_ids for m in scores], kind.topk_ids),
        teacher_topk_logprob=_join_optional([m.topk_logprob for m in scores], kind.topk_logprob),
        student_topk_ids=_join_optional([r.topk_ids for r in rollouts], template.topk_ids),
        student_topk_teacher_logprob=_join_optional([m.gathered for m in scores], kind.gathered),
        teacher_hidden=_join_optional([m.hidden for m in scores], kind.hidden),
        teacher_entropy=_join_where_all_have_it([m.entropy for m in scores], kind.entropy),
        reward=_f4(rewards) if rewarded else None,
        truncated=pack(np.array([r.truncated for r in rollouts], "u1")),
        weight=_f4([weights[r.id] for r in rollouts]) if weights else None,
        baseline=_f4([baselines[r.id] for r in rollouts]) if baselines and rewarded else None,
        by_teacher=_by_teacher(rollouts),
    )


def _i4(values: list[int]) -> Array:
    return pack(np.array(values, "i4"))


def _f4(values: list[float]) -> Array:
    return pack(np.array(values, "f4"))


def _tokens_array(rollouts: Sequence[Rollout]) -> Array:
    data = b"".join(part for rollout in rollouts for part in (rollout.prompt.data, rollout.tokens.data))
    return Array("i4", (len(data) // 4,), data)


def _token_steps(rollouts: Sequence[Rollout], step_of: StepOf, step: int) -> Array:
    runs = [run for rollout in rollouts for run in _runs(rollout, step_of, step)]
    steps, counts = np.array(runs, "i8").reshape(-1, 2).T
    return pack(np.repeat(steps, counts).astype("i4"))


def _runs(rollout: Rollout, step_of: StepOf, step: int) -> list[tuple[int, int]]:
    """(step, tokens sampled at it), one after the other; a teacher's tokens count as of the batch's step."""
    if rollout.by_teacher:
        return [(step, rollout.length)]
    return [(step_of(span.version), span.end - span.start) for span in rollout.spans]


def _by_teacher(rollouts: Sequence[Rollout]) -> Array | None:
    """u1 [R]; None: all are the student's."""
    flags = [rollout.by_teacher for rollout in rollouts]
    return pack(np.array(flags, "u1")) if any(flags) else None


def _join_optional(arrays: list[Array | None], template: Array | None) -> Array | None:
    if template is None:
        return None
    present = [array for array in arrays if array is not None]
    if len(present) < len(arrays):
        raise DataError(
            f"{len(arrays) - len(present)} of {len(arrays)} rollouts lack an array that the others have: "
            "all teachers of a run must give the same scores"
        )
    return _join(present, template)


def _join_where_all_have_it(arrays: list[Array | None], template: Array | None) -> Array | None:
    """For what is only measured: some teachers can tell it and others cannot."""
    return None if None in arrays else _join_optional(arrays, template)


def _join(arrays: list[Array], template: Array) -> Array:
    """Concatenated along the first axis; float arrays of unlike precision become f4."""
    kinds = {array.dtype for array in arrays} or {template.dtype}
    if len(kinds) > 1:
        arrays = [pack(_float32(array)) for array in arrays]
    count = sum(array.shape[0] for array in arrays)
    width = arrays[0].shape[1:] if arrays else template.shape[1:]
    dtype = arrays[0].dtype if arrays else template.dtype
    return Array(dtype, (count, *width), b"".join(array.data for array in arrays))


def _float32(array: Array) -> np.ndarray:
    values = unpack(array)
    if array.dtype == "bf16":
        return (values.astype("<u4") << 16).view(DTYPES["f4"])
    return values.astype("f4")
