"""Whether rows can be packed (`varlen`), ranks share rows (`sequence_split`) or experts (`expert_layers`)
as it is configured. No torch: the preflight asks too."""

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


ATTENTIONS: Final = ("sdpa", "eager")
"""Values of trainer.attention that the trainer computes itself, row by row (`varlen`)."""
ATTENTION_LAYERS: Final = frozenset({"attention", "full_attention", "sliding_attention"})
"""Kinds of layers, in transformers' words, that see other tokens by plain attention alone."""
MOVING: Final = frozenset({"dynamic", "longrope"})
"""Kinds of rotary embeddings whose frequencies follow the longest position that a rank has."""
FAMILIES: Final = {
    "deepseek_v3": Family("n_routed_experts", "deepseek_v3", "shared_experts"),
    "mixtral": Family("num_local_experts", "mixtral"),
    "olmoe": Family("num_experts"),
    "qwen2_moe": Family("num_experts", "qwen3_moe", "shared_expert", "shared_expert_gate"),
    "qwen3_moe": Family("num_experts", "qwen3_moe"),
}
"""transformers' `model_type` of those whose replaced layers compute what the original ones do. Their layers
have a router `gate` and experts `gate_up_proj` and `down_proj`."""


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
    """Why rows cannot be packed or split, or experts shared, as it is asked for.

    `model`: transformers' text configuration; `world_size`: ranks of the trainer; None: another launcher
    decides. What DeepSpeed's JSON must not have is refused by `deepspeed_json`.
    """
    layers = getattr(model, "layer_types", None) or getattr(model, "layers_block_type", None) or ()
    kinds = ", ".join(sorted(set(layers) - ATTENTION_LAYERS))
    if kinds and settings.packing == "varlen":
        yield (
            f"the student has layers of the kind {kinds}, through which rows laid end to end would see each "
            'other: set trainer.packing = "padded"'
        )
    for name in ("sequence_parallel", "expert_parallel"):
        if world_size is not None and world_size % (size := getattr(settings, name)):
            yield f"trainer.{name} is {size} and the trainer has {world_size} ranks: it must divide them"
    if settings.sequence_parallel > 1:
        yield from _row_problems(settings, model, kinds)
    if settings.expert_parallel > 1:
        yield from _expert_problems(settings, model)


def _expert_problems(settings: TrainerSettings, model: Any) -> Iterator[str]:
    asked = f"trainer.expert_parallel is {settings.expert_parallel} and "
    if settings.lora is not None:
        yield f"{asked}trainer.lora is set: adapters on shared experts are not supported, leave one out"
    if (family := FAMILIES.get(model.model_type)) is None:
        yield (
            f"{asked}the student is a {model.model_type}: DeepSpeed's AutoEP computes {', '.join(FAMILIES)} "
            "as transformers does, and others otherwise or not at all; leave it out"
        )
    elif (experts := getattr(model, family.experts)) % settings.expert_parallel:
        yield f"{asked}the student has {experts} experts a layer: it must divide them"


def _row_problems(settings: TrainerSettings, model: Any, kinds: str) -> Iterator[str]:
    size = settings.sequence_parallel
    asked = f"trainer.sequence_parallel is {size} and "
    if settings.attention not in ATTENTIONS:
        yield (
            f"{asked}trainer.attention is {settings.attention!r}: heads are exchanged for "
            f"{' and '.join(ATTENTIONS)} alone, set one of them"
        )
    if kinds:
        yield (
            f"{asked}the student has layers of the kind {kinds}, which would not see what other ranks hold "
            "of a row: leave it out"
        )
    rope = getattr(model, "rope_parameters", None) or {}  # one table for all layers, or one for each kind
    tables = [rope, *(table for table in rope.values() if isinstance(table, dict))]
    if moving := sorted(MOVING & {str(table.get("rope_type")) for table in tables}):
        yield (
            f"{asked}the student's rotary embedding is of the type {', '.join(moving)}, which follows the "
            "longest position of a row, and a rank holds a part of it: leave it out"
        )
    heads = getattr(model, "num_attention_heads", None) or size  # without heads `check_rows` refuses it
    keys = getattr(model, "num_key_value_heads", None) or heads
    if heads % size:
        yield f"{asked}the student has {heads} attention heads: it must divide them"
    elif keys % size and size % keys:
        yield (
            f"{asked}the student has {keys} heads of keys and values: it must divide them, or be a multiple "
            "of them"
        )
