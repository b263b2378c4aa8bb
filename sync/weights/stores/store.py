"""The one interface of every store, and the rules that all of them keep.

A store maps keys (relative paths with "/") to immutable bytes. `create` has exactly one winner; `replace` is
for the few small keys that move (LATEST, leases). Readers verify what they fetch: a store is not trusted.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final
from uuid import uuid4

from sync.base.durable import force, is_full, make_folder
from sync.base.errors import AlreadyPublished, StoreError

MOST_SMALL: Final = 1 << 20
"""Bytes of a manifest, lease, receipt or LATEST; hundreds of files or ranks need a tenth of it."""
_FULL: Final = "free space there, or lower weights.keep_anchors; nothing half-written was left behind"
_PART: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=-]*")


class Store(ABC):
    """Bytes under keys. Every method is safe to call from several threads and processes. All raise StoreError
    when the store fails, and for a key that `check_key` refuses."""

    absent: tuple[type[Exception], ...] = ()
    """What the store's client raises for a key that is not there."""
    failures: tuple[type[Exception], ...] = (OSError,)
    """What it raises besides."""
    remedy = "check the path, its permissions and the mount"

    @abstractmethod
    def create(self, key: str, data: bytes | Path) -> None:
        """Write a new key, from memory or from a file; all of it or nothing becomes visible. Raises
        AlreadyPublished, changing nothing, when the key exists, whatever it holds."""

    @abstractmethod
    def replace(self, key: str, data: bytes) -> None:
        """Write a small key, new or not; readers see the old bytes or the new ones."""

    @abstractmethod
    def fetch(self, key: str, path: Path) -> None:
        """Write the bytes of a key to `path` (its folder exists). Raises StoreError when it is missing."""

    @abstractmethod
    def list(self, prefix: str) -> list[str]:
        """Every key that starts with `prefix` (any string, "" for all), sorted."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove a key; a missing one is no error."""

    @abstractmethod
    def _size(self, key: str) -> int | None:
        """Bytes that a key holds, without reading them; None: it is missing."""

    def exists(self, key: str) -> bool:
        return self._size(key) is not None

    def size(self, key: str) -> int:
        """Bytes that a key holds, without reading them. Raises StoreError when it is missing."""
        if (size := self._size(key)) is None:
            raise self._missing(key)
        return size

    def read(self, key: str) -> bytes:
        """The bytes of a key. Raises StoreError when it is missing."""
        with tempfile.TemporaryDirectory() as folder:
            self.fetch(key, path := Path(folder) / "content")
            return path.read_bytes()

    @contextmanager
    def _explained(self, verb: str, key: str = "") -> Iterator[None]:
        """The client's errors as StoreError; without a key, of the store itself."""
        try:
            yield
        except (*self.absent, *self.failures) as error:
            if verb != "write" and isinstance(error, self.absent):  # of a write: what is to hold the key
                raise self._missing(key) from None
            why = " ".join(str(getattr(error, "strerror", None) or error).splitlines())[:400]
            what = f"{key!r} in {self}" if key else str(self)
            remedy = _FULL if is_full(error) else self.remedy
            raise StoreError(f"cannot {verb} {what}: {why}; {remedy}") from error

    def _missing(self, key: str) -> StoreError:
        return StoreError(f"{self} has no {key!r}: it was never published, or garbage collection removed it")

    def _taken(self, key: str) -> AlreadyPublished:
        return AlreadyPublished(
            f"{self} already has {key!r} and nothing is published twice under one name: "
            "is another trainer writing this run? A restart opens a new lineage"
        )


def content(data: bytes | Path) -> bytes:
    """What `Store.create` is given, in memory."""
    return data.read_bytes() if isinstance(data, Path) else bytes(data)


def read_small(store: Store, key: str) -> bytes:
    """The bytes of a key that holds little. Raises StoreError, before reading, when it holds much."""
    if (size := store.size(key)) > MOST_SMALL:
        raise StoreError(
            f"{key!r} in {store} has {size} bytes where at most {MOST_SMALL} belong: it was altered"
        )
    return store.read(key)


def check_key(key: str) -> str:
    """`key` itself. Raises StoreError unless it is parts of letters, digits and ._+=- joined by "/"."""
    if not all(_PART.fullmatch(part) for part in key.split("/")):
        raise StoreError(
            f"{key!r} is not a key: use parts of letters, digits and ._+=- joined by '/', "
            "none starting with '.'"
        )
    return key


# --- in a folder, shared by every process and machine that mounts it ----------------------------------------

_PENDING: Final = ".pending"
"""Folder of files that are being written; no key starts with a dot."""
_PENDING_SECONDS: Final = 86400.0
"""Since its last byte: a file there is then of a writer that was killed."""


class DirectoryStore(Store):
    """One file per key under `root`, which is made when missing. A file is written aside and forced to disk,
    then linked (create) or renamed (replace) into place: a crash leaves at most a file in `.pending`, never
    half a key. Whoever opens the store removes those that are a day old."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        with self._explained("open"):
            make_folder(self.root / _PENDING)
            oldest = time.time() - _PENDING_SECONDS
            for path in (self.root / _PENDING).iterdir():
                with suppress(OSError):  # another process was faster, or it is another user's
                    if path.lstat().st_mtime < oldest:
                        path.unlink()

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
        with suppress(OSError):  # not empty, or another process was faster: both are fine
            for folder in path.parents:
                if folder == self.root:
                    break
                folder.rmdir()

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
                if isinstance(data, Path):
                    shutil.copyfile(data, pending)
                else:
                    pending.write_bytes(data)
                force(pending)
                _place(pending, target, place)
                force(target.parent)
            except FileExistsError:
                raise self._taken(key) from None
            finally:
                pending.unlink(missing_ok=True)


def _place(pending: Path, target: Path, place: Callable[[Path, Path], None]) -> None:
    """Link or rename into place; a deletion may have removed the empty folder meanwhile: try again."""
    while True:
        try:
            make_folder(target.parent)
            return place(pending, target)
        except FileNotFoundError:
            if target.parent.exists():
                raise
