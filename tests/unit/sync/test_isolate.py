"""Isolation: a bad item fails alone; a fault that is no item's is raised."""

from collections.abc import Sequence

import pytest

from sync.base.errors import Unreachable
from sync.base.retry import isolate


async def test_only_the_bad_item_fails_and_the_order_stays() -> None:
    async def run(items: Sequence[int]) -> list[int]:
        if 3 in items:
            raise ValueError("three")
        return [10 * item for item in items]

    assert await isolate(range(6), run, lambda item, error: -item) == [0, 10, 20, -3, 40, 50]


async def test_a_fault_that_is_no_items_is_raised_at_once() -> None:
    seen: list[int] = []

    async def run(items: Sequence[int]) -> list[int]:
        seen.append(len(items))
        raise Unreachable("gone")

    with pytest.raises(Unreachable):
        await isolate([1, 2, 3, 4], run, lambda item, error: item, never=(Unreachable,))
    assert seen == [4]
