"""The student's weights in checkpoint coordinates: this rank's flat shards, whole tensors, a folder, digests.

Under ZeRO-3 rank r holds of every parameter the flat elements [r·k, (r+1)·k), k = shard length, padded at the
end: published shards need no gather. Names and shapes are what `save_pretrained` writes, a tied tensor once;
a parameter that fuses several checkpoint tensors is cut where they meet (`student_trainer.layout`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from student_trainer.checksum import checksum
from student_trainer.disk_full import all_done
from student_trainer.layout import alone, layout
from student_trainer.model import Student
from student_trainer.ranks import Ranks
from sync.delta.codec import Bits
from sync.errors import ConfigError
from sync.publish import Slice
from sync.snapshots.checkpoint import BITS, digest, let_others_read, model_fingerprint

log = logging.getLogger(__name__)
DTYPES = {torch.bfloat16: "bf16", torch.float32: "f4"}
"""Precisions of the trained weights, by their wire names."""
_SIGNED = {2: torch.int16, 4: torch.int32}


class Weights:
    """The parameters of one student, named as in its checkpoint; made after deepspeed.initialize.

    Raises ConfigError when memory and checkpoint do not name the same tensors, or for other precisions.
    """

    def __init__(self, student: Student, ranks: Ranks) -> None:
        self._student, self._ranks = student, ranks
        self.adapters = hasattr(student.model, "peft_config")
        """Only adapters are trained and published, named as peft names them in its folder."""
        self.parameters = trained_parameters(student.model) if self.adapters else whole_model(student.model)
        shapes = {name: shape_of(parameter) for name, parameter in self.parameters.items()}
        self.pieces = alone(shapes) if self.adapters else layout(student.model, shapes)
        """Parameter → the checkpoint tensors in it."""
        wrong = {name: p.dtype for name, p in self.parameters.items() if p.dtype not in DTYPES}
        if wrong:
            raise ConfigError(f"{wrong} cannot be published: train in bf16 or fp32")
        self.slices = [part for name in self.parameters for part, _ in self._slices(name)]

    @property
    def fingerprint(self) -> str:
        """Names the model's checkpoint: tensors, shapes, precision."""
        return model_fingerprint({part.name: (part.shape, part.dtype) for part in self.slices})

    def _slices(self, name: str) -> list[tuple[Slice, int]]:
        """What this rank holds of each tensor in a parameter, and where it begins in the rank's shard."""
        parameter = self.parameters[name]
        length, kind = _local(parameter).numel(), DTYPES[parameter.dtype]
        first = self._ranks.rank * length
        found = []
        for piece in self.pieces[name]:
            start = min(max(first - piece.start, 0), piece.count)
            end = min(max(first + length - piece.start, start), piece.count)
            held = Slice(piece.name, piece.shape, kind, start, end - start)
            found.append((held, max(piece.start + start - first, 0)))
        return found

    def snapshot(self) -> dict[str, Bits]:
        """Copies of this rank's slices as flat bits, by tensor, where the shards lie. No collective.

        Shards in host memory come as arrays, those on a GPU as tensors of integers on it.
        """
        return {
            part.name: copy_of(_local(parameter)[at : at + part.count])
            for name, parameter in self.parameters.items()
            for part, at in self._slices(name)
        }

    def _whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter in order: a copy in host memory on rank 0, else empty. Collective: use it up."""
        for name, parameter in self.parameters.items():
            with _whole(parameter):
                own = parameter.detach() if self._ranks.rank == 0 else parameter.detach()[:0]
                tensor = own.to("cpu", copy=True)
            yield name, tensor

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Every checkpoint tensor: whole, in host memory, on rank 0, else empty. Collective: use it up."""
        for name, tensor in self._whole_parameters():
            flat = tensor.flatten()
            for piece in self.pieces[name]:
                if self._ranks.rank == 0:
                    yield piece.name, flat[piece.start : piece.start + piece.count].view(piece.shape)
                else:
                    yield piece.name, flat

    def digests(self) -> dict[str, str]:
        """Checkpoint tensor → BLAKE3 hex of its bytes; on rank 0, elsewhere empty. Collective."""
        named = ((name, tensor) for name, tensor in self.gathered() if self._ranks.rank == 0)
        return {name: digest(bits(tensor.flatten())) for name, tensor in named}

    def shown(self) -> str:
        """Checksum of this rank's shards without their padding, computed where they lie. No collective."""
        held = {name: sum(part.count for part, _ in self._slices(name)) for name in self.parameters}
        return checksum(_local(self.parameters[name])[:count] for name, count in held.items())

    def save_folder(self, folder: Path, tokenizer: Any) -> None:
        """Write a Hugging Face folder that any tool loads; all ranks return when it is there. Collective."""
        state = dict(self._whole_parameters())
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
        if self._ranks.rank == 0:
            let_others_read(folder)


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


def copy_of(flat: Tensor) -> Bits:
    """Copy of a flat tensor as integers of its width: an array of a host's, on the same GPU of a GPU's."""
    return bits(flat) if flat.device.type == "cpu" else flat.detach().clone().view(_SIGNED[flat.itemsize])


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
