"""Causal models of any family with random weights, and tokenizers of words: small enough for a test."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

SIZE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
"""Of a model about which nothing else is said."""


def language_model(kind: str, seed: int = 0, **fields: Any) -> Any:
    """An untrained model in fp32; `kind` as in Qwen3ForCausalLM, `fields` of its configuration over SIZE."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**(SIZE | fields))
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def model_of(folder: Path) -> Any:
    """The model of a folder in fp32, as transformers computes it."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def save_adapter(base: Path, folder: Path, seed: int, rank: int, std: float = 0.3) -> None:
    """A random adapter of all linear layers of the model in `base`, in bf16, as peft saves it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    wrapped = get_peft_model(model, settings, autocast_adapter_dtype=False)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=std)
    wrapped.save_pretrained(folder)


def save_words(folder: Path, words: Iterable[str], **special: str) -> None:
    """A tokenizer of words between spaces, the first for unknown ones; `special`: tokens by their roles."""
    ids = {word: place for place, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(ids, unk_token=next(iter(ids))))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
