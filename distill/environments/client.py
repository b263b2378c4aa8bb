"""The client of one environment: every episode at one of its processes, from its first turn to its last.

A new episode goes to the process with the fewest. One that is gone is left alone for a while, one that is
full for as long as it asks. Episodes of a process that was restarted are lost; their ids may begin again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Final

from distill.environments.episode import ANSWER, EnvironmentAnswer, FinishReason
from sync import wire
from sync.base.address import Place
from sync.base.errors import DistillError, Overloaded, Unreachable, WireError
from sync.wire.claims import Claim
from sync.wire.client import MAX_SMALL
from sync.wire.peers import ProcessClient, ProcessClients, Role

log = logging.getLogger(__name__)
MARGIN_SECONDS: Final = 10.0
"""Beyond the environment's own limit of a call: for the way there and back, or a restart."""
END_SECONDS: Final = 2.0


class EnvironmentClient(ProcessClients):
    """One environment (`distill.environments.episode.Environment`).

    `claim`: the run that requests are made for. `timeout`: the environment's limit of a call, in seconds.
    """

    def __init__(
        self,
        name: str,
        urls: Sequence[Place],
        token: str | None = None,
        claim: Claim | None = None,
        timeout: float = 60.0,
    ) -> None:
        self.name, self._limit = name, timeout + MARGIN_SECONDS
        super().__init__(f"environment {name!r}", Role.ENVIRONMENT, urls, token, self._limit, claim)
        self._places: dict[str, ProcessClient] = {}
        """Episode → its process, until it is over or `end` is called."""

    async def info(self, timeout: float | None = None) -> wire.EnvironmentInfo:
        """EnvironmentInfo of all processes. Raises ConfigError when they differ."""
        return self._same(await self._answers("/v1/info", wire.EnvironmentInfo, timeout))

    async def begin(self, id: str, task: int) -> EnvironmentAnswer:
        """The first turn of an episode, from any process; waits while all are full."""
        body, expires = wire.encode(wire.EpisodeBegin(id=id, task=task)), time.monotonic() + self._limit
        try:
            while True:
                process = min(self._processes, key=lambda server: (server.pause, server.load))
                await asyncio.sleep(process.pause)
                self._place(id, process)
                try:
                    answer = await process.peer.once("/v1/begin", body, self._limit, MAX_SMALL)
                    process.backoff.reset()
                    return self._checked(id, wire.decode(answer, ANSWER))
                except Overloaded as error:
                    process.back_at = time.monotonic() + error.retry_after
                    expires = time.monotonic() + self._limit
                except Unreachable as error:
                    if time.monotonic() >= expires:
                        raise
                    if not process.pause:  # of the episodes that it was to begin, the first to notice
                        process.failed()
                        log.warning("%s; retrying", error)
        except (DistillError, asyncio.CancelledError):
            self._place(id, None)
            raise

    async def proceed(
        self, id: str, turn: int, token_ids: wire.Array, finish_reason: FinishReason
    ) -> EnvironmentAnswer:
        """What follows the student's answer; retried until it arrives or the time limit has passed."""
        if (process := self._places.get(id)) is None:
            return wire.EpisodeFailed(id=id, error=f"episode {id} has not begun", lost=True)
        body = wire.EpisodeContinue(id=id, turn=turn, token_ids=token_ids, finish_reason=finish_reason)
        return self._checked(id, await process.peer.call("/v1/continue", body, ANSWER))

    async def end(self, id: str) -> None:
        """Give it up. A process that cannot be reached frees its place once it needs that."""
        if (process := self._places.get(id)) is not None:
            self._place(id, None)
            body = wire.encode(wire.EpisodeEnd(ids=[id]))
            with contextlib.suppress(DistillError):
                wire.decode(await process.peer.once("/v1/end", body, END_SECONDS, MAX_SMALL), wire.Ok)

    def _place(self, id: str, process: ProcessClient | None) -> None:
        if (before := self._places.pop(id, None)) is not None:
            before.load -= 1
        if process is not None:
            self._places[id] = process
            process.load += 1

    def _checked(self, id: str, said: EnvironmentAnswer) -> EnvironmentAnswer:
        if said.id != id:
            raise WireError(f"environment {self.name!r} answered for episode {said.id!r}, not {id!r}")
        if not isinstance(said, wire.Turn):
            self._place(id, None)
        return said
