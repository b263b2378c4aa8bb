"""Configs of tiny models, whose sizes are sums made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LAYERS, WIDTH, INNER, HEADS, KV_HEADS, HEAD, VOCABULARY = 3, 64, 96, 4, 2, 16, 128
LAYER = 2 * WIDTH * HEADS * HEAD + 2 * WIDTH * KV_HEADS * HEAD + 2 * WIDTH + 2 * HEAD
"""Parameters of a layer beside its feed-forward part."""
PARAMETERS = VOCABULARY * WIDTH + WIDTH + LAYERS * (LAYER + 3 * WIDTH * INNER)
"""Of the dense model, whose embeddings are tied to its head."""
KV = 2 * 2 * LAYERS * KV_HEADS * HEAD
"""Bytes of a token's keys and values."""
SIZES: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
SIZES |= {"num_key_value_heads": KV_HEADS, "head_dim": HEAD, "vocab_size": VOCABULARY, "dtype": "bfloat16"}


def dense(folder: Path, **more: Any) -> str:
    """A folder with the config of a Qwen3; `more` is written over it."""
    from transformers import Qwen3Config

    Qwen3Config(intermediate_size=INNER, tie_word_embeddings=True, **SIZES).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    return str(folder)


def mixture(folder: Path, **more: Any) -> str:
    """That of a Qwen3-MoE with 8 experts of 3 x WIDTH x INNER in a layer, 2 for a token."""
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": INNER}
    Qwen3MoeConfig(**SIZES, **experts, **more).save_pretrained(folder)
    return str(folder)
