"""Packing of a batch into the shares of ranks and micro-batches. Pure and vectorised.

Which rows share a micro-batch, and which rank computes it, follows from the rows' lengths alone:

    end_to_end    rows lie one after the other: micro-batches of about as many tokens, about as few as can be
    rectangles    rows are padded to the longest: neighbours in length share, as many as fit

Ranks run in lockstep under ZeRO-3: micro-batches that they compute at the same time should cost the same.
Rows of unlike kinds never share one. Flat arrays are joined as bytes; no token is touched in Python.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from statistics import stdev
from typing import Any

import numpy as np
from msgspec.structs import replace

from distill.buffer import Batch, StepOf
from distill.prompts.stream import group_of
from distill.record.rollout import Rollout
from sync.wire import (
    PARTED_BYTES,
    TOKEN_PARTS,
    Array,
    Rows,
    SamplingMask,
    Scored,
    Segment,
    TrainBatch,
    VersionSpan,
    pack,
    unpack,
)


@dataclass(frozen=True)
class Shape:
    """How every batch of a run is split into shares."""

    micro_batch_tokens: int
    """Of one micro-batch at most; a longer row gets one of its own."""
    teachers: Sequence[str]  # in the order in which Rows.teacher counts them
    supervised: int | None = None
    """Tokens of each completion that are trained on, from its beginning; None: all. Those of environments do
    not count."""
    group: int = 1  # completions of a prompt whose mean reward is the baseline; 1: that of the step
    padded: bool = False
    """Whether rows are padded to the longest of their micro-batch, counted so; else they lie end to end."""


GroupRewards = tuple[float, float]
"""Of the rewards of the student's rollouts in a group: their mean, and the standard deviation of one, 0 where
there is one; both 0 where the teacher generated all of it."""


def group_rewards(rollouts: Sequence[Rollout]) -> dict[str, GroupRewards]:
    """The rewards of every rollout's group, by the rollout's id, of those that have a reward."""
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.reward is not None and not rollout.by_teacher:
            rewards.setdefault(group_of(rollout.id), []).append(rollout.reward)
    groups = {
        group: (sum(values) / len(values), stdev(values) if len(values) > 1 else 0.0)
        for group, values in rewards.items()
    }
    rewarded = (rollout for rollout in rollouts if rollout.reward is not None)
    return {rollout.id: groups.get(group_of(rollout.id), (0.0, 0.0)) for rollout in rewarded}


def pack_batch(batch: Batch, world_size: int, shape: Shape, step_of: StepOf) -> list[TrainBatch]:
    """One TrainBatch per rank; the same batch gives the same bytes. Its rollouts have their arrays.

    `step_of`: a token's version as a step of the trainer's lineage.
    """
    weights = dict(zip((rollout.id for rollout in batch.rollouts), batch.weights, strict=False))
    groups = group_rewards(batch.rollouts) if shape.group > 1 else {}
    rollouts = [_cut(rollout, shape.supervised) for rollout in batch.rollouts]
    lengths = [rollout.prompt.shape[0] + rollout.length for rollout in rollouts]
    split = rectangles if shape.padded else end_to_end
    places = split(lengths, [_widths(rollout) for rollout in rollouts], world_size, shape.micro_batch_tokens)
    shares = [[[rollouts[place] for place in micro] for micro in share] for share in places]
    count = max(len(share) for share in shares)
    index = {name: i for i, name in enumerate(shape.teachers)}
    denominator, step = sum(rollout.own_length for rollout in rollouts), batch.version.step
    return [
        TrainBatch(
            version=batch.version,
            denominator=denominator,
            micro_batches=[
                rows_of(micro, (micro or rollouts)[0], index, step_of, step, weights, groups)
                for micro in share + [[]] * (count - len(share))
            ],
        )
        for share in shares
    ]


def _cut(rollout: Rollout, tokens: int | None) -> Rollout:
    """The rollout up to the `tokens`-th token of the student's; its reward stays that of the whole."""
    if tokens is None or rollout.own_length <= tokens:
        return rollout
    own_T, scores = unpack(_own([rollout])), rollout.scored
    limit = int(np.flatnonzero(own_T)[tokens - 1]) + 1
    if scores is not None and scores.segment is not None:
        # what is cut off of a segment is missing in its score
        segment_T = unpack(scores.segment).copy()
        begins = int(np.flatnonzero(segment_T[: limit + 1] != Segment.GOES_ON)[-1])
        segment_T[begins:limit] = Segment.UNSCORED
        scores = replace(scores, segment=pack(segment_T))

    def first(struct: Rollout | Scored, names: Iterable[str]) -> dict[str, Any]:
        parts = ((name, getattr(struct, name)) for name in names)
        return {name: part.cut(limit) for name, part in parts if isinstance(part, Array | SamplingMask)}

    spans = tuple(
        VersionSpan(span.version, span.start, min(span.end, limit))
        for span in rollout.spans
        if span.start < limit
    )
    turns = tuple((start, min(end, limit)) for start, end in rollout.own if start < limit)
    scored = scores and replace(scores, **first(scores, scores.__struct_fields__))
    routes = rollout.routes and rollout.routes.cut(rollout.prompt.shape[0] + limit - 1)
    parts = first(rollout, ("tokens", *TOKEN_PARTS))
    return replace(rollout, spans=spans, own=turns, scored=scored, routes=routes, **parts)


def _widths(rollout: Rollout) -> tuple[tuple[int, ...], str]:
    """Trailing sizes of the optional arrays, and whether there is a reward: rows of a micro-batch must agree.

    An environment may reward some episodes and not others. Arrays that a teacher keeps have its sizes.
    """
    arrays: list[Array | None] = [rollout.topk_ids]
    if (scores := rollout.scored) is not None:
        arrays += [scores.topk_ids, scores.topk_logprob, scores.gathered, scores.hidden]
    sizes = (0 if array is None else array.shape[-1] for array in arrays)
    return (*sizes, int(rollout.reward is not None)), rollout.teacher if rollout.kept else ""


def rows_of(
    rollouts: Sequence[Rollout],
    template: Rollout,
    teachers: dict[str, int],
    step_of: StepOf,
    step: int,
    weights: Mapping[str, float],
    groups: Mapping[str, GroupRewards],
) -> Rows:
    """Rows of rollouts, in order, trained on top of `step`.

    `template`: the first of them; where there are none, one that has the optional arrays. By rollout's id:
    its loss weight (empty: 1 for all), and the rewards that its own is compared with (empty: those of the
    step).
    """
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    assert len(rewards) in (0, len(rollouts)), "rows of one micro-batch all have a reward or none has"
    rewarded, compared = template.reward is not None, groups if template.reward is not None else {}
    scores = [rollout.scored for rollout in rollouts]
    token_step, off_path = _token_steps(rollouts, step_of, step)

    def student(name: str) -> Any:
        return _join([getattr(rollout, name) for rollout in rollouts], getattr(template, name))

    def teacher(name: str) -> Any:
        return _join([getattr(score, name, None) for score in scores], getattr(template.scored, name, None))

    by_teacher = [rollout.by_teacher for rollout in rollouts]
    routes = [rollout.routes for rollout in rollouts if rollout.routes is not None]
    return Rows(
        ids=[rollout.id for rollout in rollouts],
        tokens=_join([part for row in rollouts for part in (row.prompt, row.tokens)], template.tokens),
        prompt_lens=_array("i4", [rollout.prompt.shape[0] for rollout in rollouts]),
        completion_lens=_array("i4", [rollout.length for rollout in rollouts]),
        behavior_logprob=student("logprob"),
        token_step=token_step,
        teacher=_array("i4", [teachers[rollout.teacher] for rollout in rollouts]) if teachers else None,
        teacher_logprob=teacher("logprob"),
        teacher_topk_ids=teacher("topk_ids"),
        teacher_topk_logprob=teacher("topk_logprob"),
        student_topk_ids=student("topk_ids"),
        student_topk_teacher_logprob=teacher("gathered"),
        teacher_hidden=teacher("hidden"),
        teacher_entropy=teacher("entropy") if all(s and s.entropy for s in scores) else None,
        reward=_array("f4", rewards) if rewarded else None,
        truncated=_array("u1", [rollout.truncated for rollout in rollouts]),
        weight=_array("f4", [weights[rollout.id] for rollout in rollouts]) if weights else None,
        baseline=_array("f4", [compared[rollout.id][0] for rollout in rollouts]) if compared else None,
        deviation=_array("f4", [compared[rollout.id][1] for rollout in rollouts]) if compared else None,
        by_teacher=_array("u1", by_teacher) if any(by_teacher) else None,
        kept=[rollout.kept for rollout in rollouts] if template.kept else None,
        teacher_prompts=[rollout.teacher_prompt for rollout in rollouts] if template.kept else None,
        own=_own(rollouts) if any(row.own_length < row.length for row in rollouts) else None,
        mask=_mask(rollouts),
        routes=Array.joined(routes) if routes else None,
        route_lens=_array("i4", [r.routes.shape[0] if r.routes else 0 for r in rollouts]) if routes else None,
        earned=_by_turn(rollouts, "f4", lambda r: r.earned) if any(r.earned for r in rollouts) else None,
        **_of_text(scores),
        off_path=off_path,
    )


def _array(dtype: str, values: Sequence[float]) -> Array:
    return pack(np.array(values, dtype))


def _own(rollouts: Sequence[Rollout]) -> Array:
    """1 where the student sampled the token, else 0."""
    return _by_turn(rollouts, "u1", lambda rollout: [1] * max(1, len(rollout.own)))


def _mask(rollouts: Sequence[Rollout]) -> SamplingMask | None:
    """Sampling masks of all tokens, where there are any; a teacher's tokens have none."""
    if all(rollout.mask is None for rollout in rollouts):
        return None
    return SamplingMask.joined([rollout.mask or SamplingMask.none(rollout.length) for rollout in rollouts])


def _of_text(scores: Sequence[Scored | None]) -> dict[str, Array]:
    """`parted` and `segment` of Rows, where any teacher has a tokenizer of its own."""
    scored = [score for score in scores if score is not None]
    sizes = [score.logprob.shape for score in scored]
    plain = {
        "parted": [pack(np.zeros((*size, PARTED_BYTES), "u1")) for size in sizes],
        "segment": [pack(np.full(size, Segment.TOKEN, "u1")) for size in sizes],
    }
    arrays = {name: [getattr(score, name) for score in scored] for name in plain}
    return {
        name: Array.joined([array or other for array, other in zip(arrays[name], plain[name], strict=True)])
        for name in plain
        if any(arrays[name])
    }


def _by_turn(rollouts: Sequence[Rollout], dtype: str, of: Callable[[Rollout], Sequence[float]]) -> Array:
    """A value for every token: `of` has one for each turn that the student sampled; of the others 0."""
    parts = [np.zeros(row.length, dtype) for row in rollouts]
    for rollout, part_T in zip(rollouts, parts, strict=True):
        turns = rollout.own or [(0, rollout.length)]
        for (start, end), value in zip(turns, of(rollout), strict=False):
            part_T[start:end] = value
    return pack(np.concatenate(parts))


def _token_steps(rollouts: Sequence[Rollout], step_of: StepOf, step: int) -> tuple[Array, Array | None]:
    """Step at which each token was sampled, and `Rows.off_path`; a teacher's tokens count as of the batch's
    step."""
    runs: list[tuple[int, bool, int]] = []
    for rollout in rollouts:
        if rollout.by_teacher:
            runs.append((step, False, rollout.length))
        for span in rollout.spans:
            counted = step_of(span.version)
            runs.append((counted, counted != span.version.step, span.end - span.start))
    steps, off_path, counts = np.array(runs, "i8").reshape(-1, 3).T
    flags = pack(np.repeat(off_path, counts).astype("u1")) if off_path.any() else None
    return pack(np.repeat(steps, counts).astype("i4")), flags


def _join(arrays: list[Any], template: Array | None) -> Any:
    """Concatenated along the first axis; float arrays of unlike precision become f4. None: not used."""
    return None if template is None else Array.joined(arrays or [template.cut(0)])


# --- which rows share a micro-batch ------------------------------------------------------------------------

Split = list[list[list[int]]]
"""Of each rank, its micro-batches as places in `lengths`; a rank may have fewer than another."""


def end_to_end(lengths: Sequence[int], kinds: Sequence[Any], ranks: int, tokens: int) -> Split:
    """Micro-batches of at most `tokens`, a longer row alone; as many for every rank while there are rows.

    Those of equal attention, Σ length², are computed at the same time, the most expensive first.
    """
    groups: dict[Any, list[int]] = {}
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        groups.setdefault(kinds[place], []).append(place)
    sizes = {kind: [lengths[place] for place in places] for kind, places in groups.items()}
    counts = {kind: _fewest(size, tokens) for kind, size in sizes.items()}
    while sum(counts.values()) % ranks:
        divisible = [kind for kind in counts if counts[kind] < len(sizes[kind])]
        if not divisible:
            break
        counts[max(divisible, key=lambda kind: sum(sizes[kind]) / counts[kind])] += 1
    micro: list[list[int]] = []
    for kind, places in groups.items():
        parts = _spread(sizes[kind], counts[kind], tokens)
        assert parts is not None, "more micro-batches than needed are enough"
        micro += [[places[index] for index in part] for part in parts]
    micro.sort(key=lambda part: -sum(lengths[place] ** 2 for place in part))
    return [micro[rank::ranks] for rank in range(ranks)]


def _fewest(sizes: Sequence[int], tokens: int) -> int:
    """The fewest micro-batches that `_spread` fills. With more it succeeds too, so bisection finds them."""
    no_pair = sum(2 * size > tokens for size in sizes)
    low = max(1, no_pair, -(-sum(min(size, tokens) for size in sizes) // tokens))
    return low + bisect_left(
        range(low, len(sizes)), True, key=lambda n: _spread(sizes, n, tokens) is not None
    )


def _spread(sizes: Sequence[int], count: int, tokens: int) -> list[list[int]] | None:
    """Indices of `sizes`, longest first, each put where the fewest tokens are; None: they do not fit."""
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    heapify(loads)
    for index, size in enumerate(sizes):
        load, number = loads[0]
        if load and load + size > tokens:
            return None
        parts[number].append(index)
        heapreplace(loads, (load + size, number))
    return parts


def rectangles(lengths: Sequence[int], kinds: Sequence[Any], ranks: int, tokens: int) -> Split:
    """Micro-batches of at most `tokens`, rows × longest, a longer row alone.

    Rows go to ranks by length, longest first, to and fro (0 1 2 2 1 0 …): every rank gets the same lengths.
    """
    ordered = sorted(range(len(lengths)), key=lambda place: (kinds[place], -lengths[place]))
    shares: Split = [[] for _ in range(ranks)]
    room, kind_of = [0] * ranks, list[Any]([None] * ranks)
    for place, row in enumerate(ordered):
        lap, rank = divmod(place, ranks)
        rank = rank if lap % 2 == 0 else ranks - 1 - rank
        if room[rank] < 1 or kinds[row] != kind_of[rank]:
            shares[rank].append([])
            room[rank], kind_of[rank] = max(1, tokens // lengths[row]), kinds[row]
        shares[rank][-1].append(row)
        room[rank] -= 1
    return shares
