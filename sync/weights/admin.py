"""Look after a store of versions: list, verify, collect garbage, export. Nothing is printed here."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sync.errors import SnapshotError, StoreError
from sync.stores.base import Store
from sync.weights.leases import leased
from sync.weights.manifest import Manifest, manifest_key, read_latest, read_manifest, versions
from sync.weights.mirror import Mirror
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
class Verified:
    """Whether one version can be read back, byte for byte."""

    version: Version
    problem: str | None
    """None: every file and every tensor of it is what the trainer had."""


@dataclass(frozen=True)
class Collected:
    """What garbage collection did, or would do."""

    kept: list[Version]
    removed: list[Version]
    bytes: int
    """Freed; files without a manifest are not counted."""


def ls(store: Store, run: str) -> list[Listed]:
    """Published versions, oldest first. Raises SnapshotError for a manifest that cannot be read."""
    latest = read_latest(store, run)
    return [
        Listed(
            version,
            manifest.kind,
            manifest.base,
            manifest.parent,
            manifest.bytes,
            manifest.full_bytes,
            manifest.created,
            version == latest,
        )
        for version, manifest in _manifests(store, run).items()
    ]


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
                mirror.promote(mirror.stage(version))
            except (SnapshotError, StoreError) as error:
                yield Verified(version, str(error))
            else:
                yield Verified(version, None)


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
    chains to leased versions; and what a newer anchor made superfluous less than `grace_seconds` ago, as
    a reader may have set out before. Removed is the rest, and files below LATEST that never got a manifest.
    Manifests go first, so that nobody sets out on a chain whose files are going. `now` is Unix time in
    seconds; None: the clock.
    """
    manifests = _manifests(store, run)
    now = time.time() if now is None else now
    needed = _needed(manifests, keep_anchors, now - grace_seconds)
    latest = read_latest(store, run)
    for version in leased(store, run, now) | ({latest} if latest else set()):
        needed |= _chain(manifests, version)
    removed = [version for version in manifests if version not in needed]
    removed += _abandoned(store, run, manifests)
    if not dry_run:
        for version in removed:
            _remove(store, run, version)
    freed = sum(manifests[version].bytes for version in removed if version in manifests)
    return Collected([version for version in manifests if version in needed], removed, freed)


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


def _manifests(store: Store, run: str) -> dict[Version, Manifest]:
    """Every version's manifest, oldest version first."""
    return {version: read_manifest(store, run, version) for version in versions(store, run)}


def _chain(manifests: dict[Version, Manifest], version: Version) -> set[Version]:
    """`version` and all that it is built on, as far as it is there."""
    found: set[Version] = set()
    link: Version | None = version
    while link is not None and link in manifests and link not in found:
        found.add(link)
        link = manifests[link].base
    return found


def _needed(manifests: dict[Version, Manifest], keep_anchors: int, since: float) -> set[Version]:
    """Versions to keep for their own sake; see `gc`."""
    anchors = [version for version, manifest in manifests.items() if manifest.base is None]
    settled = sum(manifests[version].created <= since for version in anchors)
    kept = set(anchors[max(0, settled - keep_anchors) :])
    return {version for version in manifests if _root(manifests, version) in kept}


def _root(manifests: dict[Version, Manifest], version: Version) -> Version | None:
    """Anchor at the start of a version's chain; None when the chain is broken."""
    for link in _chain(manifests, version):
        if manifests[link].base is None:
            return link
    return None


def _abandoned(store: Store, run: str, manifests: dict[Version, Manifest]) -> list[Version]:
    """Versions older than LATEST with files and no manifest: their publisher failed, or a collector died."""
    latest = read_latest(store, run)
    names = {key.split("/")[1] for key in store.list(f"{run}/L") if key.count("/") > 1}
    found = sorted(Version.parse(name) for name in names)
    return [version for version in found if version not in manifests and latest and version < latest]


def _remove(store: Store, run: str, version: Version) -> None:
    """Delete a version's manifest, then its files."""
    store.delete(manifest_key(run, version))
    for key in store.list(f"{run}/{version}/"):
        store.delete(key)
    logger.info("removed %s of run %s", version, run)
