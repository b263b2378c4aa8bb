"""Entry point that vLLM loads in each of its processes; it makes our weight-transfer engine known by name."""

from __future__ import annotations

from typing import Final

from sync.secrets import redact_process

BACKEND: Final = "distill"
"""Name for `--weight-transfer-config '{"backend": "distill"}'`."""


def register() -> None:
    """Register the engine by name, without importing it. Calling again changes nothing."""
    redact_process()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "sync.replica.engine", "CheckpointEngine")
