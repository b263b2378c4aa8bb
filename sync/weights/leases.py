"""A reader that takes long says what it is reading, so that garbage collection leaves it alone.

`RUN/leases/NAME.json` holds a version and the time at which nobody need care about the lease any more: a
reader that died holds nothing back for ever. Short reads need none: see `sync.weights.admin.gc`.

Readers and the collector are on different machines, so the time is that of the wall. A clock that is wrong by
more than a lease costs a reader its read (a missing file is an error; it begins again at the newest version)
or keeps files for longer. What LATEST names is kept whatever the clocks say.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from uuid import uuid4

import msgspec

from sync.errors import StoreError
from sync.stores.base import Store
from sync.weights.manifest import dump, load
from sync.wire import Version

SECONDS: Final = 3600.0
"""A lease that is older has no effect."""


class Lease(msgspec.Struct, frozen=True):
    """What one reader reads, and until when."""

    version: Version
    """The chain to this version is being read."""
    expires: float
    """Unix time, seconds."""


@contextmanager
def lease(store: Store, run: str, version: Version) -> Iterator[None]:
    """While inside, no file of the chain to `version` is collected."""
    key = f"{run}/leases/{uuid4().hex}.json"
    store.replace(key, dump(Lease(version, time.time() + SECONDS)))
    try:
        yield
    finally:
        store.delete(key)


def leased(store: Store, run: str, now: float) -> set[Version]:
    """Versions that somebody reads at `now` (Unix time)."""
    found = set()
    for key in store.list(f"{run}/leases/"):
        try:
            entry = load(store.read(key), Lease, key)
        except StoreError:  # given back between the listing and now
            continue
        if entry.expires > now:
            found.add(entry.version)
    return found
