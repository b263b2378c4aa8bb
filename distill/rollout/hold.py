"""A replica held at one version for an evaluation.

    serving ─▶ held: it gets no new prompts and swaps no weights
            ─▶ drained, if it must go back: completions never mix a version with an earlier one
            ─▶ at the version, until the block ends ─▶ brought to the newest version ─▶ serving

What it has in flight goes on beside the evaluation. The other replicas go on; with one replica rollouts wait.
`evaluation.replica`, where there is one, is held instead of one that others need.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from distill import waits
from distill.rollout.replica_pool import Replica, ReplicaPool
from distill.waits import EVALUATION, GENERATION
from sync.base.errors import DistillError, Unreachable
from sync.wire import Version


@asynccontextmanager
async def hold(pool: ReplicaPool, version: Version, seconds: float) -> AsyncIterator[Replica]:
    """A serving replica that holds exactly `version`, or for step 0 the model folder, while the block runs.

    Raises Unreachable when none serves within `seconds`, or when it is lost before it is there; RemoteError
    when the version cannot be loaded. The caller watches `Replica.lost`.
    """
    replica = await _choose(pool, version, seconds)
    replica.held = True
    try:
        await replica.unless_lost(replica.busy.acquire())  # an update under way ends first
        try:
            if not (version.step == 0 and (replica.version is None or replica.version.step == 0)):
                await replica.unless_lost(_bring(pool, replica, version))
            with waits.on(replica.name, EVALUATION, lambda: f"it is held at {version}"):
                yield replica
        finally:
            replica.busy.release()
        with suppress(DistillError):  # its own task retries
            await replica.unless_lost(pool.catch_up_once(replica))
    finally:
        replica.held = False
        pool.published()
        pool.changed.wake()


async def _choose(pool: ReplicaPool, version: Version, seconds: float) -> Replica:
    """The serving replica that need not go back, with the fewest completions in flight."""
    loop, alone = asyncio.get_running_loop(), bool(pool.members(for_evaluations=True))
    deadline = loop.time() + seconds
    while True:
        willing = [replica for replica in pool.serving(alone) if not (replica.held or replica.refuses)]
        if willing:
            return min(willing, key=lambda replica: (pool.is_ahead(replica, version), replica.in_flight))
        if (left := deadline - loop.time()) <= 0:
            of = "evaluation.replica does not serve, which" if alone else "no replica serves that"
            raise Unreachable(f"{of} could generate with {version}: see the logs of replicas")
        state = lambda: "; ".join(replica.condition for replica in pool.members(alone))  # noqa: E731
        with waits.on(EVALUATION, "a replica", state, of=lambda: [*pool.replicas], progress=version):
            await pool.changed.wait(min(left, pool.retry_seconds))


async def _bring(pool: ReplicaPool, replica: Replica, version: Version) -> None:
    while replica.in_flight and pool.is_ahead(replica, version):
        old = lambda: f"{replica.in_flight} completions of {replica.version}"  # noqa: E731
        with waits.on(EVALUATION, replica.name, old, of=lambda: [GENERATION], progress=replica.in_flight):
            await pool.changed.wait()
    await pool.update_locked(replica, pool.request_for(version))
