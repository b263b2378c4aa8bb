"""What a published version is: its manifest, and where its files lie.

RUN/LATEST                              name of the newest version; moves last
RUN/L000-v00000000/manifest.json        created once, after every file it names
                  /model/…              an anchor: a Hugging Face checkpoint folder
RUN/L000-v00000001/manifest.json
                  /delta-00000.bin      a delta: one file per trainer rank
                  /part-00001.json      receipt of rank 1 for rank 0
RUN/leases/…                            what readers are reading
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Final, Literal, TypeVar
from uuid import uuid4

import msgspec

from sync.errors import SnapshotError, StoreError, WireError
from sync.snapshots.checkpoint import model_fingerprint, refused
from sync.stores import Store, read_small
from sync.wire import Version

__all__ = ["File", "Manifest", "model_fingerprint", "read_chain", "read_latest", "read_manifest", "versions"]

LATEST: Final = "LATEST"
_MOST_FILES: Final = 1 << 18
"""Files of a chain of versions, all together."""
_Bytes = Annotated[int, msgspec.Meta(ge=0)]
_Text = Annotated[str, msgspec.Meta(max_length=512)]


class File(msgspec.Struct, frozen=True):
    """One immutable object of a version."""

    key: _Text
    """Relative to the version's own folder."""
    size: _Bytes
    """Bytes."""
    blake3: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    """Hex digest of its bytes."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version; authenticates its files."""

    format: Literal[1] = 1
    run: _Text
    run_id: _Text | None = None
    """`RunIdentity.id`; None: published before runs had one, or by no run."""
    version: Version
    kind: Literal["full", "delta", "lora"]
    parent: Version | None
    """Where this version's lineage branched from; None: it is the run's first."""
    base: Version | None
    """The version that the delta is applied to; None for a version that needs no other."""
    fingerprint: _Text
    """`model_fingerprint` of the checkpoint."""
    files: list[File]
    bytes: _Bytes
    """Of all files."""
    full_bytes: _Bytes
    """Of a full snapshot of the same weights."""
    created: float
    """Unix time, seconds."""


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Receipt of one rank's delta file."""

    rank: int
    base: Version
    file: File
    shard_bytes: _Bytes
    """Of all that this rank holds, uncompressed."""


def version_key(run: str, version: Version, name: str) -> str:
    """Key of a file of a version."""
    return f"{run}/{version}/{name}"


def manifest_key(run: str, version: Version) -> str:
    """Key of a version's manifest."""
    return version_key(run, version, "manifest.json")


def latest_key(run: str) -> str:
    """Key of the name of the newest version."""
    return f"{run}/{LATEST}"


M = TypeVar("M")


def dump(struct: msgspec.Struct) -> bytes:
    """Indented JSON."""
    return msgspec.json.format(msgspec.json.encode(struct), indent=1) + b"\n"


def load(data: bytes, kind: type[M], key: str) -> M:
    """Inverse of `dump`. Raises SnapshotError that names `key`."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SnapshotError(f"{key} is not a {kind.__name__}: {error}; it was altered, or is newer") from None


def read_manifest(store: Store, run: str, version: Version) -> Manifest:
    """Manifest of a version. Raises StoreError when there is none, SnapshotError when it is another's."""
    key = manifest_key(run, version)
    manifest = load(read_small(store, key), Manifest, key)
    if (manifest.run, manifest.version) != (run, version):
        raise SnapshotError(
            f"{key} is the manifest of {manifest.version} of run {manifest.run!r}: files were mixed up"
        )
    if (manifest.base is None) == (manifest.kind == "delta"):
        raise SnapshotError(
            f"{key} is of kind {manifest.kind!r} and has base {manifest.base}: it was altered"
        )
    if (wrong := _wrong_files(manifest)) is not None:
        raise SnapshotError(f"{key} {wrong}: it was altered")
    return manifest


def _wrong_files(manifest: Manifest) -> str | None:
    """Why no publisher can have written it; None: it can."""
    keys = [file.key for file in manifest.files]
    if len(set(keys)) < len(keys) or sum(file.size for file in manifest.files) != manifest.bytes:
        return f"names {len(keys)} files, some twice or not of {manifest.bytes} bytes in all"
    if manifest.kind == "delta":
        ranks = [f"delta-{rank:05d}.bin" for rank in range(len(keys))]
        return next(
            (
                f"names {key!r} in the place of {own}"
                for key, own in zip(keys, ranks, strict=True)
                if key != own
            ),
            None,
        )
    return next((f"names {key!r}: {why}" for key in keys if (why := refused(key)) is not None), None)


def read_latest(store: Store, run: str) -> Version | None:
    """The newest published version; None before the first. Raises SnapshotError when it names none."""
    if not store.exists(latest_key(run)):
        return None
    try:
        return Version.parse(read_small(store, latest_key(run)).decode("ascii", "replace").strip())
    except WireError as error:
        raise SnapshotError(f"{latest_key(run)} was altered: {error}") from None


def versions(store: Store, run: str) -> list[Version]:
    """Every version that has a manifest, oldest first; folders with other names are none."""
    names = (key.split("/") for key in store.list(f"{run}/L"))
    manifests = (parts[1] for parts in names if parts[2:] == ["manifest.json"])
    return sorted(version for _, version in named(manifests) if version is not None)


def named(folders: Iterable[str]) -> Iterator[tuple[str, Version | None]]:
    """Each folder's name and its version; None: it names none."""
    for name in folders:
        try:
            yield name, Version.parse(name)
        except WireError:
            yield name, None


def read_chain(
    store: Store, run: str, version: Version, have: frozenset[Version] = frozenset()
) -> list[Manifest]:
    """Manifests that lead to `version`, oldest first.

    The first one is an anchor, or a delta on a version in `have`; nothing older is read.
    Raises SnapshotError when a link is missing or leads nowhere.
    """
    chain, files = [read_manifest(store, run, version)], 0
    while (base := chain[0].base) is not None and base not in have:
        if base >= chain[0].version:
            raise SnapshotError(
                f"{chain[0].version} of run {run!r} has base {base}, which is not older: altered"
            )
        try:
            chain.insert(0, read_manifest(store, run, base))
        except StoreError as error:
            raise SnapshotError(
                f"the chain to {version} of run {run!r} is broken at {base}: {error}"
            ) from error
        if (files := files + len(chain[0].files)) > _MOST_FILES:
            raise SnapshotError(
                f"the chain to {version} of run {run!r} names more than {_MOST_FILES} files: it was altered"
            )
    return chain


# --- leases ---------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)
SECONDS: Final = 3600.0
"""A lease that is not renewed for so long has no effect."""
_LONGEST: Final = 86400.0
"""Seconds ahead of the collector's clock beyond which no reader's clock and lease are: it was altered."""


class Lease(msgspec.Struct, frozen=True):
    """What a slow reader is reading, so that garbage collection (`sync.snapshots.admin.gc`) leaves it alone.

    Written by readers, renewed while they live, ignored once expired. Readers and collector are on different
    machines, so the time is the wall's. A clock that is wrong by more than a lease costs a reader its read (a
    missing file is an error; it begins again at the newest version) or keeps files for longer. What LATEST
    names is kept whatever the clocks say.
    """

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
    """Versions leased at `now` (Unix time); keys of leases that cannot be read, and why."""
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
