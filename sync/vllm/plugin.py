"""Entry point that vLLM loads in each of its processes: our weight-transfer engine, by name, and the mends of
`vllm_compat`."""

from __future__ import annotations

from typing import Final

from sync.base.secrets import redact_process

PLUGIN: Final = "onpolicy_distill"
"""Name of the entry point, for VLLM_PLUGINS."""
BACKEND: Final = "distill"
"""Name for `--weight-transfer-config '{"backend": "distill"}'`."""


def register() -> None:
    """Register the engine by name, without importing it. Calling again changes nothing."""
    redact_process()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    from sync.vllm import vllm_compat

    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(BACKEND, "sync.vllm.engine", "CheckpointEngine")
    vllm_compat.tell_engine_signals()
    if current_platform.is_cpu():
        vllm_compat.avoid_amx_attention()
        vllm_compat.fork_engine()


if __name__ == "__main__":  # vLLM's API server, on a port that its launcher holds
    from sync.vllm.vllm_compat import serve_on_held_port

    serve_on_held_port()
