"""One exchange with any replica of a teacher: the least busy living one, and another when it fails.

A replica that does not answer /health while it holds a request counts as dead: slow work is waited for, a
stopped process is not. A failed or full replica is left alone for a while; the others take its work.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from sync.claims import Claim
from sync.client import Peer
from sync.errors import Overloaded, Unreachable, WrongServer

log = logging.getLogger(__name__)
HEALTH_SECONDS: Final = 5.0
"""How often a replica that holds a request is asked whether it lives; two misses in a row: it does not."""
FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 2.0
WRONG_PAUSE: Final = 30.0
"""Seconds that a replica is left alone after a failure, doubling from the first to the longest; the last one
for one of another run or model."""


class Answer(NamedTuple):
    """What came back, and whence."""

    body: bytes
    url: str


@dataclass(eq=False)
class Replica:
    """What is known of one process."""

    peer: Peer
    outstanding: int = 0
    """Tokens asked for and not yet answered."""
    back_at: float = 0.0
    """time.monotonic() before which it is left alone."""
    pause: float = FIRST_PAUSE
    left_out: bool = False
    """It is asked nothing any more, while there is another."""
    wrong: bool = False
    """It last answered for another run, or with another model."""

    def failed(self, wait: float) -> None:
        """Leave it alone for `wait` seconds, or for its pause when that is longer."""
        self.back_at = time.monotonic() + max(wait, self.pause)
        self.pause = min(self.pause * 2, LONGEST_PAUSE)

    def answered(self) -> None:
        """It is well again."""
        self.back_at, self.pause, self.wrong = 0.0, FIRST_PAUSE, False


class Replicas:
    """All processes of one teacher."""

    def __init__(
        self, urls: Sequence[str], token: str | None, timeout: float, health: float, claim: Claim | None
    ) -> None:
        self.all = [Replica(Peer(url, token, timeout, claim)) for url in urls]
        self.retries = 0
        self._health = health

    async def aclose(self) -> None:
        """Close every connection."""
        await asyncio.gather(*(replica.peer.aclose() for replica in self.all))

    def leave_out(self, url: str) -> bool:
        """Ask the replica at `url` nothing more; whether another is left."""
        for replica in self.all:
            replica.left_out |= replica.peer.url == url
        return not all(replica.left_out for replica in self.all)

    async def exchange(self, path: str, body: bytes | None, tokens: int, expires: float) -> Answer:
        """Answer of the first replica that gives one before `expires` (time.monotonic()).

        Raises Unreachable when none did, Overloaded when the last one was full, RemoteError for a refusal,
        WrongServer when all serve another run or model; one that does is left to the others.
        """
        while True:
            used = [replica for replica in self.all if not replica.left_out] or self.all
            replica = min(used, key=lambda r: (max(0.0, r.back_at - time.monotonic()), r.outstanding))
            pause = replica.back_at - time.monotonic()
            if pause > 0:
                await asyncio.sleep(min(pause, max(0.0, expires - time.monotonic())))
            replica.outstanding += tokens
            try:
                answer = await self._attempt(replica, path, body, max(0.05, expires - time.monotonic()))
                replica.answered()
                return Answer(answer, replica.peer.url)
            except WrongServer as error:
                replica.wrong = True
                replica.failed(WRONG_PAUSE)
                if all(other.wrong for other in used):
                    raise
                log.error("%s", error)
            except (Unreachable, Overloaded) as error:
                replica.failed(error.retry_after if isinstance(error, Overloaded) else 0.0)
                if time.monotonic() >= expires or min(r.back_at for r in used) >= expires:
                    raise
                self.retries += 1
                log.warning("%s; trying again", error)
            finally:
                replica.outstanding -= tokens

    async def _attempt(self, replica: Replica, path: str, body: bytes | None, timeout: float) -> bytes:
        """One exchange, given up when the replica stops answering /health."""
        call = asyncio.ensure_future(replica.peer.once(path, body, timeout))
        misses = 0
        try:
            while not (await asyncio.wait({call}, timeout=self._health))[0]:
                misses = 0 if await replica.peer.alive() else misses + 1
                if misses == 2 and not call.done():
                    raise Unreachable(f"{replica.peer.url} holds a request and does not answer /health")
            return call.result()
        finally:
            call.cancel()
