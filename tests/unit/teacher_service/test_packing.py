"""Rectangles and the place of each scored position, by counting."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from teacher_service.engines.base import Item
from teacher_service.engines.transformers import hidden_rows, padded_ids, rectangles

lengths = st.lists(st.integers(2, 50), min_size=1, max_size=40)


@given(lengths, st.integers(1, 200), st.integers(0, 100))
def test_every_sequence_lies_in_one_rectangle_within_budget_and_padding(
    sizes: list[int], budget: int, overhead: int
) -> None:
    groups = rectangles(sizes, budget, overhead)
    assert sorted(row for group in groups for row in group.rows) == list(range(len(sizes)))
    for group in groups:
        assert group.width == max(sizes[row] for row in group.rows)
        assert len(group.rows) == 1 or group.width * len(group.rows) <= budget
        assert sum(group.width - sizes[row] for row in group.rows) <= overhead


def test_positions_are_predicted_one_place_earlier() -> None:
    items = [Item(np.arange(5, dtype=np.int32), 2), Item(np.arange(10, 13, dtype=np.int32), 1)]
    assert padded_ids(items, 5).tolist() == [[0, 1, 2, 3, 4], [10, 11, 12, 0, 0]]
    flat = padded_ids(items, 5).reshape(-1)
    assert flat[hidden_rows(items, 5)].tolist() == [1, 2, 3, 10, 11]
