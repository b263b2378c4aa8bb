"""A byte-level tokenizer without merges, with ChatML: a token is a byte or a special token."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}" + HEADER
)


def byte_tokenizer(
    template: str | None = CHATML, end: str = "<|im_end|>", names: Sequence[str] = (), **special: str
) -> Any:
    """`names`: further special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *names]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({word: i for i, word in enumerate([*names, *letters])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, additional_special_tokens=names, eos_token=end, **special
    )
    tokenizer.chat_template = template
    return tokenizer


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


class Letters:
    """A tokenizer of Unicode letters without a chat template, whose id 0 ends a text."""

    chat_template, eos_token_id = None, 0

    def __len__(self) -> int:
        return sys.maxunicode + 1

    def encode(self, text: str) -> list[int]:
        return letters(text)

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))
