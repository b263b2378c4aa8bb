"""The loop that finds the bad item of a batch: in requests to a teacher, and in the batches of its engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

W = TypeVar("W")
A = TypeVar("A")


async def isolate(
    items: Sequence[W],
    run: Callable[[Sequence[W]], Awaitable[Sequence[A]]],
    failed: Callable[[W, Exception], A],
    *,
    on: tuple[type[Exception], ...] = (Exception,),
    never: tuple[type[Exception], ...] = (),
) -> list[A]:
    """Answers of `run`, one per item, in order; each half of a batch that fails runs again on its own.

    `failed` gives the answer for an item that fails alone. `on`: exceptions that may be an item's fault;
    `never`: those of them that are not. Every other exception is raised at once.
    """
    try:
        return list(await run(items))
    except never:
        raise
    except on as error:
        if len(items) == 1:
            return [failed(items[0], error)]
    middle = len(items) // 2
    halves = [
        await isolate(half, run, failed, on=on, never=never) for half in (items[:middle], items[middle:])
    ]
    return [*halves[0], *halves[1]]
