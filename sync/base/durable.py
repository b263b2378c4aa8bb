"""Files that a power cut leaves whole and a full disk does not cut."""

from __future__ import annotations

import errno
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
RETRY_SECONDS = 5.0
"""Pause between two attempts to write to a full disk."""
waiting_for_space: list[str] = []
"""What this process cannot write now, because a disk is full; in words."""
_SQLITE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)
_WORDS = tuple(os.strerror(number) for number in FULL)
_log = logging.getLogger(__name__)


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
    """Replace a JSON file, as `write` does."""
    write(path, json.dumps(value, indent=2).encode() + b"\n", mode)


# --- a full disk ----------------------------------------------------------------------------------------


def is_full(error: BaseException) -> bool:
    """Whether a full disk is behind an error, however it was wrapped."""
    seen: BaseException | None = error
    while seen is not None:
        if getattr(seen, "sqlite_errorcode", None) in _SQLITE or getattr(seen, "errno", None) in FULL:
            return True
        if any(word in str(seen) for word in _WORDS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def append(path: Path, data: bytes, durable: bool = False) -> bool:
    """Append all of `data`; False, and nothing changed, when the disk is full. Raises other OSErrors.
    `durable`: it is on disk when this returns."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        if error.errno in FULL:
            return False
        raise
    try:
        size, rest = os.fstat(handle).st_size, memoryview(data)
        try:
            while rest:
                rest = rest[os.write(handle, rest) :]
            if durable:
                os.fsync(handle)
        except OSError as error:
            os.ftruncate(handle, size)
            if error.errno in FULL:
                return False
            raise
        return True
    finally:
        os.close(handle)


def until_disk_space(
    work: Callable[[], T], what: str, paused: str = "the run", anywhere: Callable[[bool], bool] = bool
) -> T:
    """What `work` returns, repeated while the disk is full, which is said once. `work` is all or nothing.
    `paused`: what waits with it. `anywhere`: whether a disk is full, given whether one is in this process."""
    waiting = False
    while True:
        problem: Exception | None = None
        try:
            result = work()
        except Exception as error:  # libraries in other languages have kinds of their own
            if not is_full(error):
                raise
            problem = error
        if not anywhere(problem is not None):
            break
        if not waiting:
            why = problem or "another rank"
            _log.error("disk full: %s waits for space, %s pauses (%s)", what, paused, why)
        waiting = True
        waiting_for_space.append(said := f"{what} waits for disk space")
        time.sleep(RETRY_SECONDS)
        waiting_for_space.remove(said)
    if waiting:
        _log.warning("%s has space again, %s continues", what, paused)
    return result
