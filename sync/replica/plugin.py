"""Entry point that vLLM loads in each of its processes: registers our weight-transfer engine by name, and mends
what the CPU build needs mended (`vllm_compat`)."""

from __future__ import annotations

from typing import Final

PLUGIN: Final = "onpolicy_distill"
"""Name of the entry point, for VLLM_PLUGINS."""
BACKEND: Final = "distill"
"""Name for `--weight-transfer-config '{"backend": "distill"}'`."""


def register() -> None:
    """Register the engine by name, without importing it. Calling again changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "sync.replica.engine", "CheckpointEngine")
    if current_platform.is_cpu():
        from sync.replica.vllm_compat import avoid_amx_attention

        avoid_amx_attention()
