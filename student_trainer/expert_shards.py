"""Where the parameters of AutoEP's layers lie in those that transformers has in their place.

AutoEP makes of a layer with E experts, n ranks sharing them, rank q of n

    gate.weight              [E, H]        router.gate.weight   [E, H]      on all ranks, under ZeRO-3
    experts.gate_up_proj     [E, 2F, H]    experts.w1           [E/n, F, H] experts q·E/n …, rows 0 … F − 1
                                           experts.w3           [E/n, F, H] the same experts, rows F … 2F − 1
    experts.down_proj        [E, H, F]     experts.w2           [E/n, H, F] the same experts

and partitions w1, w2 and w3 over the ranks that hold the same experts. All of one expert's rows are one flat
range of either side, so a rank's shard is still, in checkpoint coordinates, ranges of a few tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from student_trainer.expert_parallel import DOWN, FAMILIES, GATE_UP, ROUTER


@dataclass(frozen=True)
class Part:
    """A parameter as experts × rows of the one that transformers has in its place."""

    source: str
    """Name of that one."""
    shape: tuple[int, ...]
    """Its whole shape: [E, rows, columns], or any other that was only renamed."""
    own: tuple[int, ...]
    """Whole shape of the parameter: [E / n, rows, columns], or `shape`."""
    expert: int = 0
    """First expert."""
    row: int = 0
    """First row of each expert."""
    group: Any = None
    """Process group of the n ranks that share the experts, in the order of experts; None: only renamed."""

    def start(self, start: int, count: int) -> int | None:
        """First element in the parameter of the range that begins at element `start` of the source.

        None: it lies in another parameter. That of an expert of another rank lies before the first element or
        behind the last. Raises ValueError where the range is cut.
        """
        if self.group is None:
            return start
        whole, size = math.prod(self.shape[1:]), math.prod(self.own[1:])
        expert, inside = divmod(start, whole)
        inside -= self.row * self.shape[2]
        if not 0 <= inside < size:
            return None
        if inside + count > size:
            raise ValueError(f"a checkpoint tensor in {self.source} spans more than one expert's gate or up")
        return (expert - self.expert) * size + inside


def parts(model: Any) -> dict[str, Part]:
    """Parameter of AutoEP's layers in `model`, a transformers model → where it comes from."""
    by_name: dict[str, Part] = {}
    for prefix, layer in model.named_modules():
        if getattr(layer, "_is_autoep_layer", False):
            by_name |= _of_layer(f"{prefix}.", layer, FAMILIES[model.config.model_type])
    return by_name


def _of_layer(prefix: str, layer: Any, family: Any) -> dict[str, Part]:
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in layer.named_parameters()}
    renamed = {"router.gate.weight": ROUTER}
    for name in shapes:
        for module, original in (
            ("shared_experts", family.shared),
            ("shared_experts_gate", family.shared_gate),
        ):
            if name.startswith(f"{module}."):
                renamed[name] = original + name.removeprefix(module)
    by_name = {name: Part(prefix + source, shapes[name], shapes[name]) for name, source in renamed.items()}
    count, rows, columns = shapes["experts.w1"]
    first, group = layer.ep_rank * count, layer.ep_group
    gate_up, down = (layer.num_experts, 2 * rows, columns), (layer.num_experts, columns, rows)
    for name, source, shape, row in (
        ("experts.w1", GATE_UP, gate_up, 0),
        ("experts.w3", GATE_UP, gate_up, rows),
        ("experts.w2", DOWN, down, 0),
    ):
        by_name[name] = Part(prefix + source, shape, shapes[name], first, row, group)
    if (bias := layer.router.e_score_correction_bias) is not None:
        name, shape = "e_score_correction_bias", tuple(bias.shape)
        by_name[f"router.{name}"] = Part(f"{prefix}gate.{name}", shape, shape)
    if others := shapes.keys() - by_name.keys():
        raise ValueError(f"{prefix}{sorted(others)[0]} of DeepSpeed's AutoEP is not known here")
    return {prefix + name: part for name, part in by_name.items()}


def assembled(shards: Iterable[tuple[Tensor, Part]], first_rank: bool) -> Tensor:
    """The source of parameters whose own experts are given whole: in host memory on rank 0, else empty.

    Collective: tensors may be made while they are iterated over.
    """
    source: Tensor | None = None
    for shard, part in shards:
        every = _collected(shard, part.group)
        if not first_rank:
            source = shard[:0].cpu()
            continue
        if source is None:
            source = torch.empty(part.shape, dtype=shard.dtype)
        rows = slice(part.row, part.row + part.own[1])
        for block, target in zip(every, source.split(part.own[0]), strict=True):
            target[:, rows] = block
    assert source is not None
    return source


def _collected(shard: Tensor, group: Any) -> list[Tensor]:
    """`own` of every rank of the group, on its first; elsewhere empty."""
    ranks = dist.get_process_group_ranks(group)
    every = [torch.empty_like(shard) for _ in ranks] if dist.get_rank() == ranks[0] else None
    dist.gather(shard.contiguous(), every, dst=ranks[0], group=group)
    return every or []
