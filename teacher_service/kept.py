"""Scores that this process keeps until a trainer's rank has fetched them and its step is safe.

    put ──▶ memory ──beyond `memory_bytes`──▶ files ──beyond `disk_bytes`──▶ dropped       the oldest first
              └─────────── release, close ──────┴──▶ gone

Whatever is gone can be computed again: where a file cannot be written, the scores are dropped.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

from blake3 import blake3
from prometheus_client import CollectorRegistry, Counter, Gauge

from sync.wire import DIGEST_BYTES, Kept

log = logging.getLogger(__name__)
PART_BYTES: Final = 1 << 22
"""Bytes of a file that are read at a time."""
FREE_BYTES: Final = 2 << 30
"""Bytes of the disk that kept scores leave to the others."""
_SUFFIX: Final = ".scores"
NAMESPACE: Final = "distill_teacher"
"""Prefix of a teacher's Prometheus metrics."""


def _read(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while part := file.read(PART_BYTES):
            yield part


def _size(parts: list[bytes]) -> int:
    return sum(map(len, parts))


class KeptScores:
    """Bodies by key, bounded in memory and on disk. Its methods block; call them from worker threads."""

    def __init__(
        self, folder: Path | None, memory_bytes: int, disk_bytes: int, registry: CollectorRegistry
    ) -> None:
        """`folder`: for this process alone, cleared of what an earlier one left. None: a temporary one."""
        self._boot, self._count = secrets.token_hex(8), 0
        self._folder = folder or Path(tempfile.gettempdir(), f"distill-scores-{secrets.token_hex(8)}")
        for path in self._folder.glob(f"*{_SUFFIX}"):
            path.unlink(missing_ok=True)
        self._limits = {"memory": memory_bytes, "disk": disk_bytes}
        self._sizes = {"memory": 0, "disk": 0}
        self._memory: dict[str, list[bytes]] = {}  # the oldest first, as on disk
        self._disk: dict[str, int] = {}
        self._full = False  # the last spill could not be written
        self._lock = threading.Lock()
        labels: Any = {"registry": registry, "namespace": NAMESPACE}
        kept = Gauge("kept_bytes", "Kept scores", ("where",), **labels)
        for where in self._sizes:
            kept.labels(where).set_function(partial(self._sizes.__getitem__, where))
        self._fetched = Counter("kept_fetches", "Fetches by result", ("result",), **labels)
        self._dropped = Counter("kept_dropped", "Evicted before release", **labels)

    def put(self, parts: list[bytes]) -> Kept:
        """Keep a body, given in parts so that nothing copies it whole; the reference has no url yet."""
        digest = blake3()
        for part in parts:
            digest.update(part)
        with self._lock:
            self._count += 1
            key = f"{self._boot}-{self._count}"
            self._memory[key] = parts
            self._sizes["memory"] += _size(parts)
            while self._sizes["memory"] > self._limits["memory"]:
                oldest = next(iter(self._memory))
                self._spill(oldest, self._memory.pop(oldest))
            while self._sizes["disk"] > self._limits["disk"]:
                self._drop(next(iter(self._disk)))
        return Kept("", key, _size(parts), digest.digest(DIGEST_BYTES))

    def open(self, key: str) -> tuple[int, Iterator[bytes]] | None:
        """Size and parts of the body of `key`, which can be read to its end, whatever happens to the store
        meanwhile; None where it is not kept, or no longer."""
        with self._lock:
            where, body = "gone", None
            if (parts := self._memory.get(key)) is not None:
                where, body = "memory", (_size(parts), iter(parts))
            elif (size := self._disk.get(key)) is not None:
                with suppress(OSError):  # somebody else removed it
                    where, body = "disk", (size, _read(self._path(key).open("rb")))
        self._fetched.labels(where).inc()
        return body

    def release(self, keys: Iterable[str]) -> None:
        """Forget these; keys that are not kept are ignored."""
        with self._lock:
            for key in keys:
                if (parts := self._memory.pop(key, None)) is not None:
                    self._sizes["memory"] -= _size(parts)
                elif (size := self._disk.pop(key, None)) is not None:
                    self._unlink(key, size)

    def close(self) -> None:
        """Forget everything and remove the folder."""
        self.release([*self._memory, *self._disk])
        with suppress(OSError):  # it was never made, or holds what is not ours
            self._folder.rmdir()

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{_SUFFIX}"

    def _spill(self, key: str, parts: list[bytes]) -> None:
        """Move a body from memory to a file; one that cannot be written is dropped."""
        size = _size(parts)
        self._sizes["memory"] -= size
        self._disk[key] = size
        self._sizes["disk"] += size
        try:
            self._folder.mkdir(0o700, parents=True, exist_ok=True)
            if shutil.disk_usage(self._folder).free < FREE_BYTES + size:
                raise OSError(f"{self._folder} has less than {FREE_BYTES >> 30} GiB free")
            with self._path(key).open("wb") as file:
                file.writelines(parts)
        except OSError as error:
            if not self._full:
                log.warning("the oldest kept scores are dropped instead of written to disk: %s", error)
            self._full = True
            self._drop(key)
        else:
            self._full = False

    def _drop(self, key: str) -> None:
        self._unlink(key, self._disk.pop(key))
        self._dropped.inc()

    def _unlink(self, key: str, size: int) -> None:
        self._sizes["disk"] -= size
        with suppress(OSError):  # it may never have been written
            self._path(key).unlink()
