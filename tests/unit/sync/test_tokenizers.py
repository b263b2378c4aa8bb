"""Tokenizers are compared by what an id means, not by their padding."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sync.base.tokenizers import (
    chat_template_fingerprint,
    differing_parts,
    fingerprint,
    vocab_size,
)

VOCAB = {"<eos>": 0, "a": 1, "b": 2, "c": 3, "ab": 4, "bc": 5}
MERGES = [("a", "b"), ("b", "c")]


def tokenizer(vocab: dict[str, int] = VOCAB, merges: list[tuple[str, str]] = MERGES, **kwargs: Any) -> Any:
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **({"eos_token": "<eos>"} | kwargs))


def test_the_same_tokenizer_has_the_same_fingerprint_whatever_its_padding() -> None:
    one, other = tokenizer(), tokenizer(padding_side="left", pad_token="c", model_max_length=7)
    assert fingerprint(one) == fingerprint(other)
    assert len(fingerprint(one)) == 96
    assert vocab_size(one) == 6


def test_swapped_ids_are_a_different_vocabulary() -> None:
    other = tokenizer(VOCAB | {"a": 2, "b": 1})
    assert differing_parts(fingerprint(tokenizer()), fingerprint(other)) == ["vocabulary"]


def test_an_added_token_is_a_different_vocabulary() -> None:
    other = tokenizer()
    other.add_tokens(["new"])
    assert vocab_size(other) == 7
    assert differing_parts(fingerprint(tokenizer()), fingerprint(other)) == ["vocabulary"]


def test_other_merges_are_told_apart() -> None:
    other = tokenizer(merges=MERGES[::-1])
    assert differing_parts(fingerprint(tokenizer()), fingerprint(other)) == ["merges"]


def test_another_end_of_sequence_is_told_apart() -> None:
    other = tokenizer(eos_token="c")
    assert differing_parts(fingerprint(tokenizer()), fingerprint(other)) == ["special ids"]


def test_chat_templates_are_compared_apart_from_the_tokenizer() -> None:
    one, other = tokenizer(chat_template="{{ messages }}"), tokenizer(chat_template="{{ messages }}!")
    assert fingerprint(one) == fingerprint(other) == fingerprint(tokenizer())
    assert chat_template_fingerprint(tokenizer()) is None
    assert chat_template_fingerprint(one) != chat_template_fingerprint(other)


def test_a_fingerprint_of_another_kind_differs_in_every_part() -> None:
    assert differing_parts("0" * 64, "1" * 64) == ["vocabulary", "merges", "special ids"]
    assert differing_parts("abc", "abc") == []
