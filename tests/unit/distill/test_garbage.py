"""distill.garbage: circles are looked for where there are more objects than tasks account for."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from distill import garbage


class Circle:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize(("few", "a_task", "freed"), [(0, 0, True), (1 << 30, 0, False), (0, 1 << 30, False)])
async def test_a_batch_frees_circles_where_there_are_more_objects_than_tasks_account_for(
    few: int, a_task: int, freed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "_FEW", few)
    monkeypatch.setattr(garbage, "_A_TASK", a_task)
    gc.disable()
    try:
        circle = weakref.ref(Circle())
        garbage.batch_made(garbage.STEPS - 1)
        await asyncio.sleep(0)
        assert circle() is not None, "no look is due"
        garbage.batch_made(garbage.STEPS)
        await asyncio.sleep(0)
        assert (circle() is None) == freed
    finally:
        gc.enable()
