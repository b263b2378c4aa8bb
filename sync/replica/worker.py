"""What the API process may call in every vLLM worker, besides vLLM's own methods.

Named by `--worker-extension-cls`; vLLM adds it to its worker's base classes, so `self` is a vLLM worker and
all names carry a prefix. An update runs: [distill_receive, distill_received]* while generating, pause,
vLLM's update_weights, distill_outcome of all, distill_revert of all if any failed, resume.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from sync.client import token_from_environment
from sync.errors import ConfigError
from sync.wire import BroadcastTicket

if TYPE_CHECKING:
    from sync.replica.engine import CheckpointEngine


class WorkerExtension:
    """Methods for `collective_rpc`; arguments and answers are plain data."""

    weight_transfer_engine: CheckpointEngine
    vllm_config: Any

    def distill_apply(self, update: dict[str, str]) -> None:
        """Load an adapter outside of vLLM's weight update session; see `distill_outcome`."""
        self.weight_transfer_engine.update_weights(update)

    def distill_outcome(self) -> str | None:
        """Why the last update failed in this worker; None: it is loaded."""
        return self.weight_transfer_engine.swap.error

    def distill_revert(self) -> None:
        """Load what was held before the last update (before the first one: what the engine was started with),
        or end this process."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.swap.revert_or_end()

    def distill_digests(self) -> dict[str, str] | None:
        """Checkpoint tensor name → BLAKE3 hex of the bytes last given to the loader; None: none were."""
        return self.weight_transfer_engine.swap.digests

    def distill_receive(self, ticket: dict[str, Any], timeout: float) -> None:
        """Start to receive a broadcast in the background, into host memory, while generation goes on.

        Raises ConfigError when the replica has more than one worker: a ticket is one seat.
        """
        from sync.broadcast.broadcast import Reception

        workers = self.vllm_config.parallel_config.world_size
        if workers != 1:
            raise ConfigError(
                f"this replica has {workers} workers and a broadcast has one seat for it: "
                'set weights.transport = "snapshot", or one device per replica'
            )
        engine = self.weight_transfer_engine
        engine.swap.settle()
        seat = msgspec.convert(ticket, BroadcastTicket)
        engine.reception = Reception(seat, timeout, engine.device, token_from_environment())

    def distill_received(self) -> dict[str, Any]:
        """{"done": bool, "bytes": int, "error": text or None} of the broadcast being received."""
        reception = self.weight_transfer_engine.reception
        if reception is None:
            return {"done": True, "bytes": 0, "error": "no broadcast was asked for"}
        return {"done": reception.done, "bytes": reception.bytes_received, "error": reception.error}
