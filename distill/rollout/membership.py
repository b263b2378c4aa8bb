"""Student replicas that people let join and leave while a run goes on.

One that joins is brought to the newest version before it is asked anything; what one that leaves has not
finished is asked elsewhere. Nothing of it is on record: a controller that starts again has the replicas of
its configuration.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress

from distill.rollout.replica_client import ReplicaEngine
from distill.rollout.replica_pool import ReplicaPool
from sync.client import url_problem
from sync.errors import RemoteError, Unreachable
from sync.wire import ReplicaJoins, ReplicaLeaves, Replicas, ReplicaStatus


class Members:
    """The fleet as people see it. `connect`: a replica by its URL; None: none can join."""

    def __init__(self, pool: ReplicaPool, connect: Callable[[str], ReplicaEngine] | None) -> None:
        self._pool = pool
        self._connect = connect

    def listing(self) -> Replicas:
        """Who belongs to the fleet, in the order of joining."""
        return Replicas(
            replicas=[
                ReplicaStatus(one.name, one.engine.url, one.phase.value, one.version, one.in_flight)
                for one in self._pool.replicas.values()
            ]
        )

    async def join(self, wanted: ReplicaJoins) -> Replicas:
        """Take a replica in, whether it answers already or not.

        Raises RemoteError for a name or URL that is taken, for no HTTP URL, and for one of another run.
        """
        url, known = wanted.url.rstrip("/"), self._pool.replicas
        if self._connect is None or url_problem(url):
            raise RemoteError(f"replica {url!r} cannot join: give its URL, http://host:port")
        engine = self._connect(url)
        try:
            with suppress(Unreachable):
                if await engine.alive():
                    await engine.state()
            taken = [one.name for one in known.values() if one.engine.url == url or one.name == wanted.name]
            if taken:
                raise RemoteError(f"replica {taken[0]} is a member already: remove it first")
        except RemoteError:
            await engine.aclose()
            raise
        name = wanted.name or next(n for i in itertools.count() if (n := f"student-{i}") not in known)
        self._pool.add(name, engine)
        return self.listing()

    async def leave(self, wanted: ReplicaLeaves) -> Replicas:
        """Let a replica go. Raises RemoteError when there is none of that name."""
        if wanted.name not in self._pool.replicas:
            known = ", ".join(self._pool.replicas) or "none"
            raise RemoteError(f"no replica {wanted.name!r}: there are {known}")
        await self._pool.remove(wanted.name)
        return self.listing()
