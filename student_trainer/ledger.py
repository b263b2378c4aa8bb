"""Which rollouts were trained on at which version: one append-only file per rank and lineage.

    ledger/L000-rank0.jsonl      {"lineage": 0, "parent": null, "step": 0}    first line
                                 {"step": 1, "ids": ["…", …]}                 one line per step, step after it

A line is flushed before its step is reported, so the files prove that nothing was trained on twice: a rollout
may appear in two lineages only when the step that trained on it was left behind by the branch.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sync.errors import DataError
from sync.wire import Version


class Ledger:
    """The file of one rank of one lineage."""

    def __init__(self, folder: Path, start: Version, parent: Version | None, rank: int) -> None:
        """Begin the file. Raises DataError when this lineage was written before."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"L{start.lineage:03d}-rank{rank}.jsonl"
        if self._path.exists():
            raise DataError(
                f"{self._path} exists: lineage {start.lineage} was trained before, "
                "and every start of the trainer needs a new one"
            )
        origin = None if parent is None else list(parent)
        self._write({"lineage": start.lineage, "parent": origin, "step": start.step})

    def record(self, step: int, ids: list[str]) -> None:
        """The step that made `step` trained on `ids` on this rank; in the file when this returns."""
        self._write({"step": step, "ids": ids})

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


@dataclass(frozen=True)
class Lineage:
    """What the files of one lineage say, all ranks together."""

    parent: Version | None
    steps: dict[int, list[str]]
    """Step after it → ids it trained on."""


def read(folder: Path) -> dict[int, Lineage]:
    """Every lineage in a run's ledger. A last line that a crash cut off was never reported: it is skipped."""
    lineages: dict[int, Lineage] = {}
    for path in sorted(folder.glob("L*-rank*.jsonl")):
        complete = path.read_text().split("\n")[:-1]
        lines = [json.loads(line) for line in complete]
        if not lines:
            continue
        parent = None if lines[0]["parent"] is None else Version(*lines[0]["parent"])
        lineage = lineages.setdefault(lines[0]["lineage"], Lineage(parent, {}))
        for line in lines[1:]:
            lineage.steps.setdefault(line["step"], []).extend(line["ids"])
    return lineages


def trained_twice(lineages: dict[int, Lineage], last: Version) -> list[str]:
    """Ids that the weights of `last` were trained on more than once, along its ancestry."""
    seen: Counter[str] = Counter()
    current: Version | None = last
    while current is not None and current.lineage in lineages:
        lineage = lineages[current.lineage]
        for step, ids in lineage.steps.items():
            if step <= current.step:
                seen.update(ids)
        current = lineage.parent
    return sorted(name for name, count in seen.items() if count > 1)
