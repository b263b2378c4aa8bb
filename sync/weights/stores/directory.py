"""A store in a folder, shared by every process and machine that mounts it."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final
from uuid import uuid4

from sync.base.durable import force, make_folder
from sync.base.errors import StoreError
from sync.weights.stores.store import Store, check_key

_PENDING: Final = ".pending"
"""Folder of files that are being written; no key starts with a dot."""
_PENDING_SECONDS: Final = 86400.0
"""Since its last byte: a file there is then of a writer that was killed."""


class DirectoryStore(Store):
    """One file per key under `root`, which is made when missing.

    A file is written aside and forced to disk, then linked (create) or renamed (replace) into place: a crash
    leaves at most a file in `.pending`, never half a key. Whoever opens the store removes those that are a
    day old.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        with self._explained("open"):
            make_folder(self.root / _PENDING)
            _remove_old(self.root / _PENDING)

    def create(self, key: str, data: bytes | Path) -> None:
        target = self._path(key)
        if target.exists():
            raise self._taken(key)
        self._write(key, target, data, os.link)

    def replace(self, key: str, data: bytes) -> None:
        self._write(key, self._path(key), data, os.replace)

    def read(self, key: str) -> bytes:
        with self._explained("read", key):
            return self._file(key).read_bytes()

    def fetch(self, key: str, path: Path) -> None:
        with self._explained("copy", key):
            shutil.copyfile(self._file(key), path)

    def list(self, prefix: str) -> list[str]:
        start = self.root / prefix.rpartition("/")[0]
        keys = (Path(folder, name) for folder, _, names in os.walk(start) for name in names)
        relative = (path.relative_to(self.root).as_posix() for path in keys)
        return sorted(key for key in relative if key.startswith(prefix) and not key.startswith(_PENDING))

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._explained("delete", key):
            path.unlink(missing_ok=True)
            _remove_empty(path.parent, self.root)

    def _size(self, key: str) -> int | None:
        with self._explained("look for", key):
            return self._file(key).stat().st_size if self._path(key).is_file() else None

    def __str__(self) -> str:
        return f"the store {self.root}"

    def _path(self, key: str) -> Path:
        """Where a key lies. Raises StoreError when links lead out of the store."""
        path = self.root / check_key(key)
        if not Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(self.root)):
            raise StoreError(f"{key!r} lies behind a link that leads out of {self}: remove the link")
        return path

    def _file(self, key: str) -> Path:
        """The regular file of a key. Raises StoreError when there is none, or a link stands there."""
        path = self._path(key)
        if path.is_symlink():
            raise StoreError(f"{key!r} in {self} is a link, and a store holds files: remove it")
        if not path.is_file():
            raise self._missing(key)
        return path

    def _write(self, key: str, target: Path, data: bytes | Path, place: Callable[[Path, Path], None]) -> None:
        pending = self.root / _PENDING / uuid4().hex
        with self._explained("write", key):
            try:
                with pending.open("xb") as file:
                    _fill(file, data)
                    os.fsync(file.fileno())
                _place(pending, target, place)
                force(target.parent)
            except FileExistsError:
                raise self._taken(key) from None
            finally:
                pending.unlink(missing_ok=True)


def _fill(file: BinaryIO, data: bytes | Path) -> None:
    if isinstance(data, Path):
        with data.open("rb") as source:
            shutil.copyfileobj(source, file, 1 << 20)
    else:
        file.write(data)


def _place(pending: Path, target: Path, place: Callable[[Path, Path], None]) -> None:
    """Link or rename into place; a deletion may have removed the empty folder meanwhile: try again."""
    while True:
        try:
            make_folder(target.parent)
            return place(pending, target)
        except FileNotFoundError:
            if target.parent.exists():
                raise


def _remove_old(pending: Path) -> None:
    oldest = time.time() - _PENDING_SECONDS
    for path in pending.iterdir():
        with contextlib.suppress(OSError):  # another process was faster, or it is another user's
            if path.lstat().st_mtime < oldest:
                path.unlink()


def _remove_empty(folder: Path, root: Path) -> None:
    while folder != root:
        try:
            folder.rmdir()
        except OSError:  # not empty, or another process was faster: both are fine
            return
        folder = folder.parent
