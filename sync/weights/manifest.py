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

from typing import Final, Literal, TypeVar

import msgspec

from sync.errors import SnapshotError, StoreError
from sync.stores.base import Store
from sync.weights.checkpoint import model_fingerprint
from sync.wire import Version

__all__ = ["File", "Manifest", "model_fingerprint", "read_chain", "read_latest", "read_manifest", "versions"]

LATEST: Final = "LATEST"


class File(msgspec.Struct, frozen=True):
    """One immutable object of a version."""

    key: str
    """Relative to the version's own folder."""
    size: int
    """Bytes."""
    blake3: str
    """Hex digest of its bytes."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version; authenticates its files."""

    format: Literal[1] = 1
    run: str
    run_id: str | None = None
    """`RunIdentity.id`; None: published before runs had one, or by no run."""
    version: Version
    kind: Literal["full", "delta", "lora"]
    parent: Version | None
    """Where this version's lineage branched from; None: it is the run's first."""
    base: Version | None
    """The version that the delta is applied to; None for a version that needs no other."""
    fingerprint: str
    """`model_fingerprint` of the checkpoint."""
    files: list[File]
    bytes: int
    """Of all files."""
    full_bytes: int
    """Of a full snapshot of the same weights."""
    created: float
    """Unix time, seconds."""


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Receipt of one rank's delta file."""

    rank: int
    base: Version
    file: File
    shard_bytes: int
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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SnapshotError(f"{key} is not a {kind.__name__}: {error}; it was altered, or is newer") from None


def read_manifest(store: Store, run: str, version: Version) -> Manifest:
    """Manifest of a version. Raises StoreError when there is none, SnapshotError when it is another's."""
    key = manifest_key(run, version)
    manifest = load(store.read(key), Manifest, key)
    if (manifest.run, manifest.version) != (run, version):
        raise SnapshotError(
            f"{key} is the manifest of {manifest.version} of run {manifest.run!r}: files were mixed up"
        )
    if (manifest.base is None) == (manifest.kind == "delta"):
        raise SnapshotError(
            f"{key} is of kind {manifest.kind!r} and has base {manifest.base}: it was altered"
        )
    return manifest


def read_latest(store: Store, run: str) -> Version | None:
    """The newest published version; None before the first."""
    if not store.exists(latest_key(run)):
        return None
    return Version.parse(store.read(latest_key(run)).decode("ascii", "replace").strip())


def versions(store: Store, run: str) -> list[Version]:
    """Every version that has a manifest, oldest first."""
    names = (key.split("/") for key in store.list(f"{run}/L"))
    return sorted(Version.parse(parts[1]) for parts in names if parts[2:] == ["manifest.json"])


def read_chain(
    store: Store, run: str, version: Version, have: frozenset[Version] = frozenset()
) -> list[Manifest]:
    """Manifests that lead to `version`, oldest first.

    The first one is an anchor, or a delta on a version in `have`; nothing older is read.
    Raises SnapshotError when a link is missing or leads nowhere.
    """
    chain = [read_manifest(store, run, version)]
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
    return chain
