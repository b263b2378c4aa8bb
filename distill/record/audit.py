"""Checks a run's guarantees: each is a question to the tables of its record and to the ranks' ledgers.

The record holds what was to be trained on, the ledgers what was. A question is one SELECT, whose rows are
violations of one guarantee; a run that is still going on has none. The audit also reports how many steps were
trained again, after a resume on as many ranks, and which of them gave other bits than the first time: none on
CPUs; on GPUs it takes deterministic kernels.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from distill.prompts.streaming import saved_starts
from distill.record.load import load
from distill.record.reader import Ledger, add_ledgers, open_tables
from distill.record.rollout import Block
from distill.record.store import RECORD, open_read_only, read_bytes, reader
from student_trainer.checkpoint_files import CHECKPOINTS, choose, index, latest
from student_trainer.ledger import read, repeated
from sync.base.errors import DataError
from sync.wire import Version

VIOLATIONS: Final = {
    "record_damaged": "the record is missing or damaged, or rows are gone from it that others count or name",
    "ledger_damaged": "a ledger file was altered: a line is changed, missing, repeated or from elsewhere",
    "missing_in_ledger": "steps that the run reached, and that the ledger of a rank does not show",
    "unknown_version": "versions in the ledger or on record that no start of the trainer on record made",
    "checkpoint_missing": "`latest` names no whole checkpoint of this run, or an older one than is on record",
    "issued_twice": "prompts that were issued twice",
    "lost": "scored rollouts that are in no batch, not buffered, and not dropped",
    "trained_twice": "rollouts that went twice into the same weights",
    "not_as_batched": (
        "steps that were trained on other rollouts than the batch on record, or on other tokens of them"
    ),
    "not_on_record": "trained rollouts that are not on record, or without the versions of their tokens",
    "too_old": "rollouts that were older than the bound when they were trained",
    "wrong_weight": "rollouts whose loss weight on record is not the one of their age",
    "impossible_version": "rollouts with tokens of a version that the run had not published then",
    "unproven": "what the end of the run did not show: weights that differ or were not compared, no score",
    "wrong_generator": "completions by the teacher for a prompt of the student's, or the other way round",
}
"""Name → what its entries are. The documentation lists them."""

_DUE = """
    done AS (SELECT lineage, step, rollout, count(*) AS times FROM trained GROUP BY 1, 2, 3),
    due AS (SELECT trained_step.lineage, trained_step.step, rollout, count(*) AS times FROM trained_step
        JOIN chain ON chain.lineage = trained_step.lineage
            AND trained_step.step > chain.first AND trained_step.step <= chain.past
        JOIN member ON member.lineage = chain.owner AND member.step = trained_step.step - 1
        GROUP BY 1, 2, 3)"""
_QUESTIONS: Final = {
    "missing_in_ledger": """
        WITH RECURSIVE rank (lineage, rank, start, last) AS (
            SELECT number, 0, start, max(start, coalesce(shown.step, 0))
            FROM lineage LEFT JOIN shown ON shown.lineage = number
            UNION ALL SELECT lineage, rank + 1, rank.start, last FROM rank JOIN lineage ON number = lineage
            WHERE rank + 1 < ranks),
        known AS (SELECT lineage, rank, start AS step FROM rank UNION ALL
            SELECT lineage, rank, last + 1 FROM rank UNION ALL
            SELECT lineage, rank, step FROM line JOIN rank USING (lineage, rank)
            WHERE step > start AND step <= last),
        gap AS (SELECT lineage, rank, step AS next,
            lag(step) OVER (PARTITION BY lineage, rank ORDER BY step) AS before FROM known)
        SELECT version_name(lineage, before + 1)
            || iif(next > before + 2, ' to ' || version_name(lineage, next - 1), '') || ' of rank ' || rank
        FROM gap WHERE next > before + 1 ORDER BY lineage, rank, before""",
    "unknown_version": """
        SELECT 'lineage ' || lineage FROM (SELECT lineage FROM ledger UNION SELECT lineage FROM shown)
        WHERE lineage NOT IN (SELECT number FROM lineage) ORDER BY lineage""",
    "issued_twice": "SELECT id FROM rollout WHERE NOT continues GROUP BY id HAVING count(*) > 1 ORDER BY id",
    "lost": """
        SELECT id FROM rollout WHERE status = 'batched'
        AND id NOT IN (SELECT rollout FROM member JOIN path USING (lineage, step)) ORDER BY id""",
    "trained_twice": """
        SELECT DISTINCT rollout FROM ancestry JOIN trained ON trained.lineage = ancestor AND step <= until
        WHERE ancestry.lineage IN (SELECT lineage FROM ledger)
        GROUP BY ancestry.lineage, rollout HAVING count(*) > 1 ORDER BY rollout""",
    "not_as_batched": f"""
        WITH {_DUE},
        added AS (SELECT lineage, step FROM (SELECT * FROM done EXCEPT SELECT * FROM due)),
        left_out AS (SELECT lineage, step FROM (SELECT * FROM due EXCEPT SELECT * FROM done)),
        reached AS (SELECT lineage, max(step) AS step FROM step GROUP BY lineage),
        counted AS (SELECT lineage, step, sum(min(own_tokens, coalesce((SELECT supervised FROM opening
            ORDER BY at DESC LIMIT 1), 1 << 62))) AS tokens
            FROM trained JOIN rollout ON id = rollout AND scored GROUP BY 1, 2)
        SELECT version_name(made.lineage, made.step) FROM trained_step AS made
        JOIN lineage ON number = made.lineage
        LEFT JOIN reached ON reached.lineage = made.lineage
        LEFT JOIN counted ON (counted.lineage, counted.step) = (made.lineage, made.step)
        WHERE (made.lineage, made.step) IN added
        OR (made.lineage, made.step) IN left_out AND made.step <= coalesce(reached.step, 0)
        OR made.tokens <> coalesce(counted.tokens, 0) ORDER BY made.lineage, made.step""",
    "not_on_record": "SELECT rollout FROM aged WHERE age IS NULL",
    "too_old": "SELECT rollout FROM aged WHERE age > bound",
    "wrong_weight": """
        SELECT DISTINCT rollout FROM member JOIN batch USING (lineage, step)
        WHERE abs(member.weight / weight(age, max_staleness, hard_limit, half_life) - 1) > 1e-9
        ORDER BY rollout""",
    "impossible_version": """
        SELECT DISTINCT rollout FROM sampled JOIN rollout ON id = rollout
        WHERE NOT (sampled.lineage = 0 AND sampled.step = 0) AND NOT EXISTS (
            SELECT 1 FROM version JOIN lineage ON number = version.lineage
            WHERE version.lineage = sampled.lineage AND version.step >= sampled.step
            AND sampled.step >= start AND version.at < rollout.scored)""",
    "unproven": """
        SELECT problem.value FROM conclusion, json_each(problems) AS problem
        WHERE at = (SELECT max(at) FROM conclusion)
        OR EXISTS (SELECT 1 FROM json_each(weights) AS equal WHERE equal.type = 'false')
        ORDER BY at, problem.key""",
    "wrong_generator": "SELECT id FROM rollout WHERE scored AND by_teacher <> for_teacher ORDER BY number",
    "record_damaged": """
        SELECT 'no start of a controller' WHERE NOT EXISTS (SELECT 1 FROM opening)
            AND EXISTS (SELECT 1 FROM fact UNION ALL SELECT 1 FROM rollout) UNION ALL
        SELECT printf('rollouts %d to %d', before + 1, number - 1) FROM (
            SELECT number, lag(number, 1, -1) OVER (ORDER BY number) AS before FROM rollout
            WHERE NOT continues)
        WHERE number > before + 1 UNION ALL
        SELECT printf('rollout %s of the batch of %s', rollout, version_name(lineage, step)) FROM member
        WHERE rollout NOT IN (SELECT id FROM rollout_row) UNION ALL
        SELECT printf('rollouts of the batch of %s', version_name(lineage, step)) FROM batch
        WHERE members = '[]'""",
    "ledger_damaged": """
        SELECT printf('ledger of lineage %d begins at step %d from %s; on record is step %d from %s', lineage,
            ledger.start, coalesce(version_name(ledger.from_lineage, ledger.from_step), 'the model folder'),
            lineage.start,
            coalesce(version_name(lineage.from_lineage, lineage.from_step), 'the model folder'))
        FROM ledger JOIN lineage ON number = lineage WHERE ledger.start IS NOT NULL
        AND (ledger.from_lineage, ledger.from_step, ledger.start)
            IS NOT (lineage.from_lineage, lineage.from_step, lineage.start)
        UNION ALL
        SELECT DISTINCT printf('ledger of lineage %d: rank %d of a trainer with %d ranks', lineage, rank,
            ranks)
        FROM line JOIN lineage ON number = lineage WHERE rank >= ranks""",
}
"""What is asked for a violation: a row for each."""
_CONTRADICTORY: Final = f"""
    SELECT printf('lineage %d begins from lineage %d', number, from_lineage) FROM lineage
        WHERE from_lineage >= number UNION ALL
    SELECT printf('lineage %d takes over batches of lineage %d', number, origin) FROM lineage
        WHERE origin >= number UNION ALL
    SELECT printf('lineage %d has %d ranks', number, ranks) FROM lineage
        WHERE ranks NOT BETWEEN 1 AND {1 << 20} UNION ALL
    SELECT printf('half-life of the batch of %s: %g', version_name(lineage, step), half_life) FROM batch
        WHERE half_life <= 0"""
"""Rows that nothing else can be asked of."""
_NEWEST_CHECKPOINT: Final = """
    SELECT lineage, step FROM (SELECT at, lineage, step FROM checkpoint UNION ALL
        SELECT at, lineage, step FROM rolled_back UNION ALL
        SELECT at, from_lineage, from_step FROM lineage WHERE from_lineage IS NOT NULL)
    ORDER BY at DESC LIMIT 1"""
"""Saved, begun from, or gone back to."""
_FIGURES: Final = {
    "prompts": "SELECT count(*) FROM rollout WHERE NOT continues",
    "scored": "SELECT count(*) FROM rollout WHERE scored",
    "tokens": "SELECT sum(own_tokens) FROM rollout",
    "tokens_by_teacher": "SELECT sum(tokens) FROM rollout WHERE by_teacher",
    "late": "SELECT count(*) FROM member WHERE weight < 1",
    "oldest": "SELECT max(age) FROM aged",
    "trained": """
        SELECT count(*) FROM ancestry JOIN trained ON trained.lineage = ancestor AND step <= until
        WHERE ancestry.lineage = (SELECT max(number) FROM lineage)""",
}
"""What is asked for a figure of the report."""


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
    """Name in `VIOLATIONS` → its entries; checks that found nothing are left out."""

    @property
    def ok(self) -> bool:
        return not self.violations


def audit(run_dir: Path) -> AuditReport:
    """Audit a run's folder; the run may be going on. Raises DataError when it is no run's folder at all.

    The ledger is read before the record and after it: what it shows before must be on record, and what is on
    record must be in it after.
    """
    folder, record = run_dir / "ledger", run_dir / RECORD
    if not record.is_file() and not folder.is_dir():
        raise DataError(f"{run_dir} holds neither {RECORD} nor ledger: name the folder of a run")
    before = read(folder)
    try:
        with closing(open_tables(run_dir)) as tables:
            tables.execute("BEGIN")  # one moment of a run that goes on
            damage = [line for (line,) in tables.execute("PRAGMA integrity_check") if line != "ok"]
            damage = damage or [line for (line,) in tables.execute(_CONTRADICTORY)]
            if not damage:
                unreadable = _unreadable(run_dir, tables)
                return audit_of(tables, before, read(folder), run_dir / CHECKPOINTS, unreadable)
    except (DataError, sqlite3.DatabaseError) as error:  # the second: of a value that cannot be asked about
        damage = [str(error)]
    entries = {"record_damaged": damage, "ledger_damaged": _damage(read(folder))}
    return AuditReport(violations={name: lines for name, lines in entries.items() if lines})


def audit_of(
    tables: sqlite3.Connection,
    before: Ledger,
    after: Ledger,
    checkpoints: Path | None = None,
    unreadable: Sequence[str] = (),
) -> AuditReport:
    """Audit a record, and ledgers that were read `before` it and `after` it.

    `unreadable`: its arrays that are not what was written.
    """
    report = AuditReport()

    def rows(question: str) -> list[Any]:
        return [row[0] if len(row) == 1 else row for row in tables.execute(question)]

    add_ledgers(tables, before, after)
    tables.execute("CREATE TEMP TABLE aged AS SELECT * FROM trained_age")
    entries = {"record_damaged": [*unreadable], "ledger_damaged": _damage(after)}
    if checkpoints:
        run_id = next(iter(rows("SELECT id FROM opening ORDER BY at DESC LIMIT 1")), None)
        saved = [Version(*version) for version in rows(_NEWEST_CHECKPOINT) if version[0] is not None]
        entries["checkpoint_missing"] = [*_checkpoint_missing(checkpoints, run_id, *saved)]
    for name, question in _QUESTIONS.items():
        entries[name] = entries.get(name, []) + rows(question)
    report.violations = {name: entries[name] for name in VIOLATIONS if entries.get(name)}
    for figure, question in _FIGURES.items():
        setattr(report, figure, rows(question)[0] or 0)
    report.open_prompts = rows("SELECT id FROM rollout WHERE status = 'pending' ORDER BY id")
    report.dropped = dict(
        rows("SELECT reason, count(*) FROM rollout WHERE status = 'dropped' GROUP BY reason")
    )
    same, other = repeated(dict(before))
    report.again, report.differing = len(same) + len(other), [str(version) for version in other]
    return report


def _damage(ledger: Ledger) -> list[str]:
    return [line for lineage in ledger.values() for line in lineage.damage]


def _unreadable(run_dir: Path, tables: sqlite3.Connection) -> list[str]:
    """Why no resume is possible: rows that contradict each other, arrays and prompts that it reads and that
    are not what was written. The run may free some meanwhile."""
    problems = dict(_problems(run_dir, tables))
    if problems:
        with closing(open_read_only(run_dir / RECORD)) as now:
            problems = {block: problem for block, problem in _problems(run_dir, now) if block in problems}
    return list(problems.values())


def _problems(run_dir: Path, tables: sqlite3.Connection) -> Iterator[tuple[Block | None, str]]:
    try:
        state = load(tables, None, reader(run_dir))
        saved_starts(run_dir)
    except DataError as error:
        return (yield None, str(error))
    for block in sorted(state.blocks):
        try:
            read_bytes(run_dir, block)
        except (DataError, ValueError, OverflowError, MemoryError) as error:
            yield block, str(error)


def _checkpoint_missing(folder: Path, run_id: str | None, saved: Version | None = None) -> Iterator[str]:
    """What is wrong with `latest`; a folder of checkpoints that was removed whole is no violation.

    `saved`: the newest checkpoint on record.
    """
    try:
        while True:
            name = latest(folder)
            choice = choose(folder)
            if name == latest(folder):  # else the run saved another one meanwhile
                break
    except DataError as error:
        return (yield str(error))
    if choice.damaged and (name or saved):  # before the first is on record, `latest` may be to come
        yield choice.line
    header = index(choice.path)[0] if choice.path else None
    if header and header.run_id not in (None, run_id):
        yield f"{choice.path}: run {header.run_id} saved it, not run {run_id}"
    elif header and saved and Version.parse(header.version) < saved:
        yield f"{choice.path} is older than {saved}, which is on record"
