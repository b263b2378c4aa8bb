"""A replica that answers and writes nothing: its server lives and its engine hangs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from sync.errors import DistillError

if TYPE_CHECKING:
    from distill.control.replicas import Replica


async def until_silent(replica: Replica, seconds: float, poll_seconds: float) -> None:
    """Return when, for `seconds`, the replica has had work, has answered, and has written no token.

    Waits for ever where the engine does not count its tokens. A replica that does not answer is not silent
    but gone, which others notice.
    """
    pause, quiet, tokens = min(poll_seconds, seconds / 4), 0.0, None
    while quiet < seconds:  # counted in looks: a controller that stood still has not listened
        await asyncio.sleep(pause)
        try:
            state = await replica.engine.state()
        except DistillError:
            tokens = None
            continue
        wrote = state.tokens is None or state.tokens != tokens
        quiet = 0.0 if wrote or replica.in_flight == 0 else quiet + pause
        tokens = state.tokens
