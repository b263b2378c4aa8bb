"""Checks a run's guarantees from its journal and the trainer's ledger.

answered   every prompt has a scored rollout, was dropped with a reason, or is reported as open
kept       every scored rollout is in a batch on the last lineage's way, dropped, or buffered
once       no weights were trained twice on one rollout: along the ancestry of every lineage
as told    every step was trained on the batch that the journal composed for it, and on all of it (a step
           that a crash cut off before it was reported may be in the ledger of some ranks only)
fresh      no rollout was older than the bound when it was trained (the hard limit, with freshness weights);
           what a teacher wrote has no age
weighed    every rollout of a batch has the weight on record that its age and the bound give it
recorded   every trained rollout is in the journal with the versions of its tokens
remembered every snapshot that a restart may begin from is what the records before it say
authors    every rollout was written by whom its prompt was issued to, teacher or student

Beside the guarantees it says how many steps were trained again, after a resume on as many ranks, and which of
them gave other bits than the first time: none on CPUs; on GPUs it takes deterministic kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from distill.control.clock import Bound
from distill.control.records import (
    AnyRecord,
    Composed,
    Dropped,
    Issued,
    LineageOpened,
    Location,
    Opened,
    Rollout,
    Snapshot,
    Stepped,
    Trace,
    trace_of,
)
from distill.control.segments import read_all
from distill.control.snapshot import differs
from distill.control.state import Rules, RunState
from student_trainer.ledger import read, repeated
from sync.errors import DataError
from sync.wire import Version

LedgerLines = Mapping[int, Mapping[int, list[str]]]
"""Lineage → step after it → ids trained on, all ranks together."""


@dataclass
class AuditReport:
    """What was found; every list is empty when the guarantees hold."""

    prompts: int = 0
    scored: int = 0
    trained: int = 0
    """Rollouts on the way of the last lineage."""
    tokens: int = 0
    """Completion tokens of scored rollouts."""
    tokens_by_teacher: int = 0
    """Those of them that teachers wrote."""
    open_prompts: list[str] = field(default_factory=list)
    """Issued, neither scored nor dropped: a resumed run asks them again. No violation."""
    dropped: dict[str, int] = field(default_factory=dict)
    issued_twice: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    trained_twice: list[str] = field(default_factory=list)
    not_as_composed: list[str] = field(default_factory=list)
    """Steps whose ledger differs from the journal's batch."""
    too_old: list[str] = field(default_factory=list)
    misweighed: list[str] = field(default_factory=list)
    """Rollouts whose weight on record is not the one of their age."""
    misremembered: list[str] = field(default_factory=list)
    """Checkpoints whose snapshot, which a restart begins from, is not what the records before it say."""
    late: int = 0
    """Rollouts of batches at a weight below 1, by their freshness. No violation."""
    unrecorded: list[str] = field(default_factory=list)
    again: int = 0
    """Steps that were trained again on the same rows of the same ranks."""
    differing: list[str] = field(default_factory=list)
    """Those that gave other weights than the first time. No violation."""
    other_author: list[str] = field(default_factory=list)
    oldest: int = 0
    """Greatest age of a trained rollout, in versions."""

    @property
    def ok(self) -> bool:
        """Whether every guarantee holds."""
        broken = (self.issued_twice, self.lost, self.trained_twice, self.not_as_composed, self.misremembered)
        return not any((*broken, self.too_old, self.misweighed, self.unrecorded, self.other_author))


@dataclass
class _Books:
    """The journal as the audit reads it."""

    state: RunState
    issued: Counter[str] = field(default_factory=Counter)
    for_teacher: set[str] = field(default_factory=set)
    """Prompts that were issued for a teacher to complete."""
    scored: dict[str, Trace] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    composed: dict[Version, list[str]] = field(default_factory=dict)
    opened: list[LineageOpened] = field(default_factory=list)
    reached: dict[int, int] = field(default_factory=dict)
    """Newest step that the trainer reported, by lineage."""
    bound: dict[Version, Bound] = field(default_factory=dict)
    """Bound on staleness when the batch was composed."""
    misweighed: set[str] = field(default_factory=set)
    misremembered: list[str] = field(default_factory=list)


def audit(run_dir: Path) -> AuditReport:
    """Audit a run's folder; the run may still go on. Raises DataError for a damaged or missing journal."""
    if not (run_dir / "journal").is_dir():
        raise DataError(f"{run_dir} holds no journal: name the folder of a run")
    records = ((Location(s, o), record) for s, o, record in read_all(run_dir / "journal"))
    lineages = read(run_dir / "ledger")
    report = check(records, {number: lineage.steps for number, lineage in lineages.items()})
    same, other = repeated(lineages)
    report.again, report.differing = len(same) + len(other), [str(version) for version in other]
    return report


def check(records: Iterable[tuple[Location, AnyRecord]], ledger: LedgerLines) -> AuditReport:
    """Audit a journal's records against a ledger. Pure."""
    books = _read(records)
    report = AuditReport(prompts=len(books.issued), scored=len(books.scored))
    report.issued_twice = sorted(i for i, count in books.issued.items() if count > 1)
    report.open_prompts = sorted(books.issued.keys() - books.scored.keys() - books.dropped.keys())
    report.dropped = dict(Counter(books.dropped.values()))
    report.lost = sorted(_lost(books))
    report.misweighed = sorted(books.misweighed)
    report.misremembered = books.misremembered
    report.late = books.state.counters.late
    _check_authors(books, report)
    for lineage in ledger:
        _check_lineage(books, ledger, lineage, report)
    last = max(ledger, default=None)
    report.trained = sum(_way(books, ledger, last).values()) if last is not None else 0
    return report


def _read(records: Iterable[tuple[Location, AnyRecord]]) -> _Books:
    books, bound = None, Bound(0, 0)
    for location, record in records:
        if isinstance(record, Opened):
            hard = record.max_staleness if record.hard_limit is None else record.hard_limit
            bound = Bound(record.max_staleness, hard, record.half_life)
            books = books or _Books(RunState(Rules(record.batch, bound, group=record.group)))
        if books is None:
            raise DataError("the journal does not begin with the opening of a run: it is not whole")
        _note(books, record, bound)
        books.state.apply(record, location if isinstance(record, Issued | Rollout) else None)
        if isinstance(record, Rollout):
            books.state.unload(record.id)
        elif isinstance(record, Composed):
            books.misweighed |= _misweighed(books, record, bound)
        elif isinstance(record, Snapshot) and differs(record, books.state):
            books.misremembered.append(str(record.checkpoint))
    if books is None:
        raise DataError("the journal is empty: there is nothing to audit")
    return books


def _note(books: _Books, record: AnyRecord, bound: Bound) -> None:
    if isinstance(record, Issued):
        books.issued.update(prompt.id for prompt in record.prompts)
        books.for_teacher.update(record.prompts[place].id for place in record.by_teacher)
    elif isinstance(record, Rollout | Trace):
        books.scored[record.id] = trace_of(record)
    elif isinstance(record, Dropped):
        books.dropped.update(dict.fromkeys(record.ids, record.reason))
    elif isinstance(record, Composed):
        books.composed[record.version] = record.ids
        books.bound[record.version] = bound
    elif isinstance(record, LineageOpened):
        books.opened.append(record)
        books.dropped.update(dict.fromkeys(record.without, "rolled_back"))
    elif isinstance(record, Stepped):
        books.reached[record.version.lineage] = record.version.step


def _misweighed(books: _Books, record: Composed, bound: Bound) -> set[str]:
    """Rollouts of a batch whose weight is not that of their age, as it was when they were composed."""
    told = record.weights or [1.0] * len(record.ids)
    due = [bound.weight(age) for age in books.state.batches[record.version].ages]
    return {i for i, one, other in zip(record.ids, told, due, strict=True) if one != other}


def _lost(books: _Books) -> set[str]:
    """Scored rollouts that are nowhere."""
    placed = set(books.state.buffer.ids()) | books.dropped.keys()
    if books.opened:
        last, lineages = books.opened[-1].lineage, books.state.lineages
        for version, ids in books.composed.items():
            if lineages.owner(last, version.step) == version.lineage:
                placed.update(ids)
    return books.scored.keys() - placed


def _way(books: _Books, ledger: LedgerLines, lineage: int) -> Counter[str]:
    """How often the weights of `lineage` were trained on each rollout, its ancestry included."""
    seen: Counter[str] = Counter()
    until, current = 1 << 62, lineage
    while True:
        for step, ids in ledger.get(current, {}).items():
            if step <= until:
                seen.update(ids)
        checkpoint = books.opened[current].checkpoint
        if checkpoint is None:
            return seen
        until, current = min(until, checkpoint.step), checkpoint.lineage


def _check_lineage(books: _Books, ledger: LedgerLines, lineage: int, report: AuditReport) -> None:
    twice = [i for i, count in _way(books, ledger, lineage).items() if count > 1]
    report.trained_twice = sorted({*report.trained_twice, *twice})
    for after, ids in ledger[lineage].items():
        version = Version(books.state.lineages.owner(lineage, after - 1), after - 1)
        told, trained = Counter(books.composed.get(version, [])), Counter(ids)
        cut_off = after > books.reached.get(lineage, 0) and trained <= told
        if trained != told and not cut_off:
            report.not_as_composed.append(f"{Version(lineage, after)}")
        bound = books.bound.get(version, Bound(0, 0))
        for rollout in ids:
            _check_age(books, rollout, Version(lineage, after - 1), bound.hard, report)


def _check_authors(books: _Books, report: AuditReport) -> None:
    for one in books.scored.values():
        report.tokens += one.length
        report.tokens_by_teacher += one.length if one.by_teacher else 0
        if one.by_teacher != (one.id in books.for_teacher):
            report.other_author.append(one.id)


def _check_age(books: _Books, rollout: str, at: Version, bound: int, report: AuditReport) -> None:
    one = books.scored.get(rollout)
    if one is None or not (one.spans or one.by_teacher):
        report.unrecorded.append(rollout)
        return
    steps = [books.state.lineages.step_in(span.version, at.lineage) for span in one.spans]
    age = 0 if one.by_teacher else at.step - min(steps)
    report.oldest = max(report.oldest, age)
    if age > bound:
        report.too_old.append(rollout)
