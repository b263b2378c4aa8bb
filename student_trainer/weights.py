"""The student's weights in checkpoint coordinates: this rank's flat shards, whole tensors, a folder, digests.

Under ZeRO-3 rank r holds of every parameter the flat elements [r·k, (r+1)·k), k = shard length, padded at the
end: published shards need no gather. Of experts that ranks share (`expert_layers`), r counts the ranks that
hold the same ones. Names and shapes are what `save_pretrained` writes, a tied tensor once;
a parameter that fuses several checkpoint tensors is cut where they meet (`layout`).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn

from student_trainer.expert_layers import Part, assembled, gathered, parts, shape_of
from student_trainer.ranks import Ranks, all_done
from sync.base.errors import ConfigError
from sync.weights.delta.codec import Bits, on_host
from sync.weights.delta.file import Slice
from sync.weights.snapshots.checkpoint import let_others_read, model_fingerprint, tensor_digest

DTYPES: Final = {torch.bfloat16: "bf16", torch.float32: "f4"}
"""Precisions of the trained weights, by their wire names."""
_SIGNED: Final = {2: torch.int16, 4: torch.int32}
_ADAPTER: Final = ".default."
_NUMBER: Final = 1 << 40
"""A probe's elements are parameter number × this + flat element."""


class Weights:
    """The parameters of the student, named as in its checkpoint; made after deepspeed.initialize.

    Raises ConfigError when memory and checkpoint do not name the same tensors, or for other precisions.
    """

    def __init__(self, model: Any, ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks
        self.adapters = hasattr(model, "peft_config")
        """Only adapters are trained and published, named as peft names them in its folder."""
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        """By checkpoint name, a tied one once; of an adapter the trained ones, without its own name."""
        if self.adapters:
            trained = ((name, p) for name, p in self.parameters.items() if p.requires_grad)
            self.parameters = {name.replace(_ADAPTER, "."): p for name, p in trained}
        else:  # and what no gradient reaches: the correction of scores in DeepSeek-V3's routers
            saved, buffers = model.state_dict().keys(), model.named_buffers(remove_duplicate=False)
            self.parameters |= {name: b for name, b in buffers if name in saved and b.is_floating_point()}
        wrong = {name: p.dtype for name, p in self.parameters.items() if p.dtype not in DTYPES}
        if wrong:
            raise ConfigError(f"{wrong} cannot be published: train in bf16 or fp32")
        whole = {name: shape_of(parameter) for name, parameter in self.parameters.items()}
        self._parts = {name: Part(name, shape, shape) for name, shape in whole.items()} | parts(model)
        shapes = {self._parts[name].source: self._parts[name].shape for name in whole}
        alone = {name: [Piece(name, shape, 0)] for name, shape in shapes.items()}
        self.pieces = alone if self.adapters else layout(model, shapes)
        """Parameter of the transformers model → the checkpoint tensors in it."""
        self._shards = {name: list(self._slices(name)) for name in self.parameters}
        self.slices = [part for shards in self._shards.values() for part, _ in shards]

    @property
    def fingerprint(self) -> str:
        """Identifies the model's checkpoint: tensors, shapes, precision."""
        return model_fingerprint({part.name: (part.shape, part.dtype) for part in self.slices})

    @property
    def adapter_config(self) -> str | None:
        """How an adapter's tensors apply: the text of its adapter_config.json; None: a whole checkpoint."""
        if not self.adapters:
            return None
        (settings,) = self._model.peft_config.values()
        return json.dumps(settings.to_dict(), default=sorted)

    def _slices(self, name: str) -> Iterator[tuple[Slice, int]]:
        """What this rank holds of each tensor in a parameter, and where it begins in the rank's shard."""
        parameter = self.parameters[name]
        length, kind = _local(parameter).numel(), DTYPES[parameter.dtype]
        first = getattr(parameter, "ds_zero_partition_rank", self._ranks.rank) * length
        part = self._parts[name]
        for piece in self.pieces[part.source]:
            if (begin := part.start(piece.start, piece.count)) is not None:
                start = min(max(first - begin, 0), piece.count)
                end = min(max(first + length - begin, start), piece.count)
                slice = Slice(piece.name, piece.shape, kind, start, end - start)
                yield slice, max(begin - first, 0)

    def snapshot(self) -> dict[str, Bits]:
        """Copies of this rank's slices as flat bits, by tensor, where the shards lie. No collective.

        Shards in host memory come as arrays, those on a GPU as tensors of integers on it.
        """
        shards = {name: _local(parameter) for name, parameter in self.parameters.items()}
        pieces = ((shards[name], part, at) for name, parts in self._shards.items() for part, at in parts)
        return {part.name: copy_of(shard[at : at + part.count]) for shard, part, at in pieces}

    def _whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of the transformers model: a copy in host memory on rank 0, else empty.

        Collective: use it up.
        """
        shared: dict[str, list[tuple[Tensor, Part]]] = {}
        for name, parameter in self.parameters.items():
            part = self._parts[name]
            if part.group is not None:
                shared.setdefault(part.source, []).append((parameter, part))
                continue
            with gathered(parameter):
                data = parameter.detach() if self._ranks.rank == 0 else parameter.detach()[:0]
                tensor = data.to("cpu", copy=True)
            yield part.source, tensor
        for source, shards in shared.items():
            yield source, assembled(shards, self._ranks.rank == 0)

    def digests(self) -> dict[str, str]:
        """Checkpoint tensor → BLAKE3 hex of its bytes; on rank 0, elsewhere empty. Collective."""
        digests: dict[str, str] = {}
        for name, tensor in self._whole_parameters():
            flat, pieces = tensor.flatten(), self.pieces[name] if self._ranks.rank == 0 else []
            digests |= {p.name: tensor_digest(flat[p.start : p.start + p.count]) for p in pieces}
        return digests

    def checksum(self) -> str:
        """Checksum of this rank's shards without their padding, computed where they lie. No collective."""
        counts = {name: sum(part.count for part, _ in parts) for name, parts in self._shards.items()}
        return checksum(_local(self.parameters[name])[:count] for name, count in counts.items())

    def save_folder(self, folder: Path, tokenizer: Any) -> None:
        """Write a Hugging Face folder that any tool loads; all ranks return when it is there. Collective."""
        state = dict(self._whole_parameters())

        def write() -> None:
            if self.adapters:  # `lora_A.weight` in the folder is `lora_A.default.weight` in memory
                split = ((name.rpartition("."), tensor) for name, tensor in state.items())
                named = {f"{stem}{_ADAPTER}{last}": tensor for (stem, _, last), tensor in split}
                self._model.save_pretrained(folder, state_dict=named)
                # peft's empty model card would be a fifth of a small adapter
                (folder / "README.md").unlink(missing_ok=True)
            else:
                self._model.save_pretrained(folder, state_dict=dict(state))  # it empties what it is given
            tokenizer.save_pretrained(folder)
            let_others_read(folder)

        all_done(self._ranks, str(folder), write if self._ranks.rank == 0 else lambda: None)


def copy_of(flat: Tensor) -> Bits:
    """Copy of a flat tensor as integers of its width: an array of a host's, on the same GPU of a GPU's."""
    bits = flat.detach().clone().view(_SIGNED[flat.itemsize])
    return on_host(bits) if bits.device.type == "cpu" else bits


def _local(parameter: Tensor) -> Tensor:
    """Flat elements that this rank holds, padding included."""
    shard = getattr(parameter, "ds_tensor", None)
    return parameter.detach().flatten() if shard is None else shard


# --- where checkpoint tensors lie in parameters ------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A checkpoint tensor as a flat range of one parameter, from its element `start` on."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def layout(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[Piece]]:
    """Parameter → the checkpoint tensors that tile it, in flat order.

    Most lie alone in a parameter of the same name and shape. transformers fuses the experts of a layer: the
    checkpoint has `experts.3.up_proj.weight`, memory has `experts.gate_up_proj`, whose flat elements are gate
    and up of expert 0, of expert 1, … Such a tensor is still one flat range of its parameter, so a shard of
    the parameter is, in checkpoint coordinates, ranges of a few tensors: nothing has to be gathered.

    Found by letting transformers convert probes whose elements say where they come from; a probe has at most
    two columns, so it is small. Raises ConfigError when a checkpoint tensor is no flat range of one
    parameter (transposed, interleaved or joined from several).
    """
    from transformers.core_model_loading import revert_weight_conversion

    probes = {name: _probe(number, shape) for number, (name, shape) in enumerate(shapes.items())}
    pieces_by_name: dict[str, list[Piece]] = {name: [] for name in shapes}
    try:
        written = revert_weight_conversion(model, probes)
        pieces = [_piece(name, tensor, shapes) for name, tensor in written.items()]
        for name, piece in sorted(pieces, key=lambda item: item[1].start):
            pieces_by_name[name].append(piece)
        for name, parts in pieces_by_name.items():
            ends = list(itertools.accumulate((part.count for part in parts), initial=0))
            if [part.start for part in parts] != ends[:-1] or ends[-1] != math.prod(shapes[name]):
                raise ValueError(f"{name} is not tiled by {[part.name for part in parts[:3]]}")
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{type(model).__name__} keeps its weights in memory otherwise than in its checkpoint: {error}; "
            "only tensors that are flat ranges of a parameter can be published from shards"
        ) from None
    return pieces_by_name


def _probe(number: int, shape: tuple[int, ...]) -> Tensor:
    """Where each of the first two columns' elements lies."""
    if len(shape) < 2:
        return torch.arange(math.prod(shape)).reshape(shape) + number * _NUMBER
    rows, columns = math.prod(shape[:-1]), torch.arange(min(2, shape[-1]))
    places = torch.arange(rows).unsqueeze(1) * shape[-1] + columns
    return places.reshape(*shape[:-1], len(columns)) + number * _NUMBER


def _piece(name: str, probe: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, Piece]:
    """(parameter, piece) of a converted probe. Raises ValueError when it is no flat range."""
    number, start = divmod(int(probe.flatten()[0]), _NUMBER)
    parameter, source = list(shapes.items())[number]
    shape = (*probe.shape[:-1], source[-1]) if len(source) >= 2 else tuple(probe.shape)
    expected = _probe(number, shape) + start
    if probe.shape != expected.shape or not torch.equal(probe, expected):
        raise ValueError(f"{name} is no flat range of {parameter}")
    return parameter, Piece(name, shape, start)


# --- checksum -----------------------------------------------------------------------------------------------

BLOCK: Final = 1 << 15
"""Elements of a GPU's shard that one number stands for."""
_BLOCKS_AT_ONCE: Final = 128
"""32 MiB of int64 for a moment."""


def checksum(shards: Iterable[Tensor]) -> str:
    """16 hex digits of BLAKE3 over the bits of flat bf16 or fp32 tensors, in their order.

    A GPU's shard stays there. Hashed are the sums of its blocks, s_b = Σ_j k_j · x_bj modulo 2⁶⁴, with x the
    element's bits as a signed integer and k fixed odd pseudo-random numbers: a single changed element is
    always seen, since odd numbers have inverses; that several cancel has a chance of about 2⁻⁶³ (at worst, of
    sign bits alone, 2⁻⁴⁸ for bf16 and 2⁻³² for fp32). This detects accidents, not forgeries.
    """
    hashed = blake3()
    for shard in shards:
        numbers = shard.detach().view(_SIGNED[shard.itemsize])
        hashed.update((numbers if numbers.is_cpu else block_sums(numbers).cpu()).numpy().view(np.uint8).data)
    return hashed.hexdigest(length=8)


def block_sums(numbers_N: Tensor) -> Tensor:
    """int64: s of every block, computed where the numbers lie."""
    k, sums = _keys(numbers_N.device), []
    for part in numbers_N.split(BLOCK * _BLOCKS_AT_ONCE):
        padded = nn.functional.pad(part.long(), (0, -len(part) % BLOCK))
        sums.append(padded.view(-1, BLOCK).mul_(k).sum(1))
    return torch.cat(sums)


@cache
def _keys(device: torch.device) -> Tensor:
    """int64 [BLOCK]: k"""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(1 << 62), 1 << 62, (BLOCK,), generator=generator) * 2 + 1).to(device)
