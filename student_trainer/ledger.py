"""Which rollouts were trained on at which version: one append-only file per rank and lineage.

    ledger/L000-rank0.jsonl
        {"lineage": 0, "parent": null, "step": 0, "rank": 0, "chain": "…"}     first line
        {"step": 1, "ids": ["…", …], "weights": "…", "tokens": 9, "chain": "…"}   one line per step, after it

Each line is forced to disk before its step is reported, so the files prove what the weights were trained on.
"weights" is the checksum of the rank's shards after the step: trained again after a resume, the step must
have it again. "tokens" counts those in the loss. "chain" is a digest over the line and the chain of the line
before it: it reveals a line that was altered, left out, repeated or moved. A crash can spoil the last line
alone, of a step not yet reported.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from sync.base.decoding import json_decoder
from sync.base.durable import append, force, make_folder, until_disk_space
from sync.base.errors import DataError
from sync.wire import Version

_NAME: Final = re.compile(r"L(\d{3,})-rank(\d+)\.jsonl")
_LINKED: Final = re.compile(rb'(.*),"chain":"([0-9a-f]{16})"}', re.DOTALL)


class _First(msgspec.Struct, forbid_unknown_fields=True):
    lineage: int
    parent: Version | None
    step: int
    """Step of the weights that the lineage began with."""
    rank: int


class _Step(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    step: int
    ids: list[str]
    weights: str
    tokens: int | None = None


class Ledger:
    """The file of one rank of one lineage."""

    def __init__(self, folder: Path, start: Version, parent: Version | None, rank: int) -> None:
        """Begin the file. Raises DataError when this lineage was written before."""
        make_folder(folder)
        self._path = folder / f"L{start.lineage:03d}-rank{rank}.jsonl"
        self._chain, self._step = b"", start.step
        if self._path.exists():
            raise DataError(
                f"{self._path} exists: lineage {start.lineage} was trained before, "
                "and every start of the trainer needs a new one"
            )
        first = _First(start.lineage, parent, start.step, rank)
        until_disk_space(lambda: self._write(first), str(self._path))
        force(folder)

    def record(self, step: int, ids: list[str], weights: str, tokens: int | None = None) -> None:
        """The step that made `step` trained on `ids` on this rank; on disk when this returns.

        `tokens`: of them in the loss; None: not known. Raises OSError when the disk is full: nothing was
        written. A step that is there already (another rank had no room, and all try again) is not written
        twice.
        """
        if step != self._step:
            self._write(_Step(step, ids, weights, tokens))
            self._step = step

    def _write(self, line: _First | _Step) -> None:
        text = msgspec.json.encode(line)[:-1]
        chain = _digest(self._chain, text)
        if not append(self._path, b'%b,"chain":"%b"}\n' % (text, chain), durable=True):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._chain = chain


def _digest(before: bytes, text: bytes) -> bytes:
    return blake2b(before + text, digest_size=8).hexdigest().encode()


@dataclass
class Lineage:
    """The content of the files of one lineage, all ranks together; made by `read` for the audit."""

    parent: Version | None = None
    start: int | None = None
    """Step that it begins at; None: no file has it."""
    shown: dict[int, dict[int, tuple[tuple[str, ...], str]]] = field(default_factory=dict)
    """Step after it → rank → its ids in order, and the checksum of its weights."""
    tokens: dict[int, int] = field(default_factory=dict)
    """Step after it → tokens in its loss; lines of earlier releases do not say."""
    damage: list[str] = field(default_factory=list)
    """Each with the file, the line and what is wrong; what follows in that file is left out."""

    @property
    def steps(self) -> dict[int, list[str]]:
        """Step after it → ids it trained on."""
        return {step: [id for ids, _ in now.values() for id in ids] for step, now in self.shown.items()}


def read(folder: Path) -> dict[int, Lineage]:
    """Every lineage in a run's ledger. A last line that a crash spoilt was never reported: it is skipped."""
    lineages: dict[int, Lineage] = {}
    for path in sorted(folder.glob("L*-rank*.jsonl")):
        if name := _NAME.fullmatch(path.name):
            lineage = lineages.setdefault(int(name[1]), Lineage())
            try:
                _read_file(path, lineage, int(name[1]), int(name[2]))
            except (DataError, OSError) as error:
                lineage.damage.append(str(error))
            except msgspec.DecodeError as error:
                lineage.damage.append(f"{path} holds a line that cannot be read: {error}")
    return lineages


def _read_file(path: Path, lineage: Lineage, number: int, rank: int) -> None:
    """Add a file to its lineage. Raises DataError at the first line that is damaged."""
    texts = _texts(path)
    for text in islice(texts, 1):
        first = json_decoder(_First).decode(text)
        if (first.lineage, first.rank) != (number, rank):
            raise DataError(f"{path} was written as that of lineage {first.lineage}, rank {first.rank}")
        if lineage.start is not None and (lineage.parent, lineage.start) != (first.parent, first.step):
            raise DataError(f"{path} begins at step {first.step} from {first.parent}, another rank elsewhere")
        lineage.parent, lineage.start = first.parent, first.step
    for expected, text in enumerate(texts, 1 + (lineage.start or 0)):
        line = json_decoder(_Step).decode(text)
        if line.step != expected:
            raise DataError(f"{path} holds step {line.step} where step {expected} belongs")
        lineage.shown.setdefault(line.step, {})[rank] = (tuple(line.ids), line.weights)
        if line.tokens is not None:
            lineage.tokens[line.step] = lineage.tokens.get(line.step, 0) + line.tokens


def _texts(path: Path) -> Iterator[bytes]:
    """The lines whose chain holds, as JSON without it. A last line that a crash spoilt is left out."""
    *lines, rest = path.read_bytes().split(b"\n")
    chain = b""
    for number, line in enumerate(lines, 1):
        linked = _LINKED.fullmatch(line)
        if linked is None or linked[2] != _digest(chain, linked[1]):
            if number == len(lines) and not rest:
                return
            raise DataError(
                f"{path} line {number} is not what was written there: it was altered, moved, repeated or "
                "left out, or an earlier release wrote it; a crash spoils nothing but the last line"
            )
        chain = linked[2]
        yield linked[1] + b"}"


def repeated(lineages: dict[int, Lineage]) -> tuple[list[Version], list[Version]]:
    """Versions whose step an earlier lineage trained on the same rows of the same ranks: (same, other) bits.

    A lineage is compared with the one whose checkpoint it began from, or, when it began from the model
    folder, with the newest earlier one that did so too; up to the first step that had other rows.
    """
    same: list[Version] = []
    other: list[Version] = []
    root = None
    for number, lineage in sorted(lineages.items()):
        before = lineages.get(-1 if root is None else root)
        if lineage.parent is None:
            root = number
        else:
            before = lineages.get(lineage.parent.lineage)
        for step, now in sorted(lineage.shown.items()):
            then = before.shown.get(step, {}) if before else {}
            if [(rank, now[rank][0]) for rank in sorted(now)] != [(r, then[r][0]) for r in sorted(then)]:
                break
            (same if now == then else other).append(Version(number, step))
    return same, other
