"""Liveness: who has given no sign of life for so long that it counts as hung.

Silence is counted in looks, not by the clock: whoever looks and was itself stopped for an hour, then goes on,
has missed one look.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)
LOOK_SECONDS = 5.0
"""Longest pause between two looks; of a short limit a quarter."""


def look_seconds(limit: float) -> float:
    """Pause between two looks for silence of `limit` seconds."""
    return min(LOOK_SECONDS, limit / 4)


async def until_silent(sign: Callable[[], Awaitable[bool]], seconds: float) -> None:
    """Return when `sign`, asked again and again, has said no for `seconds` without a break; 0: never.

    The time that it takes to say no counts, up to as much as a pause: a time-out is silence, a stop is not.
    """
    if seconds == 0:
        await asyncio.Event().wait()
    loop, pause, silent = asyncio.get_running_loop(), look_seconds(seconds), 0.0
    while silent < seconds:
        await asyncio.sleep(pause)
        began = loop.time()
        silent = 0.0 if await sign() else silent + pause + min(pause, loop.time() - began)


class Heartbeats:
    """Those of the trainer's ranks, each watched from its first one on. `run()` for the length of the run.

    `hung` is called with the ranks that sent none for `seconds` (0: never), which are then forgotten.
    """

    def __init__(self, seconds: float, hung: Callable[[list[int]], None]) -> None:
        self._seconds, self._hung = seconds, hung
        self._silent: dict[int, float] = {}
        """Rank → seconds since its last heartbeat."""

    def heard(self, rank: int) -> None:
        """A rank lives."""
        self._silent[rank] = 0.0

    @property
    def watched(self) -> list[int]:
        """Ranks whose next heartbeat is waited for."""
        return sorted(self._silent)

    def forget(self) -> None:
        """These ranks are gone, or may leave: others are watched once they are heard."""
        self._silent.clear()

    async def run(self) -> None:
        """Watch until cancelled."""
        if self._seconds == 0:
            await asyncio.Event().wait()
        pause = look_seconds(self._seconds)
        while True:
            await asyncio.sleep(pause)
            for rank in self._silent:
                self._silent[rank] += pause
            late = sorted(rank for rank, silent in self._silent.items() if silent >= self._seconds)
            if late:
                self.forget()
                self._hung(late)
