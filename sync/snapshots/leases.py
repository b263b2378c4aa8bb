"""A reader that takes long says what it is reading, so that garbage collection leaves it alone.

`RUN/leases/NAME.json` holds a version and the time at which nobody need care about the lease any more: a
reader that died holds nothing back for ever, and one that lives renews it. Short reads need none: see
`sync.snapshots.admin.gc`.

Readers and the collector are on different machines, so the time is that of the wall. A clock that is wrong by
more than a lease costs a reader its read (a missing file is an error; it begins again at the newest version)
or keeps files for longer. What LATEST names is kept whatever the clocks say.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final
from uuid import uuid4

import msgspec

from sync.errors import SnapshotError, StoreError
from sync.snapshots.manifest import dump, load
from sync.stores.base import Store, read_small
from sync.wire import Version

logger = logging.getLogger(__name__)
SECONDS: Final = 3600.0
"""A lease that is not renewed for so long has no effect."""
_LONGEST: Final = 86400.0
"""Seconds ahead of the collector's clock beyond which no reader's clock and lease are: it was altered."""


class Lease(msgspec.Struct, frozen=True):
    """What one reader reads, and until when."""

    version: Version
    """The chain to this version is being read."""
    expires: float
    """Unix time, seconds."""


@contextmanager
def lease(store: Store, run: str, version: Version, seconds: float = SECONDS) -> Iterator[None]:
    """While inside, no file of the chain to `version` is collected; renewed three times in `seconds`."""
    key, done = f"{run}/leases/{uuid4().hex}.json", threading.Event()

    def write() -> None:
        store.replace(key, dump(Lease(version, time.time() + seconds)))

    def renew() -> None:
        while not done.wait(seconds / 3):
            _or_warn(write, f"the lease on {version} was not renewed")

    write()
    renewing = threading.Thread(target=renew, name="lease", daemon=True)
    renewing.start()
    try:
        yield
    finally:
        done.set()
        renewing.join()
        _or_warn(lambda: store.delete(key), f"the lease on {version} stays until it expires")


def _or_warn(work: Callable[[], None], otherwise: str) -> None:
    """A lease that fails is no fault of what is read."""
    try:
        work()
    except StoreError as error:
        logger.warning("%s: %s", otherwise, error)


def leased(store: Store, run: str, now: float) -> tuple[set[Version], dict[str, str]]:
    """Versions that somebody reads at `now` (Unix time); keys of leases that say nothing, and why."""
    found, odd = set(), {}
    for key in store.list(f"{run}/leases/"):
        try:
            entry = load(read_small(store, key), Lease, key)
        except (SnapshotError, StoreError) as error:
            if _there(store, key):  # not given back between the listing and now
                odd[key] = str(error)
            continue
        if entry.expires > now + _LONGEST:
            odd[key] = (
                f"it would hold {entry.version} until {entry.expires:g}: it was altered, or a clock is wrong"
            )
        elif entry.expires > now:
            found.add(entry.version)
    return found, odd


def _there(store: Store, key: str) -> bool:
    try:
        return store.exists(key)
    except StoreError:
        return True
