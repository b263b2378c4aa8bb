"""A byte-level tokenizer without merges, with ChatML: a token is a byte or a special token."""

from __future__ import annotations

from typing import Any

HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}" + HEADER
)


def byte_tokenizer(template: str | None = CHATML, end: str = "<|im_end|>", **special: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({word: i for i, word in enumerate([*names, *letters])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, additional_special_tokens=names, eos_token=end, **special
    )
    tokenizer.chat_template = template
    return tokenizer
