"""Publish versions of a model to a store, and follow them; nothing else of this project is needed for it.

open_store(DirectoryStoreConfig(), folder)    where versions are kept (other kinds: `sync.base.settings`)
Publisher(store, RunIdentity, slices)         the trainer's side: `anchor` once, then `delta` after a step
Mirror(folder, store, run)                    a reader's side: `stage` a Version, `promote` it
checkpoint                                    tensors, bits and fingerprint of a Hugging Face folder
"""

from sync.base.settings import DirectoryStoreConfig
from sync.weights.delta.file import Slice
from sync.weights.publish import Publisher
from sync.weights.snapshots import checkpoint
from sync.weights.stores import open_store
from sync.weights.subscribe import Mirror
from sync.wire import RunIdentity, Version

__all__ = [
    "DirectoryStoreConfig",
    "Mirror",
    "Publisher",
    "RunIdentity",
    "Slice",
    "Version",
    "checkpoint",
    "open_store",
]
