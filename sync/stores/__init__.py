"""The one interface of every store, and the rules that all of them keep.

A store maps keys (relative paths with "/") to immutable bytes. `create` has exactly one winner; `replace` is
for the few small keys that move (LATEST, leases). Readers verify what they fetch: a store is not trusted.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Protocol

from sync.errors import AlreadyPublished, StoreError
from sync.secrets import HIDDEN
from sync.settings import BucketStoreConfig, DirectoryStoreConfig, StoreConfig, XetStoreConfig

MOST_SMALL: Final = 1 << 20
"""Bytes of a manifest, lease, receipt or LATEST; hundreds of files or ranks need a tenth of it."""
_PART: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=-]*")


class Store(Protocol):
    """Bytes under keys. Every method is safe to call from several threads and processes.

    All raise StoreError when the store fails, and for a key that `check_key` refuses.
    """

    def create(self, key: str, data: bytes | Path) -> None:
        """Write a new key, from memory or from a file; all of it or nothing becomes visible.

        Raises AlreadyPublished, changing nothing, when the key exists, whatever it holds.
        """
        ...

    def replace(self, key: str, data: bytes) -> None:
        """Write a small key, new or not; readers see the old bytes or the new ones."""
        ...

    def read(self, key: str) -> bytes:
        """The bytes of a key. Raises StoreError when it is missing."""
        ...

    def fetch(self, key: str, path: Path) -> None:
        """Write the bytes of a key to `path` (its folder exists). Raises StoreError when it is missing."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Every key that starts with `prefix` (any string, "" for all), sorted."""
        ...

    def delete(self, key: str) -> None:
        """Remove a key; a missing one is no error."""
        ...

    def exists(self, key: str) -> bool:
        """Whether the key is there."""
        ...

    def size(self, key: str) -> int:
        """Bytes that a key holds, without reading them. Raises StoreError when it is missing."""
        ...


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


def missing(where: str, key: str) -> StoreError:
    """Error of a key that is not there."""
    return StoreError(f"{where} has no {key!r}: it was never published, or garbage collection removed it")


def taken(where: str, key: str) -> AlreadyPublished:
    """Error of a key that is there already."""
    return AlreadyPublished(
        f"{where} already has {key!r} and nothing is published twice under one name: "
        "is another trainer writing this run? A restart opens a new lineage"
    )


__all__ = ["Store", "open_store"]


def open_store(config: StoreConfig, default_path: Path) -> Store:
    """The store that `config` names; local kinds without a path of their own use `default_path`.

    Raises StoreError when it cannot be opened, ConfigError when a needed package is missing.
    """
    if isinstance(config, DirectoryStoreConfig):
        from sync.stores.directory import DirectoryStore

        return DirectoryStore(config.path or default_path)
    if isinstance(config, XetStoreConfig):
        from sync.stores.xet import XetStore

        return XetStore(config.path or default_path)
    if isinstance(config, BucketStoreConfig):
        from sync.stores.bucket import BucketStore

        return BucketStore(config.bucket, config.prefix, create=config.create)
    from sync.stores.object_store import ObjectStore

    # of a run's record, where secrets are hidden: the client looks into the environment for what is not given
    return ObjectStore(config.url, {name: v for name, v in config.options.items() if v != HIDDEN})
