"""The one place that writes: every change goes into the journal and the state together."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import msgspec

from distill.batching.bisection import accused_by_death, is_single, plan_lineage
from distill.buffer.buffer import Entry
from distill.prompts.stream import Cursor, PromptStream
from distill.run_log.journal import Journal
from distill.run_log.records import (
    AnyRecord,
    BatchFormed,
    Dropped,
    DropReason,
    Issued,
    LineageOpened,
    Opened,
    Requeued,
    RequeueReason,
    Rollout,
    Snapshot,
)
from distill.run_log.snapshot import base, cover, restore, take
from distill.run_log.state import Batch, PendingPrompt, Rules, RunState
from distill.run_log.validation import ValidateRollout
from sync.errors import ConfigError
from sync.wire import RunIdentity, Version, unpack
from sync.wire.checks import Problem

PutAside = Callable[[str, DropReason, str, list[int]], None]
"""Hears of a rollout of the journal that is quarantined: id, reason, detail, tokens if they can be read."""
logger = logging.getLogger(__name__)


class RunLog:
    """Journal, state and prompt cursor of a run. Use `Books.open`."""

    def __init__(
        self,
        journal: Journal,
        state: RunState,
        prompts: PromptStream,
        author: Callable[[int], bool],
        name: str,
        sift: ValidateRollout,
        quarantine: PutAside,
    ) -> None:
        self.journal = journal
        self._name = name
        self.state = state
        self._prompts = prompts
        self._author = author
        self._sift, self._quarantine = sift, quarantine

    @classmethod
    def open(
        cls,
        journal: Journal,
        prompts: PromptStream,
        *,
        run: str,
        seed: int,
        rules: Rules,
        author: Callable[[int], bool] = lambda number: False,
        sift: ValidateRollout = lambda rollout: rollout,
        quarantine: PutAside = lambda rollout, reason, detail, tokens: None,
    ) -> RunLog:
        """Rebuild the state from the journal (empty: a new run).

        `author`: whether the teacher completes the prompt with that number; asked once, when it is issued.
        `sift`: every rollout that comes back from the journal goes through it before it is trained on;
        `quarantine` hears of those that are then quarantined.
        Raises DataError when it is damaged, ConfigError when it is another run's or of other prompts.
        """
        state, bound = RunState(rules), rules.bound
        now = Opened(
            run, seed, rules.batch, bound.limit, bound.hard, bound.half_life, rules.group,
            prompts.per_prompt, prompts.rows,
        )  # fmt: skip
        for number, (location, record) in enumerate(journal.replay()):
            if isinstance(record, Snapshot) and number == 0:
                state = restore(record, rules, journal.read)
            state.apply(record, location if isinstance(record, Issued | Rollout | Snapshot) else None)
            if isinstance(record, Rollout):
                state.unload(record.id)
        if state.opened is not None:
            _check_same_prompts(journal.folder, state.opened, now)
        state.forget_unavailable()
        prompts.cursor = Cursor(*state.cursor)
        run_log = cls(journal, state, prompts, author, run, sift, quarantine)
        run_log.write(msgspec.structs.replace(now, id=run_log.run.id or secrets.token_hex(8)))
        run_log._drop_broken()
        return run_log

    @property
    def run(self) -> RunIdentity:
        """What all requests of this run name."""
        opened = self.state.opened
        return RunIdentity(self._name, opened.id if opened else None, self.state.fingerprint)

    def write(self, record: AnyRecord) -> None:
        """Append to the journal and change the state; safe on disk after the next commit."""
        self.state.apply(record, self.journal.append(record))

    def issue(self, count: int) -> list[PendingPrompt]:
        """Take `count` prompts from the cursor."""
        prompts, first = self._prompts.take(count), self.state.counters.issued
        by_teacher = [place for place in range(count) if self._author(first + place)]
        self.write(Issued(prompts, *self._prompts.cursor, by_teacher))
        return [self.state.asked[prompt.id] for prompt in prompts]

    def requeue(
        self, asked: Iterable[PendingPrompt], reason: RequeueReason, tokens: int = 0
    ) -> list[PendingPrompt]:
        """Note that these completions were lost; returns the prompts that are to be asked again.

        `tokens`: what is known to have been generated of them.
        """
        ids = [one.prompt.id for one in asked]
        if not ids:
            return []
        self.write(Requeued(ids, reason, tokens))
        most = self.state.rules.max_attempts
        spent = [i for i in ids if self.state.asked[i].attempts >= most]
        if spent:
            why: DropReason = reason if reason in ("straggler", "over_long", "unusable") else "engine_failed"
            self.drop(spent, why, f"{most} completions were lost ({reason})")
        if broken := [i for i in ids if i in self.state.asked and self.state.is_broken(i)]:
            self.drop(broken, "group_broken", "another completion of its prompt was dropped")
        return [self.state.asked[i] for i in ids if i in self.state.asked]

    def drop(self, ids: list[str], reason: DropReason, detail: str, tokens: int = 0) -> None:
        """These will not be trained on; `tokens` were generated for them and are not on record.

        With groups, the members of theirs that are buffered go too.
        """
        self.write(Dropped(ids, reason, tokens, detail))
        self._drop_broken()

    def _drop_broken(self) -> None:
        if self.state.broken and (ids := [i for i in self.state.buffer.ids() if self.state.is_broken(i)]):
            self.write(Dropped(ids, "group_broken", 0, "another completion of its prompt was dropped"))

    async def admit(self, rollouts: list[Rollout]) -> None:
        """Journal scored rollouts and put them into the buffer."""
        for rollout in rollouts:
            self.write(rollout)
        self._drop_broken()
        await self.journal.commit()

    async def compose(self) -> Batch | None:
        """The next batch of the current lineage, safe on disk; None: too few rollouts. Drops the too old."""
        state = self.state
        assert state.lineage is not None, "a batch is composed for a trainer"
        while True:
            trial = state.trials.next_part(state.buffer)
            pick = state.buffer.pick(state.next_step, state.rules.batch, state.step_of, trial)
            if pick.too_old:
                hard = state.rules.bound.hard
                self.drop(pick.too_old, "too_old", f"older than {hard} at step {state.next_step}")
            if not self._quarantined_of(pick.chosen) and (pick.chosen or not trial):
                break
        if not pick.chosen:
            return None
        version = Version(state.lineage, state.next_step)
        self.write(BatchFormed(version, pick.chosen, pick.weights if min(pick.weights) < 1 else []))
        await self.journal.commit(durable=True)
        return state.batches.get(version)

    async def open_lineage(
        self,
        checkpoint: Version | None,
        fingerprint: str,
        without: Collection[str] | None = None,
        ranks: int | None = None,
    ) -> LineageOpened:
        """A trainer of so many ranks started from `checkpoint`.

        `without`: it was rolled back: no batch is handed out again, and these rollouts never again.
        """
        accused = accused_by_death(self.state)
        record = plan_lineage(self.state, checkpoint, fingerprint, without, ranks, self._sound)
        self.write(record)
        self._drop_broken()
        if accused is not None:
            self._convict(accused)
        await self.journal.commit(durable=True)
        return record

    def _convict(self, accused: Batch) -> None:
        """Quarantine what a trainer died on, when no part of it is left to be tried by itself."""
        ids = [entry.id for entry in accused.entries]
        if not is_single(self.state, accused):
            logger.error(
                "trainers died on the batch of %s: its %d rollouts are trained in parts, until the one that "
                "cannot be trained is found", accused.version, len(ids),
            )  # fmt: skip
            return
        detail = f"a trainer died on the batch of {accused.version}, which held nothing else"
        rollouts = self.rollouts(accused)
        self.drop(ids, "poisoned", detail)
        for rollout in rollouts:
            self._quarantine(rollout.id, "poisoned", detail, unpack(rollout.tokens).tolist())
            logger.error("rollout %s is quarantined, poisoned: %s", rollout.id, detail)

    def _sound(self, batch: Batch) -> bool:
        """Whether it can be handed out again; one that was trained once can be."""
        return all(self._problem(entry) is None for entry in batch.entries)

    def _problem(self, entry: Entry) -> Problem | None:
        """What is wrong with a rollout as the journal holds it; one that was admitted here was checked."""
        if entry.rollout is None and entry.id not in self.state.where:
            return Problem("the rollout", "a trace in the journal", "there with its arrays")
        if entry.rollout is None:
            found = self._sift(self._record(entry.id))
            if isinstance(found, Problem):
                return found
            entry.rollout = found
        return None

    def _quarantined_of(self, chosen: list[str]) -> int:
        """Quarantine those of `chosen` that cannot be used; how many there were."""
        count = 0
        for rollout in chosen:
            if rollout not in self.state.buffer:  # its group went with another one
                continue
            if problem := self._problem(self.state.buffer[rollout]):
                self.drop([rollout], "unusable", str(problem))
                self._quarantine(rollout, "unusable", str(problem), [])
                logger.error("rollout %s of the journal is quarantined, unusable: %s", rollout, problem)
                count += 1
        return count

    def rollouts(self, batch: Batch) -> list[Rollout]:
        """The rollouts of a batch, in order; read back from the journal where memory let them go."""
        return [entry.rollout or self._read(entry.id) for entry in batch.entries]

    def _read(self, rollout: str) -> Rollout:
        found = self._sift(self._record(rollout))
        return self._record(rollout) if isinstance(found, Problem) else found

    def _record(self, rollout: str) -> Rollout:
        record = self.journal.read(self.state.where[rollout])
        assert isinstance(record, Rollout), f"{rollout} is not where the journal should hold it"
        return record

    async def tidy(self, keep_checkpoints: int) -> None:
        """After a checkpoint: take a snapshot, and archive the segments that no restart needs."""
        state, covered = self.state, cover(self.state, keep_checkpoints)
        held = base(state, covered)
        begins_here = covered == state.checkpoints[-1]
        record = take(state, None if begins_here else held.segment if held else 0)
        location = self.journal.append(record)
        await self.journal.commit(durable=True)
        state.apply(record, location)
        if held := base(state, covered):
            in_use = {location.segment for location in state.where.values()}
            await self.journal.archive(held.segment, in_use | held.needed)


def _check_same_prompts(folder: Path, before: Opened, now: Opened) -> None:
    """Raise ConfigError when the cursor on record would give out ids that were given out before."""
    if (before.run, before.seed) != (now.run, now.seed):
        raise ConfigError(
            f"the journal in {folder} is of run {before.run!r} with seed {before.seed}, this is {now.run!r} "
            f"with seed {now.seed}: its prompts come in another order; start a new run"
        )
    if (before.per_prompt, before.rows) != (now.per_prompt, now.rows):
        raise ConfigError(
            f"the journal in {folder} is of {before.rows or 'endless'} prompts, {before.per_prompt} of each, "
            f"and these are {now.rows or 'endless'} prompts, {now.per_prompt} of each: some would be asked "
            "twice; undo the change of the prompts, rollout.per_prompt, evaluation or evaluation.prompts, or "
            "start a new run"
        )
