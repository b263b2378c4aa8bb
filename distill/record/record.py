"""The one place that writes: every change goes into a run's rows and the state, their cache, together."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Iterable
from functools import lru_cache, partial

import numpy as np

from distill.buffer import Batch, pick
from distill.events import Events, ScoresUnneeded
from distill.metrics.samples import Quarantine
from distill.prompts.stream import PromptStream
from distill.record import changes as r
from distill.record.changes import Change, LineageOpened, facts
from distill.record.resume import Resume, handover
from distill.record.rollout import DropReason, RequeueReason, Rollout
from distill.record.state import RunState
from distill.record.store import Store, other_controller
from sync.wire import RunIdentity, Version, unpack

GROUP_BROKEN = "another completion of its prompt was dropped"
_TEACHER_TURNS = 1  # stream of random numbers of a run's seed, beside that of the prompts' order
logger = logging.getLogger(__name__)


class Record:
    """Record, state and prompt cursor of a run. `flush()` for the length of the run."""

    def __init__(
        self, store: Store, prompts: PromptStream, start: Resume, events: Events | None = None
    ) -> None:
        """Raises DataError when something was written since `start` was read."""
        if store.at != start.at:
            raise other_controller(store.folder)
        self.store, self.state = store, start.state
        store.facts = partial(facts, start.state)
        self._prompts = prompts
        self._events, self._admitted = events or Events(), asyncio.Event()
        self._opening, prompts.cursor = start.opening, start.state.cursor
        self.write(start.opening)
        self._drop_broken()

    @property
    def run(self) -> RunIdentity:
        """What all requests of this run name."""
        return RunIdentity(self._opening.run, self._opening.id, self.state.fingerprint)

    async def flush(self) -> None:
        """Commit what was admitted, as it comes, until cancelled."""
        while True:
            await self._admitted.wait()
            self._admitted.clear()
            await self.store.commit()

    def write(self, change: Change) -> None:
        """Change the state and queue the rows; safe on disk after the next commit."""
        if isinstance(change, r.Dropped):
            buffer = self.state.buffer
            self._unneeded(buffer[i] for i in change.ids if i in buffer)
        self.store.begin()
        change.apply(self.state, self.store)

    def _unneeded(self, rollouts: Iterable[Rollout]) -> None:
        if kept := [rollout for rollout in rollouts if rollout.kept is not None]:
            self._events.emit(ScoresUnneeded(kept))

    def issue(self, count: int) -> list[Rollout]:
        prompts, first, rules = self._prompts.take(count), self.state.counters.issued, self.state.rules
        by_teacher = [
            place
            for place in range(count)
            if is_teacher_turn(first + place, self._opening.seed, rules.batch, rules.on_policy)
        ]
        self.write(r.Issued(prompts, self._prompts.cursor, by_teacher))
        return [self.state.pending[prompt.id] for prompt in prompts]

    def requeue(self, lost: Rollout, reason: RequeueReason, tokens: int = 0) -> Rollout | None:
        """Note that a completion was lost; returns the rollout when it is to be sent again, else drops it.

        `tokens`: what is known to have been generated of it.
        """
        pending, limit = self.state.pending, self.state.rules.max_attempts
        self.write(r.Requeued([lost.id], reason, tokens))
        if pending[lost.id].attempts >= limit:
            why: DropReason = reason if reason in ("straggler", "over_long", "unusable") else "engine_failed"
            self.drop([lost.id], why, f"{limit} completions were lost ({reason})")
        elif self.state.is_broken(lost.id):
            self.drop([lost.id], "group_broken", GROUP_BROKEN)
        return pending.get(lost.id)

    def drop(self, ids: list[str], reason: DropReason, detail: str, tokens: int = 0) -> None:
        """These will not be trained on; `tokens` were generated for them and are not on record.

        With groups, the buffered members of theirs are dropped too.
        """
        self.write(r.Dropped(ids, reason, tokens, detail))
        self._drop_broken()

    def _drop_broken(self) -> None:
        if self.state.broken and (ids := [i for i in self.state.buffer if self.state.is_broken(i)]):
            self.write(r.Dropped(ids, "group_broken", 0, GROUP_BROKEN))

    def admit(self, rollout: Rollout) -> None:
        self.write(r.Admitted(rollout))
        self._drop_broken()
        self._admitted.set()

    async def form_batch(self) -> Batch | None:
        """The next batch of the current lineage, safe on disk; None: too few rollouts. Drops the too old."""
        state = self.state
        assert state.lineage is not None, "a batch is formed for a trainer"
        while True:
            part = state.next_part()
            chosen, too_old, weights = pick(state.buffer, state.rules, state.next_step, state.step_of, part)
            if too_old:
                hard = state.rules.bound.hard
                self.drop(too_old, "too_old", f"older than {hard} at step {state.next_step}")
            if lost := sorted({*part} & {*too_old}):
                logger.warning("trainers died on a batch with %s: too old to be tried by themselves", lost)
            if chosen or not part:
                break
        if not chosen:
            return None
        version = Version(state.lineage, state.next_step)
        self.write(r.BatchFormed(version, chosen, weights if min(weights) < 1 else []))
        await self.store.commit(durable=True)
        return state.batches.get(version)

    async def open_lineage(
        self,
        checkpoint: Version | None,
        fingerprint: str,
        without: Collection[str] | None = None,
        ranks: int = 1,
    ) -> LineageOpened:
        """A trainer of so many ranks started from `checkpoint`.

        `without`: it was rolled back: no batch is handed out again, and these rollouts never again.
        """
        state, reached = self.state, self.state.reached
        if checkpoint is not None and reached is not None and checkpoint.lineage == reached.lineage:
            for step in range(reached.step, checkpoint.step):  # saved, and the trainer died before its report
                self.write(r.Stepped(Version(reached.lineage, step + 1)))
            if checkpoint.step >= reached.step and checkpoint not in state.checkpoints:
                self.write(r.Checkpointed(checkpoint, str(checkpoint)))
        suspected = state.suspect
        begins = handover(state, checkpoint, rolled_back=without is not None)
        start, origin, branch = begins.start, begins.origin, begins.branch
        gone, batches = {*(without or ())}, state.batches.values()
        left = [rollout for batch in batches for rollout in batch.rollouts if rollout.id in gone]
        self._unneeded(left)
        ids, parts, number = [rollout.id for rollout in left], _parts_from(state, branch), len(state.lineages)
        opening = LineageOpened(number, checkpoint, start, origin, branch, fingerprint, ids, ranks, parts)
        self.write(opening)
        self._drop_broken()
        if suspected is not None:
            self._bisect(suspected)
        await self.store.commit(durable=True)
        return opening

    def _bisect(self, batch: Batch) -> None:
        """Quarantine what a trainer died on, when no part of it is left to be tried by itself."""
        if len(batch.rollouts) > self.state.rules.group:
            logger.error(
                "trainers died on the batch of %s: its %d rollouts are trained in parts, until the one that "
                "cannot be trained is found", batch.version, len(batch.rollouts),
            )  # fmt: skip
            return
        detail = f"a trainer died on the batch of {batch.version}, which held nothing else"
        rollouts = self.rollouts(batch)
        self.drop([rollout.id for rollout in rollouts], "poisoned", detail)
        for rollout in rollouts:
            self._quarantine(rollout, [], "poisoned", detail)

    def reject(self, rollout: Rollout, reason: DropReason, detail: str) -> None:
        """Drop and quarantine a rollout that is not on record."""
        if not rollout.continues:
            self.drop([rollout.id], reason, detail, rollout.own_length)
        self._quarantine(rollout, rollout.source_prompt.token_ids, reason, detail)

    def _quarantine(self, rollout: Rollout, prompt: list[int], reason: DropReason, detail: str) -> None:
        logger.warning("rollout %s is quarantined, %s: %s", rollout.id, reason, detail)
        tokens = unpack(rollout.tokens).tolist()
        self._events.emit(Quarantine(rollout.id, prompt, tokens, reason, detail))

    def rollouts(self, batch: Batch) -> list[Rollout]:
        """The rollouts of a batch, in order; released ones are read back, also if dropped meanwhile."""
        where = {each.id: self.state.where[each.id] for each in batch.rollouts if each.is_released}
        in_order = sorted(where, key=where.__getitem__)  # a block is unpacked once
        whole = {rollout: self.store.read(where[rollout]) for rollout in in_order}
        return [
            rollout.whole(whole[rollout.id]) if rollout.id in whole else rollout for rollout in batch.rollouts
        ]

    async def tidy(self, keep_checkpoints: int) -> None:
        """After a checkpoint: free what only batches need that the oldest kept checkpoint covers."""
        state, batches = self.state, dict(self.state.batches)
        kept = state.kept(keep_checkpoints)
        if len(kept) < keep_checkpoints:
            return
        self.write(r.Covered(min(version.step for version in kept)))
        covered = [batch for version, batch in batches.items() if version not in state.batches]
        self._unneeded(rollout for batch in covered for rollout in batch.rollouts)
        await self.store.commit(durable=True)
        newest = self.store.file  # before what is not committed: it will be in this file or a newer
        await self.store.free(state.files, newest)


def is_teacher_turn(number: int, seed: int, batch: int, on_policy: float) -> bool:
    """Whether the teacher completes the prompt of this number in the order of issue.

    Of each `batch` consecutive numbers the teacher has (1 − on_policy) · batch, rounded so that the sum over
    all of them is right; which ones depends on `seed`.
    """
    return on_policy < 1 and number % batch in _teacher_turns(seed, number // batch, batch, on_policy)


@lru_cache(maxsize=16)
def _teacher_turns(seed: int, block: int, batch: int, on_policy: float) -> frozenset[int]:
    """Places in one block of `batch` numbers."""
    share = (1 - on_policy) * batch
    count = math.floor((block + 1) * share + 1e-6) - math.floor(block * share + 1e-6)
    order = np.random.default_rng([seed, block, _TEACHER_TURNS]).permutation(batch)
    return frozenset(order[:count].tolist())


def _parts_from(state: RunState, branch: int) -> list[list[str]]:
    """The parts of batches that trainers died on, where batches are formed anew from step `branch` on."""
    suspected, group, parts = state.suspect, state.rules.group, list[list[str]]()
    for _, batch in sorted(state.batches.items()):
        if batch is suspected and len(batch.ids) > group:
            middle = -(-len(batch.ids) // group // 2) * group
            parts += [batch.ids[:middle], batch.ids[middle:]]
        elif batch is not suspected and batch.is_part and batch.version.step >= branch:
            parts.append(batch.ids)
    parts += state.bisection.parts
    if suspected is not None and len(suspected.ids) <= group:  # most likely the only one: the rest at once
        return [[id for part in parts for id in part]] if parts else []
    return parts
