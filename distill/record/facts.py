"""A run's tables for questions: its record, read only, and beside it what the ranks' ledgers say.

run.db ──────────────────────────────▶ main ─┐
ledgers, files of people ─▶ beside.sql ─▶ temp ┴▶ questions of the audit and of `distill sql`
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path

from distill.buffer import Bound
from distill.record.store import RECORD, open_read_only
from student_trainer.ledger import Lineage
from sync.wire import Version

Ledger = Mapping[int, Lineage]  # lineage → what its ranks trained on


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
