"""vLLM's weight-transfer engine of this project: checkpoints or adapters from a folder, or a broadcast.

One class serves all of them, so that all load, record and revert in the same code. It differs from vLLM's
own engines in what failure means: an update that fails is reverted (`WorkerExtension.distill_revert`) before
anyone may resume, and a revert that fails ends the process.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from sync.address import token_from_environment
from sync.broadcast import Reception
from sync.errors import ConfigError
from sync.replica.routing import RouteRecord
from sync.replica.swap import Source, Swap
from sync.replica.vllm_weights import initial_weights, leave_out_padding, load_adapter, load_weights
from sync.snapshots.checkpoint import read_folder
from sync.wire import BroadcastTicket


@dataclass
class NoInfo(WeightTransferInitInfo):
    """Nothing to set up: folders and tickets name themselves."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where one update comes from."""

    path: str | None = None
    """A checkpoint or adapter folder; None: the last broadcast that was received."""


class CheckpointEngine(WeightTransferEngine[NoInfo, UpdateInfo]):
    """Loads checkpoints into one worker's model, or adapters when it was started for them.

    Registered as "distill" by `sync.replica.plugin`.
    """

    init_info_cls = NoInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        leave_out_padding(model, vllm_config)
        if vllm_config.lora_config is None:
            initial = Source("the model folder of the start", partial(initial_weights, vllm_config, model))
        else:
            initial = self._adapter(None)
        self.swap = Swap(partial(load_weights, model, self.model_config), initial)
        self.reception: Reception | None = None
        """The broadcast that is being received or was received last, and is not applied yet."""

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Nothing to do: an update is one call, so that it cannot be left half made."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """vLLM's own, without waiting for an accelerator: there may be none."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load one update. Its failure is not raised here but kept for `distill_outcome` of all workers."""
        self.swap.apply(self._source(update_info.path))

    def _source(self, path: str | None) -> Source:
        if self.vllm_config.lora_config is not None:
            if path is None:
                raise RuntimeError("adapters are not broadcast: publish them to a store")
            return self._adapter(Path(path))
        if path is not None:
            return Source(path, partial(read_folder, Path(path)))
        if self.reception is None:
            raise RuntimeError("no broadcast was received: stage it first")
        received, self.reception = self.reception.result(), None
        return Source(f"broadcast {received.group}", received.tensors.items, received.digests)

    def _adapter(self, folder: Path | None) -> Source:
        """An adapter in a folder; None: the empty one, which leaves the model as it was started."""
        load = partial(load_adapter, self.model, self.vllm_config, folder)
        if folder is None:
            return Source("no adapter", tuple, load=load)
        return Source(str(folder), partial(read_folder, folder), load=load)

    def finish_weight_update(self) -> None:
        """Nothing to do."""

    def shutdown(self) -> None:
        """Nothing to release: a reception ends with its time-out."""


# --- what the API process calls -------------------------------------------------------------------------


class WorkerExtension:
    """What the API process may call in every vLLM worker by `collective_rpc`; arguments are plain data.

    Named by `--worker-extension-cls`: vLLM adds it to its worker's base classes, so `self` is a vLLM worker
    and all names carry a prefix. An update runs: [distill_receive, distill_received]* while generating,
    pause, vLLM's update_weights, distill_outcome of all, distill_revert of all if any failed, resume.
    """

    weight_transfer_engine: CheckpointEngine
    vllm_config: Any
    model_runner: Any
    rank: int
    distill_record: RouteRecord | None = None
    """Set by the first `distill_record_routes`."""

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

        Raises ConfigError when the replica has more than one worker: a ticket is one rank.
        """
        workers = self.vllm_config.parallel_config.world_size
        if workers != 1:
            raise ConfigError(
                f"this replica has {workers} workers and a broadcast has one rank for it: "
                'set weights.transport = "snapshot", or one device per replica'
            )
        engine = self.weight_transfer_engine
        engine.swap.settle()
        own = msgspec.convert(ticket, BroadcastTicket)
        engine.reception = Reception(own, timeout, engine.device, token_from_environment())

    def distill_received(self) -> dict[str, Any]:
        """{"done": bool, "bytes": int, "error": text or None} of the broadcast being received."""
        reception = self.weight_transfer_engine.reception
        if reception is None:
            return {"done": True, "bytes": 0, "error": "no broadcast was asked for"}
        return {"done": reception.done, "bytes": reception.bytes_received, "error": reception.error}

    def distill_record_routes(self) -> dict[str, Any]:
        """Record the experts of every token from now on; again changes nothing. Call it before any request.

        {"layers": M, "chosen": K, "experts": E}, or {"error": why this engine cannot}; where it records them
        itself, "native" lists the layers that have experts. {} of all workers but the first: those of a
        tensor-parallel replica choose alike.
        """
        from sync.replica.vllm_routing import native_routes, record_routes  # only for students with experts

        if self.rank > 0:
            return {}
        if native := native_routes(self.model_runner, self.vllm_config):
            return {"native": native.layers, **native.shape._asdict()}
        try:
            if self.distill_record is None:
                self.distill_record = record_routes(self.model_runner, self.vllm_config)
        except ConfigError as error:
            return {"error": str(error)}
        return self.distill_record.shape._asdict()

    def distill_routes(self, requests: list[str]) -> list[dict[str, Any] | None]:
        """For each of these requests, which gave out their completions: its message for `routing.routes_of`.
        They are forgotten here. None of all workers but the first."""
        record = self.distill_record
        return [None if record is None else record.take(record.named(request)) for request in requests]
