"""The trained p is the sampled p: a model's own dropout and router jitter play no part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, OPTConfig, Qwen3Config

from student_trainer.engine import without_randomness

SMALL = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS = [
    GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=32),
    OPTConfig(**SMALL, ffn_dim=32, word_embed_proj_dim=16, max_position_embeddings=32, layerdrop=0.5),
    LlamaConfig(**SMALL, intermediate_size=32, attention_dropout=0.2),
    Qwen3Config(**SMALL, intermediate_size=32, num_key_value_heads=1, head_dim=8, attention_dropout=0.2),
    MixtralConfig(**SMALL, intermediate_size=32, num_key_value_heads=1, router_jitter_noise=0.3),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_training_mode_does_not_change_the_logits(config: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        expected = model.eval()(tokens).logits
        assert not torch.equal(model.train()(tokens).logits, expected)
        torch.testing.assert_close(without_randomness(model).train()(tokens).logits, expected)
    assert model.training
