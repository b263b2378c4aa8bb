"""Look after a store of versions: list, verify, collect garbage, export. Nothing is printed here."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sync.base.errors import SnapshotError, StoreError
from sync.weights.snapshots.manifest import Manifest, leased, manifest_key, named, read_latest, read_manifest
from sync.weights.stores import Store
from sync.weights.subscribe import Mirror
from sync.wire import Version

logger = logging.getLogger(__name__)


@dataclass
class Listing:
    """What a store holds of a run."""

    latest: Version | None = None
    """What LATEST named before the rest was read."""
    bare: list[Version] = field(default_factory=list)
    """Versions with files and without a manifest."""
    odd: dict[str, str] = field(default_factory=dict)
    """Version, folder or key, printable → why it cannot be used; it is left where it is."""
    manifests: dict[Version, Manifest] = field(default_factory=dict)
    """Of those that can be read, oldest version first."""


@dataclass(frozen=True)
class Collected:
    """What garbage collection did, or would do."""

    kept: list[Version]
    removed: list[Version]
    bytes: int
    """Freed; files without a manifest are not counted."""
    odd: dict[str, str] = field(default_factory=dict)
    """What could not be read or removed, and why; nothing that may be built on it is removed."""


def ls(store: Store, run: str) -> Listing:
    """Published versions, and what is there and cannot be used."""
    listing = Listing()
    try:
        listing.latest = read_latest(store, run)
    except (SnapshotError, StoreError) as error:
        listing.odd["LATEST"] = str(error)
    published, listing.bare, odd = _folders(store, run)
    listing.odd |= odd
    for version in published:
        try:
            listing.manifests[version] = read_manifest(store, run, version)
        except (SnapshotError, StoreError) as error:
            listing.odd[str(version)] = str(error)
    return listing


def verify(store: Store, run: str) -> Iterator[tuple[str, str | None]]:
    """Read every version as a replica would, oldest first: its name, and why it cannot be read back (None:
    every file and every tensor of it is what the trainer had). Last come folders with a name that is no
    version's. Takes room for two checkpoints in a temporary folder (TMPDIR)."""
    published, _, odd = _folders(store, run)
    with tempfile.TemporaryDirectory() as folder, Mirror(Path(folder) / "mirror", store, run) as mirror:
        for version in published:
            problem = None
            try:
                mirror.stage(version)
                mirror.promote(version)
            except (SnapshotError, StoreError) as error:
                problem = str(error)
            yield str(version), problem
    yield from odd.items()


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
    a reader may have set out before. Removed is the rest, and files without a manifest that lie below what
    LATEST named before anything was listed: what is being published comes after that. Manifests go first, so
    that no reader sets out on a chain whose files are going. `now` is Unix time in seconds; None: the clock.
    """
    listing = ls(store, run)
    manifests = listing.manifests
    now = time.time() if now is None else now
    needed = _needed(listing, keep_anchors, now - grace_seconds)
    leases, odd_leases = leased(store, run, now)
    for link in leases | ({listing.latest} if listing.latest else set()):
        version: Version | None = link
        while version is not None and version not in needed:
            needed.add(version)
            version = manifests[version].base if version in manifests else None
    removed = [version for version in manifests if version not in needed]
    left = [version for version in listing.bare if listing.latest and version < listing.latest]
    removed += [version for version in left if not store.exists(manifest_key(run, version))]
    odd = listing.odd | {ascii(key): problem for key, problem in odd_leases.items()}
    if not dry_run:
        for version in removed:
            odd |= _remove(store, run, version)
    freed = sum(manifests[version].bytes for version in removed if version in manifests)
    return Collected([version for version in manifests if version in needed], removed, freed, odd)


def export(store: Store, run: str, version: Version, folder: Path) -> None:
    """Write a version as a Hugging Face checkpoint folder (for kind "lora": as an adapter folder). Raises
    SnapshotError when `folder` exists and is not empty, or the version does not verify."""
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


def _folders(store: Store, run: str) -> tuple[list[Version], list[Version], dict[str, str]]:
    """Versions with a manifest, oldest first; those without; folders that look like versions and are none."""
    keys = [key.split("/") for key in store.list(f"{run}/L") if key.count("/") > 1]
    pairs = list(named(sorted({name for _, name, *_ in keys})))
    versions = sorted(version for _, version in pairs if version is not None)
    whole = {name for _, name, *rest in keys if rest == ["manifest.json"]}
    why = "it is no version's name, such as L000-v00000012: nothing here reads or removes it"
    odd = {ascii(name): why for name, version in pairs if version is None}
    bare = [version for version in versions if str(version) not in whole]
    return [version for version in versions if str(version) in whole], bare, odd


def _needed(listing: Listing, keep_anchors: int, since: float) -> set[Version]:
    """Versions to keep for their own sake, or because their base is unknown; see `gc`."""
    manifests = listing.manifests
    anchors = [version for version, manifest in manifests.items() if manifest.base is None]
    settled = sum(manifests[version].created <= since for version in anchors)
    kept = set(anchors[max(0, settled - keep_anchors) :])
    roots: dict[Version, Version] = {}  # of each chain; a base is older than what is built on it
    for version, manifest in manifests.items():
        roots[version] = version if manifest.base is None else roots.get(manifest.base, manifest.base)
    return {version for version, root in roots.items() if root in kept or str(root) in listing.odd}


def _remove(store: Store, run: str, version: Version) -> dict[str, str]:
    """Delete a version's manifest, then its files; what could not be deleted, and why."""
    odd, manifest = {}, manifest_key(run, version)
    for key in [manifest, *store.list(f"{run}/{version}/")]:
        try:
            store.delete(key)
        except StoreError as error:
            odd[ascii(key)] = str(error)
            if key == manifest:  # it names the files
                break
    logger.info("removed %s of run %s", version, run)
    return odd
