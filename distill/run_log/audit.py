"""Checks a run's guarantees from its journal, the trainer's ledger and its checkpoints.

The journal says what was to be trained on, the ledger what was. Each check is one function that finds one
kind of violation; a run that is still going on has none. The audit also reports how many steps were trained
again, after a resume on as many ranks, and which of them gave other bits than the first time: none on CPUs;
on GPUs it takes deterministic kernels.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from distill.run_log.evidence import Evidence, JournalEvidence, LedgerLines, by_rank
from distill.run_log.records import AnyRecord, Concluded, Location
from distill.run_log.segments import read_all
from student_trainer.checkpoint_files import index, latest, saved
from student_trainer.ledger import read, repeated
from sync.errors import DataError
from sync.wire import Version

Find = Callable[[Evidence], Iterable[str]]
VIOLATIONS: Final[dict[str, str]] = {}
"""Name → what its entries are. The documentation lists them."""
_CHECKS: Final[dict[str, Find]] = {}


def _check(find: Find) -> Find:
    """Register a check; the first line of its docstring says what the entries are."""
    first = (find.__doc__ or "").splitlines()[0].rstrip(".")
    VIOLATIONS[find.__name__] = first[0].lower() + first[1:]
    _CHECKS[find.__name__] = find
    return find


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
    """Name in `VIOLATIONS` → what was found; checks that found nothing are left out."""

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
    journal = JournalEvidence.read((Location(s, o), record) for s, o, record in read_all(run_dir / "journal"))
    after = read(run_dir / "ledger")
    lines = {number: lineage.steps for number, lineage in before.items()}
    shown = by_rank(journal, after)
    report = _report(Evidence(journal, lines, shown, before, after, run_dir / "checkpoints"))
    same, other = repeated(before)
    report.again, report.differing = len(same) + len(other), [str(version) for version in other]
    return report


def check(records: Iterable[tuple[Location, AnyRecord]], ledger: LedgerLines) -> AuditReport:
    """Audit a journal's records against a ledger. Pure."""
    shown = {number: {"": steps.keys()} for number, steps in ledger.items()}
    return _report(Evidence(JournalEvidence.read(records), ledger, shown))


def _report(evidence: Evidence) -> AuditReport:
    journal, report = evidence.journal, AuditReport()
    names = ("journal_damaged", "ledger_damaged") if journal.damage else _CHECKS
    report.violations = {name: found for name in names if (found := list(_CHECKS[name](evidence)))}
    if journal.damage:
        return report
    report.prompts, report.scored = len(journal.issued), len(journal.scored)
    report.tokens = sum(stub.length for stub in journal.scored.values())
    report.tokens_by_teacher = sum(stub.length for stub in journal.scored.values() if stub.by_teacher)
    report.open_prompts = sorted(journal.issued.keys() - journal.scored.keys() - journal.dropped.keys())
    report.dropped = dict(Counter(journal.dropped.values()))
    report.late = evidence.state.counters.late
    report.oldest = max((age for _, age, _ in evidence.trained if age is not None), default=0)
    if journal.opened:
        report.trained = evidence.ancestry(len(journal.opened) - 1).total()
    return report


# --- checks -----------------------------------------------------------------------------------------------


@_check
def journal_damaged(e: Evidence) -> list[str]:
    """The journal is missing or damaged, or a record contradicts those before it."""
    return e.journal.damage


@_check
def ledger_damaged(e: Evidence) -> Iterator[str]:
    """A ledger file was altered: a line is changed, missing, repeated or from elsewhere."""
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


@_check
def missing_in_ledger(e: Evidence) -> Iterator[str]:
    """Steps that the run reached, and that the ledger of a rank does not show.

    Entries are ranges of steps.
    """
    for number, opened in enumerate(e.journal.opened):
        last = e.journal.shown.get(number, 0)
        for whose, steps in e.shown.get(number, {"": ()}).items():
            there = [opened.start, *sorted(step for step in steps if opened.start < step <= last), last + 1]
            for before, after in itertools.pairwise(there):
                if after > before + 1:
                    upto = f" to {Version(number, after - 1)}" if after > before + 2 else ""
                    yield f"{Version(number, before + 1)}{upto}{whose}"


@_check
def unknown_version(e: Evidence) -> list[str]:
    """Versions in the ledger or the journal that no start of the trainer on record made."""
    named = e.ledger.keys() | e.journal.shown.keys()
    return [f"lineage {n}" for n in sorted(named) if n not in range(len(e.journal.opened))]


@_check
def checkpoint_missing(e: Evidence) -> Iterator[str]:
    """`latest` names no whole checkpoint: a resume would not find what was saved.

    A folder of checkpoints that was removed whole is no violation.
    """
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


@_check
def issued_twice(e: Evidence) -> list[str]:
    """Prompts that were issued twice."""
    return sorted(i for i, count in e.journal.issued.items() if count > 1)


@_check
def lost(e: Evidence) -> list[str]:
    """Scored rollouts that are in no batch, not buffered, and not dropped."""
    placed = set(e.state.buffer.ids()) | e.journal.dropped.keys()
    if e.journal.opened:
        last = e.journal.opened[-1].lineage
        for version, (ids, _) in e.journal.batches.items():
            if e.state.lineages.owner(last, version.step) == version.lineage:
                placed.update(ids)
    return sorted(e.journal.scored.keys() - placed)


@_check
def trained_twice(e: Evidence) -> list[str]:
    """Rollouts that went twice into the same weights."""
    return sorted({i for n in e.lineages for i, count in e.ancestry(n).items() if count > 1})


@_check
def not_as_composed(e: Evidence) -> Iterator[str]:
    """Steps that were trained on other rollouts than the batch on record.

    A step that a crash cut off before it was reported may be in the ledger of some ranks only.
    """
    for lineage in e.lineages:
        for after, ids in e.ledger[lineage].items():
            composed, trained = Counter(e.batch(lineage, after)[0]), Counter(ids)
            cut_off = after > e.journal.reached.get(lineage, 0) and trained <= composed
            if trained != composed and not cut_off:
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
    return sorted(e.journal.wrong_weight)


@_check
def impossible_version(e: Evidence) -> list[str]:
    """Rollouts with tokens of a version that the run had not published then."""
    return e.journal.impossible


@_check
def unproven(e: Evidence) -> list[str]:
    """What the end of the run did not show: weights that differ or were not compared, no score.

    Problems of the last end; of earlier ends, those with weights that differed.
    """
    *before, last = [Concluded(None, {}, []), *e.journal.concluded]
    counted = [one for one in before if False in one.weights.values()] + [last]
    return [problem for one in counted for problem in one.problems]


@_check
def wrong_generator(e: Evidence) -> list[str]:
    """Completions by the teacher for a prompt of the student's, or the other way round."""
    return [i for i, one in e.journal.scored.items() if one.by_teacher != (i in e.journal.for_teacher)]
