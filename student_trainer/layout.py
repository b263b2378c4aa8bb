"""Where each checkpoint tensor lies in the parameters that the model holds.

Most lie alone in a parameter of the same name and shape. transformers fuses the experts of a layer: the
checkpoint has `experts.3.up_proj.weight`, memory has `experts.gate_up_proj`, whose flat elements are gate and
up of expert 0, of expert 1, … Such a tensor is still one flat range of its parameter, so a shard of the
parameter is, in checkpoint coordinates, ranges of a few tensors: nothing has to be gathered to name them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from sync.errors import ConfigError

_NUMBER: Final = 1 << 40
"""A probe's elements are parameter number × this + flat element."""


@dataclass(frozen=True)
class Piece:
    """A checkpoint tensor as a flat range of one parameter."""

    name: str
    """In the checkpoint."""
    shape: tuple[int, ...]
    """Of the tensor."""
    start: int
    """Its first element in the flat parameter."""

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def alone(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[Piece]]:
    """Every parameter is a checkpoint tensor of its own name."""
    return {name: [Piece(name, shape, 0)] for name, shape in shapes.items()}


def layout(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[Piece]]:
    """Parameter → the checkpoint tensors that tile it, in flat order.

    Found by letting transformers convert probes whose elements say where they come from; a probe has at most
    two columns, so it is small. Raises ConfigError when a checkpoint tensor is no flat range of one
    parameter (transposed, interleaved or joined from several).
    """
    from transformers.core_model_loading import revert_weight_conversion

    names = list(shapes)
    probes = {name: _probe(i, shapes[name]) for i, name in enumerate(names)}
    try:
        written = revert_weight_conversion(model, probes)
        pieces = [_piece(name, tensor, names, shapes) for name, tensor in written.items()]
    except (ValueError, RuntimeError) as error:
        raise _refusal(model, str(error)) from None
    found: dict[str, list[Piece]] = {name: [] for name in names}
    for name, piece in sorted(pieces, key=lambda one: one[1].start):
        found[name].append(piece)
    for name, parts in found.items():
        ends = list(itertools.accumulate((part.count for part in parts), initial=0))
        if [part.start for part in parts] != ends[:-1] or ends[-1] != math.prod(shapes[name]):
            raise _refusal(model, f"{name} is not tiled by {[part.name for part in parts[:3]]}")
    return found


def _probe(number: int, shape: tuple[int, ...]) -> Tensor:
    """Where each of the first two columns' elements lies."""
    if len(shape) < 2:
        return torch.arange(math.prod(shape)).reshape(shape) + number * _NUMBER
    rows, columns = math.prod(shape[:-1]), torch.arange(min(2, shape[-1]))
    places = torch.arange(rows).unsqueeze(1) * shape[-1] + columns
    return places.reshape(*shape[:-1], len(columns)) + number * _NUMBER


def _piece(
    name: str, probe: Tensor, names: list[str], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[str, Piece]:
    """(parameter, piece) of a converted probe. Raises ValueError when it is no flat range."""
    number, start = divmod(int(probe.flatten()[0]), _NUMBER)
    source = shapes[names[number]]
    shape = tuple(probe.shape)
    if len(source) >= 2:
        shape = (*shape[:-1], source[-1])
    expected = _probe(number, shape) + start
    if probe.shape != expected.shape or not torch.equal(probe, expected):
        raise ValueError(f"{name} is no flat range of {names[number]}")
    return names[number], Piece(name, shape, start)


def _refusal(model: Any, why: str) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} keeps its weights in memory otherwise than in its checkpoint: {why}; only "
        "tensors that are flat ranges of a parameter can be published from shards"
    )
