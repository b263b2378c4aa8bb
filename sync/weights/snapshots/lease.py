"""RUN/leases/…: what slow readers are reading, so that `sync.weights.snapshots.admin.gc` spares it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final
from uuid import uuid4

import msgspec

from sync.base.errors import SnapshotError, StoreError
from sync.weights.snapshots.manifest import dump, load
from sync.weights.stores import Store, read_small
from sync.wire import Version

logger = logging.getLogger(__name__)
SECONDS: Final = 3600.0
"""A lease that is not renewed for so long has no effect. A clock off by more costs a reader its read."""
_MOST_AHEAD: Final = 86400.0
"""Seconds from the collector's clock to the expiry beyond which a lease was altered."""


class Lease(msgspec.Struct, frozen=True):
    """Spares the chain to `version` until `expires` (Unix time, seconds)."""

    version: Version
    expires: float


@contextmanager
def lease(store: Store, run: str, version: Version, seconds: float = SECONDS) -> Iterator[None]:
    """Hold a lease on the chain to `version`, renewed three times in `seconds`.

    A store that refuses it costs a warning, never the read: `gc` has a grace period besides.
    """
    key, done = f"{run}/leases/{uuid4().hex}.json", threading.Event()

    def write() -> None:
        try:
            store.replace(key, dump(Lease(version, time.time() + seconds)))
        except StoreError as error:
            logger.warning("the lease on %s was not written: %s", version, error)

    def renew() -> None:
        while not done.wait(seconds / 3):
            write()

    write()
    renewing = threading.Thread(target=renew, name="lease", daemon=True)
    renewing.start()
    try:
        yield
    finally:
        done.set()
        renewing.join()
        with suppress(StoreError):  # it expires
            store.delete(key)


def leased(store: Store, run: str, now: float) -> tuple[set[Version], dict[str, str]]:
    """Versions leased at `now` (Unix time); keys of leases that cannot be used, and why."""
    versions, odd = set(), {}
    for key in store.list(f"{run}/leases/"):
        try:
            record = load(read_small(store, key), Lease, key)
            if record.expires > now + _MOST_AHEAD:
                raise SnapshotError(
                    f"{key} expires at {record.expires:g}: it was altered, or a clock is wrong"
                )
            if record.expires > now:
                versions.add(record.version)
        except (SnapshotError, StoreError) as error:
            odd[key] = str(error)
    left = store.list(f"{run}/leases/") if odd else []  # without those given back meanwhile
    return versions, {key: why for key, why in odd.items() if key in left}
