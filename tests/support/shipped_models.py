"""Stand-ins for the models that shipped configurations name: their config.json, a tiny tokenizer, no weights.

A config has the shape of the model's, so that sizes computed from it are the model's; the tokenizer has the
special tokens of its family, and a chat template of the same kind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
TURNS: Final = (
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
)
HYBRID: Final = (
    TURNS
    + "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    + "{%- endif %}{%- endif %}"
)
"""Thinks unless told not to, as Qwen3 does."""
NO_THINKING: Final = TURNS + "{%- endif %}"
"""Never thinks, as Qwen3-Coder."""
_DENSE: Final = {
    "Qwen/Qwen3-0.6B": (1024, 3072, 28, 16, True),
    "Qwen/Qwen3-1.7B": (2048, 6144, 28, 16, True),
    "Qwen/Qwen3-4B": (2560, 9728, 36, 32, True),
    "Qwen/Qwen3-8B": (4096, 12288, 36, 32, False),
    "Qwen/Qwen3-14B": (5120, 17408, 40, 40, False),
    "Qwen/Qwen3-32B": (5120, 25600, 64, 64, False),
}
"""Width, feed-forward width, layers, heads, tied embeddings."""
_EXPERTS: Final = {
    "Qwen/Qwen3-30B-A3B": (2048, 768, 48, 32),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": (2048, 768, 48, 32),
    "Qwen/Qwen3-235B-A22B": (4096, 1536, 94, 64),
}
"""Width, an expert's width, layers, heads; 128 experts, 8 a token."""


def make(folder: Path, name: str) -> Path:
    """The stand-in for the model called `name` on the Hub."""
    place = folder / name.replace("/", "--")
    if not place.is_dir():
        _config(name).save_pretrained(place)
        tokenizer = _tokenizer()
        tokenizer.chat_template = NO_THINKING if "Coder" in name else HYBRID
        tokenizer.save_pretrained(place)
    return place


def _config(name: str) -> Any:
    longest = 262144 if "Coder" in name else 40960
    shared = {"head_dim": 128, "vocab_size": 151936, "dtype": "bfloat16", "max_position_embeddings": longest}
    if "SmolLM2-135M" in name:
        shared = {"vocab_size": 49152, "dtype": "bfloat16", "max_position_embeddings": 8192}
        return LlamaConfig(**_sized(576, 1536, 30, 9, 3), tie_word_embeddings=True, **shared)
    if name in _DENSE:
        *size, tied = _DENSE[name]
        return Qwen3Config(**_sized(*size, 8), tie_word_embeddings=tied, **shared)
    width, inner, layers, heads = _EXPERTS[name]
    experts = {"moe_intermediate_size": inner, "num_experts": 128, "num_experts_per_tok": 8}
    sizes = _sized(width, 3 * width, layers, heads, 4)
    return Qwen3MoeConfig(**sizes, **experts, tie_word_embeddings=False, **shared)


def _sized(*size: int) -> dict[str, int]:
    attention = "num_attention_heads", "num_key_value_heads"
    return dict(zip(("hidden_size", "intermediate_size", "num_hidden_layers", *attention), size, strict=True))


def _tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    inner.pre_tokenizer, inner.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    inner.add_special_tokens([*SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")
