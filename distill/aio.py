"""Waiting for tasks without leaving one behind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from sync.errors import Unreachable

T = TypeVar("T")


async def unless(lost: asyncio.Event, work: Coroutine[Any, Any, T], name: str) -> T:
    """`work`, given up when `lost` is set first (Unreachable)."""
    task, watch = asyncio.create_task(work), asyncio.create_task(lost.wait())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Unreachable(f"replica {name} was lost")
        return await task
    finally:
        await cancel([task, watch])


async def until(over: Coroutine[Any, Any, None], workers: Iterable[asyncio.Task[None]]) -> None:
    """Until `over` returns or a worker ends; its error is raised, of a task group's the first."""
    end = asyncio.create_task(over)
    try:
        done, _ = await asyncio.wait([end, *workers], return_when=asyncio.FIRST_COMPLETED)
    finally:
        end.cancel()
    for task in done:
        if error := task.exception():
            raise _first_error(error)


def _first_error(error: BaseException) -> BaseException:
    """The error itself; of a task group's, the first that one of its tasks ended with."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def cancel(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancel and wait; errors of the tasks are not raised."""
    live = [task for task in tasks if task is not None]
    for task in live:
        task.cancel()
    await asyncio.gather(*live, return_exceptions=True)


class Signal:
    """`wake()` wakes all current waiters. Look at what you wait for, then wait: nothing is lost between."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def wake(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seconds: float | None = None) -> bool:
        """Until the next wake, or `seconds` at most; whether it was a wake."""
        event = self._event
        try:  # not wait_for: on Python 3.11 it can swallow a cancellation
            async with asyncio.timeout(seconds):
                return await event.wait()
        except TimeoutError:
            return False
