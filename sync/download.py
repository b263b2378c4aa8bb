"""Fetch a version's files, each checked against its manifest before anybody looks into it.

A store is not trusted, and neither are its manifests: sizes are compared before bytes move, no more is
decoded than the model explains, and nothing that could run is taken.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from blake3 import blake3

from sync.delta import file as delta_file
from sync.delta.file import Header
from sync.errors import SnapshotError, StoreError
from sync.snapshots.checkpoint import TensorAt, check_no_code
from sync.snapshots.manifest import File, Manifest, version_key
from sync.stores import Store, check_key
from sync.wire import Version


def fetch_file(store: Store, manifest: Manifest, file: File, path: Path) -> int:
    """Bring `path` to hold `file`; returns the bytes read from the store, 0 when it held them already.

    Raises SnapshotError when the store's bytes are not the manifest's; then there is no `path`.
    """
    if path.exists() and _is(path, file):
        return 0
    key = version_key(manifest.run, manifest.version, check_key(file.key))
    if (size := store.size(key)) != file.size:
        raise SnapshotError(f"{key} has {size} bytes, the manifest says {file.size}: it was cut or altered")
    path.parent.mkdir(parents=True, exist_ok=True)
    store.fetch(key, path)
    if not _is(path, file):
        size = path.stat().st_size
        path.unlink()
        raise SnapshotError(
            f"{key} has {size} bytes of which the digest is wrong, the manifest says {file.size}: "
            "it was cut or altered"
        )
    return file.size


def fetch_folder(store: Store, manifest: Manifest, folder: Path) -> int:
    """Write an anchor's files into the new `folder`; returns the bytes read from the store.

    Raises StoreError, before anything is read, when the disk has no room for them, and SnapshotError when
    they name code.
    """
    folder.mkdir(parents=True)
    if (free := shutil.disk_usage(folder).free) < manifest.bytes:
        raise StoreError(
            f"{manifest.version} takes {manifest.bytes} bytes and {folder} has {free}: free some"
        )
    read = 0
    for file in manifest.files:
        read += fetch_file(store, manifest, file, folder / file.key.removeprefix("model/"))
    check_no_code(folder)
    return read


class Deltas:
    """Delta files on this machine: each is downloaded once, although both slots need it."""

    def __init__(self, store: Store, folder: Path) -> None:
        self._store, self._folder = store, folder
        self.bytes_read = 0

    def fetch(self, manifest: Manifest, places: Mapping[str, TensorAt]) -> None:
        """Download every rank's file. Raises SnapshotError when one is not what the manifest says, or all of
        them are longer than a delta of the checkpoint with `places` can be."""
        if manifest.bytes > (most := delta_file.most_bytes(places, len(manifest.files))):
            raise SnapshotError(
                f"{manifest.version} has {manifest.bytes} bytes of delta, the whole model would take {most}: "
                "it was altered"
            )
        for rank, file in enumerate(manifest.files):
            self.bytes_read += fetch_file(self._store, manifest, file, self._path(manifest, rank))

    def open(self, manifest: Manifest, places: Mapping[str, TensorAt]) -> list[tuple[Header, memoryview]]:
        """Header and blobs of every rank's file that `fetch` brought. Raises SnapshotError when one is not
        what it should be."""
        return [self._open(manifest, rank, places) for rank in range(len(manifest.files))]

    def keep(self, versions: set[Version]) -> None:
        """Remove the files of all other versions."""
        names = {str(version) for version in versions}
        for folder in self._folder.iterdir() if self._folder.exists() else ():
            if folder.name not in names:
                shutil.rmtree(folder)

    def _path(self, manifest: Manifest, rank: int) -> Path:
        return self._folder / str(manifest.version) / f"{rank:05d}.bin"

    def _open(
        self, manifest: Manifest, rank: int, places: Mapping[str, TensorAt]
    ) -> tuple[Header, memoryview]:
        path = self._path(manifest, rank)
        data = np.memmap(path, np.uint8, "r").data if path.stat().st_size else memoryview(b"")
        header, blobs = delta_file.parse(data, delta_file.most_header(places))
        if len(header.ranges) > len(places):
            raise SnapshotError(
                f"{path} has {len(header.ranges)} ranges, the model {len(places)} tensors: it was altered"
            )
        stated = (header.run, header.version, header.base, header.fingerprint, header.rank, header.world_size)
        expected = (
            manifest.run,
            manifest.version,
            manifest.base,
            manifest.fingerprint,
            rank,
            len(manifest.files),
        )
        if stated != expected:
            raise SnapshotError(f"{path} states {stated}, its manifest {expected}: files were mixed up")
        return header, blobs


def _is(path: Path, file: File) -> bool:
    if path.stat().st_size != file.size:
        return False
    return (blake3().update_mmap(path) if file.size else blake3()).hexdigest() == file.blake3
