"""Shares of ranks and micro-batches, and which prompts a teacher completes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_memory import some_masks, some_routes
from msgspec.structs import replace

from distill.batching.packing import Shape, Split, end_to_end, group_rewards, pack_batch, rectangles
from distill.buffer import Lineage, Lineages
from distill.record.record import is_teacher_turn
from distill.record.rollout import Rollout
from distill.record.state import Batch
from distill.scoring import seed_of
from sync import wire
from sync.wire import Array, Segment, Version, VersionSpan, pack, unpack


def rollout(number: int, prompt: int, length: int, **scores: Array | None) -> Rollout:
    """Tokens number·1000 + place; the first half from step 3, the rest from step 5."""
    tokens = np.arange(prompt + length, dtype="i4") + 1000 * number
    half = length // 2
    spans = [VersionSpan(Version(0, 3), 0, half), VersionSpan(Version(0, 5), half, length)]
    return Rollout(
        f"r{number}",
        number,
        pack(tokens[:prompt]),
        pack(tokens[prompt:]),
        pack(np.full(length, -0.5 - number, "f4")),
        [span for span in spans if span.end > span.start],
        number % 2 == 1,
        "t1",
        wire.Scored(f"r{number}", pack(np.full(length, -1.0 - number, "f4")), **scores),
    )


TEACHERS = {"t0": 0, "t1": 1}


def step(version: Version) -> int:
    return version.step


def shares(rollouts: list[Rollout], ranks: int, tokens: int) -> list[wire.TrainBatch]:
    return pack_batch(formed(rollouts), ranks, Shape(tokens, list(TEACHERS)), step)


def share(rollouts: list[Rollout], tokens: int = 99, **shape: int) -> tuple[wire.TrainBatch, wire.Rows]:
    """Of one rank, whose rows are one micro-batch."""
    (batch,) = pack_batch(formed(rollouts), 1, Shape(tokens, list(TEACHERS), **shape), step)
    (rows,) = batch.micro_batches
    return batch, rows


def formed(rollouts: list[Rollout], weights: list[float] | None = None) -> Batch:
    return Batch(Version(0, 6), rollouts, [0] * len(rollouts), weights or [])


def test_what_a_replica_says_of_each_token_is_checked_and_goes_with_the_rollout_to_where_it_is_cut() -> None:
    """A field of Generated that is in neither list would be lost on the way, without a word."""
    others = {"schema", "id", "token_ids", "spans", "finish_reason", "routes"}
    assert {*wire.Generated.__struct_fields__} == others | {*wire.TOKEN_PARTS}
    parts = {
        "logprob": pack(np.full(3, -0.5, "f4")),
        "topk_ids": pack(np.arange(6, dtype="i4").reshape(3, 2)),
        "mask": some_masks([4, 9, 5], 3),
    }
    token_ids, span = pack(np.array([4, 9, 5], "i4")), VersionSpan(Version(0, 3), 0, 3)
    said = wire.Generated(id="r0", token_ids=token_ids, spans=[span], finish_reason="stop", **parts)
    asked = wire.Sampling(max_tokens=3, top_k=3, mask=True, student_topk=2)
    assert wire.checks.generated(said, asked, 20) is None
    made = Rollout("r0", 0, pack(np.arange(1, dtype="i4"))).completed(said)
    assert {name: getattr(made, name) for name in wire.TOKEN_PARTS} == parts
    (short,) = pack_batch(formed([made]), 1, Shape(99, [], supervised=2), step)
    (whole,) = pack_batch(formed([made]), 1, Shape(99, []), step)
    for name, part in parts.items():
        problem = wire.checks.generated(replace(said, **{name: part.cut(2)}), asked, 20)
        assert problem.field.startswith(name)
    for rows, count in ((whole.micro_batches[0], 3), (short.micro_batches[0], 2)):
        assert rows.behavior_logprob == parts["logprob"].cut(count)
        assert rows.student_topk_ids == parts["topk_ids"].cut(count)
        assert rows.mask == parts["mask"].cut(count)


def test_the_segment_in_which_a_completion_is_cut_is_not_scored() -> None:
    """Four tokens are allowed, and the third and fourth are scored with the fifth."""
    segment = pack(np.array([0, 1, 0, 1, 1, 0], "u1"))
    text, plain = rollout(1, 2, 6, segment=segment), rollout(2, 2, 3)
    _, rows = share([text, plain], supervised=4)
    cut = dict(zip(rows.ids, unpack(rows.completion_lens).tolist(), strict=True))
    assert cut == {"r1": 4, "r2": 3}
    segments = np.split(unpack(rows.segment), np.cumsum(unpack(rows.completion_lens))[:-1])
    assert {id_: row.tolist() for id_, row in zip(rows.ids, segments, strict=True)} == {
        "r1": [Segment.BEGINS, Segment.GOES_ON, Segment.UNSCORED, Segment.UNSCORED],
        "r2": [Segment.TOKEN] * 3,
    }


def test_of_a_long_completion_only_the_first_tokens_are_trained_on() -> None:
    long = rollout(1, 2, 8, hidden=Array("bf16", (8, 2), bytes(range(32))))
    short = rollout(2, 3, 2, hidden=Array("bf16", (2, 2), bytes(8)))
    batch, rows = share([long, short], supervised=5)
    assert batch.denominator == 7
    assert unpack(rows.completion_lens).tolist() == [5, 2]
    assert unpack(rows.tokens)[:7].tolist() == [1000, 1001, 1002, 1003, 1004, 1005, 1006]
    assert rows.behavior_logprob.shape == rows.teacher_logprob.shape == (7,)
    assert rows.teacher_hidden == Array("bf16", (7, 2), bytes([*range(20), *bytes(8)]))
    assert unpack(rows.truncated).tolist() == [1, 0]


def test_sampling_masks_follow_their_tokens_and_a_teachers_tokens_have_none() -> None:
    mask = wire.SamplingMask(pack(np.array([1, 3, 2, 1], "i4")), pack(np.arange(7, dtype="i4")))
    made = [replace(rollout(1, 2, 4), mask=mask), replace(rollout(2, 1, 3), by_teacher=True, spans=[])]
    _, rows = share(made, supervised=2)
    assert rows.mask.padded().tolist() == [[0, -1, -1], [1, 2, 3], [-1, -1, -1], [-1, -1, -1]]
    assert share(made[1:])[1].mask is None


def test_routes_follow_their_rows_and_a_teachers_row_has_none() -> None:
    made = [replace(rollout(1, 2, 4), routes=some_routes(range(6)))]
    made += [replace(rollout(2, 1, 3), by_teacher=True, spans=[])]
    made += [replace(rollout(3, 2, 2), routes=some_routes(range(9, 13)))]
    _, rows = share(made, supervised=2)
    routed = {"r1": some_routes(range(4)), "r2": None, "r3": some_routes(range(9, 13))}
    assert dict(zip(rows.ids, unpack(rows.route_lens).tolist(), strict=True)) == {"r1": 3, "r2": 0, "r3": 3}
    assert rows.routes == wire.Array.joined([routed[id] for id in rows.ids if id != "r2"])
    (batch,) = shares(made[1:2], 1, 99)
    assert batch.micro_batches[0].routes is batch.micro_batches[0].route_lens is None


def episode(number: int, prompt: int, length: int, *own: tuple[int, int], **scores: Array | None) -> Rollout:
    return replace(rollout(number, prompt, length, **scores), own=list(own))


def test_an_environments_tokens_travel_as_context_and_are_not_counted() -> None:
    made = [episode(1, 2, 7, (0, 2), (4, 6)), rollout(0, 2, 3), episode(2, 1, 2, (0, 2))]
    batch, rows = share(made)
    assert (rows.ids, batch.denominator) == (["r1", "r0", "r2"], 4 + 3 + 2)
    assert unpack(rows.completion_lens).tolist() == [7, 3, 2]
    assert unpack(rows.own).tolist() == [1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1, 1]
    batch, rows = share(made[1:])
    assert rows.own is None, "no token of an environment is in this micro-batch"
    assert batch.denominator == 5


@pytest.mark.parametrize(
    ("most", "own"),
    [(1, [(0, 1)]), (2, [(0, 2)]), (3, [(0, 2), (4, 5)]), (4, [(0, 2), (4, 6)]), (9, [(0, 2), (4, 6)])],
)
def test_an_episode_is_cut_behind_the_last_of_the_students_first_tokens(
    most: int, own: list[tuple[int, int]]
) -> None:
    topk = pack(np.arange(14, dtype="i4").reshape(7, 2))
    made = episode(1, 2, 7, (0, 2), (4, 6), topk_ids=topk)
    batch, rows = share([made], supervised=most)
    length = own[-1][1] if most < 4 else 7
    assert batch.denominator == min(most, 4)
    assert unpack(rows.completion_lens).tolist() == [length]
    mask = [int(any(start <= t < end for start, end in own)) for t in range(length)]
    assert (rows.own is None) == all(mask)
    assert rows.own is None or unpack(rows.own).tolist() == mask
    assert unpack(rows.tokens).tolist() == [1000 + t for t in range(2 + length)]
    assert unpack(rows.token_step).tolist() == [3, 3, 3, 5, 5, 5, 5][:length]
    assert unpack(rows.teacher_topk_ids).tolist() == unpack(topk)[:length].tolist()


def test_kept_and_inline_scores_and_the_teachers_they_are_of_never_share_a_micro_batch() -> None:
    hidden = Array("bf16", (2, 3), bytes(12))
    inline = [rollout(i, 1, 2, hidden=hidden) for i in range(2)]
    kept = []
    for number, own in enumerate(PROMPTS, 2):
        one = rollout(number, 1, 2, kept=wire.Kept("u", f"b-{number}", 9, b"d"))
        kept.append(replace(one, teacher=f"t{number % 2}", teacher_prompt=own))
    (batch,) = shares([*kept, *inline], 1, 1000)
    found = {tuple(rows.ids): rows for rows in batch.micro_batches}
    assert found.keys() == {("r0", "r1"), ("r2", "r4"), ("r3", "r5")}
    assert found["r0", "r1"].kept is found["r0", "r1"].teacher_prompts is None
    assert found["r0", "r1"].teacher_hidden.shape == (4, 3)
    assert [one.key for one in found["r3", "r5"].kept] == ["b-3", "b-5"]
    assert found["r3", "r5"].teacher_prompts == [PROMPTS[1], PROMPTS[3]]
    assert found["r3", "r5"].teacher_hidden is None


PROMPTS = [pack(np.arange(3, dtype="i4")), None, None, pack(np.arange(1, dtype="i4"))]


def test_flat_arrays_follow_the_rows() -> None:
    ids, ones = np.arange(8, dtype="i4").reshape(4, 2), np.ones((4, 2), "f2")
    topk = {"topk_ids": pack(ids), "topk_logprob": pack(ones)}
    second = {name: pack(unpack(array)[:3]) for name, array in topk.items()}
    _, rows = share([rollout(1, 2, 3, **second), rollout(0, 3, 4, **topk)])
    assert rows.ids == ["r0", "r1"]
    assert unpack(rows.tokens).tolist() == [0, 1, 2, 3, 4, 5, 6, 1000, 1001, 1002, 1003, 1004]
    assert unpack(rows.prompt_lens).tolist() == [3, 2]
    assert unpack(rows.completion_lens).tolist() == [4, 3]
    assert unpack(rows.token_step).tolist() == [3, 3, 5, 5, 3, 5, 5]
    assert unpack(rows.behavior_logprob).tolist() == [-0.5] * 4 + [-1.5] * 3
    assert unpack(rows.teacher_logprob).tolist() == [-1.0] * 4 + [-2.0] * 3
    assert unpack(rows.teacher).tolist() == [1, 1]
    assert unpack(rows.truncated).tolist() == [0, 1]
    assert unpack(rows.teacher_topk_ids).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1], [2, 3], [4, 5]]
    assert rows.teacher_topk_logprob.dtype == "f2"
    assert rows.teacher_hidden is None
    assert rows.reward is None


def test_a_rank_with_fewer_micro_batches_gets_empty_arrays_of_the_same_kinds() -> None:
    hidden = Array("bf16", (2, 4), bytes(16))
    made = formed([rollout(number, 1, 2, hidden=hidden) for number in range(3)])
    first, second = pack_batch(made, 2, Shape(3, list(TEACHERS), padded=True), step)
    row, empty = first.micro_batches
    assert [row.ids, empty.ids, *(rows.ids for rows in second.micro_batches)] == [["r0"], [], ["r1"], ["r2"]]
    assert (row.teacher_hidden, empty.teacher_hidden) == (hidden, Array("bf16", (0, 4), b""))
    assert unpack(empty.token_step).tolist() == []
    assert first.denominator == second.denominator == 6


@pytest.mark.parametrize(("padded", "ids"), [(True, [["r0"], ["r1"]]), (False, [["r0", "r1"]])])
def test_rows_that_are_padded_count_as_long_as_the_longest(padded: bool, ids: list[list[str]]) -> None:
    made = formed([rollout(0, 1, 8), rollout(1, 1, 1)])
    (batch,) = pack_batch(made, 1, Shape(12, list(TEACHERS), padded=padded), step)
    assert [rows.ids for rows in batch.micro_batches] == ids


@pytest.mark.parametrize("other", [Array("bf16", (2, 4), bytes(16)), None], ids=["narrower", "none"])
def test_rows_with_unlike_arrays_of_their_teachers_do_not_share_a_micro_batch(other: Array | None) -> None:
    arrays = [Array("bf16", (2, 8), bytes(32)), other]
    (batch,) = shares([rollout(i, 1, 2, hidden=array) for i, array in enumerate(arrays)], 1, 1000)
    hidden = {rows.ids[0]: rows.teacher_hidden for rows in batch.micro_batches}
    assert hidden == {"r0": arrays[0], "r1": other}


def test_unlike_precisions_meet_in_single() -> None:
    half, bits = pack(np.array([[1.5]], "f2")), Array("bf16", (1, 1), np.array([0x4020], "<u2").tobytes())
    _, rows = share([rollout(0, 1, 1, hidden=half), rollout(1, 1, 1, hidden=bits)])
    assert rows.teacher_hidden.dtype == "f4"
    assert unpack(rows.teacher_hidden).tolist() == [[1.5], [2.5]]


@pytest.mark.parametrize("without", [[], [0], [3], [1, 2], [0, 1, 2, 3]])
def test_every_reward_travels_whichever_rows_have_none(without: list[int]) -> None:
    mixed = [replace(rollout(i, 1, 2), reward=None if i in without else i / 4) for i in range(4)]
    (batch,) = pack_batch(formed(mixed), 1, Shape(100, list(TEACHERS), group=4), step)
    rewards, baselines = {}, {}
    for rows in batch.micro_batches:
        assert (rows.reward is None) == (rows.baseline is None)
        if rows.reward is not None and rows.baseline is not None:
            rewards |= dict(zip(rows.ids, unpack(rows.reward).tolist(), strict=True))
            baselines |= dict(zip(rows.ids, unpack(rows.baseline).tolist(), strict=True))
    given = [i for i in range(4) if i not in without]
    assert rewards == {f"r{i}": i / 4 for i in given}
    mean = np.float32(np.mean(given) / 4) if given else None
    assert baselines == {f"r{i}": mean for i in given}
    assert sorted(name for rows in batch.micro_batches for name in rows.ids) == ["r0", "r1", "r2", "r3"]


def test_weights_and_baselines_follow_their_rows() -> None:
    rollouts = [replace(rollout(i, 1, 2 + i), reward=float(i % 3)) for i in range(4)]
    weights = [1 / (1 + i) for i in range(4)]
    batches = pack_batch(formed(rollouts, weights), 2, Shape(5, list(TEACHERS), group=4), step)
    rows = [micro for batch in batches for micro in batch.micro_batches]
    for micro in rows:
        assert unpack(micro.weight).tolist() == [np.float32(weights[int(i[1:])]) for i in micro.ids]
        assert unpack(micro.baseline).tolist() == [0.75] * len(micro.ids)
        deviation = np.float32(np.std([0, 1, 2, 0], ddof=1))
        assert unpack(micro.deviation).tolist() == [deviation] * len(micro.ids)
    assert sum(len(micro.ids) for micro in rows) == 4
    assert group_rewards([rollout(9, 1, 2)]) == {}
    _, plain = share(rollouts)
    assert (plain.weight, plain.baseline) == (None, None)


def test_a_groups_baseline_and_deviation_are_of_the_students_rewards() -> None:
    """Of groups of two the teacher generated none, one or both."""
    names = [f"0:{i // 2}:{i % 2}" for i in range(6)]
    rollouts = [
        replace(rollout(i, 1, 2), id=name, reward=float(i), by_teacher=i in (3, 4, 5))
        for i, name in enumerate(names)
    ]
    rewards = group_rewards(rollouts)
    assert [rewards[name] for name in names] == [(0.5, 0.5**0.5)] * 2 + [(2.0, 0.0)] * 2 + [(0.0, 0.0)] * 2


def test_entropy_is_left_out_where_one_teacher_cannot_tell_it() -> None:
    entropy = pack(np.zeros(2, "f4"))
    (batch,) = shares([rollout(0, 1, 2, entropy=entropy), rollout(1, 1, 2)], 1, 100)
    assert [rows.teacher_entropy for rows in batch.micro_batches] == [None]


def test_tokens_of_weights_that_a_rollback_left_behind_are_off_the_path() -> None:
    lineages = Lineages([Lineage(0, 0, None, 0)])
    lineages.add(Lineage(1, 4, 0, 4))  # back from step 5 and beyond to the checkpoint of step 4
    step_of = partial(lineages.step_in, lineage=1)
    (batch,) = pack_batch(formed([rollout(1, 2, 5)]), 1, Shape(99, list(TEACHERS)), step_of)
    (rows,) = batch.micro_batches
    assert unpack(rows.token_step).tolist() == [3, 3, 4, 4, 4]
    assert unpack(rows.off_path).tolist() == [0, 0, 1, 1, 1]
    assert share([rollout(1, 2, 5)])[1].off_path is None


def test_rows_say_which_of_them_the_teacher_generated_and_those_are_of_the_steps_age() -> None:
    written = replace(rollout(2, 1, 3), spans=[], by_teacher=True)
    _, rows = share([rollout(0, 1, 4), written])
    assert rows.ids == ["r0", "r2"]
    assert unpack(rows.by_teacher).tolist() == [0, 1]
    assert unpack(rows.token_step).tolist() == [3, 3, 5, 5, 6, 6, 6]
    assert share([rollout(0, 1, 4)])[1].by_teacher is None


# --- which rows share a micro-batch, and which rank computes it


rows = st.lists(st.tuples(st.integers(1, 90), st.sampled_from("abc")), min_size=1, max_size=60)


def slots(fill: Callable[..., Split], micro: list[int], lengths: list[int]) -> int:
    """Positions that a rank computes."""
    sizes = [lengths[place] for place in micro]
    return sum(sizes) if fill is end_to_end else len(sizes) * max(sizes)


@pytest.mark.parametrize("fill", [end_to_end, rectangles])
@given(rows=rows, ranks=st.integers(1, 5), tokens=st.integers(1, 200))
def test_every_row_is_in_one_micro_batch_of_its_kind_that_is_not_too_long(
    fill: Callable[..., Split], rows: list[tuple[int, str]], ranks: int, tokens: int
) -> None:
    lengths, kinds = [length for length, _ in rows], [kind for _, kind in rows]
    split = fill(lengths, kinds, ranks, tokens)
    micro = [part for share in split for part in share]
    assert sorted(place for part in micro for place in part) == list(range(len(rows)))
    for part in micro:
        assert len({kinds[place] for place in part}) == 1
        assert slots(fill, part, lengths) <= tokens or len(part) == 1
    counts = {len(share) for share in split}
    if fill is end_to_end and len(counts) > 1:
        assert max(len(part) for part in micro) == 1
        assert max(counts) - min(counts) == 1
    of_ranks = [sum(map(len, share)) for share in split]
    assert fill is end_to_end or max(of_ranks) - min(of_ranks) <= 1


def test_lockstep_ranks_get_as_much_to_compute_of_rows_that_are_padded() -> None:
    lengths = [*range(2, 18)]
    one, two = rectangles(lengths, [0] * 16, 2, 60)
    assert len(one) > 1
    for a, b in zip(one, two, strict=True):
        assert abs(slots(rectangles, a, lengths) - slots(rectangles, b, lengths)) <= 16


def test_the_fewest_micro_batches_are_filled_evenly_and_the_longest_come_first() -> None:
    assert end_to_end([5, 1, 4, 2], [0] * 4, 1, 100) == [[[0, 2, 3, 1]]]
    assert end_to_end([5, 1, 4, 2], [0] * 4, 1, 6) == [[[0, 1], [2, 3]]]
    assert end_to_end([5, 1, 4, 2], [0] * 4, 2, 100) == [[[0, 1]], [[2, 3]]]
    assert end_to_end([50, 1, 2], [0] * 3, 1, 6) == [[[0], [2, 1]]]
    assert end_to_end([3, 3], [0] * 2, 3, 6) == [[[0]], [[1]], []]
    assert end_to_end([4, 4, 4, 3, 3], [0] * 5, 1, 9) == [[[0, 3], [1, 4], [2]]]


def test_long_rows_are_computed_at_the_same_time_and_not_beside_as_many_tokens_of_short_ones() -> None:
    lengths, kinds = [9] + [1] * 9 + [8] + [2] * 4, ["b"] * 10 + ["a"] * 5
    assert end_to_end(lengths, kinds, 2, 9) == [[[0], [11, 12, 13, 14]], [[10], list(range(1, 10))]]


def test_kinds_share_the_rounds_of_the_ranks() -> None:
    """Three kinds on four ranks: one of them is divided, instead of each being given to all four."""
    split = end_to_end([4, 4, 4, 4, 4], ["a", "b", "b", "b", "c"], 4, 100)
    assert sorted(len(micro) for share in split for micro in share) == [1, 1, 1, 2]
    assert [len(share) for share in split] == [1, 1, 1, 1]


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("seed", range(5))
def test_a_mixture_of_lengths_fills_the_micro_batches_of_all_ranks_alike(seed: int, ranks: int) -> None:
    """32 to 4,096 tokens, even over their logarithms. A round takes what its fullest rank takes."""
    g, tokens = np.random.default_rng(seed), 16_384
    lengths = np.exp(g.uniform(np.log(32), np.log(4096), 1024)).astype(int).tolist()
    split = end_to_end(lengths, [0] * len(lengths), ranks, tokens)
    loads = np.array([[sum(lengths[p] for p in micro) for micro in share] for share in split])
    fewest = math.ceil(sum(lengths) / tokens / ranks)
    assert loads.shape == (ranks, fewest)
    assert loads.sum() / (loads.max(0).sum() * ranks) >= 0.97
    squares = np.array([[sum(lengths[p] ** 2 for p in micro) for micro in share] for share in split])
    assert squares.sum() / (squares.max(0).sum() * ranks) >= 0.9, "attention costs the ranks the same"


# --- which prompts the teacher completes; the rest of their path is in test_controller


@given(seed=st.integers(0, 9), batch=st.integers(1, 40), on_policy=st.floats(0, 1))
def test_of_every_batch_of_numbers_the_teacher_has_its_share(seed: int, batch: int, on_policy: float) -> None:
    chosen = [is_teacher_turn(number, seed, batch, on_policy) for number in range(20 * batch)]
    expected = (1 - on_policy) * batch
    for block in range(20):
        assert abs(sum(chosen[block * batch : (block + 1) * batch]) - expected) < 1 + 1e-6
    assert abs(sum(chosen) - 20 * expected) < 1 + 1e-6


def test_the_choice_and_the_completions_depend_on_the_seed() -> None:
    one, other = ([is_teacher_turn(number, seed, 64, 0.5) for number in range(640)] for seed in (0, 1))
    assert one != other
    assert len({seed_of(seed, number) for seed in (0, 1) for number in range(500)}) == 1000
