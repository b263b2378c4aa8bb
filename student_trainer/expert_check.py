"""Whether AutoEP's layers compute what transformers' did, measured before anything is trained.

AutoEP copies weights into layers of its own and takes from configuration and preset how a family routes; what
it does not know of a family it leaves out without a word. So every layer of experts answers the same random
tokens before and after it is replaced.

Letters: M layers, T tokens, H hidden size.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from student_trainer.ranks import Ranks
from sync.base.errors import ConfigError

TOKENS: Final = 32
LIMITS: Final = {torch.float32: (0.96, 1e-5), torch.bfloat16: (0.5, 0.05)}
"""Precision → quantile over tokens of the relative difference, and its limit. Not the largest: where two
experts score alike, rounding may choose the other. In fp32 that is one token at most; in bf16 it may be every
tenth of a family whose own router computes in fp32. A family that AutoEP misunderstands differs at all."""
Originals = dict[str, Tensor]
"""Layer's name in the student → its output [T, H] on this rank's tokens."""


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
    return {name: _output(student.get_submodule(name), rank) for name in names}


@torch.no_grad()
def _output(layer: nn.Module, rank: int) -> Tensor:
    """Of a layer that is still transformers' own. Collective."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    with GatheredParameters([weight for weight in layer.parameters() if hasattr(weight, "ds_id")]):
        parameter = next(layer.parameters())
        return _tokens_TH(layer(_input(layer, parameter.dtype, parameter.device, rank)))


def _input(layer: nn.Module, dtype: torch.dtype, device: torch.device, rank: int) -> Tensor:
    """[1, T, H], others on every rank so that an exchange of the wrong tokens shows."""
    router = layer.router if getattr(layer, "_is_autoep_layer", False) else layer
    weight: Any = router.gate.weight  # type: ignore[union-attr]
    shape = tuple(getattr(weight, "ds_shape", weight.shape))
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(1, TOKENS, shape[1], generator=generator).to(device, dtype)


def _tokens_TH(output: Any) -> Tensor:
    whole = output[0] if isinstance(output, tuple) else output
    return whole.detach().flatten(0, -2).float()


@torch.no_grad()
def check_experts(before: Originals, student: nn.Module, run: nn.Module, ranks: Ranks) -> float:
    """Largest relative difference of any layer of any rank, as LIMITS counts it. Collective.

    `run`: what to call in the student's place: the engine, whose hooks gather the weights. Raises ConfigError
    on every rank for a difference that the precision does not explain, or a layer that was not replaced.
    """
    after: Originals = {}
    hooks = []
    for name in before:
        layer = student.get_submodule(name)
        if not getattr(layer, "_is_autoep_layer", False):
            raise ConfigError(f"trainer.expert_parallel: DeepSpeed's AutoEP left {name} as it was")
        hooks += _watched(name, layer, after, ranks.rank)
    tokens_RL = torch.zeros(1, TOKENS, dtype=torch.int64, device=ranks.device)
    try:
        run.eval()
        run(tokens_RL, torch.arange(TOKENS, device=ranks.device))
    finally:
        run.train()
        for hook in hooks:
            hook.remove()
    return _judged(before, after, student, ranks)


def _watched(name: str, layer: nn.Module, after: Originals, rank: int) -> list[Any]:
    """Hooks that give the layer our tokens in place of its own and keep what it makes of them."""

    def give(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = arguments[0]
        return (_input(module, hidden.dtype, hidden.device, rank), *arguments[1:])

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        after[name] = _tokens_TH(output)

    return [layer.register_forward_pre_hook(give), layer.register_forward_hook(keep)]


def _judged(before: Originals, after: Originals, student: nn.Module, ranks: Ranks) -> float:
    quantile, limit = LIMITS[next(student.parameters()).dtype]
    gaps = []
    for name, wanted_TH in before.items():
        gap_T = (after[name] - wanted_TH).norm(dim=1) / wanted_TH.norm(dim=1).clamp(min=1e-30)
        gaps.append(float(gap_T.quantile(quantile)))
    highest_M = ranks.gather(torch.tensor(gaps)).nan_to_num(torch.inf).max(0).values
    gap, layer = float(highest_M.max()), list(before)[int(highest_M.argmax())]
    if not gap <= limit:
        raise ConfigError(
            f"{layer} with trainer.expert_parallel computes otherwise than without: outputs differ by "
            f"{gap:.3g} of their norm (limit {limit:g}): DeepSpeed's AutoEP does not know this model's "
            "experts or routers; set trainer.expert_parallel = 1"
        )
    return gap
