"""Which rows share a micro-batch, and which rank computes it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.batching.filling import Split, end_to_end, rectangles

rows = st.lists(st.tuples(st.integers(1, 90), st.sampled_from("abc")), min_size=1, max_size=60)


def filled(split: Split, lengths: list[int]) -> list[list[int]]:
    """Tokens of each micro-batch of each rank."""
    return [[sum(lengths[place] for place in micro) for micro in share] for share in split]


@given(rows=rows, ranks=st.integers(1, 5), tokens=st.integers(1, 200))
def test_every_row_is_in_one_micro_batch_of_its_kind_that_is_not_too_long(
    rows: list[tuple[int, str]], ranks: int, tokens: int
) -> None:
    lengths, kinds = [length for length, _ in rows], [kind for _, kind in rows]
    split = end_to_end(lengths, kinds, ranks, tokens)
    micro = [part for share in split for part in share]
    assert sorted(place for part in micro for place in part) == list(range(len(rows)))
    for part in micro:
        assert len({kinds[place] for place in part}) == 1
        assert sum(lengths[place] for place in part) <= tokens or len(part) == 1
    counts = {len(share) for share in split}
    assert len(counts) == 1 or (max(len(part) for part in micro) == 1 and max(counts) - min(counts) == 1)


@given(rows=rows, ranks=st.integers(1, 5), tokens=st.integers(1, 200))
def test_rectangles_hold_every_row_once_and_no_more_than_fits(
    rows: list[tuple[int, str]], ranks: int, tokens: int
) -> None:
    lengths, kinds = [length for length, _ in rows], [kind for _, kind in rows]
    split = rectangles(lengths, kinds, ranks, tokens)
    micro = [part for share in split for part in share]
    assert sorted(place for part in micro for place in part) == list(range(len(rows)))
    for part in micro:
        assert len({kinds[place] for place in part}) == 1
        assert len(part) * max(lengths[place] for place in part) <= tokens or len(part) == 1


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
    loads = np.array(filled(split, lengths))
    fewest = math.ceil(sum(lengths) / tokens / ranks)
    assert loads.shape == (ranks, fewest)
    assert loads.sum() / (loads.max(0).sum() * ranks) >= 0.97
    squares = np.array([[sum(lengths[p] ** 2 for p in micro) for micro in share] for share in split])
    assert squares.sum() / (squares.max(0).sum() * ranks) >= 0.9, "attention costs the ranks the same"
    padded = rectangles(lengths, [0] * len(lengths), ranks, tokens)
    slots = sum(len(m) * max(lengths[p] for p in m) for share in padded for m in share)
    assert sum(lengths) / slots < 0.97, "what there is to gain"
