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


class Facts:
    """The tables of a run. Raises DataError where its record is missing or damaged."""

    def __init__(self, tables: sqlite3.Connection) -> None:
        self.tables = tables
        tables.executescript((files("distill.record") / "beside.sql").read_text())
        tables.create_function("weight", 4, _weight, deterministic=True)
        tables.create_function("version_name", 2, lambda *version: str(Version(*version)))

    @classmethod
    def of(cls, run_dir: Path) -> Facts:
        return cls(open_read_only(run_dir / RECORD))

    def add(self, table: str, *rows: Iterable[object]) -> None:
        """Add rows to a table of beside.sql."""
        for row in map(tuple, rows):
            self.tables.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)

    def add_ledgers(self, before: Ledger, after: Ledger) -> None:
        """Add what the ranks trained on, as read before and after the record."""
        for number, lineage in before.items():
            self.add("ledger", (number, *(lineage.parent or (None, None)), lineage.start))
            for step, ranks in lineage.shown.items():
                self.add("trained_step", (number, step, lineage.tokens.get(step)))
                for rank, (ids, _) in ranks.items():
                    self.add("trained", *((number, step, rank, rollout) for rollout in ids))
        for number, lineage in after.items():
            for step, ranks in lineage.shown.items():
                self.add("line", *((number, step, rank) for rank in ranks))


def _weight(age: int, limit: int, hard: int, half_life: float) -> float:
    return Bound(limit, hard, half_life).weight(age)
