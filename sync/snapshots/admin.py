"""Look after a store of versions: list, verify, collect garbage, export. Nothing is printed here."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from sync.errors import SnapshotError, StoreError
from sync.snapshots.manifest import Manifest, manifest_key, named, read_latest, read_manifest, versions
from sync.stores import Store
from sync.subscribe import Mirror
from sync.wire import Version

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Listed:
    """One published version."""

    version: Version
    kind: Literal["full", "delta", "lora"]
    base: Version | None
    parent: Version | None
    bytes: int
    full_bytes: int
    created: float
    """Unix time, seconds."""
    latest: bool
    """LATEST names it."""


@dataclass(frozen=True)
class Odd:
    """An entry of the store that cannot be used; it is reported and left where it is."""

    name: str
    """Of a version, a folder or a key; printable."""
    problem: str


@dataclass(frozen=True)
class Verified:
    """Whether one version can be read back, byte for byte."""

    version: Version | str
    """A name where a folder has one that is no version's."""
    problem: str | None
    """None: every file and every tensor of it is what the trainer had."""


@dataclass(frozen=True)
class Collected:
    """What garbage collection did, or would do."""

    kept: list[Version]
    removed: list[Version]
    bytes: int
    """Freed; files without a manifest are not counted."""
    odd: list[Odd] = field(default_factory=list)
    """What could not be read or removed; nothing that may be built on it is removed."""


def ls(store: Store, run: str) -> list[Listed | Odd]:
    """Published versions, oldest first, then what is there and cannot be used."""
    held = _read(store, run)
    listed = [
        Listed(
            version,
            manifest.kind,
            manifest.base,
            manifest.parent,
            manifest.bytes,
            manifest.full_bytes,
            manifest.created,
            version == held.latest,
        )
        for version, manifest in held.manifests.items()
    ]
    return [*listed, *held.odd]


def verify(store: Store, run: str, work: Path | None = None) -> Iterator[Verified]:
    """Read every version as a replica would, oldest first, and say how it went.

    Takes room for two checkpoints in a temporary folder inside `work` (None: the system's).
    """
    with (
        tempfile.TemporaryDirectory(dir=work) as folder,
        Mirror(Path(folder) / "mirror", store, run) as mirror,
    ):
        for version in versions(store, run):
            try:
                mirror.stage(version)
                mirror.promote(version)
            except (SnapshotError, StoreError) as error:
                yield Verified(version, str(error))
            else:
                yield Verified(version, None)
    for odd in _odd_folders(store, run):
        yield Verified(odd.name, odd.problem)


def gc(
    store: Store,
    run: str,
    keep_anchors: int,
    grace_seconds: float = 3600.0,
    dry_run: bool = False,
    now: float | None = None,
) -> Collected:
    """Remove versions that no reader needs.

    Kept are what LATEST names; the `keep_anchors` newest anchors, by version, and the deltas built on them;
    and what a newer anchor made superfluous less than `grace_seconds` ago, as it may still be read (a reader
    that takes longer fails and begins again at the newest version). Removed is the rest, and files below
    LATEST that never got a manifest.
    Manifests go first, so that no reader sets out on a chain whose files are going. `now` is Unix time in
    seconds; None: the clock.
    """
    held = _read(store, run)
    manifests = held.manifests
    now = time.time() if now is None else now
    needed = _needed(held, keep_anchors, now - grace_seconds)
    if held.latest:
        needed |= _chain(manifests, held.latest).keys()
    removed = [version for version in manifests if version not in needed]
    removed += _abandoned(store, run, held)
    odd = [*held.odd]
    if not dry_run:
        for version in removed:
            odd += _remove(store, run, version)
    freed = sum(manifests[version].bytes for version in removed if version in manifests)
    return Collected([version for version in manifests if version in needed], removed, freed, odd)


def export(store: Store, run: str, version: Version, folder: Path) -> None:
    """Write a version as a Hugging Face checkpoint folder (for kind "lora": as an adapter folder).

    Raises SnapshotError when `folder` exists and is not empty, or the version does not verify.
    """
    if folder.exists() and any(folder.iterdir()):
        raise SnapshotError(f"{folder} is not empty: export {version} into a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=folder.parent, prefix=".export-") as work,
        Mirror(Path(work) / "mirror", store, run) as mirror,
    ):
        staged = mirror.stage(version)
        if folder.exists():
            folder.rmdir()
        shutil.move(staged.path, folder)


@dataclass(frozen=True)
class _Held:
    """What a store holds of a run."""

    latest: Version | None
    manifests: dict[Version, Manifest]
    """Oldest version first."""
    unreadable: set[Version]
    """With a manifest that cannot be read."""
    odd: list[Odd]


def _read(store: Store, run: str) -> _Held:
    held = _Held(None, {}, set(), _odd_folders(store, run))
    for version in versions(store, run):
        try:
            held.manifests[version] = read_manifest(store, run, version)
        except (SnapshotError, StoreError) as error:
            held.unreadable.add(version)
            held.odd.append(Odd(str(version), str(error)))
    try:
        return replace(held, latest=read_latest(store, run))
    except (SnapshotError, StoreError) as error:
        held.odd.append(Odd("LATEST", str(error)))
        return held


def _odd_folders(store: Store, run: str) -> list[Odd]:
    """Folders that look like versions and are none."""
    return [
        Odd(ascii(name), "it is no version's name, such as L000-v00000012: nothing here reads or removes it")
        for name, version in named(_folders(store, run))
        if version is None
    ]


def _folders(store: Store, run: str) -> list[str]:
    """Names of all folders that may be versions'."""
    return sorted({key.split("/")[1] for key in store.list(f"{run}/L") if key.count("/") > 1})


def _chain(manifests: dict[Version, Manifest], version: Version) -> dict[Version, Version | None]:
    """`version` and all that it is built on, as far as it is there, each with its base."""
    found: dict[Version, Version | None] = {}
    link: Version | None = version
    while link is not None and link in manifests and link not in found:
        found[link] = manifests[link].base
        link = found[link]
    return found


def _needed(held: _Held, keep_anchors: int, since: float) -> set[Version]:
    """Versions to keep for their own sake, or because their base is unknown; see `gc`."""
    manifests = held.manifests
    anchors = [version for version, manifest in manifests.items() if manifest.base is None]
    settled = sum(manifests[version].created <= since for version in anchors)
    kept = set(anchors[max(0, settled - keep_anchors) :]) | held.unreadable
    return {version for version in manifests if _root(manifests, version) in kept}


def _root(manifests: dict[Version, Manifest], version: Version) -> Version:
    """Anchor at the start of a version's chain, or the version at which the chain is broken."""
    oldest, base = list(_chain(manifests, version).items())[-1]
    return base or oldest


def _abandoned(store: Store, run: str, held: _Held) -> list[Version]:
    """Versions older than LATEST with files and no manifest: their publisher failed, or a collector died."""
    known = held.manifests.keys() | held.unreadable
    found = (version for _, version in named(_folders(store, run)) if version is not None)
    return sorted(
        version for version in found if version not in known and held.latest and version < held.latest
    )


def _remove(store: Store, run: str, version: Version) -> list[Odd]:
    """Delete a version's manifest, then its files; what could not be deleted."""
    odd = []
    for key in [manifest_key(run, version), *store.list(f"{run}/{version}/")]:
        try:
            store.delete(key)
        except StoreError as error:
            odd.append(Odd(ascii(key), str(error)))
    logger.info("removed %s of run %s", version, run)
    return odd
