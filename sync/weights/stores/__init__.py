"""Stores of published weights: `Store` is the one interface of all of them, `open_store` opens one."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from sync.base.own_code import make_own
from sync.base.secrets import HIDDEN
from sync.base.settings import (
    BucketStoreConfig,
    DirectoryStoreConfig,
    OwnStoreConfig,
    StoreConfig,
    XetStoreConfig,
)
from sync.weights.stores.store import MOST_SMALL, DirectoryStore, Store, check_key, content, read_small

__all__ = ["MOST_SMALL", "Store", "check_key", "content", "open_store", "read_small"]


def open_store(config: StoreConfig, default_path: Path) -> Store:
    """The store that `config` names; local kinds without a path of their own use `default_path`. Raises
    StoreError when it cannot be opened, ConfigError when a needed package is missing or the user's own code
    makes none."""
    if isinstance(config, DirectoryStoreConfig):
        return DirectoryStore(config.path or default_path)
    if isinstance(config, XetStoreConfig):
        from sync.weights.stores.xet import XetStore

        return XetStore(config.path or default_path)
    if isinstance(config, BucketStoreConfig):
        from sync.weights.stores.bucket import BucketStore

        return BucketStore(config.bucket, config.prefix, create=config.create)
    # of a run's record, where secrets are hidden: the client looks into the environment for what is not given
    options = {name: value for name, value in config.options.items() if value != HIDDEN}
    if isinstance(config, OwnStoreConfig):
        field, expected = "weights.store.type", "a sync.weights.stores.Store"
        made = make_own(config.name, field, lambda made: isinstance(made, Store), expected, **options)
        return cast(Store, made)
    from sync.weights.stores.object_store import ObjectStore

    return ObjectStore(config.url, options)
