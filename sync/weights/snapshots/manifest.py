"""What a published version is: its manifest, where its files lie, and how they are fetched and verified.

RUN/LATEST                              name of the newest version; moves last
RUN/L000-v00000000/manifest.json        created once, after every file it names
                  /model/…              an anchor: a Hugging Face checkpoint folder
RUN/L000-v00000001/manifest.json
                  /delta-00000.bin      a delta: one file per trainer rank
                  /part-00001.json      receipt of rank 1 for rank 0
RUN/leases/…                            what slow readers are reading, which garbage collection spares

Neither a store nor its manifests are trusted: sizes are compared before bytes move, no more is decoded than
the model explains, and nothing that could run is taken.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar
from uuid import uuid4

import msgspec
import numpy as np
from blake3 import blake3

from sync.base.decoding import json_decoder
from sync.base.errors import SnapshotError, StoreError, WireError
from sync.weights.delta import file as delta_file
from sync.weights.delta.file import Header
from sync.weights.snapshots.checkpoint import TensorAt, check_no_code, refused
from sync.weights.stores import Store, check_key, read_small
from sync.wire import Version

logger = logging.getLogger(__name__)
_MOST_FILES: Final = 1 << 18
"""Files of a chain of versions, all together."""
_MOST_RANKS: Final = 4096
"""Files of one delta."""
_Bytes = Annotated[int, msgspec.Meta(ge=0)]
_Text = Annotated[str, msgspec.Meta(max_length=512)]


class File(msgspec.Struct, frozen=True):
    """One immutable object of a version."""

    key: _Text
    """Relative to the version's own folder."""
    size: _Bytes
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
    """Bytes of a full snapshot of the same weights."""
    created: float
    """Unix time, seconds."""


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Receipt of one rank's delta file."""

    rank: int
    base: Version
    file: File
    shard_bytes: _Bytes
    """Bytes of all that this rank holds, uncompressed."""


def version_key(run: str, version: Version, name: str) -> str:
    """Key of a file of a version."""
    return f"{run}/{version}/{name}"


def manifest_key(run: str, version: Version) -> str:
    """Key of a version's manifest."""
    return version_key(run, version, "manifest.json")


def latest_key(run: str) -> str:
    """Key of the name of the newest version."""
    return f"{run}/LATEST"


M = TypeVar("M")


def dump(struct: msgspec.Struct) -> bytes:
    """Indented JSON."""
    return msgspec.json.format(msgspec.json.encode(struct), indent=1) + b"\n"


def load(data: bytes, kind: type[M], key: str) -> M:
    """Inverse of `dump`. Raises SnapshotError that names `key`."""
    try:
        return json_decoder(kind).decode(data)
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
    """Why no publisher can have written these; None: it can."""
    keys = [file.key for file in manifest.files]
    if len(set(keys)) < len(keys) or sum(file.size for file in manifest.files) != manifest.bytes:
        return f"names {len(keys)} files, some twice or not of {manifest.bytes} bytes in all"
    if manifest.kind == "delta":
        if len(keys) > _MOST_RANKS:
            return f"names {len(keys)} files, a delta has one of each rank and at most {_MOST_RANKS}"
        ranks = zip(keys, (f"delta-{rank:05d}.bin" for rank in range(len(keys))), strict=True)
        return next((f"names {key!r} in the place of {name}" for key, name in ranks if key != name), None)
    return next((f"names {key!r}: {why}" for key in keys if (why := refused(key)) is not None), None)


def read_latest(store: Store, run: str) -> Version | None:
    """The newest published version; None before the first. Raises SnapshotError when it names none."""
    if not store.exists(latest_key(run)):
        return None
    try:
        return Version.parse(read_small(store, latest_key(run)).decode("ascii", "replace").strip())
    except WireError as error:
        raise SnapshotError(f"{latest_key(run)} was altered: {error}") from None


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
    """Manifests that lead to `version`, oldest first. The first one is an anchor, or a delta on a version in
    `have`; nothing older is read. Raises SnapshotError when a link is missing or leads nowhere."""
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


# --- files, verified as they come ------------------------------------------------------------------------


class Download:
    """Brings files of versions from a store, and counts the bytes. A delta's are kept in `folder`: each is
    downloaded once, although both slots need it."""

    def __init__(self, store: Store, folder: Path) -> None:
        self._store, self._folder = store, folder
        self.bytes_read = 0

    def anchor(self, manifest: Manifest, folder: Path) -> None:
        """Write an anchor's files into the new `folder`. Raises StoreError, before anything is read, when the
        disk has no room for them, and SnapshotError when they name code or are not what the manifest says."""
        folder.mkdir(parents=True)
        if (free := shutil.disk_usage(folder).free) < manifest.bytes:
            raise StoreError(
                f"{manifest.version} takes {manifest.bytes} bytes and {folder} has {free}: free some"
            )
        for file in manifest.files:
            self._fetch(manifest, file, folder / file.key.removeprefix("model/"))
        check_no_code(folder)

    def delta(self, manifest: Manifest, places: Mapping[str, TensorAt]) -> None:
        """Download every rank's file. Raises SnapshotError when one is not what the manifest says, or all of
        them are longer than a delta of the checkpoint with `places` can be."""
        if manifest.bytes > (limit := delta_file.most_bytes(places, len(manifest.files))):
            raise SnapshotError(
                f"{manifest.version} has {manifest.bytes} bytes of delta, the whole model would take "
                f"{limit}: it was altered"
            )
        for rank, file in enumerate(manifest.files):
            self._fetch(manifest, file, self._path(manifest, rank))

    def open(self, manifest: Manifest, places: Mapping[str, TensorAt]) -> list[tuple[Header, memoryview]]:
        """Header and blobs of every rank's file that `delta` brought. Raises SnapshotError when one is not
        what it should be."""
        version, base, ranks = manifest.version, manifest.base or manifest.version, len(manifest.files)
        files = []
        for rank in range(ranks):
            path = self._path(manifest, rank)
            data = np.memmap(path, np.uint8, "r").data if path.stat().st_size else memoryview(b"")
            header, blobs = delta_file.parse(data, delta_file.most_header(places))
            if len(header.ranges) > len(places):
                raise SnapshotError(
                    f"{path} has {len(header.ranges)} ranges, the model {len(places)} tensors: it was altered"
                )
            if header != Header(
                manifest.run, manifest.fingerprint, version, base, rank, ranks, header.ranges
            ):
                raise SnapshotError(
                    f"{path} is not rank {rank}'s file of {version} on {base}: files were mixed up"
                )
            files.append((header, blobs))
        return files

    def keep(self, versions: set[Version]) -> None:
        """Remove the delta files of all other versions."""
        names = {str(version) for version in versions}
        for folder in self._folder.iterdir() if self._folder.exists() else ():
            if folder.name not in names:
                shutil.rmtree(folder)

    def _path(self, manifest: Manifest, rank: int) -> Path:
        return self._folder / str(manifest.version) / f"{rank:05d}.bin"

    def _fetch(self, manifest: Manifest, file: File, path: Path) -> None:
        """Bring `path` to hold `file`. Raises SnapshotError, and removes `path`, when the bytes that come are
        not the manifest's."""
        if path.exists() and _is(path, file):
            return
        key = version_key(manifest.run, manifest.version, check_key(file.key))
        if (size := self._store.size(key)) != file.size:
            raise SnapshotError(
                f"{key} has {size} bytes, the manifest says {file.size}: it was cut or altered"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        self._store.fetch(key, path)
        if not _is(path, file):
            path.unlink()
            raise SnapshotError(f"{key} has another digest than its manifest: it was cut or altered")
        self.bytes_read += file.size


def _is(path: Path, file: File) -> bool:
    return path.stat().st_size == file.size and blake3().update_mmap(path).hexdigest() == file.blake3


# --- leases: what slow readers are reading, so that garbage collection spares it ---------------------------

LEASE_SECONDS: Final = 3600.0
"""A lease that is not renewed for so long has no effect. A clock off by more costs a reader its read."""
_MOST_AHEAD: Final = 86400.0
"""Seconds from the collector's clock to the expiry beyond which a lease was altered."""


class Lease(msgspec.Struct, frozen=True):
    """Spares the chain to `version` until `expires` (Unix time, seconds)."""

    version: Version
    expires: float


@contextmanager
def lease(store: Store, run: str, version: Version, seconds: float = LEASE_SECONDS) -> Iterator[None]:
    """Hold a lease on the chain to `version`, renewed three times in `seconds`. A store that refuses it costs
    a warning, never the read: `gc` has a grace period besides."""
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
