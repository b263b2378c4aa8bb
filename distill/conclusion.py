"""The end of a run: every replica is compared with the trainer's last version, which is evaluated."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from distill import waits
from distill.evaluation.schedule import Evaluations
from distill.record.changes import Concluded
from distill.rollout.replica_pool import Phase, Replica, ReplicaPool
from sync.base.errors import DistillError
from sync.wire import FinalDigests, Version

logger = logging.getLogger(__name__)


async def conclude(
    final: FinalDigests | None, pool: ReplicaPool, evaluations: Evaluations | None, seconds: float | None
) -> Concluded:
    """Compare all weights and evaluate the last version; `final`: the trainer's last message.

    Replicas that are absent or catching up get `seconds` to come back. None: the run was interrupted and will
    be resumed; nothing need be proven until then, but weights that differ are wrong all the same.
    """
    version = None if final is None else final.version
    weights = {} if final is None else await compare_weights(pool, final, seconds or 0.0)
    counted, failure = weights, None
    if seconds is None:
        counted = {name: equal for name, equal in weights.items() if equal is False}
        if not counted:
            return Concluded(version, weights, [])
    elif final is not None and evaluations is not None:
        try:
            with waits.on(waits.END, "evaluation", of=lambda: [waits.EVALUATION]):
                await evaluations.now(final.version, last=True)
        except DistillError as error:
            failure = str(error)
    return Concluded(version, weights, end_problems(version, counted, failure, seconds or 0.0))


async def compare_weights(
    pool: ReplicaPool, final: FinalDigests, seconds: float = 0.0
) -> dict[str, bool | None]:
    """Bring every replica to the last version and compare its weights; name → whether they are equal.

    One that is absent or catching up gets `seconds` to come back. None: it was not compared.
    """
    deadline, members = time.monotonic() + seconds, pool.members()
    compared = await asyncio.gather(*(_compared(pool, member, final, deadline) for member in members))
    pairs = zip(members, compared, strict=True)
    return {member.name: equal for member, equal in pairs if pool.has(member)}


async def _compared(pool: ReplicaPool, replica: Replica, final: FinalDigests, deadline: float) -> bool | None:
    while pool.has(replica):
        if replica.phase is Phase.SERVING:
            try:
                if replica.version != final.version:
                    await pool.update(replica, final.version)
                state = await replica.engine.state(digests=True)
                if state.version == final.version:
                    return state.digests == final.digests
            except DistillError as error:
                logger.warning("replica %s cannot show its weights: %s", replica.name, error)
        left = deadline - time.monotonic()
        if left <= 0 or (replica.version != final.version and not pool.is_stored(final.version)):
            return None
        with waits.on(waits.END, replica.name, progress=replica.joined):
            await pool.changed.wait(min(left, pool.retry_seconds))
    return None


def end_problems(
    version: Version | None, compared: Mapping[str, bool | None], failure: str | None, waited: float
) -> list[str]:
    """In sentences: value, rule, remedy.

    `failure`: why `version` was not evaluated. `waited`: seconds that replicas were given.
    """
    remedy = "mend it and go on with --resume"
    if version is None:
        return [f"the trainer left without its last word, so no replica was compared with it: {remedy}"]
    problems = [
        f"replica {name} holds other weights than the trainer at {version}, and they must be equal bit for "
        "bit: what it generated is in doubt; run `distill sync verify`, and repeat it with a fresh replica"
        for name, equal in compared.items()
        if equal is False
    ]
    missing = [name for name, equal in compared.items() if equal is None]
    if missing or not compared:
        problems.append(
            f"the trainer's weights at {version} were not compared with those of "
            f"{', '.join(missing) or 'any replica'}, which had {waited:.0f} s to show them "
            f"(weights.timeout_seconds): {remedy}"
        )
    if failure is not None:
        problems.append(f'{version} could not be evaluated, so "after" is empty: {failure}; {remedy}')
    return problems
