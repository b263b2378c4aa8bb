"""Broadcasts of weights to the replicas: the members of each, and those that will not receive it to its end.

Published ──▶ admit every live replica ──▶ Audience (to the trainer, which sends)
                    └──▶ each is sent a ticket   ──▶ serves it, or is a lost member with its reason
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from typing import Final

from distill.aio import cancel, until_stalled
from distill.rollout.replica_pool import Phase, Replica, ReplicaPool
from sync.base.errors import DistillError, Overloaded, RemoteError, WireError
from sync.wire import Audience, BroadcastTicket, Published, Version

logger = logging.getLogger(__name__)
MEMBER_SECONDS: Final = 8.0
"""Without an answer of /health, after which a member is lost."""
BROADCAST_RETRY_SECONDS: Final = 0.5


class Broadcasts:
    """Broadcasts to the replicas of `pool`. `close` at the end cancels what is being received."""

    def __init__(self, pool: ReplicaPool, start_seconds: float = 900.0) -> None:
        """`start_seconds`: how long the first broadcast waits for replicas that are still starting."""
        self._pool, self._until = pool, time.monotonic() + start_seconds
        self._attempt: str | None = None  # of the newest broadcast
        self._audience: Audience | None = None  # of it; None: there was none
        self._count, self._lost = 0, dict[str, str]()
        self._receiving: set[asyncio.Task[None]] = set()

    def wanted(self) -> bool:
        """Whether a live replica lacks the newest version, which was broadcast, and none is under way."""
        newest = self._pool.newest_broadcast
        lacking = (member.version != newest for member in self._live())
        return newest is not None and not self._receiving and any(lacking)

    def listening(self) -> bool:
        """Whether to broadcast now: to all replicas that come up within `start_seconds`, later to any."""
        starting = self._count == 0 and time.monotonic() < self._until
        return len(self._live()) >= (len(self._pool.members()) if starting else 1)

    def _live(self) -> list[Replica]:
        now = time.monotonic()
        return [
            member
            for member in self._pool.members()
            if member.phase is not Phase.ABSENT
            and not (member.lost.is_set() or member.held)
            and (member.refusal is None or now >= member.rests_until)
        ]

    def announce(self, published: Published, ending: bool = False) -> Audience:
        """Tell every live replica that needs this version to receive it; the size of the group.

        Every broadcast has a group of its own: addresses of an earlier one may not be used again. A repeat of
        the newest attempt is given its group. Raises Overloaded while no replica would receive it, unless the
        run is `ending`.
        """
        if self._audience and published.attempt and published.attempt == self._attempt:
            return self._audience
        if not self.listening() and not ending:
            raise Overloaded("no replica listens to a broadcast yet: ask again", BROADCAST_RETRY_SECONDS)
        assert published.rendezvous is not None, "a broadcast names its meeting point"
        self._count += 1
        live = [replica for replica in self._live() if replica.version != published.version]
        size = 1 + sum(replica.workers for replica in live)
        group = f"{published.version.lineage}-{self._count}-{secrets.token_hex(8)}"
        self._attempt, self._lost = published.attempt, {}
        self._audience = Audience(group=group, world_size=size)
        ranks = itertools.accumulate((replica.workers for replica in live), initial=1)
        for rank, replica in zip(ranks, live, strict=False):
            ticket = BroadcastTicket(published.rendezvous, group, rank, size)
            task = asyncio.create_task(self._receive(replica, published.version, ticket, self._lost))
            self._receiving.add(task)
            task.add_done_callback(self._receiving.discard)
        return self._audience

    def lost_members(self, group: str) -> dict[str, str]:
        """Replicas that will not receive the newest broadcast to its end, each with the reason.

        Raises RemoteError for any other broadcast: it is over.
        """
        newest = self._audience.group if self._audience else None
        if group != newest:
            raise RemoteError(f"broadcast {group} is over, the newest is {newest}: announce it again")
        return dict(self._lost)

    async def _receive(
        self, replica: Replica, version: Version, ticket: BroadcastTicket, lost: dict[str, str]
    ) -> None:
        """Have one member receive; a failure is noted in `lost` at once.

        One that a member refuses fails for all: that one, the first, rests before the next one.
        """
        watch = asyncio.create_task(self._watch(replica))
        try:
            if replica.held:  # since it was announced: it takes no update for the length of an evaluation
                raise RemoteError(f"replica {replica.name} is held for an evaluation")
            reply = await self._pool.update(replica, version, ticket)
            if reply is None or not reply.bytes_read:
                lost[replica.name] = f"it serves {version} already"
            self._pool.published()
        except DistillError as error:
            if isinstance(error, RemoteError) and not (lost or replica.held):
                self._pool.refused_update(replica, error)
                self._pool.refused(replica, None)
            lost[replica.name] = str(error)
            logger.warning("replica %s stays at %s: %s", replica.name, replica.version, error)
            if isinstance(error, WireError):
                self._pool.bad_answer(replica, str(error))
            if not isinstance(error, RemoteError):
                self._pool.report_lost(replica)
        finally:
            await cancel([watch])

    async def _watch(self, replica: Replica) -> None:
        """Report a replica that does not answer while its connection is open, as when its machine is gone."""
        limit = min(MEMBER_SECONDS, 16 * self._pool.poll_seconds)
        await until_stalled(replica.engine.alive, limit)
        self._pool.report_lost(replica)

    async def close(self) -> None:
        await cancel(self._receiving)
