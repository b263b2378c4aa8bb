"""The end of a run: what is shown of the last version, and what is wrong where it is not."""

from __future__ import annotations

from collections.abc import Mapping

from distill.evaluation.schedule import Evaluations
from distill.rollout.replica_pool import ReplicaPool
from distill.run_log.records import Concluded
from sync.errors import DistillError
from sync.wire import FinalDigests, Version


async def conclude(
    final: FinalDigests | None, pool: ReplicaPool, evaluations: Evaluations | None, seconds: float | None
) -> Concluded:
    """The proof of equal weights, and the evaluation of the last version; `final`: the trainer's last word.

    Replicas that are away or catching up are waited for, `seconds` at most. None: the run was interrupted and
    goes on later; it owes no proof until then, but weights that differ are wrong all the same.
    """
    version = None if final is None else final.version
    weights = {} if final is None else await pool.hold_exactly(final.version, final.digests, seconds or 0.0)
    if seconds is None:
        differing = {name: equal for name, equal in weights.items() if equal is False}
        return Concluded(version, weights, end_problems(version, differing, None, 0.0) if differing else [])
    failure = None
    try:
        if final is not None and evaluations is not None:
            await evaluations.now(final.version)
    except DistillError as error:
        failure = str(error)
    return Concluded(version, weights, end_problems(version, weights, failure, seconds))


def end_problems(
    version: Version | None,
    compared: Mapping[str, bool | None],
    failure: str | None,
    waited: float,
) -> list[str]:
    """In sentences: value, rule, remedy.

    `failure`: why `version` was not evaluated. `waited`: seconds that replicas were waited for.
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
