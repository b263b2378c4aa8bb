"""What an audit looks at: the journal as it was replayed, and the trainer's ledger. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from distill.buffer.staleness import Bound, Rules
from distill.run_log.records import (
    AnyRecord,
    BatchFormed,
    Checkpointed,
    Concluded,
    Dropped,
    Evaluated,
    Issued,
    LineageOpened,
    Location,
    Opened,
    RolledBack,
    Rollout,
    Snapshot,
    Stepped,
    VersionApplied,
    VersionPublished,
)
from distill.run_log.snapshot import differs
from distill.run_log.state import RunState
from distill.run_log.validation import span_problem
from student_trainer.ledger import Lineage
from sync.errors import DataError
from sync.wire import Version

LedgerLines = Mapping[int, Mapping[int, list[str]]]
"""Lineage → step after it → rollout ids trained on, all ranks together."""


@dataclass
class JournalEvidence:
    """The journal's records as the checks need them."""

    state: RunState | None = None
    bound: Bound = field(default_factory=lambda: Bound(0, 0))
    """On staleness, as of the newest opening."""
    issued: Counter[str] = field(default_factory=Counter)
    for_teacher: set[str] = field(default_factory=set)
    """Prompts issued for a teacher to complete."""
    scored: dict[str, Rollout] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    """Rollout → reason."""
    batches: dict[Version, tuple[list[str], Bound]] = field(default_factory=dict)
    """Ids of each batch, and the bound on staleness when it was composed."""
    opened: list[LineageOpened] = field(default_factory=list)
    reached: dict[int, int] = field(default_factory=dict)
    """Newest step that the trainer reported, by lineage."""
    shown: dict[int, int] = field(default_factory=dict)
    """Newest step that any record names, by lineage: a report, a publication, a checkpoint, …"""
    checkpoint: Version | None = None
    """The newest on record."""
    wrong_weight: set[str] = field(default_factory=set)
    impossible: list[str] = field(default_factory=list)
    """Rollouts with tokens of versions that had not been published when they were recorded."""
    concluded: list[Concluded] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, records: Iterable[tuple[Location, AnyRecord]]) -> JournalEvidence:
        """Apply the records in order; stops at damage."""
        journal = cls()
        try:
            for location, record in records:
                journal._take(record, location)
        except DataError as error:
            journal.damage.append(str(error))
        if journal.state is None and not journal.damage:
            journal.damage.append("the journal is empty or missing")
        return journal

    def _take(self, record: AnyRecord, at: Location) -> None:
        """Apply a record and note it. Raises DataError when it contradicts those before it."""
        if isinstance(record, Opened):
            hard = record.max_staleness if record.hard_limit is None else record.hard_limit
            self.bound = Bound(record.max_staleness, hard, record.half_life)
            self.state = self.state or RunState(Rules(record.batch, self.bound, group=record.group))
        if self.state is None:
            raise DataError("the journal does not begin with the opening of a run: it is not whole")
        try:
            _check_order(self.state, record)
            self.state.replay(record, at)
            if isinstance(record, BatchFormed):
                self.wrong_weight |= _wrong_weights(self.state, record, self.bound)
        except (LookupError, ValueError, AssertionError) as error:
            raise DataError(
                f"segment {at.segment}, byte {at.offset} of the journal: {type(record).__name__} contradicts "
                f"the records before it ({type(error).__name__}: {error})"
            ) from None
        self._note(record, self.state)

    def _note(self, record: AnyRecord, state: RunState) -> None:
        match record:
            case Issued():
                self.issued.update(prompt.id for prompt in record.prompts)
                self.for_teacher.update(record.prompts[place].id for place in record.by_teacher)
            case Rollout():
                self.scored[record.id] = record.released()
                if span_problem(record.spans, state):
                    self.impossible.append(record.id)
            case Dropped():
                self.dropped.update(dict.fromkeys(record.ids, record.reason))
            case BatchFormed():
                self.batches[record.version] = record.ids, self.bound
            case LineageOpened():
                self.opened.append(record)
                self.dropped.update(dict.fromkeys(record.without, "rolled_back"))
                self._show(record.checkpoint)
            case Stepped() | VersionPublished() | VersionApplied() | Checkpointed():
                self._show(record.version)
                if isinstance(record, Stepped):
                    self.reached[record.version.lineage] = record.version.step
                elif isinstance(record, Checkpointed):
                    self.checkpoint = record.version
            case RolledBack():
                self.checkpoint = record.to
            case Evaluated():
                self._show(record.report.version)
            case Concluded():
                self.concluded.append(record)

    def _show(self, version: Version | None) -> None:
        if version is not None:
            self.shown[version.lineage] = max(version.step, self.shown.get(version.lineage, 0))


def _check_order(state: RunState, record: AnyRecord) -> None:
    """Raise ValueError for a batch, a lineage or a snapshot that cannot come next."""
    if isinstance(record, Snapshot) and differs(record, state):
        raise ValueError(f"the snapshot of {record.checkpoint} holds other prompts, rollouts or counts")
    if isinstance(record, BatchFormed) and record.version != (state.lineage, state.next_step):
        raise ValueError(f"the batch of {record.version}, and step {state.next_step} is the next one")
    if isinstance(record, LineageOpened):
        start = record.checkpoint or Version(-1, 0)
        if start.lineage >= record.lineage or not start.step == record.start <= record.branch:
            raise ValueError(f"lineage {record.lineage} begins at {record.start} from {record.checkpoint}")


def _wrong_weights(state: RunState, record: BatchFormed, bound: Bound) -> set[str]:
    """Rollouts of a batch whose weight is not the one of their age when it was composed."""
    recorded = record.weights or [1.0] * len(record.ids)
    expected = [bound.weight(age) for age in state.batches[record.version].ages]
    return {i for i, one, other in zip(record.ids, recorded, expected, strict=True) if one != other}


@dataclass
class Evidence:
    """What the checks look at. Those of an undamaged journal only: `journal.state` is set."""

    journal: JournalEvidence
    ledger: LedgerLines
    """As read before the journal."""
    shown: Mapping[int, Mapping[str, Collection[int]]]
    """Lineage → whose line (in words) → steps that have one, as read after the journal."""
    before: Mapping[int, Lineage] = field(default_factory=dict)
    after: Mapping[int, Lineage] = field(default_factory=dict)
    checkpoints: Path | None = None

    @property
    def state(self) -> RunState:
        assert self.journal.state is not None, "checks of the state need a whole journal"
        return self.journal.state

    @property
    def lineages(self) -> list[int]:
        """Those of the ledger that are on record."""
        return [n for n in sorted(self.ledger) if n < len(self.journal.opened)]

    def batch(self, lineage: int, after: int) -> tuple[list[str], Bound]:
        """Batch on record for the step to `after` in the ancestry of `lineage`."""
        version = Version(self.state.lineages.owner(lineage, after - 1), after - 1)
        return self.journal.batches.get(version, ([], Bound(0, 0)))

    @cached_property
    def trained(self) -> list[tuple[str, int | None, int]]:
        """(id, age, greatest age allowed) of every rollout of every ledger line; ages in versions.

        Age None: the rollout, or the versions of its tokens, are not on record.
        """
        return [
            (rollout, self._age(rollout, Version(lineage, after - 1)), bound.hard)
            for lineage in self.lineages
            for after, ids in self.ledger[lineage].items()
            for _, bound in [self.batch(lineage, after)]
            for rollout in ids
        ]

    def _age(self, rollout: str, at: Version) -> int | None:
        stub = self.journal.scored.get(rollout)
        if stub is None or not (stub.spans or stub.by_teacher):
            return None
        steps = [self.state.lineages.step_in(span.version, at.lineage) for span in stub.spans]
        return 0 if stub.by_teacher else at.step - min(steps)

    def ancestry(self, lineage: int) -> Counter[str]:
        """How often the weights of `lineage`, its ancestors included, were trained on each rollout."""
        seen: Counter[str] = Counter()
        until, current = 1 << 62, lineage
        while True:
            for step, ids in self.ledger.get(current, {}).items():
                if step <= until:
                    seen.update(ids)
            checkpoint = self.journal.opened[current].checkpoint
            if checkpoint is None:
                return seen
            until, current = min(until, checkpoint.step), checkpoint.lineage


def by_rank(journal: JournalEvidence, ledger: Mapping[int, Lineage]) -> dict[int, dict[str, set[int]]]:
    """Lineage → rank, in words → steps of which it has a line."""
    found = {}
    for opened in journal.opened:
        shown = ledger.get(opened.lineage, Lineage()).shown
        ranks = opened.ranks or 1 + max((rank for one in shown.values() for rank in one), default=0)
        found[opened.lineage] = {
            f" of rank {rank}": {step for step, one in shown.items() if rank in one} for rank in range(ranks)
        }
    return found
