"""Fetch a version's files, each checked against its manifest before anybody looks into it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from blake3 import blake3

from sync.errors import SnapshotError
from sync.stores.base import Store, check_key
from sync.weights import delta_file
from sync.weights.delta_file import Header
from sync.weights.manifest import File, Manifest, version_key
from sync.wire import Version


def fetch_file(store: Store, manifest: Manifest, file: File, path: Path) -> int:
    """Bring `path` to hold `file`; returns the bytes read from the store, 0 when it held them already.

    Raises SnapshotError when the store's bytes are not the manifest's; then there is no `path`.
    """
    if path.exists() and _is(path, file):
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    key = version_key(manifest.run, manifest.version, check_key(file.key))
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
    """Write an anchor's files into `folder`; returns the bytes read from the store."""
    read = 0
    for file in manifest.files:
        if not file.key.startswith("model/"):
            raise SnapshotError(
                f"{manifest.version} has a file {file.key!r} outside of model/: it was altered"
            )
        read += fetch_file(store, manifest, file, folder / check_key(file.key).removeprefix("model/"))
    return read


class Deltas:
    """Delta files on this machine: each is downloaded once, although both slots need it."""

    def __init__(self, store: Store, folder: Path) -> None:
        self._store, self._folder = store, folder
        self.bytes_read = 0

    def fetch(self, manifest: Manifest) -> list[tuple[Header, memoryview]]:
        """Header and blobs of every rank's file. Raises SnapshotError when one is not what it should be."""
        return [self._open(manifest, rank, file) for rank, file in enumerate(manifest.files)]

    def keep(self, versions: set[Version]) -> None:
        """Remove the files of all other versions."""
        names = {str(version) for version in versions}
        for folder in self._folder.iterdir() if self._folder.exists() else ():
            if folder.name not in names:
                shutil.rmtree(folder)

    def _open(self, manifest: Manifest, rank: int, file: File) -> tuple[Header, memoryview]:
        path = self._folder / str(manifest.version) / f"{rank:05d}.bin"
        self.bytes_read += fetch_file(self._store, manifest, file, path)
        header, blobs = delta_file.parse(np.memmap(path, np.uint8, "r").data)
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
