"""A process's own copy of a run's weights: any published version as a model or adapter folder."""

from __future__ import annotations

from pathlib import Path

from sync.claims import Claim
from sync.replica.config import ReplicaConfig
from sync.snapshots.manifest import read_latest
from sync.stores import open_store
from sync.subscribe.mirror import Mirror
from sync.wire import Version


class Subscriber:
    """Versions of a run, read from its store into a mirror; not for two threads at once.

    `claim` is the run whose requests are served: versions of another one are refused.
    """

    def __init__(self, config: ReplicaConfig, claim: Claim) -> None:
        self._store, self._run = open_store(config.store, config.store_path), config.run
        self._claim = claim
        self._mirror = Mirror(config.mirror, self._store, config.run)

    def newest(self) -> Version | None:
        """The version published last; None: none yet, or no run claimed this process. Raises StoreError."""
        return read_latest(self._store, self._run) if self._claim.run_id else None

    def folder(self, version: Version) -> Path:
        """A model or adapter folder that holds exactly `version`. Raises SnapshotError or StoreError."""
        self._mirror.follow(self._claim.run_id)
        if self._mirror.version != version:
            self._mirror.promote(self._mirror.stage(version))
        assert self._mirror.path is not None, "a version was promoted"
        return self._mirror.path
