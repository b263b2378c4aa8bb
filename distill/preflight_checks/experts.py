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
from student_trainer.launch import machines
from student_trainer.parallelism import expert_problems
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


NOT_UPDATED: Final = ("gpt_oss",)
"""Of those, students whose experts a replica would keep as they were; `sync.vllm.vllm_compat.load_weights`
refuses all that are like them."""


def has_experts(model: Any) -> bool:
    """Whether transformers' config is of a mixture of experts."""
    return experts_of(model) > 1


def experts_of(model: Any) -> int:
    """Experts of a layer; 0: it has none."""
    return next((count for name in COUNTS if (count := getattr(model, name, None))), 0)


def routing(model: Any) -> Routing | None:
    """How transformers' config routes; None: it is of no family in FAMILIES."""
    if model.model_type not in FAMILIES:
        return None
    return Routing(layers_of_experts(model), model.num_experts_per_tok, experts_of(model))


def layers_of_experts(model: Any) -> int:
    """Layers of transformers' config that have experts; 0: it has none."""
    dense = getattr(model, "first_k_dense_replace", None) or 0
    every = getattr(model, "decoder_sparse_step", None) or 1
    without = getattr(model, "mlp_only_layers", None) or ()
    layers = [
        layer
        for layer in range(model.num_hidden_layers)
        if layer >= dense and layer not in without and (layer + 1) % every == 0
    ]
    return len(layers) if has_experts(model) else 0


def expert_parameters(model: Any) -> int:
    """Of all experts of one layer, shared ones not among them; 0: it has none."""
    inner = getattr(model, "moe_intermediate_size", None) or model.intermediate_size
    return 3 * experts_of(model) * inner * model.hidden_size if has_experts(model) else 0


def routing_of(config: RunConfig) -> Routing | None:
    """Of the student, where its routes are recorded; the configuration was checked by `problems`."""
    return routing(text_config(config.student)) if config.rollout.routing_replay else None


def problems(config: RunConfig) -> Iterator[str]:
    """Why experts cannot be updated in a replica, shared, or routing replayed, as it is asked for."""
    student = text_config(config.student).model_type
    if student in NOT_UPDATED and config.trainer.lora is None:
        yield (
            f"the student is a {student}: vLLM loads its experts past the reload of a model that serves, and "
            "replicas could not take new weights; train adapters (trainer.lora), or another student"
        )
    if config.trainer.expert_parallel > 1:
        yield from expert_problems(config.trainer, text_config(config.student), trainer_ranks(config))
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
