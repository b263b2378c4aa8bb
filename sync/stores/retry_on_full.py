"""A store whose writer waits while its disk is full, instead of losing a version."""

from __future__ import annotations

from pathlib import Path

from sync.durable import RETRY_SECONDS, until_disk_space
from sync.stores.base import Store


class RetryOnFullStore:
    """`inner`, with writes that are repeated until there is room; everything else as it is."""

    def __init__(self, inner: Store, pause: float = RETRY_SECONDS) -> None:
        self._inner, self._pause = inner, pause

    def create(self, key: str, data: bytes | Path) -> None:
        until_disk_space(lambda: self._inner.create(key, data), f"{key} in {self._inner}", self._pause)

    def replace(self, key: str, data: bytes) -> None:
        until_disk_space(lambda: self._inner.replace(key, data), f"{key} in {self._inner}", self._pause)

    def read(self, key: str) -> bytes:
        return self._inner.read(key)

    def fetch(self, key: str, path: Path) -> None:
        self._inner.fetch(key, path)

    def list(self, prefix: str) -> list[str]:
        return self._inner.list(prefix)

    def delete(self, key: str) -> None:
        self._inner.delete(key)

    def exists(self, key: str) -> bool:
        return self._inner.exists(key)

    def size(self, key: str) -> int:
        return self._inner.size(key)

    def __str__(self) -> str:
        return str(self._inner)
