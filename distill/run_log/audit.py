"""Checks a run's guarantees from its journal, the trainer's ledger and its checkpoints.

The journal says what was to be trained on, the ledger what was. `VIOLATIONS` is what can be found; that a run
still goes on is none. Beside the violations the audit says how many steps were trained again, after a resume
on as many ranks, and which of them gave other bits than the first time: none on CPUs; on GPUs it takes
deterministic kernels.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from distill.buffer.staleness import Bound, Rules
from distill.run_log.provenance import Provenance
from distill.run_log.records import (
    AnyRecord,
    BatchFormed,
    Checkpointed,
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
from distill.run_log.segments import read_all
from distill.run_log.snapshot import differs
from distill.run_log.state import RunState
from student_trainer.checkpoint_files import index, latest, saved
from student_trainer.ledger import Lineage, read, repeated
from sync.errors import DataError
from sync.wire import Version

LedgerLines = Mapping[int, Mapping[int, list[str]]]
"""Lineage → step after it → ids trained on, all ranks together."""
VIOLATIONS: Final = {
    "journal_damaged": "the journal is missing or damaged, or a record contradicts those before it",
    "ledger_damaged": "a ledger file was altered: a line is changed, missing, repeated or from elsewhere",
    "missing_in_ledger": "steps that the run reached, and that the ledger of a rank does not show",
    "unknown_version": "versions in the ledger or the journal that no start of the trainer on record made",
    "checkpoint_missing": "`latest` names no whole checkpoint: a resume would not find what was saved",
    "issued_twice": "prompts that were issued twice",
    "lost": "scored rollouts that are in no batch, not buffered, and not dropped",
    "trained_twice": "rollouts that went twice into the same weights",
    "not_as_composed": "steps that were trained on other rollouts than the batch on record",
    "not_in_journal": "trained rollouts that are not on record, or without the versions of their tokens",
    "too_old": "rollouts that were older than the bound when they were trained",
    "wrong_weight": "rollouts whose loss weight on record is not the one of their age",
    "impossible_version": "rollouts with tokens of a version that the run had not published then",
    "unproven": "what the end of the run did not show: weights that differ or were not compared, no score",
    "wrong_generator": "completions by the teacher for a prompt of the student's, or the other way round",
}
"""Lists of an AuditReport that are empty when the guarantees hold → what their entries are."""


@dataclass
class AuditReport:
    """What was found; see `VIOLATIONS` for the lists that must be empty."""

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
    journal_damaged: list[str] = field(default_factory=list)
    """The file and the byte; nothing behind it was read, and nothing else was checked."""
    ledger_damaged: list[str] = field(default_factory=list)
    """The file and the line; what follows it in that file was not read."""
    missing_in_ledger: list[str] = field(default_factory=list)
    unknown_version: list[str] = field(default_factory=list)
    checkpoint_missing: list[str] = field(default_factory=list)
    issued_twice: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    trained_twice: list[str] = field(default_factory=list)
    not_as_composed: list[str] = field(default_factory=list)
    """A step that a crash cut off before it was reported may be in the ledger of some ranks only."""
    not_in_journal: list[str] = field(default_factory=list)
    too_old: list[str] = field(default_factory=list)
    """Beyond the hard limit, with freshness weights. What a teacher wrote has no age."""
    wrong_weight: list[str] = field(default_factory=list)
    wrong_generator: list[str] = field(default_factory=list)
    impossible_version: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)
    late: int = 0
    """Rollouts of batches at a weight below 1, by their freshness. No violation."""
    again: int = 0
    """Steps that were trained again on the same rows of the same ranks."""
    differing: list[str] = field(default_factory=list)
    """Those that gave other weights than the first time. No violation."""
    oldest: int = 0
    """Greatest age of a trained rollout, in versions."""

    @property
    def violations(self) -> dict[str, list[str]]:
        """What breaks a guarantee."""
        return {name: found for name in VIOLATIONS if (found := getattr(self, name))}

    @property
    def ok(self) -> bool:
        """Whether every guarantee holds."""
        return not self.violations


@dataclass
class _RunLog:
    """The journal as the audit reads it."""

    state: RunState | None = None
    issued: Counter[str] = field(default_factory=Counter)
    for_teacher: set[str] = field(default_factory=set)
    """Prompts that were issued for a teacher to complete."""
    scored: dict[str, Rollout] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    composed: dict[Version, list[str]] = field(default_factory=dict)
    opened: list[LineageOpened] = field(default_factory=list)
    reached: dict[int, int] = field(default_factory=dict)
    """Newest step that the trainer reported, by lineage."""
    shown: dict[int, int] = field(default_factory=dict)
    """Newest step that anything on record needs, by lineage: a report, a publication, a checkpoint, …"""
    checkpoint: Version | None = None
    """The newest on record."""
    bound: dict[Version, Bound] = field(default_factory=dict)
    """Bound on staleness when the batch was composed."""
    wrong_weight: set[str] = field(default_factory=set)
    damage: list[str] = field(default_factory=list)
    provenance: Provenance = field(default_factory=Provenance)


def audit(run_dir: Path) -> AuditReport:
    """Audit a run's folder; the run may still go on. Raises DataError when it is no run's folder at all.

    The ledger is read before the journal and after it: what it shows before must be on record, and what is on
    record must be in it after.
    """
    if not (run_dir / "journal").is_dir() and not (run_dir / "ledger").is_dir():
        raise DataError(f"{run_dir} holds neither journal nor ledger: name the folder of a run")
    before = read(run_dir / "ledger")
    run_log = _read((Location(s, o), record) for s, o, record in read_all(run_dir / "journal"))
    after = read(run_dir / "ledger")
    report = _report(
        run_log, {number: lineage.steps for number, lineage in before.items()}, _by_rank(run_log, after)
    )
    report.ledger_damaged = [text for one in after.values() for text in one.damage]
    if not run_log.damage:
        report.ledger_damaged += _strangers(run_log, before)
        report.checkpoint_missing = list(_unusable(run_dir / "checkpoints", run_log))
    same, other = repeated(before)
    report.again, report.differing = len(same) + len(other), [str(version) for version in other]
    return report


def check(records: Iterable[tuple[Location, AnyRecord]], ledger: LedgerLines) -> AuditReport:
    """Audit a journal's records against a ledger. Pure."""
    run_log = _read(records)
    return _report(run_log, ledger, {number: {"": steps.keys()} for number, steps in ledger.items()})


def _report(
    run_log: _RunLog, ledger: LedgerLines, shown: Mapping[int, Mapping[str, Collection[int]]]
) -> AuditReport:
    """`shown`: lineage → whose line it is → steps that have one."""
    if run_log.damage or run_log.state is None:
        return AuditReport(journal_damaged=run_log.damage or ["the journal is empty or missing"])
    report = AuditReport(prompts=len(run_log.issued), scored=len(run_log.scored))
    report.issued_twice = sorted(i for i, count in run_log.issued.items() if count > 1)
    report.open_prompts = sorted(run_log.issued.keys() - run_log.scored.keys() - run_log.dropped.keys())
    report.dropped = dict(Counter(run_log.dropped.values()))
    report.lost = sorted(_lost(run_log, run_log.state))
    report.wrong_weight = sorted(run_log.wrong_weight)
    report.late = run_log.state.counters.late
    report.impossible_version, report.unproven = run_log.provenance.impossible, run_log.provenance.unproven()
    _check_generators(run_log, report)
    known = range(len(run_log.opened))
    report.unknown_version = [
        f"lineage {n}" for n in sorted(ledger.keys() | run_log.shown.keys()) if n not in known
    ]
    report.missing_in_ledger = [text for n in known for text in _missing(run_log, n, shown.get(n, {"": ()}))]
    for lineage in sorted(ledger.keys() & set(known)):
        _check_lineage(run_log, run_log.state, ledger, lineage, report)
    report.trained = sum(_way(run_log, ledger, known[-1]).values()) if known else 0
    return report


def _read(records: Iterable[tuple[Location, AnyRecord]]) -> _RunLog:
    run_log, bound = _RunLog(), Bound(0, 0)
    try:
        for location, record in records:
            if isinstance(record, Opened):
                hard = record.max_staleness if record.hard_limit is None else record.hard_limit
                bound = Bound(record.max_staleness, hard, record.half_life)
                run_log.state = run_log.state or RunState(Rules(record.batch, bound, group=record.group))
            if run_log.state is None:
                raise DataError("the journal does not begin with the opening of a run: it is not whole")
            _apply(run_log, run_log.state, record, location, bound)
    except DataError as error:
        run_log.damage.append(str(error))
    return run_log


def _apply(run_log: _RunLog, state: RunState, record: AnyRecord, at: Location, bound: Bound) -> None:
    """Take a record up. Raises DataError when it contradicts those before it."""
    try:
        _check_order(state, record)
        state.replay(record, at)
        if isinstance(record, BatchFormed):
            run_log.wrong_weight |= _wrong_weight(state, record, bound)
    except (LookupError, ValueError, AssertionError) as error:
        raise DataError(
            f"segment {at.segment}, byte {at.offset} of the journal: {type(record).__name__} contradicts the "
            f"records before it ({type(error).__name__}: {error})"
        ) from None
    run_log.provenance.note(record, state)
    _note(run_log, record, bound)


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


def _note(run_log: _RunLog, record: AnyRecord, bound: Bound) -> None:
    if isinstance(record, Issued):
        run_log.issued.update(prompt.id for prompt in record.prompts)
        run_log.for_teacher.update(record.prompts[place].id for place in record.by_teacher)
    elif isinstance(record, Rollout):
        run_log.scored[record.id] = record.released()
    elif isinstance(record, Dropped):
        run_log.dropped.update(dict.fromkeys(record.ids, record.reason))
    elif isinstance(record, BatchFormed):
        run_log.composed[record.version] = record.ids
        run_log.bound[record.version] = bound
    elif isinstance(record, LineageOpened):
        run_log.opened.append(record)
        run_log.dropped.update(dict.fromkeys(record.without, "rolled_back"))
        _note_shown(run_log, record.checkpoint)
    elif isinstance(record, Stepped | VersionPublished | VersionApplied | Checkpointed):
        _note_shown(run_log, record.version)
        if isinstance(record, Stepped):
            run_log.reached[record.version.lineage] = record.version.step
        elif isinstance(record, Checkpointed):
            run_log.checkpoint = record.version
    elif isinstance(record, RolledBack):
        run_log.checkpoint = record.to
    elif isinstance(record, Evaluated):
        _note_shown(run_log, record.report.version)


def _note_shown(run_log: _RunLog, version: Version | None) -> None:
    if version is not None:
        run_log.shown[version.lineage] = max(version.step, run_log.shown.get(version.lineage, 0))


def _wrong_weight(state: RunState, record: BatchFormed, bound: Bound) -> set[str]:
    """Rollouts of a batch whose weight is not that of their age, as it was when they were composed."""
    told = record.weights or [1.0] * len(record.ids)
    due = [bound.weight(age) for age in state.batches[record.version].ages]
    return {i for i, one, other in zip(record.ids, told, due, strict=True) if one != other}


def _lost(run_log: _RunLog, state: RunState) -> set[str]:
    """Scored rollouts that are nowhere."""
    placed = set(state.buffer.ids()) | run_log.dropped.keys()
    if run_log.opened:
        last, lineages = run_log.opened[-1].lineage, state.lineages
        for version, ids in run_log.composed.items():
            if lineages.owner(last, version.step) == version.lineage:
                placed.update(ids)
    return run_log.scored.keys() - placed


def _by_rank(run_log: _RunLog, ledger: Mapping[int, Lineage]) -> dict[int, dict[str, set[int]]]:
    """Lineage → rank, in words → steps of which it has a line."""
    found = {}
    for opened in run_log.opened:
        shown = ledger.get(opened.lineage, Lineage()).shown
        ranks = opened.ranks or 1 + max((rank for one in shown.values() for rank in one), default=0)
        found[opened.lineage] = {
            f" of rank {rank}": {step for step, one in shown.items() if rank in one} for rank in range(ranks)
        }
    return found


def _missing(run_log: _RunLog, lineage: int, shown: Mapping[str, Collection[int]]) -> Iterator[str]:
    """Steps of a lineage, as ranges, that the run reached and somebody has no line of."""
    start, last = run_log.opened[lineage].start, run_log.shown.get(lineage, 0)
    for whose, steps in shown.items():
        there = [start, *sorted(step for step in steps if start < step <= last), last + 1]
        for before, after in itertools.pairwise(there):
            if after > before + 1:
                upto = f" to {Version(lineage, after - 1)}" if after > before + 2 else ""
                yield f"{Version(lineage, before + 1)}{upto}{whose}"


def _strangers(run_log: _RunLog, ledger: Mapping[int, Lineage]) -> Iterator[str]:
    """Ledger files that are not those of the trainer on record."""
    for opened in run_log.opened:
        if (lineage := ledger.get(opened.lineage)) is None or not lineage.shown:
            continue
        if (lineage.parent, lineage.start) != (opened.checkpoint, opened.start):
            yield (
                f"ledger of lineage {opened.lineage} begins at step {lineage.start} from {lineage.parent}; "
                f"on record is step {opened.start} from {opened.checkpoint}"
            )
        ranks = {rank for one in lineage.shown.values() for rank in one}
        for rank in sorted(ranks - set(range(opened.ranks or 1 + max(ranks)))):
            yield f"ledger of lineage {opened.lineage}: rank {rank} of a trainer with {opened.ranks} ranks"


def _unusable(folder: Path, run_log: _RunLog) -> Iterator[str]:
    """Why a resume would not find its checkpoint; a folder of checkpoints that was removed whole is none."""
    while True:
        name = latest(folder)
        problem = index(folder / name)[1] if name else None
        if name == latest(folder):  # else the run went on meanwhile
            break
    if problem:
        yield f"{folder / 'latest'} names {name}: {problem}"
    elif not name and run_log.checkpoint and saved(folder):
        yield f"{folder / 'latest'} is missing, and checkpoint {run_log.checkpoint} is on record"


def _way(run_log: _RunLog, ledger: LedgerLines, lineage: int) -> Counter[str]:
    """How often the weights of `lineage` were trained on each rollout, its ancestry included."""
    seen: Counter[str] = Counter()
    until, current = 1 << 62, lineage
    while True:
        for step, ids in ledger.get(current, {}).items():
            if step <= until:
                seen.update(ids)
        checkpoint = run_log.opened[current].checkpoint
        if checkpoint is None:
            return seen
        until, current = min(until, checkpoint.step), checkpoint.lineage


def _check_lineage(
    run_log: _RunLog, state: RunState, ledger: LedgerLines, lineage: int, report: AuditReport
) -> None:
    twice = [i for i, count in _way(run_log, ledger, lineage).items() if count > 1]
    report.trained_twice = sorted({*report.trained_twice, *twice})
    for after, ids in ledger[lineage].items():
        version = Version(state.lineages.owner(lineage, after - 1), after - 1)
        told, trained = Counter(run_log.composed.get(version, [])), Counter(ids)
        cut_off = after > run_log.reached.get(lineage, 0) and trained <= told
        if trained != told and not cut_off:
            report.not_as_composed.append(f"{Version(lineage, after)}")
        bound = run_log.bound.get(version, Bound(0, 0))
        for rollout in ids:
            _check_age(run_log, state, rollout, Version(lineage, after - 1), bound.hard, report)


def _check_generators(run_log: _RunLog, report: AuditReport) -> None:
    for one in run_log.scored.values():
        report.tokens += one.length
        report.tokens_by_teacher += one.length if one.by_teacher else 0
        if one.by_teacher != (one.id in run_log.for_teacher):
            report.wrong_generator.append(one.id)


def _check_age(
    run_log: _RunLog, state: RunState, rollout: str, at: Version, bound: int, report: AuditReport
) -> None:
    one = run_log.scored.get(rollout)
    if one is None or not (one.spans or one.by_teacher):
        report.not_in_journal.append(rollout)
        return
    steps = [state.lineages.step_in(span.version, at.lineage) for span in one.spans]
    age = 0 if one.by_teacher else at.step - min(steps)
    report.oldest = max(report.oldest, age)
    if age > bound:
        report.too_old.append(rollout)
