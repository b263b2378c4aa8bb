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

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from sync.broadcast.broadcast import Reception
from sync.replica.swap import Source, Swap
from sync.replica.vllm_compat import initial_weights, leave_out_padding, load_adapter, load_weights
from sync.snapshots.tensors import read_folder


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
        """Load one update. Its failure is not raised here but kept for `distill_outcome` of all workers."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """See `update_weights`."""
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
