"""An event loop whose clock jumps to the next timer as soon as nothing else is left to do.

Seconds of waiting cost nothing, and "nothing further happens" means that the loop ran out of work: a test
sleeps for `LONG` and looks. For code in memory alone: a jump does not wait for a socket. While a thread of an
executor works, time stands still.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

LONG = 10.0
"""Seconds after which whatever was to happen has happened."""
LATE = 1e-6
"""A timer fires a little late, as everywhere; never early."""


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Waits only for threads; any other wait moves the loop's clock."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout <= 0 or self.loop.jobs:
            return super().select(timeout)
        found = super().select(0)
        if not found:
            self.loop.advance(timeout + LATE)
        return found


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """The loop of tests marked `virtual_time`; `time.monotonic` and `time.time` follow it there."""

    newest: VirtualTimeLoop | None = None

    def __init__(self) -> None:
        selector = _Selector()
        selector.loop = self
        self.jobs = 0
        """Calls that threads of an executor have not finished."""
        self.threads = True
        """False: what is meant for a thread is done at once, so that a seed gives the same run every time."""
        self._now = 1000.0
        super().__init__(selector)
        VirtualTimeLoop.newest = self

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        if not self.threads:
            done = self.create_future()
            done.set_result(func(*args))
            return done
        self.jobs += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._finished)
        return future

    def _finished(self, _: object) -> None:
        self.jobs -= 1


def now() -> float:
    """Of the newest virtual loop."""
    return VirtualTimeLoop.newest.time()


def advance(seconds: float) -> None:
    """Let time pass while the loop stands still."""
    VirtualTimeLoop.newest.advance(seconds)
