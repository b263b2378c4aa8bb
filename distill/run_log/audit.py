"""Checks a run's guarantees from its journal, the trainer's ledger and its checkpoints.

The journal holds what was to be trained on, the ledger what was. Each check is one function that finds one
kind of violation; a run that is still going on has none. The audit also reports how many steps were trained
again, after a resume on as many ranks, and which of them gave other bits than the first time: none on CPUs;
on GPUs it takes deterministic kernels.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from distill.buffer import Bound, Rules
from distill.run_log import records as r
from distill.run_log.journal import read_all
from distill.run_log.records import Concluded, LineageOpened, Location, Record, Rollout, contradictions
from distill.run_log.snapshot import differs
from distill.run_log.state import RunState
from student_trainer.checkpoint_files import CHECKPOINTS, choose, index, latest
from student_trainer.ledger import Lineage, read, repeated
from sync.base.errors import DataError
from sync.wire import Version

Records = Iterable[tuple[Location, Record]]
Ledger = Mapping[int, Lineage]  # lineage → what its ranks trained on


class Evidence:
    """Input of the checks: the journal's records, applied in order, and the ledger."""

    def __init__(
        self, records: Records, before: Ledger, after: Callable[[], Ledger], checkpoints: Path | None = None
    ) -> None:
        """Reads the journal up to its first damage; the ledger was read `before` it and is `after` it."""
        self.before, self.checkpoints = before, checkpoints
        self.damage: list[str] = []  # of the journal
        self.state = RunState(Rules(1, Bound(0, 0)))
        self.issued: Counter[str] = Counter()
        self.for_teacher: set[str] = set()  # prompts issued for a teacher to complete
        self.scored: dict[str, Rollout] = {}
        self.dropped: dict[str, str] = {}  # rollout → reason
        self.batches: dict[Version, tuple[list[str], Bound]] = {}  # with the bound when it was formed
        self.opened: list[LineageOpened] = []
        self.reached: dict[int, int] = {}  # lineage → newest step that the trainer reported
        self.shown: dict[int, int] = {}  # the same of any record
        self.checkpoint: Version | None = None  # the newest on record: saved, or begun from
        self.wrong_weight: set[str] = set()
        self.impossible: list[str] = []  # with tokens of versions that had not been published then
        self.concluded: list[Concluded] = []
        try:
            for location, record in records:
                self._take(record, location)
        except DataError as error:
            self.damage.append(str(error))
        if self.state.opened is None and not self.damage:
            self.damage.append("the journal is empty or missing")
        self.after = after()

    def _take(self, record: Record, at: Location) -> None:
        """Apply a record and note it. Raises DataError when it contradicts those before it."""
        if self.state.opened is None and not isinstance(record, r.Opened):
            raise DataError("the journal does not begin with the opening of a run: it is not whole")
        with contradictions(record, at):
            if isinstance(record, r.Opened):
                hard = record.max_staleness if record.hard_limit is None else record.hard_limit
                bound = Bound(record.max_staleness, hard, record.half_life)
                self.state.rules = Rules(record.batch, bound, record.group, supervised=record.supervised)
            if isinstance(record, r.Snapshot) and differs(record, self.state):
                raise ValueError(f"{record.checkpoint} has other prompts, rollouts or counts")
            self.state.replay(record, at)
            self._note(record, self.state)

    def _note(self, record: Record, state: RunState) -> None:
        match record:
            case r.Issued():
                self.issued.update(prompt.id for prompt in record.prompts)
                self.for_teacher.update(record.prompts[place].id for place in record.by_teacher)
            case Rollout():
                stub = r.compacted(record)
                assert isinstance(stub, Rollout)
                self.scored[record.id] = stub
                if state.span_problem(record.spans):
                    self.impossible.append(record.id)
            case r.Dropped():
                self.dropped.update(dict.fromkeys(record.ids, record.reason))
            case r.BatchFormed():
                self.batches[record.version] = record.ids, state.rules.bound
                expected = [state.rules.bound.weight(age) for age in state.batches[record.version].ages]
                weights = zip(record.ids, record.weights or [1.0] * len(record.ids), expected, strict=True)
                self.wrong_weight |= {i for i, weight, other in weights if weight != other}
            case LineageOpened():
                self.opened.append(record)
                self.dropped.update(dict.fromkeys(record.without, "rolled_back"))
                self._show(record.checkpoint)
                self.checkpoint = record.checkpoint or self.checkpoint
            case r.Stepped() | r.VersionPublished() | r.VersionApplied() | r.Checkpointed():
                self._show(record.version)
                if isinstance(record, r.Stepped):
                    self.reached[record.version.lineage] = record.version.step
                elif isinstance(record, r.Checkpointed):
                    self.checkpoint = record.version
            case r.RolledBack():
                self.checkpoint = record.to
            case r.Evaluated():
                self._show(record.report.version)
            case Concluded():
                self.concluded.append(record)

    def _show(self, version: Version | None) -> None:
        if version is not None:
            self.shown[version.lineage] = max(version.step, self.shown.get(version.lineage, 0))

    @property
    def lineages(self) -> list[int]:
        """Those of the ledger that are on record."""
        return [n for n in sorted(self.before) if n < len(self.opened)]

    def batch(self, lineage: int, after: int) -> tuple[list[str], Bound]:
        """Batch on record for the step to `after` in the ancestry of `lineage`."""
        version = Version(self.state.lineages.owner(lineage, after - 1), after - 1)
        return self.batches.get(version, ([], Bound(0, 0)))

    @cached_property
    def trained(self) -> list[tuple[str, int | None, int]]:
        """(id, age, greatest age allowed) of every rollout of every ledger line; ages in versions.

        Age None: the rollout, or the versions of its tokens, are not on record.
        """
        return [
            (rollout, self._age(rollout, Version(lineage, after - 1)), self.batch(lineage, after)[1].hard)
            for lineage in self.lineages
            for after, ids in self.before[lineage].steps.items()
            for rollout in ids
        ]

    def supervised(self, ids: Iterable[str]) -> int:
        """Tokens of these that are trained on."""
        limit = self.state.rules.supervised or 1 << 62
        return sum(min(self.scored[i].own_length, limit) for i in ids if i in self.scored)

    def _age(self, rollout: str, at: Version) -> int | None:
        stub = self.scored.get(rollout)
        if stub is None or not (stub.spans or stub.by_teacher):
            return None
        return stub.age(at.step, lambda version: self.state.lineages.step_in(version, at.lineage))

    def ancestry(self, lineage: int) -> Counter[str]:
        """How often the weights of `lineage`, its ancestors included, were trained on each rollout."""
        seen: Counter[str] = Counter()
        until, current = 1 << 62, lineage
        while True:
            for step, ids in self.before.get(current, Lineage()).steps.items():
                if step <= until:
                    seen.update(ids)
            checkpoint = self.opened[current].checkpoint
            if checkpoint is None:
                return seen
            until, current = min(until, checkpoint.step), checkpoint.lineage


Find = Callable[[Evidence], Iterable[str]]
VIOLATIONS: Final[dict[str, str]] = {}  # name → what its entries are. The documentation lists them
_CHECKS: Final[dict[str, Find]] = {}


def _check(find: Find) -> Find:
    """Register a check; the first line of its docstring describes the entries."""
    first = (find.__doc__ or "").splitlines()[0].rstrip(".")
    VIOLATIONS[find.__name__] = first[0].lower() + first[1:]
    _CHECKS[find.__name__] = find
    return find


@dataclass
class AuditReport:
    """Result of an audit: `violations` must be empty, the other fields are figures."""

    prompts: int = 0
    scored: int = 0
    trained: int = 0  # rollouts in the ancestry of the last lineage
    tokens: int = 0  # generated, of scored rollouts
    tokens_by_teacher: int = 0  # of them, those that teachers generated
    open_prompts: list[str] = field(default_factory=list)
    """Neither scored nor dropped: a resumed run requeues them."""
    dropped: dict[str, int] = field(default_factory=dict)  # rollouts by reason
    late: int = 0  # rollouts of batches at a weight below 1, because of their age
    again: int = 0  # steps that were trained again on the same rows of the same ranks
    differing: list[str] = field(default_factory=list)  # of them, those that gave other weights
    oldest: int = 0  # greatest age of a trained rollout, in versions
    violations: dict[str, list[str]] = field(default_factory=dict)
    """Name in `VIOLATIONS` → what was found; checks that found nothing are left out."""

    @property
    def ok(self) -> bool:
        return not self.violations


def audit(run_dir: Path) -> AuditReport:
    """Audit a run's folder; the run may be going on. Raises DataError when it is no run's folder at all.

    The ledger is read before the journal and after it: what it shows before must be on record, and what is on
    record must be in it after.
    """
    if not (run_dir / "journal").is_dir() and not (run_dir / "ledger").is_dir():
        raise DataError(f"{run_dir} holds neither journal nor ledger: name the folder of a run")
    before, records = read(run_dir / "ledger"), read_all(run_dir / "journal")
    report = report_of(Evidence(records, before, lambda: read(run_dir / "ledger"), run_dir / CHECKPOINTS))
    same, other = repeated(before)
    report.again, report.differing = len(same) + len(other), [str(version) for version in other]
    return report


def report_of(evidence: Evidence) -> AuditReport:
    """What the checks find."""
    report, scored = AuditReport(), evidence.scored
    names = ("journal_damaged", "ledger_damaged") if evidence.damage else _CHECKS
    report.violations = {name: problems for name in names if (problems := list(_CHECKS[name](evidence)))}
    if evidence.damage:
        return report
    report.prompts, report.scored = len(evidence.issued), len(scored)
    report.tokens = sum(stub.own_length for stub in scored.values())
    report.tokens_by_teacher = sum(stub.length for stub in scored.values() if stub.by_teacher)
    report.open_prompts = sorted(evidence.issued.keys() - scored.keys() - evidence.dropped.keys())
    report.dropped = dict(Counter(evidence.dropped.values()))
    report.late = evidence.state.counters.late
    report.oldest = max((age for _, age, _ in evidence.trained if age is not None), default=0)
    if evidence.opened:
        report.trained = evidence.ancestry(len(evidence.opened) - 1).total()
    return report


# --- checks -----------------------------------------------------------------------------------------------


@_check
def journal_damaged(e: Evidence) -> list[str]:
    """The journal is missing or damaged, or a record contradicts those before it."""
    return e.damage


@_check
def ledger_damaged(e: Evidence) -> Iterator[str]:
    """A ledger file was altered: a line is changed, missing, repeated or from elsewhere."""
    for lineage in e.after.values():
        yield from lineage.damage
    for opened in () if e.damage else e.opened:
        if (header := e.before.get(opened.lineage)) is None or header.start is None:
            continue
        if (header.parent, header.start) != (opened.checkpoint, opened.start):
            yield (
                f"ledger of lineage {opened.lineage} begins at step {header.start} from {header.parent}; "
                f"on record is step {opened.start} from {opened.checkpoint}"
            )
        for rank in sorted(
            {rank for number in header.shown.values() for rank in number if rank >= opened.ranks}
        ):
            yield f"ledger of lineage {opened.lineage}: rank {rank} of a trainer with {opened.ranks} ranks"


@_check
def missing_in_ledger(e: Evidence) -> Iterator[str]:
    """Steps that the run reached, and that the ledger of a rank does not show.

    Entries are ranges of steps.
    """
    for number, opened in enumerate(e.opened):
        last, lines = e.shown.get(number, 0), e.after.get(number, Lineage()).shown
        for rank in range(opened.ranks):
            steps = (step for step, ranks in lines.items() if rank in ranks and opened.start < step <= last)
            for before, after in itertools.pairwise([opened.start, *sorted(steps), last + 1]):
                if after > before + 1:
                    upto = f" to {Version(number, after - 1)}" if after > before + 2 else ""
                    yield f"{Version(number, before + 1)}{upto} of rank {rank}"


@_check
def unknown_version(e: Evidence) -> list[str]:
    """Versions in the ledger or the journal that no start of the trainer on record made."""
    named = e.before.keys() | e.shown.keys()
    return [f"lineage {n}" for n in sorted(named) if n not in range(len(e.opened))]


@_check
def checkpoint_missing(e: Evidence) -> Iterator[str]:
    """`latest` names no whole checkpoint of this run, or an older one than is on record.

    A folder of checkpoints that was removed whole is no violation.
    """
    if (folder := e.checkpoints) is None:
        return
    try:
        while True:
            name = latest(folder)
            choice = choose(folder)
            if name == latest(folder):  # else the run saved another one meanwhile
                break
    except DataError as error:
        return (yield str(error))
    if choice.damaged and (name or e.checkpoint):  # before the first is on record, `latest` may be to come
        yield choice.line
    header = index(choice.path)[0] if choice.path else None
    if header and e.state.opened and header.run_id not in (None, e.state.opened.id):
        yield f"{choice.path}: run {header.run_id} saved it, not run {e.state.opened.id}"
    elif header and e.checkpoint and Version.parse(header.version) < e.checkpoint:
        yield f"{choice.path} is older than {e.checkpoint}, which is on record"


@_check
def issued_twice(e: Evidence) -> list[str]:
    """Prompts that were issued twice."""
    return sorted(i for i, count in e.issued.items() if count > 1)


@_check
def lost(e: Evidence) -> list[str]:
    """Scored rollouts that are in no batch, not buffered, and not dropped."""
    placed = set(e.state.buffer) | e.dropped.keys()
    if e.opened:
        last = e.opened[-1].lineage
        for version, (ids, _) in e.batches.items():
            if e.state.lineages.owner(last, version.step) == version.lineage:
                placed.update(ids)
    return sorted(e.scored.keys() - placed)


@_check
def trained_twice(e: Evidence) -> list[str]:
    """Rollouts that went twice into the same weights."""
    return sorted({i for n in e.lineages for i, count in e.ancestry(n).items() if count > 1})


@_check
def not_as_batched(e: Evidence) -> Iterator[str]:
    """Steps that were trained on other rollouts than the batch on record, or on other tokens of them.

    A step that a crash cut off before it was reported may be in the ledger of some ranks only.
    """
    for lineage in e.lineages:
        for after, ids in e.before[lineage].steps.items():
            batch, trained = Counter(e.batch(lineage, after)[0]), Counter(ids)
            cut_off = after > e.reached.get(lineage, 0) and trained <= batch
            tokens = e.before[lineage].tokens.get(after)
            if (trained != batch and not cut_off) or tokens not in (None, e.supervised(ids)):
                yield f"{Version(lineage, after)}"


@_check
def not_in_journal(e: Evidence) -> list[str]:
    """Trained rollouts that are not on record, or without the versions of their tokens."""
    return [rollout for rollout, age, _ in e.trained if age is None]


@_check
def too_old(e: Evidence) -> list[str]:
    """Rollouts that were older than the bound when they were trained."""
    return [rollout for rollout, age, bound in e.trained if age is not None and age > bound]


@_check
def wrong_weight(e: Evidence) -> list[str]:
    """Rollouts whose loss weight on record is not the one of their age."""
    return sorted(e.wrong_weight)


@_check
def impossible_version(e: Evidence) -> list[str]:
    """Rollouts with tokens of a version that the run had not published then."""
    return e.impossible


@_check
def unproven(e: Evidence) -> list[str]:
    """What the end of the run did not show: weights that differ or were not compared, no score.

    Problems of the last end; of earlier ends, those with weights that differed.
    """
    *before, last = [Concluded(None, {}, []), *e.concluded]
    counted = [proof for proof in before if False in proof.weights.values()] + [last]
    return [problem for proof in counted for problem in proof.problems]


@_check
def wrong_generator(e: Evidence) -> list[str]:
    """Completions by the teacher for a prompt of the student's, or the other way round."""
    return [i for i, rollout in e.scored.items() if rollout.by_teacher != (i in e.for_teacher)]
