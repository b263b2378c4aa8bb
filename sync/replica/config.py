"""What a replica process must know besides vLLM's own arguments; it travels in one environment variable."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from pydantic import Field, ValidationError

from sync import secrets
from sync.errors import ConfigError
from sync.settings import Settings
from sync.stores.config import DirectoryStoreConfig, StoreConfig

REPLICA_VARIABLE: Final = "DISTILL_REPLICA"
"""Environment variable that holds a ReplicaConfig as JSON, the secrets of its store among it."""


class ReplicaConfig(Settings):
    """Which run's weights a replica follows, and where it keeps them."""

    run: str
    """Name of the run; snapshots of another run are refused."""
    store: StoreConfig = DirectoryStoreConfig()
    """Where the run's versions are published."""
    store_path: Path
    """Folder of a store whose configuration names none."""
    mirror: Path
    """Folder of this replica's local mirror; no other replica may use it."""
    fingerprint: str | None = None
    """Fingerprint of the model; None: whatever the first manifest says."""
    lora_rank: int | None = Field(None, ge=1)
    """Rank of the adapters that this replica follows; None: it follows whole checkpoints."""
    timeout_seconds: float = Field(300.0, gt=0)
    """A broadcast that takes longer has failed."""

    def environment(self) -> dict[str, str]:
        """The variable that `from_environment` reads."""
        return {REPLICA_VARIABLE: self.model_dump_json()}

    @classmethod
    def from_environment(cls) -> ReplicaConfig:
        """The configuration of this process. Raises ConfigError when it is missing or malformed."""
        text = os.environ.get(REPLICA_VARIABLE)
        if not text:
            raise ConfigError(
                f"{REPLICA_VARIABLE} is not set, so this replica has no weights to follow: "
                "start it with `distill student`"
            )
        try:
            config = cls.model_validate_json(text)
            secrets.found(config.model_dump(mode="json"))  # so that no log of this process shows one
            return config
        except ValidationError as error:
            raise ConfigError(f"{REPLICA_VARIABLE} cannot be used: {error}") from None
