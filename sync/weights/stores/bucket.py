"""A Hugging Face bucket, through huggingface_hub's own client; contents travel as Xet chunks.

A bucket has no conditional write: the last writer wins. So a key is created in three steps. A writer
uploads the content under a name of its own, `KEY@random`, and lists the folder. When neither the key nor
another writer's name is there, it has the server copy the content to the key and removes its name; two
writers cannot both see themselves alone, since each lists after its own name is there. Otherwise it withdraws
its name, waits a moment and looks again, until the key is there or _CLAIM_TIMEOUT is over.

A writer that is killed in between, or loses the network for good, leaves its name with the content. `list`
does not show it; `delete` of the key removes it. Garbage collection deletes what `list` shows, so a name
whose key never came stays in the bucket.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import httpx2
from huggingface_hub import HfApi
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from huggingface_hub.utils import disable_progress_bars

from sync.weights.stores.store import Store, check_key

_CLAIM_TIMEOUT: Final = 10.0
"""Seconds to wait for another writer's key before it counts as taken."""
os.environ.setdefault("HF_XET_TELEMETRY_ENABLED", "0")


class BucketStore(Store):
    """Keys under `prefix` of `bucket` ("owner/name"). `endpoint` and `token`: None takes HF_ENDPOINT and
    HF_TOKEN."""

    absent = (EntryNotFoundError,)
    failures = (HfHubHTTPError, httpx2.HTTPError, OSError, RuntimeError)
    remedy = "check HF_ENDPOINT, HF_TOKEN, the bucket's name and the network"

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        create: bool = True,
        endpoint: str | None = None,
        token: str | None = None,
    ) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._api = HfApi(endpoint=endpoint, token=token)
        with self._explained("open"):
            if create:
                self._api.create_bucket(bucket, private=True, exist_ok=True)
            else:
                self._api.bucket_info(bucket)

    def create(self, key: str, data: bytes | Path) -> None:
        path = self._path(key)
        deadline = time.monotonic() + _CLAIM_TIMEOUT
        with self._explained("write", key):
            while path not in self._around(path) and time.monotonic() <= deadline:
                if self._try_create(path, data):
                    return
                time.sleep(random.uniform(0.02, 0.3))
        raise self._taken(key)

    def _try_create(self, path: str, data: bytes | Path) -> bool:
        """One attempt; False when another writer was seen, whose key may or may not come."""
        claim = f"{path}@{uuid4().hex}"
        try:
            self._batch(add=[(data, claim)])
            entries = self._around(path)
            alone = set(entries) == {claim}
            copy = [("bucket", self._bucket, entries[claim].xet_hash, path)] if alone else []
            self._batch(copy=copy, delete=[claim])
        except self.failures:
            with suppress(*self.failures):
                self._batch(delete=[claim])
            raise
        return alone

    def replace(self, key: str, data: bytes) -> None:
        with self._explained("write", key):
            self._batch(add=[(bytes(data), self._path(key))])

    def fetch(self, key: str, path: Path) -> None:
        files = [(self._path(key), path)]
        with self._explained("read", key):
            self._api.download_bucket_files(self._bucket, files, raise_on_missing_files=True)

    def list(self, prefix: str) -> list[str]:
        with self._explained("list", prefix):
            paths = self._tree(self._prefix + prefix.rpartition("/")[0], recursive=True)
            keys = (path.removeprefix(self._prefix) for path in paths)
            return sorted(key for key in keys if key.startswith(prefix) and "@" not in key)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._explained("delete", key):
            if paths := self._around(path):
                self._batch(delete=[*paths])

    def __str__(self) -> str:
        return f"the bucket {self._bucket}"

    def _path(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _size(self, key: str) -> int | None:
        with self._explained("look for", key):
            infos = self._api.get_bucket_paths_info(self._bucket, [self._path(key)])
            return next((int(entry.size) for entry in infos), None)

    def _batch(self, **operations: Any) -> None:
        self._api.batch_bucket_files(self._bucket, **operations)

    def _tree(self, folder: str, recursive: bool) -> dict[str, Any]:
        entries = self._api.list_bucket_tree(self._bucket, folder.strip("/") or None, recursive=recursive)
        return {entry.path: entry for entry in entries if entry.type == "file"}

    def _around(self, path: str) -> dict[str, Any]:
        """The file at `path` and the claims to it."""
        files = self._tree(path.rpartition("/")[0], recursive=False)
        return {name: file for name, file in files.items() if name == path or name.startswith(f"{path}@")}

    @contextmanager
    def _explained(self, verb: str, key: str = "") -> Iterator[None]:
        with super()._explained(verb, key), disable_progress_bars():
            yield
