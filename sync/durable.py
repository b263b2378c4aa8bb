"""Files that a power cut leaves whole: forced to disk, then renamed, then the folder's entries forced too."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def force(path: Path) -> None:
    """Force a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, each with its entry on disk."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        force(path.parent)


def rename(source: Path, target: Path) -> None:
    """Rename; the new name is on disk when this returns. The files' contents must have been forced before."""
    source.rename(target)
    force(target.parent)


def write(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace a file: after a crash it is the old one or all of the new one. `mode` is less the umask."""
    pending = path.with_name(f".{path.name}.new")
    pending.unlink(missing_ok=True)
    handle = os.open(pending, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(handle)
    rename(pending, path)


def write_json(path: Path, value: Any, mode: int = 0o666) -> None:
    """`write` a value as indented JSON."""
    write(path, json.dumps(value, indent=2).encode() + b"\n", mode)
