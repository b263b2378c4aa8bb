"""Waiting for tasks without leaving one behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from sync.base.errors import Unreachable

T = TypeVar("T")
LOOK_SECONDS = 5.0  # longest pause between two looks of `until_stalled`; of a short limit a quarter


async def unless(over: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T], told: str) -> T:
    """`work`, cancelled when `over` ends first: then that one's error, else Unreachable, with `told`."""
    task, watch = asyncio.create_task(work), asyncio.create_task(over)
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            watch.result()
            raise Unreachable(told)
        return await task
    finally:
        await cancel([task, watch])


async def in_daemon(work: Callable[[], None]) -> None:
    """`work` in a thread whose end nothing waits for but this: neither the event loop nor the interpreter."""
    ended = Future[None]()
    ended.set_running_or_notify_cancel()

    def run() -> None:
        try:
            work()
            ended.set_result(None)
        except BaseException as error:  # noqa: BLE001  # raised below
            ended.set_exception(error)

    threading.Thread(target=run, name="daemon", daemon=True).start()
    await asyncio.wrap_future(ended)


async def until(over: Coroutine[Any, Any, T], workers: Iterable[asyncio.Task[Any]]) -> T | None:
    """What `over` returns; None: a worker ended first. Raises their errors, of a task group the first."""
    end = asyncio.create_task(over)
    try:
        done, _ = await asyncio.wait([end, *workers], return_when=asyncio.FIRST_COMPLETED)
    finally:
        end.cancel()
    for task in done:
        error = task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error:
            raise error
    return end.result() if end in done else None


async def cancel(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancel and wait; errors of the tasks are not raised."""
    live = [task for task in tasks if task is not None]
    for task in live:
        task.cancel()
    await asyncio.gather(*live, return_exceptions=True)


def look_seconds(limit: float) -> float:
    """Pause between two looks for a stall of `limit` seconds."""
    return min(LOOK_SECONDS, limit / 4)


async def until_stalled(progresses: Callable[[], Awaitable[bool]], seconds: float) -> None:
    """Return when `progresses`, polled, was false for `seconds` without a break; 0: never.

    The time of an answer counts, up to as much as a pause: a time-out is a stall, a stop of this process is
    not.
    """
    if seconds == 0:
        await asyncio.Event().wait()
    loop, pause, stalled = asyncio.get_running_loop(), look_seconds(seconds), 0.0
    while stalled < seconds:
        await asyncio.sleep(pause)
        began = loop.time()
        stalled = 0.0 if await progresses() else stalled + pause + min(pause, loop.time() - began)


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
