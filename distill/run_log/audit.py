"""Checks a run's guarantees from its journal, the trainer's ledger and its checkpoints.

The journal says what was to be trained on, the ledger what was. `CHECKS` names every violation, what it means
and the function that finds it; a run that is still going on violates none. The audit also reports how many
steps were trained again, after a resume on as many ranks, and which of them gave other bits than the first
time: none on CPUs; on GPUs it takes deterministic kernels.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

from distill.buffer.staleness import Bound
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
    RolloutStub,
    Snapshot,
    Stepped,
    VersionApplied,
    VersionPublished,
    stub_of,
)
from distill.run_log.segments import read_all
from distill.run_log.snapshot import differs
from distill.run_log.state import Rules, RunState
from distill.run_log.validation import span_problem
from student_trainer.checkpoint_files import index, latest, saved
from student_trainer.ledger import Lineage, read, repeated
from sync.errors import DataError
from sync.wire import Version

LedgerLines = Mapping[int, Mapping[int, list[str]]]
"""Lineage → step after it → rollout ids trained on, all ranks together."""


@dataclass
class AuditReport:
    """Result of an audit: `violations` must be empty, the other fields are figures."""

    prompts: int = 0
    scored: int = 0
    trained: int = 0
    """Rollouts in the ancestry of the last lineage."""
    tokens: int = 0
    """Completion tokens of scored rollouts."""
    tokens_by_teacher: int = 0
    """Of them, those that teachers generated."""
    open_prompts: list[str] = field(default_factory=list)
    """Issued, neither scored nor dropped: a resumed run requeues them."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Rollouts by reason."""
    late: int = 0
    """Rollouts of batches at a weight below 1, because of their age."""
    again: int = 0
    """Steps that were trained again on the same rows of the same ranks."""
    differing: list[str] = field(default_factory=list)
    """Of them, those that gave other weights than the first time."""
    oldest: int = 0
    """Greatest age of a trained rollout, in versions."""
    violations: dict[str, list[str]] = field(default_factory=dict)
    """Name in `CHECKS` → what was found; checks that found nothing are left out."""

    @property
    def ok(self) -> bool:
        """Whether every guarantee holds."""
        return not self.violations


def audit(run_dir: Path) -> AuditReport:
    """Audit a run's folder; the run may be going on. Raises DataError when it is no run's folder at all.

    The ledger is read before the journal and after it: what it shows before must be on record, and what is on
    record must be in it after.
    """
    if not (run_dir / "journal").is_dir() and not (run_dir / "ledger").is_dir():
        raise DataError(f"{run_dir} holds neither journal nor ledger: name the folder of a run")
    before = read(run_dir / "ledger")
    journal = _Journal.read((Location(s, o), record) for s, o, record in read_all(run_dir / "journal"))
    after = read(run_dir / "ledger")
    lines = {number: lineage.steps for number, lineage in before.items()}
    shown = _by_rank(journal, after)
    report = _report(_Evidence(journal, lines, shown, before, after, run_dir / "checkpoints"))
    same, other = repeated(before)
    report.again, report.differing = len(same) + len(other), [str(version) for version in other]
    return report


def check(records: Iterable[tuple[Location, AnyRecord]], ledger: LedgerLines) -> AuditReport:
    """Audit a journal's records against a ledger. Pure."""
    shown = {number: {"": steps.keys()} for number, steps in ledger.items()}
    return _report(_Evidence(_Journal.read(records), ledger, shown))


# --- evidence ---------------------------------------------------------------------------------------------


@dataclass
class _Journal:
    """The journal's records as the checks need them."""

    state: RunState | None = None
    bound: Bound = field(default_factory=lambda: Bound(0, 0))
    """On staleness, as of the newest opening."""
    issued: Counter[str] = field(default_factory=Counter)
    for_teacher: set[str] = field(default_factory=set)
    """Prompts issued for a teacher to complete."""
    scored: dict[str, RolloutStub] = field(default_factory=dict)
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
    def read(cls, records: Iterable[tuple[Location, AnyRecord]]) -> _Journal:
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
            self.state.apply(record, at if isinstance(record, Issued | Rollout) else None)
            if isinstance(record, Rollout):
                self.state.unload(record.id)
            elif isinstance(record, BatchFormed):
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
            case Rollout() | RolloutStub():
                self.scored[record.id] = stub_of(record)
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


class _Trained(NamedTuple):
    """A rollout of a ledger line."""

    id: str
    age: int | None
    """Versions; None: it, or the versions of its tokens, are not on record."""
    bound: int
    """Greatest age allowed in its batch."""


@dataclass
class _Evidence:
    """What the checks look at. Those of an undamaged journal only: `journal.state` is set."""

    journal: _Journal
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
    def trained(self) -> list[_Trained]:
        """Every rollout of every ledger line."""
        return [
            _Trained(rollout, self._age(rollout, Version(lineage, after - 1)), bound.hard)
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


def _by_rank(journal: _Journal, ledger: Mapping[int, Lineage]) -> dict[int, dict[str, set[int]]]:
    """Lineage → rank, in words → steps of which it has a line."""
    found = {}
    for opened in journal.opened:
        shown = ledger.get(opened.lineage, Lineage()).shown
        ranks = opened.ranks or 1 + max((rank for one in shown.values() for rank in one), default=0)
        found[opened.lineage] = {
            f" of rank {rank}": {step for step, one in shown.items() if rank in one} for rank in range(ranks)
        }
    return found


def _report(evidence: _Evidence) -> AuditReport:
    journal, report = evidence.journal, AuditReport()
    for name, one in CHECKS.items():
        if (not journal.damage or not one.needs_journal) and (found := list(one.find(evidence))):
            report.violations[name] = found
    if journal.damage:
        return report
    report.prompts, report.scored = len(journal.issued), len(journal.scored)
    report.tokens = sum(stub.length for stub in journal.scored.values())
    report.tokens_by_teacher = sum(stub.length for stub in journal.scored.values() if stub.by_teacher)
    report.open_prompts = sorted(journal.issued.keys() - journal.scored.keys() - journal.dropped.keys())
    report.dropped = dict(Counter(journal.dropped.values()))
    report.late = evidence.state.counters.late
    report.oldest = max((one.age for one in evidence.trained if one.age is not None), default=0)
    if journal.opened:
        report.trained = evidence.ancestry(len(journal.opened) - 1).total()
    return report


# --- checks: what each finds is in the table below --------------------------------------------------------


def _ledger_damaged(e: _Evidence) -> Iterator[str]:
    for lineage in e.after.values():
        yield from lineage.damage
    for opened in () if e.journal.damage else e.journal.opened:
        if (found := e.before.get(opened.lineage)) is None or not found.shown:
            continue
        if (found.parent, found.start) != (opened.checkpoint, opened.start):
            yield (
                f"ledger of lineage {opened.lineage} begins at step {found.start} from {found.parent}; "
                f"on record is step {opened.start} from {opened.checkpoint}"
            )
        ranks = {rank for one in found.shown.values() for rank in one}
        for rank in sorted(ranks - set(range(opened.ranks or 1 + max(ranks)))):
            yield f"ledger of lineage {opened.lineage}: rank {rank} of a trainer with {opened.ranks} ranks"


def _missing_in_ledger(e: _Evidence) -> Iterator[str]:
    """Ranges of steps."""
    for number, opened in enumerate(e.journal.opened):
        last = e.journal.shown.get(number, 0)
        for whose, steps in e.shown.get(number, {"": ()}).items():
            there = [opened.start, *sorted(step for step in steps if opened.start < step <= last), last + 1]
            for before, after in itertools.pairwise(there):
                if after > before + 1:
                    upto = f" to {Version(number, after - 1)}" if after > before + 2 else ""
                    yield f"{Version(number, before + 1)}{upto}{whose}"


def _unknown_version(e: _Evidence) -> list[str]:
    named = e.ledger.keys() | e.journal.shown.keys()
    return [f"lineage {n}" for n in sorted(named) if n not in range(len(e.journal.opened))]


def _checkpoint_missing(e: _Evidence) -> Iterator[str]:
    """A folder of checkpoints that was removed whole is no violation."""
    if (folder := e.checkpoints) is None:
        return
    while True:
        name = latest(folder)
        problem = index(folder / name)[1] if name else None
        if name == latest(folder):  # else the run saved another one meanwhile
            break
    if problem:
        yield f"{folder / 'latest'} names {name}: {problem}"
    elif not name and e.journal.checkpoint and saved(folder):
        yield f"{folder / 'latest'} is missing, and checkpoint {e.journal.checkpoint} is on record"


def _lost(e: _Evidence) -> list[str]:
    placed = set(e.state.buffer.ids()) | e.journal.dropped.keys()
    if e.journal.opened:
        last = e.journal.opened[-1].lineage
        for version, (ids, _) in e.journal.batches.items():
            if e.state.lineages.owner(last, version.step) == version.lineage:
                placed.update(ids)
    return sorted(e.journal.scored.keys() - placed)


def _trained_twice(e: _Evidence) -> list[str]:
    return sorted({i for n in e.lineages for i, count in e.ancestry(n).items() if count > 1})


def _not_as_composed(e: _Evidence) -> Iterator[str]:
    """A step that a crash cut off before it was reported may be in the ledger of some ranks only."""
    for lineage in e.lineages:
        for after, ids in e.ledger[lineage].items():
            composed, trained = Counter(e.batch(lineage, after)[0]), Counter(ids)
            cut_off = after > e.journal.reached.get(lineage, 0) and trained <= composed
            if trained != composed and not cut_off:
                yield f"{Version(lineage, after)}"


def _unproven(e: _Evidence) -> list[str]:
    """Problems of the last end; of earlier ends, those with weights that differed."""
    *before, last = [Concluded(None, {}, []), *e.journal.concluded]
    counted = [one for one in before if False in one.weights.values()] + [last]
    return [problem for one in counted for problem in one.problems]


def _wrong_generator(e: _Evidence) -> list[str]:
    return [i for i, one in e.journal.scored.items() if one.by_teacher != (i in e.journal.for_teacher)]


class Check(NamedTuple):
    """One kind of violation."""

    meaning: str
    find: Callable[[_Evidence], Iterable[str]]
    needs_journal: bool = True
    """It is skipped when the journal is damaged."""


CHECKS: Final = {
    "journal_damaged": Check(
        "the journal is missing or damaged, or a record contradicts those before it",
        lambda e: e.journal.damage,
        needs_journal=False,
    ),
    "ledger_damaged": Check(
        "a ledger file was altered: a line is changed, missing, repeated or from elsewhere",
        _ledger_damaged,
        needs_journal=False,
    ),
    "missing_in_ledger": Check(
        "steps that the run reached, and that the ledger of a rank does not show", _missing_in_ledger
    ),
    "unknown_version": Check(
        "versions in the ledger or the journal that no start of the trainer on record made", _unknown_version
    ),
    "checkpoint_missing": Check(
        "`latest` names no whole checkpoint: a resume would not find what was saved", _checkpoint_missing
    ),
    "issued_twice": Check(
        "prompts that were issued twice",
        lambda e: sorted(i for i, count in e.journal.issued.items() if count > 1),
    ),
    "lost": Check("scored rollouts that are in no batch, not buffered, and not dropped", _lost),
    "trained_twice": Check("rollouts that went twice into the same weights", _trained_twice),
    "not_as_composed": Check(
        "steps that were trained on other rollouts than the batch on record", _not_as_composed
    ),
    "not_in_journal": Check(
        "trained rollouts that are not on record, or without the versions of their tokens",
        lambda e: [one.id for one in e.trained if one.age is None],
    ),
    "too_old": Check(
        "rollouts that were older than the bound when they were trained",
        lambda e: [one.id for one in e.trained if one.age is not None and one.age > one.bound],
    ),
    "wrong_weight": Check(
        "rollouts whose loss weight on record is not the one of their age",
        lambda e: sorted(e.journal.wrong_weight),
    ),
    "impossible_version": Check(
        "rollouts with tokens of a version that the run had not published then",
        lambda e: e.journal.impossible,
    ),
    "unproven": Check(
        "what the end of the run did not show: weights that differ or were not compared, no score", _unproven
    ),
    "wrong_generator": Check(
        "completions by the teacher for a prompt of the student's, or the other way round", _wrong_generator
    ),
}
"""Violation → its check. The documentation lists them."""
VIOLATIONS: Final = {name: one.meaning for name, one in CHECKS.items()}
