"""Expert parallelism as it is configured: which families, how many ranks, DeepSpeed's section. No torch.

With `trainer.expert_parallel` = n, DeepSpeed's AutoEP replaces every layer of experts: each of n ranks holds
1/n of its experts, and they exchange the tokens instead of gathering all experts; the rest is as before.
`student_trainer.expert_shards` knows where the replaced parameters come from, `student_trainer.expert_check`
compares the replaced layers with the original ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from student_trainer.config import TrainerSettings


class Family(NamedTuple):
    """What AutoEP is told of a family of models."""

    experts: str
    """Field of its configuration that counts the experts of a layer."""
    preset: str | None = None
    """AutoEP's preset; None: the pattern alone, with softmax and without shared experts."""
    shared: str = ""
    """Module of the shared experts in a layer."""
    shared_gate: str = ""
    """Module that weighs them."""


FAMILIES: Final = {
    "deepseek_v3": Family("n_routed_experts", "deepseek_v3", "shared_experts"),
    "mixtral": Family("num_local_experts", "mixtral"),
    "olmoe": Family("num_experts"),
    "qwen2_moe": Family("num_experts", "qwen3_moe", "shared_expert", "shared_expert_gate"),
    "qwen3_moe": Family("num_experts", "qwen3_moe"),
}
"""transformers' `model_type` of those whose replaced layers compute what the original ones do. Their layers
have a router `gate` and experts `gate_up_proj` and `down_proj`."""
ROUTER: Final = "gate.weight"
GATE_UP: Final = "experts.gate_up_proj"
DOWN: Final = "experts.down_proj"


def section(settings: TrainerSettings, model_type: str) -> dict[str, Any]:
    """DeepSpeed's `expert_parallel`. What a router does is not in it: AutoEP reads top_k, norm_topk_prob and
    the scale of a router from the model's configuration."""
    family = FAMILIES[model_type]
    table: dict[str, Any] = {
        "enabled": True,
        "autoep_size": settings.expert_parallel,
        # `Student` holds the model as .model, and AutoEP matches whole names
        "moe_layer_pattern": r"model\.model\.layers\.\d+\.mlp",
        "num_experts_attr": family.experts,
    }
    return table if family.preset is None else table | {"preset_model": family.preset}


def problems(settings: TrainerSettings, model: Any, world_size: int | None) -> Iterator[str]:
    """Why experts cannot be shared as it is asked for; `model`: transformers' text configuration.

    `world_size`: ranks of the trainer; None: another launcher decides.

    What DeepSpeed's JSON must not have is refused by `deepspeed_json`.
    """
    if (size := settings.expert_parallel) == 1:
        return
    asked = f"trainer.expert_parallel is {size} and "
    if world_size is not None and world_size % size:
        yield f"{asked}the trainer has {world_size} ranks: it must divide them"
    if settings.lora is not None:
        yield f"{asked}trainer.lora is set: adapters on shared experts are not supported, leave one out"
    if (family := FAMILIES.get(model.model_type)) is None:
        yield (
            f"{asked}the student is a {model.model_type}: DeepSpeed's AutoEP computes {', '.join(FAMILIES)} "
            "as transformers does, and others otherwise or not at all; leave it out"
        )
    elif (experts := getattr(model, family.experts)) % size:
        yield f"{asked}the student has {experts} experts a layer: it must divide them"
