"""Small models with experts of every family whose routes can be replayed, and what is measured of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tiny_models import save_words
from torch import Tensor

from student_trainer.routing import SHARED, routers

EXPERTS, CHOSEN, VOCAB = 8, 2, 32
BASE = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
BASE |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GROUPED = BASE | {"num_key_value_heads": 1}
NAMED = GROUPED | {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 12}
LOCAL = GROUPED | {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "intermediate_size": 12}
GROUPS = {"n_routed_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 12}
GROUPS |= {"intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 1}
GROUPS["routed_scaling_factor"] = 1.7
LATENT = BASE | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
LATENT |= {"v_head_dim": 8, "num_key_value_heads": 2, "head_dim": 8}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Moe", NAMED | {"shared_expert_intermediate_size": 12}),
    "qwen3": ("Qwen3Moe", NAMED | {"norm_topk_prob": True, "head_dim": 8, "mlp_only_layers": [1]}),
    "mixtral": ("Mixtral", LOCAL),
    "olmoe": ("Olmoe", NAMED | {"intermediate_size": 12}),
    "gpt-oss": ("GptOss", LOCAL | {"head_dim": 8}),
    "deepseek-v3": ("DeepseekV3", LATENT | GROUPS | {"norm_topk_prob": True}),
    "deepseek-v2": ("DeepseekV2", LATENT | GROUPS | {"topk_method": "greedy"}),
    "deepseek-v2 groups": ("DeepseekV2", LATENT | GROUPS | {"topk_method": "group_limited_greedy"}),
    "glm4": ("Glm4Moe", GROUPED | GROUPS | {"head_dim": 8, "n_group": 1, "norm_topk_prob": True}),
}
PUBLISHED = tuple(CONFIGS)
"""Shards tile what transformers saves."""
BY_RANKS = ("deepseek-v3", "mixtral", "olmoe", "qwen2", "qwen3")
"""Ranks share the experts, and the gradients are those of one process."""
SERVED = ("glm4", "mixtral", "olmoe", "qwen2", "qwen3")
"""vLLM's log-probabilities are transformers', before and after an update, and so are recorded routes."""
NOT_UPDATED = ("gpt-oss",)
"""Served by vLLM, and an update is refused."""
SCORED = ("qwen3",)
"""A teacher of engine "vllm" gives the scores of transformers."""
TOKENS_RL = torch.arange(22).reshape(2, 11).mul(7).remainder(VOCAB)


WIDE: dict[str, Any] = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "head_dim": 32}
WIDE |= {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}  # of vLLM's kernel for CPUs
WIDE |= {"kv_lora_rank": 512, "q_lora_rank": 32}


def save_for_vllm(family: str, folder: Path, seed: int) -> None:
    """Large enough for vLLM's kernels on CPUs, in fp32, with a tokenizer of the words w0, w1, …"""
    kind, fields = CONFIGS[family]
    sized = fields | {"hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 64}
    sized |= {name: value for name, value in WIDE.items() if name in fields}
    if family.startswith("deepseek"):
        sized["head_dim"] = WIDE["qk_rope_head_dim"]
    if family == "deepseek-v3":  # of the published checkpoints; transformers knows no other way
        sized |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    torch.manual_seed(seed)
    model = untrained(kind, sized)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.ndim > 1 or name.endswith(("bias", "sinks")):
            torch.nn.init.normal_(tensor, std=0.15)
    model.save_pretrained(folder)
    save_words(folder, (f"w{i}" for i in range(VOCAB)))


def config_of(family: str) -> Any:
    kind, fields = CONFIGS[family]
    return getattr(transformers, f"{kind}Config")(**fields)


def untrained(kind: str, fields: dict[str, Any]) -> Any:
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**fields))


def spread(model: Any, std: float) -> None:
    """Weights of that deviation, and routers that prefer some experts."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=std)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)


def build(family: str, checkpointing: bool = False) -> Any:
    """Weights so large that another expert is another function."""
    torch.manual_seed(0)
    model = untrained(*CONFIGS[family])
    spread(model, 0.3)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def loss_of(model: Any) -> Tensor:
    logits_RLV = model(input_ids=TOKENS_RL, use_cache=False).logits
    return logits_RLV.double().log_softmax(-1)[:, :-1].gather(2, TOKENS_RL[:, 1:, None]).mean()


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def live_routes(model: Any, tokens_RL: Tensor = TOKENS_RL) -> Tensor:
    """[S, M, K]: what the routers choose by themselves."""
    chosen: list[Tensor] = []
    hooks = []
    for module in routers(model).values():
        place = 1 if type(module).__name__ == SHARED else 2
        hooks.append(module.register_forward_hook(lambda _, __, result, at=place: chosen.append(result[at])))
    with torch.no_grad():
        model(input_ids=tokens_RL, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1)


def chosen(model: Any, tokens: np.ndarray) -> np.ndarray:
    """[P + T - 1, M, K] of a sequence of P + T tokens, each row in order of the ids."""
    return live_routes(model, torch.from_numpy(tokens[None, :-1]).long()).sort(-1).values.numpy()
