"""Bisection of batches that trainers die on, until the rollouts that cannot be trained on are found.

    batch ──a trainer dies with it──▶ handed out again ──the next one dies too──▶ two parts, each a batch
    part  ──trained──▶ done
      └────a trainer dies with it──▶ two parts … ──▶ one rollout: quarantined, and the rest is one part

While there are parts, the next batch is formed only when the one before it was trained, so that a death
tells which part caused it. A group of completions of one prompt is never split. Every change of this state
is in the journal's records, so a controller that starts again continues where the old one stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from distill.buffer import Batch
from distill.run_log.records import LineageOpened
from distill.run_log.state import RunState
from sync.wire import Version


def suspect(state: RunState) -> Batch | None:
    """What the last trainer died on, where it was not the first to, or where that is a part already."""
    batch = state.held_by_last_trainer
    again = batch is not None and (batch.is_part or batch.version == state.bisection.died_on)
    return batch if again else None


def is_single(state: RunState, batch: Batch) -> bool:
    """Whether a batch cannot be split: it is one rollout, or one group of them."""
    return len(batch.rollouts) <= state.rules.group


def plan_lineage(
    state: RunState,
    checkpoint: Version | None,
    fingerprint: str,
    without: Collection[str] | None,
    ranks: int,
    usable: Callable[[Batch], bool],
) -> LineageOpened:
    """What a trainer starting from `checkpoint` opens; see `RunLog.open_lineage` and `first_anew`."""
    start = checkpoint.step if checkpoint else 0
    origin, branch = state.lineages.origin_of(checkpoint), start
    if origin is not None and without is None:
        branch = first_anew(state, origin, start, usable)
    batched = {one for batch in state.batches.values() for one in batch.ids}
    left = [rollout for rollout in without or () if rollout in batched]
    parts = parts_after(state, branch)
    return LineageOpened(
        len(state.lineages), checkpoint, start, origin, branch, fingerprint, left, ranks, parts
    )


def first_anew(state: RunState, origin: int, start: int, usable: Callable[[Batch], bool]) -> int:
    """The first step from `start` on whose batch a new lineage forms anew.

    Those of `origin` before it are handed out again: up to one that is gone, that trainers died on, or that
    none has trained and that is not `usable`.
    """
    suspected, step = suspect(state), start
    while state.available(at := Version(state.lineages.owner(origin, step), step)):
        batch = state.batches[at]
        if batch is suspected or not (batch.trained or usable(batch)):
            break
        step += 1
    return step


def parts_after(state: RunState, branch: int) -> list[list[str]]:
    """The parts from now on, where the batches from step `branch` on are formed anew."""
    suspected, parts = suspect(state), list[list[str]]()
    for _, batch in sorted(state.batches.items()):
        ids = batch.ids
        if batch is suspected and not is_single(state, batch):
            middle = -(-len(ids) // state.rules.group // 2) * state.rules.group
            parts += [ids[:middle], ids[middle:]]
        elif batch is not suspected and batch.is_part and batch.version.step >= branch:
            parts.append(ids)
    parts += state.bisection.parts
    if suspected is not None and is_single(state, suspected):  # most likely the only one: the rest at once
        return [[one for part in parts for one in part]] if parts else []
    return parts
