"""What a run's record says, to tests."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from distill.record.load import scored_rollouts
from distill.record.rollout import Rollout
from distill.record.store import RECORD, arrays_path, open_read_only, reader


def rows_of(folder: Path, question: str) -> list[Any]:
    """The rows that a SELECT gives; of one column, its values."""
    with closing(open_read_only(folder / RECORD)) as tables:
        return [row[0] if len(row) == 1 else row for row in tables.execute(question)]


def rollouts_of(folder: Path) -> list[Rollout]:
    """Those that were scored, in that order, also where they were dropped later; not those whose arrays were
    freed."""
    read = reader(folder)
    with closing(open_read_only(folder / RECORD)) as tables:
        pairs = list(scored_rollouts(tables, "WHERE scored ORDER BY scored"))
    return [
        rollout.whole(read(location))
        for rollout, location in pairs
        if arrays_path(folder, location.block.file).exists()
    ]
