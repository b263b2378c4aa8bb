"""The student's weights in checkpoint coordinates: this rank's flat shards, whole tensors, a folder, digests.

Under ZeRO-3 rank r holds of every parameter the flat elements [r·k, (r+1)·k), k = shard length, padded at the
end: published shards need no gather. Names and shapes are what `save_pretrained` writes, a tied tensor once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn

from student_trainer.model import Student
from student_trainer.ranks import Ranks
from student_trainer.room import all_done
from sync.errors import ConfigError
from sync.weights.checkpoint import BITS, digest, model_fingerprint
from sync.weights.publish import Slice

log = logging.getLogger(__name__)
DTYPES = {torch.bfloat16: "bf16", torch.float32: "f4"}
"""Precisions of the trained weights, by their wire names."""


class Weights:
    """The parameters of one student, named as in its checkpoint; made after deepspeed.initialize.

    Raises ConfigError when memory and checkpoint do not name the same tensors, or for other precisions.
    """

    def __init__(self, student: Student, ranks: Ranks) -> None:
        self._student, self._ranks = student, ranks
        self.adapters = hasattr(student.model, "peft_config")
        """Only adapters are trained and published, named as peft names them in its folder."""
        self.parameters = trained_parameters(student.model) if self.adapters else whole_model(student.model)
        self.shapes = {name: shape_of(parameter) for name, parameter in self.parameters.items()}
        if not self.adapters:
            check_names(student.model, self.shapes)
        wrong = {name: p.dtype for name, p in self.parameters.items() if p.dtype not in DTYPES}
        if wrong:
            raise ConfigError(f"{wrong} cannot be published: train in bf16 or fp32")
        self.slices = [self._slice(name, parameter) for name, parameter in self.parameters.items()]

    @property
    def fingerprint(self) -> str:
        """Names the model's checkpoint: tensors, shapes, precision."""
        return model_fingerprint({part.name: (part.shape, part.dtype) for part in self.slices})

    def _slice(self, name: str, parameter: nn.Parameter) -> Slice:
        shape = self.shapes[name]
        length, total = _local(parameter).numel(), int(np.prod(shape, dtype=np.int64))
        start = min(self._ranks.rank * length, total)
        return Slice(name, shape, DTYPES[parameter.dtype], start, min(length, total - start))

    def snapshot(self) -> dict[str, np.ndarray]:
        """Copies of this rank's slices as flat arrays of bits, by tensor. No collective."""
        pairs = zip(self.parameters.values(), self.slices, strict=True)
        return {part.name: bits(_local(parameter)[: part.count]) for parameter, part in pairs}

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Every whole tensor in order: a copy in host memory on rank 0, else empty. Collective: use it up."""
        for name, parameter in self.parameters.items():
            with _whole(parameter):
                own = parameter.detach() if self._ranks.rank == 0 else parameter.detach()[:0]
                tensor = own.to("cpu", copy=True)
            yield name, tensor

    def digests(self) -> dict[str, str]:
        """Checkpoint tensor → BLAKE3 hex of its bytes; on rank 0, elsewhere empty. Collective."""
        named = ((name, tensor) for name, tensor in self.gathered() if self._ranks.rank == 0)
        return {name: digest(bits(tensor.flatten())) for name, tensor in named}

    def shown(self) -> str:
        """BLAKE3 of this rank's shards, all tensors in order. No collective."""
        hasher = blake3(max_threads=blake3.AUTO)
        for parameter, part in zip(self.parameters.values(), self.slices, strict=True):
            if part.count:
                hasher.update(bits(_local(parameter)[: part.count]).view(np.uint8).data)
        return hasher.hexdigest(16)

    def save_folder(self, folder: Path, tokenizer: Any) -> None:
        """Write a Hugging Face folder that any tool loads; all ranks return when it is there. Collective."""
        state = dict(self.gathered())
        all_done(self._ranks, str(folder), lambda: self._write(folder, tokenizer, state))

    def _write(self, folder: Path, tokenizer: Any, state: dict[str, Tensor]) -> None:
        """Rank 0's part of `save_folder`; the others have none."""
        model: Any = self._student.model
        if self._ranks.rank == 0 and self.adapters:
            model.save_pretrained(folder, state_dict={in_memory(name): state[name] for name in state})
            # peft's empty model card would be a fifth of a small adapter
            (folder / "README.md").unlink(missing_ok=True)
        elif self._ranks.rank == 0:
            model.save_pretrained(folder, state_dict=state)
            tokenizer.save_pretrained(folder)


_ADAPTER = ".default."


def whole_model(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter by its name; a tied one once."""
    return dict(model.named_parameters())


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of peft's adapter by their names in its folder, where the adapter's own name is left out."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name.replace(_ADAPTER, "."): parameter for name, parameter in trained.items()}


def in_memory(name: str) -> str:
    """Inverse of the renaming of `trained_parameters`, for LoRA's matrices."""
    stem, _, last = name.rpartition(".")
    return f"{stem}{_ADAPTER}{last}"


def shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """Whole shape, partitioned or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def check_names(model: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse a model whose checkpoint names or shapes its tensors otherwise than memory does."""
    from transformers.core_model_loading import revert_weight_conversion

    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    written = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, empty).items()}
    if written != shapes:
        differing = sorted(written.items() ^ shapes.items())[:4]
        raise ConfigError(
            f"{type(model).__name__} keeps its weights in memory otherwise than in its checkpoint "
            f"({differing} …): such models (fused experts, mostly) cannot be published yet"
        )


def bits(flat: Tensor) -> np.ndarray:
    """Copy of a flat tensor in host memory, as unsigned integers of its width."""
    host = flat.detach().to("cpu", copy=True)
    wide = host.view(torch.uint16) if host.dtype == torch.bfloat16 else host
    return wide.numpy().view(BITS[DTYPES[host.dtype]])


def _local(parameter: nn.Parameter) -> Tensor:
    """Flat elements that this rank holds, padding included."""
    shard = getattr(parameter, "ds_tensor", None)
    return parameter.detach().flatten() if shard is None else shard


def _whole(parameter: nn.Parameter) -> contextlib.AbstractContextManager[Any]:
    """The parameter gathered on every rank, for reading."""
    if not hasattr(parameter, "ds_tensor"):
        return contextlib.nullcontext()
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    return GatheredParameters([parameter])
