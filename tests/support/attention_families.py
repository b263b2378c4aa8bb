"""Tiny models of families whose attention differs: windows, caps, sinks, latent keys, shared keys."""

from __future__ import annotations

from typing import Any

import torch

from student_trainer.engine import without_randomness

VOCAB = 37
SIZE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8}
SIZE |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
SIZE |= {"max_position_embeddings": 64, "initializer_range": 0.3}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "output_router_logits": False}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8}
LATENT |= {"qk_nope_head_dim": 8, "v_head_dim": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
LATENT["first_k_dense_replace"] = 1
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 3},
    "Gemma2": {**LAYERS, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 2.0},
    "Gemma3": {**LAYERS, "query_pre_attn_scalar": 5},
    "Qwen3Moe": {**MIXTURE, "num_experts": 4},
    "Mixtral": {"num_local_experts": 4, "sliding_window": 3},
    "GptOss": {**LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {**MIXTURE, **LATENT},
    "GPT2": {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 4},
}


def model(family: str, attention: str = "eager", **more: Any) -> Any:
    import transformers

    name = f"{family}TextConfig" if hasattr(transformers, f"{family}TextConfig") else f"{family}Config"
    size = {} if family == "GPT2" else SIZE
    config = getattr(transformers, name)(**({**size, "vocab_size": VOCAB} | FAMILIES.get(family, {}) | more))
    config._attn_implementation = attention
    torch.manual_seed(3)
    name = f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    found = getattr(transformers, name)(config)
    for parameter in found.parameters():  # biases and sinks too
        torch.nn.init.normal_(parameter, std=0.3)
    return without_randomness(found).train()
