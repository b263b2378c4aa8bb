"""One event that wakes everybody who waits for a change."""

from __future__ import annotations

import asyncio


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
