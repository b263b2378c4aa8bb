"""The evaluator's own copy of the weights: any published version as a model or adapter folder."""

from __future__ import annotations

from pathlib import Path

from distill.config import RunConfig
from sync.errors import ConfigError
from sync.stores import open_store
from sync.weights.mirror import Mirror
from sync.wire import Version


class FollowedStore:
    """Versions of a run, read from its store into a mirror of our own; not for two threads at once."""

    def __init__(self, config: RunConfig) -> None:
        if config.weights.road != "snapshot":
            raise ConfigError(
                f'weights.road is "{config.weights.road}" and the evaluator reads the store: '
                'set weights.road = "snapshot", or evaluation = false'
            )
        store = open_store(config.weights.store, config.run_dir / "store")
        self._mirror = Mirror(config.run_dir / "mirrors" / "evaluator", store, config.run.name)

    def folder(self, version: Version) -> Path:
        """A model or adapter folder that holds exactly `version`. Raises SnapshotError or StoreError."""
        if self._mirror.version != version:
            self._mirror.promote(self._mirror.stage(version))
        assert self._mirror.path is not None, "a version was promoted"
        return self._mirror.path
