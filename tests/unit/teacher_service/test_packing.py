"""Forward passes of sequences of unequal length."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from teacher_service.engines.base import Item
from teacher_service.engines.transformers import padded_ids, rectangles

lengths = st.lists(st.integers(2, 50), min_size=1, max_size=40)


@given(lengths, st.integers(1, 200), st.integers(0, 100))
def test_every_sequence_lies_in_one_rectangle_within_budget_and_padding(
    sizes: list[int], budget: int, overhead: int
) -> None:
    groups = rectangles(sizes, budget, overhead)
    assert sorted(row for rows in groups for row in rows) == list(range(len(sizes)))
    for rows in groups:
        width = max(sizes[row] for row in rows)
        assert width == sizes[rows[0]]
        assert len(rows) == 1 or width * len(rows) <= budget
        assert sum(width - sizes[row] for row in rows) <= overhead


def test_ids_are_padded_on_the_right() -> None:
    items = [Item(np.arange(5, dtype=np.int32), 2), Item(np.arange(10, 13, dtype=np.int32), 1)]
    assert padded_ids(items).tolist() == [[0, 1, 2, 3, 4], [10, 11, 12, 0, 0]]
