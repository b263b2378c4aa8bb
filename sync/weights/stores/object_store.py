"""S3, Google Cloud Storage or Azure, through obstore.

A key is created with a conditional put, which the service decides. A put whose answer was lost is repeated
by the client and then finds itself: the object carries a random id in its metadata, and a writer that finds
its own id has won. An object too large for one put is claimed by a small object first, `KEY@claim`, and
then uploaded in parts; it appears when the last part is there.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from sync.base.errors import ConfigError, StoreError
from sync.weights.stores.store import Store, check_key, content

try:
    import obstore
    from obstore import exceptions
    from obstore.store import from_url
except ImportError as error:
    raise ConfigError(
        "store type 'object' needs the package obstore: pip install 'onpolicy-distill[s3]'"
    ) from error

_ONE_PUT: Final = 64 << 20
_CLAIM: Final = "@claim"
_WRITER: Final = "writer"
_RETRY: Final[Any] = {
    "max_retries": 8,
    "retry_timeout": timedelta(minutes=3),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=10), "base": 2},
}


class ObjectStore(Store):
    """Keys under a bucket's prefix; credentials come from the environment, `options` go to the client."""

    absent = (exceptions.NotFoundError, FileNotFoundError)
    failures = (exceptions.BaseError, OSError)
    remedy = "check the address, the credentials and the network"

    def __init__(self, url: str, options: dict[str, str]) -> None:
        self._url = url
        plain = options.get("endpoint", "").startswith("http://")
        client: Any = {"allow_http": True} if plain else None
        with self._explained("open"):
            try:
                self._store = from_url(url, config=options, client_options=client, retry_config=_RETRY)
            except ValueError as error:
                raise StoreError(
                    f"store url {url!r} cannot be used: {error}; write it as s3://bucket/prefix, "
                    "gs://bucket/prefix or az://container/prefix"
                ) from None

    def create(self, key: str, data: bytes | Path) -> None:
        check_key(key)
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        if size <= _ONE_PUT:
            self._claim(key, key, content(data))
            return
        if self.exists(key):
            raise self._taken(key)
        self._claim(key + _CLAIM, key, b"")
        with self._explained("write", key):
            obstore.put(self._store, key, data, use_multipart=True)

    def replace(self, key: str, data: bytes) -> None:
        with self._explained("write", check_key(key)):
            obstore.put(self._store, key, bytes(data))

    def fetch(self, key: str, path: Path) -> None:
        with self._explained("read", check_key(key)), path.open("wb") as file:
            for chunk in obstore.get(self._store, key).stream(min_chunk_size=4 << 20):
                file.write(chunk)

    def list(self, prefix: str) -> list[str]:
        """Services list by whole parts of a key, so the last part of `prefix` is compared here."""
        with self._explained("list", prefix):
            pages = obstore.list(self._store, prefix.rpartition("/")[0] or None, chunk_size=1000)
            keys = [entry["path"] for page in pages for entry in page]
        return sorted(key for key in keys if key.startswith(prefix) and not key.endswith(_CLAIM))

    def delete(self, key: str) -> None:
        with self._explained("delete", check_key(key)):
            for name in (key, key + _CLAIM):
                with suppress(*self.absent):
                    obstore.delete(self._store, name)

    def __str__(self) -> str:
        return f"the store {self._url}"

    def _claim(self, name: str, key: str, data: bytes) -> None:
        """Create `name`, or raise AlreadyPublished for `key`."""
        claim = uuid4().hex
        with self._explained("write", key):
            try:
                obstore.put(self._store, name, data, mode="create", attributes={_WRITER: claim})
            except (exceptions.AlreadyExistsError, FileExistsError):
                if obstore.get(self._store, name).attributes.get(_WRITER) != claim:
                    raise self._taken(key) from None

    def _size(self, key: str) -> int | None:
        with self._explained("look for", check_key(key)):
            try:
                return int(obstore.head(self._store, key)["size"])
            except self.absent:
                return None
