"""AutoEP's layers of experts: where their parameters come from, and whether they compute as the original did.

AutoEP makes of a layer with E experts, n ranks sharing them, rank q of n

    gate.weight              [E, H]        router.gate.weight   [E, H]      on all ranks, under ZeRO-3
    experts.gate_up_proj     [E, 2F, H]    experts.w1           [E/n, F, H] experts q·E/n …, rows 0 … F − 1
                                           experts.w3           [E/n, F, H] the same experts, rows F … 2F − 1
    experts.down_proj        [E, H, F]     experts.w2           [E/n, H, F] the same experts

and partitions w1, w2 and w3 over the ranks that hold the same experts. All of one expert's rows are one flat
range of either side, so a rank's shard is still, in checkpoint coordinates, ranges of a few tensors.

AutoEP takes from configuration and preset how a family routes; what it does not know of a family it leaves
out without a word. So every layer answers the same random tokens before and after it is replaced.

Letters: M layers, T tokens, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from student_trainer.parallelism import FAMILIES
from student_trainer.ranks import Ranks
from sync.base.errors import ConfigError

TOKENS: Final = 32
LIMITS: Final = {torch.float32: (0.96, 1e-5), torch.bfloat16: (0.5, 0.05)}
"""Precision → quantile over tokens of the relative difference, and its limit. Not the largest: where two
experts score alike, rounding may choose the other. In fp32 that is one token at most; in bf16 it may be every
tenth of a family whose own router computes in fp32. A family that AutoEP misunderstands differs at all."""
Originals = dict[str, Tensor]
"""Layer's name in the student → its output [T, H] on this rank's tokens."""


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
    """Process group of the n ranks that share the experts, in the order of experts; None: the same as the
    source, but for the name."""

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
    shapes = {name: shape_of(parameter) for name, parameter in layer.named_parameters()}
    renamed = {"router.gate.weight": "gate.weight"}
    for module, original in (("shared_experts", family.shared), ("shared_experts_gate", family.shared_gate)):
        for name in shapes:
            if name.startswith(f"{module}."):
                renamed[name] = original + name.removeprefix(module)
    by_name = {name: Part(prefix + source, shapes[name], shapes[name]) for name, source in renamed.items()}
    count, rows, columns = shapes["experts.w1"]
    first, group = layer.ep_rank * count, layer.ep_group
    gate_up, down = (layer.num_experts, 2 * rows, columns), (layer.num_experts, columns, rows)
    for name, source, shape, row in (
        ("experts.w1", "experts.gate_up_proj", gate_up, 0),
        ("experts.w3", "experts.gate_up_proj", gate_up, rows),
        ("experts.w2", "experts.down_proj", down, 0),
    ):
        by_name[name] = Part(prefix + source, shape, shapes[name], first, row, group)
    if (bias := layer.router.e_score_correction_bias) is not None:
        name, shape = "e_score_correction_bias", tuple(bias.shape)
        by_name[f"router.{name}"] = Part(f"{prefix}gate.{name}", shape, shape)
    if others := shapes.keys() - by_name.keys():
        raise ValueError(f"{prefix}{sorted(others)[0]} of DeepSpeed's AutoEP is not known here")
    return {prefix + name: part for name, part in by_name.items()}


def shape_of(parameter: Tensor) -> tuple[int, ...]:
    """Whole shape, partitioned or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def gathered(*parameters: Tensor) -> AbstractContextManager[Any]:
    """The parameters whole on every rank that has a part of them, for reading."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    return GatheredParameters(parameters)


def assembled(shards: Iterable[tuple[Tensor, Part]], first_rank: bool) -> Tensor:
    """The source of these parameters: in host memory on rank 0, else empty. Collective."""
    source: Tensor | None = None
    for parameter, part in shards:
        ranks = dist.get_process_group_ranks(part.group)
        with gathered(parameter):
            shard = parameter.detach().contiguous()
            every = [torch.empty_like(shard) for _ in ranks] if dist.get_rank() == ranks[0] else None
            dist.gather(shard, every, dst=ranks[0], group=part.group)
            if not first_rank:
                source = shard[:0].cpu()
                continue
        if source is None:
            source = torch.empty(part.shape, dtype=shard.dtype)
        rows = slice(part.row, part.row + part.own[1])
        for block, target in zip(every or [], source.split(part.own[0]), strict=True):
            target[:, rows] = block
    assert source is not None
    return source


# --- whether they compute the same --------------------------------------------------------------------------


def originals(student: nn.Module, section: dict[str, Any], rank: int) -> Originals:
    """Outputs of every layer that AutoEP will replace. Collective.

    Raises ConfigError for a model in which AutoEP finds none, or that it cannot replace.
    """
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config

    try:
        names = [spec.moe_module_name for spec in AutoEP(student, parse_autoep_config(section)).ep_parser()]
    except ValueError as error:
        raise ConfigError(f"trainer.expert_parallel: {error}") from None
    outputs: Originals = {}
    for name in names:
        layer = student.get_submodule(name)
        with torch.no_grad(), gathered(*layer.parameters()):
            parameter = next(layer.parameters())
            outputs[name] = _tokens_TH(layer(_input(layer, parameter.dtype, parameter.device, rank)))
    return outputs


def _input(layer: nn.Module, dtype: torch.dtype, device: torch.device, rank: int) -> Tensor:
    """Random tokens [1, T, H], others on every rank so that an exchange of the wrong tokens shows."""
    router = layer.router if getattr(layer, "_is_autoep_layer", False) else layer
    weight: Any = router.gate.weight  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(1, TOKENS, shape_of(weight)[1], generator=generator).to(device, dtype)


def _tokens_TH(output: Any) -> Tensor:
    whole = output[0] if isinstance(output, tuple) else output
    return whole.detach().flatten(0, -2).float()


@torch.no_grad()
def check_experts(before: Originals, student: nn.Module, ranks: Ranks) -> float:
    """Largest relative difference of any layer of any rank, as LIMITS counts it. Collective. Raises
    ConfigError on every rank for a difference that the precision does not explain, or a layer that was not
    replaced."""
    dtype, gaps = next(student.parameters()).dtype, []
    quantile, limit = LIMITS[dtype]
    student.eval()
    for name, original_TH in before.items():
        layer = student.get_submodule(name)
        if not getattr(layer, "_is_autoep_layer", False):
            raise ConfigError(f"trainer.expert_parallel: DeepSpeed's AutoEP left {name} as it was")
        output_TH = _tokens_TH(layer(_input(layer, dtype, ranks.device, ranks.rank)))
        gap_T = (output_TH - original_TH).norm(dim=1) / original_TH.norm(dim=1).clamp(min=1e-30)
        gaps.append(float(gap_T.quantile(quantile)))
    student.train()
    highest_M = ranks.gather(torch.tensor(gaps)).nan_to_num(torch.inf).max(0).values
    gap, farthest = float(highest_M.max()), list(before)[int(highest_M.argmax())]
    if not gap <= limit:
        raise ConfigError(
            f"{farthest} with trainer.expert_parallel computes otherwise than without: outputs differ by "
            f"{gap:.3g} of their norm (limit {limit:g}): DeepSpeed's AutoEP does not know this model's "
            "experts or routers; set trainer.expert_parallel = 1"
        )
    return gap
