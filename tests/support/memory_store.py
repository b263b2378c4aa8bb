"""A store in this process's memory: for tests, and for trying things out."""

from __future__ import annotations

import threading
from pathlib import Path

from sync.weights.stores import Store, check_key, content


class MemoryStore(Store):
    """Keys in a dictionary; threads of one process share it, nothing outlives it."""

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        """`objects`: those of another store, which changes with this one; None: it begins empty."""
        self._lock = threading.Lock()
        self._objects: dict[str, bytes] = {} if objects is None else objects

    def create(self, key: str, data: bytes | Path) -> None:
        new = content(data)
        with self._lock:
            if check_key(key) in self._objects:
                raise self._taken(key)
            self._objects[key] = new

    def replace(self, key: str, data: bytes) -> None:
        with self._lock:
            self._objects[check_key(key)] = bytes(data)

    def read(self, key: str) -> bytes:
        with self._lock:
            if check_key(key) not in self._objects:
                raise self._missing(key)
            return self._objects[key]

    def fetch(self, key: str, path: Path) -> None:
        path.write_bytes(self.read(key))

    def list(self, prefix: str) -> list[str]:
        with self._lock:
            return sorted(key for key in self._objects if key.startswith(prefix))

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(check_key(key), None)

    def _size(self, key: str) -> int | None:
        with self._lock:
            found = self._objects.get(check_key(key))
            return None if found is None else len(found)

    def __str__(self) -> str:
        return "the store in memory"
