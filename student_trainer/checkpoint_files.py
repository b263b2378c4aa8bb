"""The checkpoints' folder as files: which there are, whether one is whole, and which go. No torch.

Newer is the later lineage, and of one lineage the later step: the order in which a run saves them, whatever
the clocks.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Final

import msgspec

from sync.decoding import json_decoder
from sync.wire import Version

log = logging.getLogger(__name__)
INDEX: Final = "checkpoint.json"


class File(msgspec.Struct):
    """One of DeepSpeed's files: size in bytes, BLAKE3 in hex."""

    size: int
    blake3: str


class Index(msgspec.Struct):
    """checkpoint.json: written by rank 0 when all files are on disk, read at a resume and by the audit."""

    version: str
    """such as L000-v00000012"""
    world_size: int
    """ranks that saved it"""
    fingerprint: str
    """of the model: `Weights.fingerprint`"""
    run_id: str | None = None
    """`RunIdentity.id` of the run that saved it"""
    expert_parallel: int = 1
    """ranks that shared the experts of a layer"""
    files: dict[str, File] = {}
    """path below the checkpoint's folder → file"""


def latest(folder: Path) -> str:
    """What `latest` names; empty: there is none."""
    path = folder / "latest"
    return path.read_text(errors="replace").strip() if path.exists() else ""


def saved(folder: Path) -> list[Path]:
    """Folders of checkpoints, oldest first."""
    found = {}
    for path in folder.glob("L*-v*"):
        try:
            found[Version.parse(path.name)] = path
        except ValueError:  # not ours
            continue
    return [path for _, path in sorted(found.items())]


def index(path: Path) -> tuple[Index | None, str | None]:
    """The index of a checkpoint, and what is wrong with it or with sizes of files."""
    try:
        index = json_decoder(Index).decode((path / INDEX).read_bytes())
        Version.parse(index.version)
    except (FileNotFoundError, NotADirectoryError):
        return None, f"it has no {INDEX}"
    except (msgspec.MsgspecError, ValueError):
        return None, f"its {INDEX} is damaged"
    for name, entry in index.files.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != entry.size:
            return None, f"{name} is missing or cut short"
    return index, None


def retain(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and what `latest` names, and what broken saves left."""
    named = latest(folder)
    for path in [*saved(folder)[:-keep], *folder.glob(".partial-L*")]:
        if path.name != named:
            shutil.rmtree(path)
            log.info("removed checkpoint %s", path.name)
