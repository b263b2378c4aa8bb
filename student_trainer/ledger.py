"""Which rollouts were trained on at which version: one append-only file per rank and lineage.

    ledger/L000-rank0.jsonl      {"lineage": 0, "parent": null, "step": 0}    first line
                                 {"step": 1, "ids": ["…", …], "weights": "…"} one line per step, step after it

A line is written before its step is reported, so the files prove that nothing was trained on twice: a rollout
may appear in two lineages only when the step that trained on it was left behind by the branch. "weights" is
the checksum of the rank's shards after the step: trained again after a resume, the step must show it again.
"""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sync.errors import DataError
from sync.room import append, until_room
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
        first = {"lineage": start.lineage, "parent": origin, "step": start.step}
        until_room(lambda: self._write(first), str(self._path))

    def record(self, step: int, ids: list[str], weights: str) -> None:
        """The step that made `step` trained on `ids` on this rank; in the file when this returns.

        Raises OSError when the disk is full: nothing was written.
        """
        self._write({"step": step, "ids": ids, "weights": weights})

    def _write(self, line: dict[str, Any]) -> None:
        if not append(self._path, json.dumps(line, separators=(",", ":")).encode() + b"\n"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))


@dataclass(frozen=True)
class Lineage:
    """What the files of one lineage say, all ranks together."""

    parent: Version | None
    steps: dict[int, list[str]]
    """Step after it → ids it trained on."""
    shown: dict[int, dict[int, tuple[tuple[str, ...], str]]] = field(default_factory=dict)
    """Step after it → rank → its ids in order, and the checksum of its weights."""


def read(folder: Path) -> dict[int, Lineage]:
    """Every lineage in a run's ledger. A last line that a crash cut off was never reported: it is skipped."""
    lineages: dict[int, Lineage] = {}
    for path in sorted(folder.glob("L*-rank*.jsonl")):
        rank = int(path.stem.partition("-rank")[2])
        complete = path.read_text().split("\n")[:-1]
        lines = [json.loads(line) for line in complete]
        if not lines:
            continue
        parent = None if lines[0]["parent"] is None else Version(*lines[0]["parent"])
        lineage = lineages.setdefault(lines[0]["lineage"], Lineage(parent, {}))
        for line in lines[1:]:
            lineage.steps.setdefault(line["step"], []).extend(line["ids"])
            lineage.shown.setdefault(line["step"], {})[rank] = (tuple(line["ids"]), line["weights"])
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


def repeated(lineages: dict[int, Lineage]) -> tuple[list[Version], list[Version]]:
    """Versions whose step an earlier lineage trained on the same rows of the same ranks: (same, other) bits.

    A lineage is compared with the one whose checkpoint it began from, or, when it began from the model
    folder, with the newest earlier one that did so too; up to the first step that had other rows.
    """
    same: list[Version] = []
    other: list[Version] = []
    for number, lineage in sorted(lineages.items()):
        before = _before(number, lineages)
        for step, now in sorted(lineage.shown.items()):
            then = {} if before is None else before.shown.get(step, {})
            if rows_of(now) != rows_of(then):
                break
            (same if now == then else other).append(Version(number, step))
    return same, other


def _before(number: int, lineages: dict[int, Lineage]) -> Lineage | None:
    """The lineage that held the same weights where this one began."""
    if (parent := lineages[number].parent) is not None:
        return lineages.get(parent.lineage)
    roots = [earlier for earlier in lineages if earlier < number and lineages[earlier].parent is None]
    return lineages[max(roots)] if roots else None


def rows_of(shown: dict[int, tuple[tuple[str, ...], str]]) -> dict[int, tuple[str, ...]]:
    """Rank → its ids."""
    return {rank: ids for rank, (ids, _) in shown.items()}
