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

from sync.base.decoding import json_decoder
from sync.base.errors import DataError
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
    """What `latest` names; empty: there is none. Raises DataError when it is no file."""
    path = folder / "latest"
    try:
        return path.read_text(errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}): write the name of a checkpoint beside it into it"
        ) from None


def saved(folder: Path) -> list[Path]:
    """Folders of checkpoints, oldest first."""
    checkpoints = {}
    for path in folder.glob("L*-v*"):
        try:
            checkpoints[Version.parse(path.name)] = path
        except ValueError:  # not ours
            continue
    return [path for _, path in sorted(checkpoints.items())]


def index(path: Path) -> tuple[Index | None, str | None]:
    """The index of a checkpoint, and what is wrong with it or with sizes of files."""
    try:
        Version.parse(path.name)
    except ValueError:
        return None, "no checkpoint is named so"
    try:
        index = json_decoder(Index).decode((path / INDEX).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None, f"it has no {INDEX}"
    except OSError as error:
        return None, f"its {INDEX} cannot be read ({error.strerror})"
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None, f"its {INDEX} is damaged"
    if index.version != path.name:
        return None, f"it is checkpoint {index.version:.40}, which was put in its place"
    if not index.files:
        return None, f"its {INDEX} names no files"
    for name, entry in index.files.items():
        if _size(path / name) != entry.size:
            return None, f"{name} is missing or cut short"
    return index, None


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size if file.is_file() else None
    except (OSError, ValueError):  # names that no file can have
        return None


def retain(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and what `latest` names, and what broken saves left."""
    named = latest(folder)
    for path in [*saved(folder)[:-keep], *folder.glob(".partial-L*")]:
        if path.name != named:
            shutil.rmtree(path)
            log.info("removed checkpoint %s", path.name)
