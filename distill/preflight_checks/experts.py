"""Students with experts: what their configuration says of routing, whether it can be replayed, and whether
ranks can share the experts.

The trainer's own code finds the routers in the model (`student_trainer.routing`); this knows the same without
loading it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from distill.config import RunConfig
from distill.prompts.sources import text_config
from student_trainer import expert_parallel
from student_trainer.launch import read_hosts
from sync.wire import Routing

COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of transformers' configurations that count the experts of a layer."""


class Family(NamedTuple):
    """Where a family's configuration says how it routes."""

    experts: str
    """Field that counts the experts of a layer."""
    dense: str = ""
    """Field that counts the first layers without experts; "": Qwen's two fields, or none."""


FAMILIES: Final = {
    "deepseek_v2": Family("n_routed_experts", "first_k_dense_replace"),
    "deepseek_v3": Family("n_routed_experts", "first_k_dense_replace"),
    "glm4_moe": Family("n_routed_experts", "first_k_dense_replace"),
    "gpt_oss": Family("num_local_experts"),
    "mixtral": Family("num_local_experts"),
    "olmoe": Family("num_experts"),
    "qwen2_moe": Family("num_experts"),
    "qwen3_moe": Family("num_experts"),
}
"""transformers' `model_type` of those that can be replayed."""


def has_experts(model: Any) -> bool:
    """Whether transformers' config is of a mixture of experts."""
    return any((getattr(model, name, None) or 0) > 1 for name in COUNTS)


def routing(model: Any) -> Routing | None:
    """How transformers' config routes; None: it is of no family in FAMILIES."""
    if (family := FAMILIES.get(model.model_type)) is None:
        return None
    dense = getattr(model, family.dense) if family.dense else 0
    every, without = getattr(model, "decoder_sparse_step", 1), getattr(model, "mlp_only_layers", None) or ()
    layers = [
        layer
        for layer in range(model.num_hidden_layers)
        if layer >= dense and layer not in without and (layer + 1) % every == 0
    ]
    return Routing(len(layers), model.num_experts_per_tok, getattr(model, family.experts))


def routing_of(config: RunConfig) -> Routing | None:
    """Of the student, where its routes are recorded; the configuration was checked by `problems`."""
    return routing(text_config(config.student)) if config.rollout.routing_replay else None


def problems(config: RunConfig) -> Iterator[str]:
    """Why experts cannot be shared, or routing replayed, as it is asked for."""
    if config.trainer.expert_parallel > 1:
        yield from expert_parallel.problems(config.trainer, text_config(config.student), _ranks(config))
    yield from _unreplayed(config)


def _ranks(config: RunConfig) -> int | None:
    """Of the trainer; None: started by hand."""
    if config.controller.trainer == "external":
        return None
    hostfile = config.trainer.hostfile
    return config.trainer.ranks * (1 if hostfile is None else len(read_hosts(hostfile)))


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
