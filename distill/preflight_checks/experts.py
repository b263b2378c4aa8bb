"""Students with experts: what their configuration says of routing, whether it can be replayed, and whether
ranks can share the experts.

The trainer's own code finds the routers in the model (`student_trainer.routing`); this knows the same without
loading it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from distill.config import RunConfig
from distill.prompts.sources import text_config
from student_trainer import expert_parallel
from student_trainer.launch import machines
from sync.wire import Routing

COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of transformers' configurations that count the experts of a layer."""


FAMILIES: Final = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
)
"""transformers' `model_type` of those that can be replayed."""


def has_experts(model: Any) -> bool:
    """Whether transformers' config is of a mixture of experts."""
    return any((getattr(model, name, None) or 0) > 1 for name in COUNTS)


def routing(model: Any) -> Routing | None:
    """How transformers' config routes; None: it is of no family in FAMILIES."""
    if model.model_type not in FAMILIES:
        return None
    dense, every = getattr(model, "first_k_dense_replace", 0), getattr(model, "decoder_sparse_step", 1)
    without = getattr(model, "mlp_only_layers", None) or ()
    experts = next(count for name in COUNTS if (count := getattr(model, name, None)))
    layers = [
        layer
        for layer in range(model.num_hidden_layers)
        if layer >= dense and layer not in without and (layer + 1) % every == 0
    ]
    return Routing(len(layers), model.num_experts_per_tok, experts)


def routing_of(config: RunConfig) -> Routing | None:
    """Of the student, where its routes are recorded; the configuration was checked by `problems`."""
    return routing(text_config(config.student)) if config.rollout.routing_replay else None


def problems(config: RunConfig) -> Iterator[str]:
    """Why experts cannot be shared, or routing replayed, as it is asked for."""
    if config.trainer.expert_parallel > 1:
        yield from expert_parallel.problems(
            config.trainer, text_config(config.student), trainer_ranks(config)
        )
    yield from _unreplayed(config)


def trainer_ranks(config: RunConfig) -> int | None:
    """Of the trainer; None: started by hand."""
    if config.controller.trainer == "external":
        return None
    return config.trainer.ranks * machines(config.trainer)


def _unreplayed(config: RunConfig) -> Iterator[str]:
    if not config.rollout.routing_replay:
        return
    asked, model = "rollout.routing_replay is true and ", text_config(config.student)
    if not has_experts(model):
        yield f"{asked}the student, a {model.model_type}, has no experts: leave it out"
    elif routing(model) is None:
        yield (
            f"{asked}the student is a {model.model_type}: the families that can be replayed are "
            f"{', '.join(FAMILIES)}; leave it out, and watch train/mismatch_kl and train/rho_max"
        )
    if config.student.flags().get("enable-prefix-caching"):
        yield (
            f"{asked}student.engine_args turns on enable-prefix-caching: tokens that are read from the cache "
            "are not routed again, and their routes would be missing; leave one of the two out"
        )
