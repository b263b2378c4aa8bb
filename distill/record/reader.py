"""A run's tables for questions of the audit and of `distill sql`, while it goes on or after it.

run.db (schema.sql), read only ────────▶ main ─┐
ledgers, files of people ─▶ beside.sql ─▶ temp ┴▶ SELECT …
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from distill.buffer import Bound
from distill.metrics.results import read_run
from distill.metrics.samples import read_samples
from distill.metrics.timeline import Span
from distill.record.store import RECORD, open_read_only
from student_trainer.ledger import Lineage, read
from sync.base.errors import DataError
from sync.base.jsonl import read_lines
from sync.wire import Version

Ledger = Mapping[int, Lineage]  # lineage → what its ranks trained on
_READS: Final = (
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
)
_TABLES: Final = """
    SELECT part.type AS kind, part.name, group_concat(field.name, ', ') AS columns
    FROM (SELECT type, name FROM sqlite_schema UNION ALL SELECT type, name FROM sqlite_temp_schema) AS part
    JOIN pragma_table_info(part.name) AS field
    WHERE part.type IN ('table', 'view') GROUP BY part.type, part.name
"""


def open_tables(run_dir: Path) -> sqlite3.Connection:
    """The record of a run, and the tables of beside.sql, empty. Raises DataError as `open_read_only` does."""
    tables = open_read_only(run_dir / RECORD)
    tables.executescript((files("distill.record") / "beside.sql").read_text())
    tables.create_function("version_name", 2, lambda *version: str(Version(*version)))
    tables.create_function("weight", 4, lambda age, *bound: Bound(*bound).weight(age), deterministic=True)
    return tables


def add(tables: sqlite3.Connection, name: str, *rows: Iterable[object]) -> None:
    """Add rows to a table of beside.sql."""
    for row in map(tuple, rows):
        tables.execute(f"INSERT INTO {name} VALUES ({', '.join('?' * len(row))})", row)


def add_ledgers(tables: sqlite3.Connection, before: Ledger, after: Ledger) -> None:
    """Add what the ranks trained on, as read before and after the record."""
    for number, lineage in before.items():
        add(tables, "ledger", (number, *(lineage.parent or (None, None)), lineage.start))
        for step, ranks in lineage.shown.items():
            add(tables, "trained_step", (number, step, lineage.tokens.get(step)))
            for rank, (ids, _) in ranks.items():
                add(tables, "trained", *((number, step, rank, rollout) for rollout in ids))
    for number, lineage in after.items():
        for step, ranks in lineage.shown.items():
            add(tables, "line", *((number, step, rank) for rank in ranks))


def tables(run_dir: Path) -> sqlite3.Connection:
    """A run's record, and beside it what its ledgers and files show. Raises DataError without a record."""
    ledger, opened = read(run_dir / "ledger"), open_tables(run_dir)
    add_ledgers(opened, ledger, ledger)
    if (run_dir / "metrics.jsonl").is_file():
        for row in read_run(run_dir).metrics:
            add(opened, "metrics", (row.get("lineage", 0), row["step"], row["time"], json.dumps(row)))
    add(opened, "span", *(span.values() for span in read_lines(run_dir / "timeline.jsonl", Span)))
    for sample in read_samples(run_dir):
        figures = sample.age, sample.teacher, sample.own_length, sample.reverse_kl, sample.reward
        texts = json.dumps(sample.prompt), json.dumps(sample.tokens)
        kind = sample.truncated, sample.by_teacher
        add(opened, "sample", (*Version.parse(sample.version), sample.id, *figures, *kind, *texts))
    return opened


def ask(run_dir: Path, question: str = "") -> tuple[list[str], list[tuple[Any, ...]]]:
    """Names of the columns and the rows that a SELECT gives; without one, what there is to ask.

    Raises DataError for anything else than a SELECT.
    """

    def allowed(action: int, *_: object) -> int:
        return sqlite3.SQLITE_OK if action in _READS else sqlite3.SQLITE_DENY

    connection = tables(run_dir)
    try:
        if question:
            connection.set_authorizer(allowed)
        cursor = connection.execute(question or _TABLES)
        return [name for name, *_ in cursor.description or ()], cursor.fetchall()
    except sqlite3.OperationalError as error:
        raise DataError(f"{question!r}: {error}; `distill sql RUN_DIR` lists tables and columns") from None
    except (sqlite3.DatabaseError, sqlite3.Warning) as error:
        raise DataError(
            f"{question!r} is refused ({error}): ask one question that only reads, SELECT …; a run's record "
            "is written by its controller alone"
        ) from None
    finally:
        connection.close()


def lines(columns: list[str], rows: list[tuple[Any, ...]]) -> Iterator[str]:
    """An aligned table, numbers at the right."""

    def cell(value: object) -> str:
        if value is None:
            return "–"
        return f"{value:.6g}" if isinstance(value, float) else str(value).replace("\n", "⏎")

    texts = [columns, *([cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    numeric = [
        bool(rows) and all(isinstance(row[place], int | float | None) for row in rows)
        for place in range(len(columns))
    ]
    for line in texts:
        cells = zip(line, widths, numeric, strict=True)
        yield "  ".join(
            text.rjust(width) if right else text.ljust(width) for text, width, right in cells
        ).rstrip()
