"""Xet in a local folder: content-defined chunks, stored once however often they are published.

    ROOT/keys/…    one small file per key: the content itself, or hash and size of what Xet holds
        /xet/…     hf_xet's own chunks
        /lock      hf_xet lets one process at a time into a local store

hf_xet does not verify what it reads and never frees chunks: readers check digests, and a deleted key frees
only chunks of no other use when the folder is rebuilt.
"""

from __future__ import annotations

import fcntl
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, TypeVar

import hf_xet
import msgspec

from sync.base.decoding import msgpack_decoder
from sync.base.errors import StoreError
from sync.weights.stores.store import DirectoryStore, Store, content, read_small

_INLINE: Final = 1 << 14
"""Bytes; shorter content lies beside its key, where Xet would gain nothing."""


R = TypeVar("R")
os.environ.setdefault("HF_XET_TELEMETRY_ENABLED", "0")


class _Pointer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a key's file says."""

    content: bytes | None = None
    hash: str | None = None
    size: Annotated[int, msgspec.Meta(ge=0)] = 0


class XetStore(Store):
    """Keys as in a directory store, contents in Xet."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._keys = DirectoryStore(self._root / "keys")
        self._endpoint = f"local://{self._root / 'xet'}"
        (self._root / "xet").mkdir(exist_ok=True)

    def create(self, key: str, data: bytes | Path) -> None:
        if self._keys.exists(key):  # before anything is stored
            raise self._taken(key)
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        pointer = _Pointer(content(data)) if size <= _INLINE else self._alone(_upload, data)
        self._keys.create(key, msgspec.msgpack.encode(pointer))

    def replace(self, key: str, data: bytes) -> None:
        self._keys.replace(key, msgspec.msgpack.encode(_Pointer(bytes(data))))

    def fetch(self, key: str, path: Path) -> None:
        pointer = self._pointer(key)
        if pointer.content is not None:
            path.write_bytes(pointer.content)
        else:
            self._alone(_fetch, pointer, path)

    def list(self, prefix: str) -> list[str]:
        return self._keys.list(prefix)

    def delete(self, key: str) -> None:
        self._keys.delete(key)

    def _size(self, key: str) -> int | None:
        if not self._keys.exists(key):
            return None
        pointer = self._pointer(key)
        return pointer.size if pointer.content is None else len(pointer.content)

    def __str__(self) -> str:
        return f"the Xet store {self._root}"

    def _pointer(self, key: str) -> _Pointer:
        try:
            pointer = msgpack_decoder(_Pointer).decode(read_small(self._keys, key))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise StoreError(f"{self} has damaged {key!r}: {error}") from None
        if pointer.content is None and pointer.hash is None:
            raise StoreError(f"{self} has damaged {key!r}: it says neither content nor hash")
        return pointer

    def _alone(self, work: Callable[..., R], *arguments: object) -> R:
        """work(endpoint, *arguments) while no other process or thread uses the chunks. hf_xet holds its own
        lock until the objects that `work` made are gone: when it has returned, or when the frames of its
        error are cleared."""
        with (self._root / "lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                return work(self._endpoint, *arguments)
            except (RuntimeError, OSError, hf_xet.XetObjectNotFoundError) as error:
                traceback.clear_frames(error.__traceback__)
                raise StoreError(f"{self} failed: {error}; is the disk full, or a chunk missing?") from None


def _upload(endpoint: str, data: bytes | Path) -> _Pointer:
    commit = hf_xet.XetSession().new_upload_commit(endpoint=endpoint)
    if isinstance(data, Path):
        upload = commit.start_upload_file(str(data), sha256=hf_xet.SKIP_SHA256)
    else:
        upload = commit.start_upload_bytes(bytes(data), sha256=hf_xet.SKIP_SHA256)
    commit.wait_to_finish()
    info = upload.result().xet_info
    return _Pointer(hash=info.hash, size=info.file_size)


def _fetch(endpoint: str, pointer: _Pointer, path: Path) -> None:
    group = hf_xet.XetSession().new_file_download_group(endpoint=endpoint)
    group.start_download_file(hf_xet.XetFileInfo(pointer.hash, pointer.size), str(path))
    group.wait_to_finish()
