"""Where published versions are kept: one interface, five kinds of store."""

from __future__ import annotations

from pathlib import Path

from sync.secrets import HIDDEN
from sync.stores.base import Store
from sync.stores.config import BucketStoreConfig, DirectoryStoreConfig, StoreConfig, XetStoreConfig

__all__ = ["Store", "open_store"]


def open_store(config: StoreConfig, default_path: Path) -> Store:
    """The store that `config` names; local kinds without a path of their own use `default_path`.

    Raises StoreError when it cannot be opened, ConfigError when a needed package is missing.
    """
    if isinstance(config, DirectoryStoreConfig):
        from sync.stores.directory import DirectoryStore

        return DirectoryStore(config.path or default_path)
    if isinstance(config, XetStoreConfig):
        from sync.stores.xet import XetStore

        return XetStore(config.path or default_path)
    if isinstance(config, BucketStoreConfig):
        from sync.stores.bucket import BucketStore

        return BucketStore(config.bucket, config.prefix, create=config.create)
    from sync.stores.object_store import ObjectStore

    # of a run's record, where secrets are hidden: the client looks into the environment for what is not given
    return ObjectStore(config.url, {name: v for name, v in config.options.items() if v != HIDDEN})
