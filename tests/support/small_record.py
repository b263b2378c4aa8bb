"""A run of two lineages as rows of a record, and the ledger of its one rank."""

from __future__ import annotations

import json
import sqlite3
import zlib
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from blake3 import blake3
from zstandard import ZstdCompressor

from distill.prompts.stream import Prompt
from distill.record.blocks import pack_block
from distill.record.changes import Change
from distill.record.rollout import Rollout
from distill.record.state import RunState
from distill.record.store import FORMAT, RECORD
from student_trainer.ledger import Ledger
from sync.wire import Version

LEDGER = {0: {1: ["a", "b"], 2: ["c", "d"]}, 1: {2: ["c", "d"], 3: ["f", "e"]}}
"""Lineage 1 resumes at step 1, trains step 2 anew and makes step 3."""
WEIGHTED = (
    "UPDATE batch SET members = (SELECT json_group_array(json_array(value ->> 0, value ->> 1, {})) "
    "FROM json_each(members))"
)
"""With a loss weight that is filled in, for every rollout of every batch."""


def record(folder: Path) -> sqlite3.Connection:
    """Write a run.db, without arrays of what is scored.

    Rollouts a to h: a to f are in batches, g is dropped, h is in flight.
    """
    (folder / "arrays").mkdir()
    prompt, _ = pack_block([Rollout("", 0, issued=Prompt("h", [1]))], 1, ZstdCompressor())
    (folder / "arrays/00000000.bin").write_bytes(prompt)
    db = sqlite3.connect(folder / RECORD, isolation_level=None)
    db.executescript((files("distill.record") / "schema.sql").read_text())
    db.executescript(
        f"""
        PRAGMA user_version = {FORMAT};
        INSERT INTO opening (at, run, id, seed, batch, max_staleness, hard_limit, half_life, completions,
            per_prompt) VALUES (1, 'r', 'x', 0, 2, 1, 1, 1.0, 1, 1);
        INSERT INTO lineage VALUES (0, 2, NULL, NULL, 0, NULL, 0, 1, 'm'), (1, 30, 0, 1, 1, 0, 2, 1, 'm');
        INSERT INTO version VALUES (20, 0, 1, 'delta', 1, 1, 0.0);
        INSERT INTO checkpoint (at, lineage, step, path) VALUES (21, 0, 1, 'x');
        INSERT INTO batch (lineage, step, max_staleness, hard_limit, half_life, is_part, members)
            VALUES (0, 0, 1, 1, 1.0, 0, '[[0, 0], [1, 0]]'), (0, 1, 1, 1, 1.0, 0, '[[2, 1], [3, 1]]'),
            (1, 2, 1, 1, 1.0, 0, '[[4, 1], [5, 1]]');
        INSERT INTO step (lineage, step) VALUES (0, 1), (0, 2), (1, 2), (1, 3);
        """
    )
    db.execute("INSERT INTO block VALUES (0, 0, 0, ?, ?)", (len(prompt), zlib.crc32(prompt)))
    for number, id in enumerate("abcdefgh"):
        scored = None if id == "h" else 10 + number + 20 * (id >= "e")
        spans = None if id == "h" else json.dumps([[0, int(id >= "e"), 0]])
        reason = "too_old" if id == "g" else None
        db.execute(
            "INSERT INTO rollout_row (row, id, number, reason, scored, by_teacher, tokens, own_tokens, "
            "spans, block, place) VALUES (?1, ?2, ?1, ?3, ?4, 0, ?5, ?5, ?6, 0, 0)",
            (number, id, reason, scored, scored and 2, spans),
        )
    return db


def ledgers(folder: Path, trained: dict[int, dict[int, list[str]]] = LEDGER) -> None:
    """Write what one rank trained on."""
    for lineage, steps in trained.items():
        start, parent = (Version(0, 0), None) if lineage == 0 else (Version(1, 1), Version(0, 1))
        ledger = Ledger(folder / "ledger", start, parent, rank=0)
        for step, ids in steps.items():
            ledger.record(step, ids, f"bits {step}", 2 * len(ids))


def checkpoint(folder: Path, version: Version) -> Path:
    """Write a checkpoint that `latest` names."""
    path = folder / "checkpoints" / str(version)
    path.mkdir(parents=True)
    (path / "weights.pt").write_bytes(b"weights")
    files = {"weights.pt": {"size": 7, "blake3": blake3(b"weights").hexdigest()}}
    index = {"version": str(version), "world_size": 1, "fingerprint": "model", "files": files}
    (path / "checkpoint.json").write_text(json.dumps(index))
    (path.parent / "latest").write_text(f"{version}\n")
    return path


def apply(state: RunState, *changes: Change) -> None:
    """Change a state without rows; of versions, lineages and rollbacks."""
    nothing: Any = SimpleNamespace(at=0, execute=lambda *_: None, insert=lambda *_: None)
    for change in changes:
        change.apply(state, nothing)
