"""The one place that writes: every change goes into the journal and the state together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Literal

from distill.control.journal import Journal
from distill.control.records import (
    AgainReason,
    AnyRecord,
    AskedAgain,
    Composed,
    Dropped,
    DropReason,
    Issued,
    LineageOpened,
    Opened,
    Rollout,
)
from distill.control.state import Asked, Batch, RunState
from distill.prompts.stream import Cursor, PromptStream
from sync.errors import ConfigError
from sync.wire import Version

MAX_ATTEMPTS = 5
"""Completions of one prompt that may be broken off or too slow before it is dropped."""


class Books:
    """Journal, state and prompt cursor of a run. Use `Books.open`."""

    def __init__(
        self, journal: Journal, state: RunState, prompts: PromptStream, author: Callable[[int], bool]
    ) -> None:
        self.journal = journal
        self.state = state
        self._prompts = prompts
        self._author = author
        self._compacted: set[int] = set()

    @classmethod
    def open(
        cls,
        journal: Journal,
        prompts: PromptStream,
        *,
        run: str,
        seed: int,
        batch: int,
        max_staleness: int,
        order: Literal["oldest", "arrival"] = "oldest",
        author: Callable[[int], bool] = lambda number: False,
    ) -> Books:
        """Rebuild the state from the journal (empty: a new run).

        `author`: whether the teacher completes the prompt with that number; asked once, when it is issued.
        Raises DataError when it is damaged, ConfigError when it is another run's.
        """
        state = RunState(batch, max_staleness, order)
        for location, record in journal.replay():
            if isinstance(record, Opened) and (record.run, record.seed) != (run, seed):
                raise ConfigError(
                    f"the journal in {journal.folder} is of run {record.run!r} with seed {record.seed}, this "
                    f"is {run!r} with seed {seed}: its prompts come in another order; start a new run"
                )
            state.apply(record, location if isinstance(record, Issued | Rollout) else None)
            if isinstance(record, Rollout):
                state.unload(record.id)
        state.forget_unavailable()
        prompts.cursor = Cursor(*state.cursor)
        books = cls(journal, state, prompts, author)
        books.write(Opened(run, seed, batch, max_staleness))
        return books

    def write(self, record: AnyRecord) -> None:
        """Append to the journal and change the state; safe on disk after the next commit."""
        self.state.apply(record, self.journal.append(record))

    def issue(self, count: int) -> list[Asked]:
        """Take `count` prompts from the cursor."""
        prompts, first = self._prompts.take(count), self.state.counters.issued
        by_teacher = [place for place in range(count) if self._author(first + place)]
        self.write(Issued(prompts, *self._prompts.cursor, by_teacher))
        return [self.state.asked[prompt.id] for prompt in prompts]

    def ask_again(self, asked: Iterable[Asked], reason: AgainReason) -> list[Asked]:
        """Note that these completions were lost; returns the prompts that are to be asked again."""
        ids = [one.prompt.id for one in asked]
        if not ids:
            return []
        self.write(AskedAgain(ids, reason))
        spent = [i for i in ids if self.state.asked[i].attempts >= MAX_ATTEMPTS]
        if spent:
            why: DropReason = "straggler" if reason == "straggler" else "engine_failed"
            self.drop(spent, why, f"{MAX_ATTEMPTS} completions were lost ({reason})")
        return [self.state.asked[i] for i in ids if i in self.state.asked]

    def drop(self, ids: list[str], reason: DropReason, detail: str, tokens: int = 0) -> None:
        """These will not be trained on; `tokens` were generated for them and are not on record."""
        self.write(Dropped(ids, reason, tokens, detail))

    async def admit(self, rollouts: list[Rollout]) -> None:
        """Journal scored rollouts and put them into the buffer."""
        for rollout in rollouts:
            self.write(rollout)
        await self.journal.commit()

    async def compose(self) -> Batch | None:
        """The next batch of the current lineage, safe on disk; None: too few rollouts. Drops the too old."""
        state = self.state
        assert state.lineage is not None, "a batch is composed for a trainer"
        pick = state.buffer.pick(state.next_step, state.batch, state.step_of)
        if pick.too_old:
            self.drop(pick.too_old, "too_old", f"older than {state.max_staleness} at step {state.next_step}")
        if not pick.chosen:
            return None
        version = Version(state.lineage, state.next_step)
        self.write(Composed(version, pick.chosen))
        await self.journal.commit(durable=True)
        return state.batches.get(version)

    async def open_lineage(
        self, checkpoint: Version | None, fingerprint: str, without: Collection[str] | None = None
    ) -> LineageOpened:
        """A trainer started from `checkpoint`.

        `without`: it was rolled back: no batch is handed out again, and these rollouts never again.
        """
        record = self.state.plan_lineage(checkpoint, fingerprint, anew=without is not None)
        self.write(record)
        if bad := [rollout for rollout in without or () if rollout in self.state.buffer]:
            self.drop(bad, "rolled_back", f"trained on in bad steps after {checkpoint or 'the model folder'}")
        await self.journal.commit(durable=True)
        return record

    def rollouts(self, batch: Batch) -> list[Rollout]:
        """The rollouts of a batch, in order; read back from the journal where memory let them go."""
        return [entry.rollout or self._read(entry.id) for entry in batch.entries]

    def _read(self, rollout: str) -> Rollout:
        record = self.journal.read(self.state.where[rollout])
        assert isinstance(record, Rollout), f"{rollout} is not where the journal should hold it"
        return record

    async def tidy(self, keep_checkpoints: int) -> None:
        """Shrink the segments that the kept checkpoints cover."""
        needed = self.state.forget_covered(keep_checkpoints)
        self._compacted |= await self.journal.compact(needed, self._compacted)
