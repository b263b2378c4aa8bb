"""Tokenizers are compared by what an id means, not by their padding."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sync.base.errors import ConfigError, DataError
from sync.base.settings import ModelSource
from sync.base.tokenizers import (
    agree,
    chat_template_fingerprint,
    differing_parts,
    end_ids,
    fingerprint,
    load_tokenizer,
    never_sample_from,
    rendered,
    vocab_size,
)

VOCAB = {"<eos>": 0, "a": 1, "b": 2, "c": 3, "ab": 4, "bc": 5}
MERGES = [("a", "b"), ("b", "c")]


def tokenizer(vocab: dict[str, int] = VOCAB, merges: list[tuple[str, str]] = MERGES, **kwargs: Any) -> Any:
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **({"eos_token": "<eos>"} | kwargs))


def test_the_same_tokenizer_has_the_same_fingerprint_whatever_its_padding_and_special_ids() -> None:
    one, other = tokenizer(), tokenizer(padding_side="left", pad_token="c", model_max_length=7)
    assert fingerprint(one) == fingerprint(other) == fingerprint(tokenizer(eos_token="c", bos_token="a"))
    assert fingerprint(one) == fingerprint(with_tokens("new"), 6)
    assert (len(fingerprint(one)), vocab_size(one), vocab_size(with_tokens("new"), 6)) == (64, 6, 6)


def with_tokens(*more: str) -> Any:
    one = tokenizer()
    one.add_tokens([*more])
    return one


@pytest.mark.parametrize(
    ("other", "size", "differ"),
    [
        (tokenizer(VOCAB | {"a": 2, "b": 1}), 6, ["vocabulary"]),
        (with_tokens("new"), 7, ["vocabulary"]),
        (tokenizer(merges=MERGES[::-1]), 6, ["merges"]),
    ],
    ids=["swapped ids", "an added token", "other merges"],
)
def test_what_makes_another_tokenizer_is_told_apart(other: Any, size: int, differ: list[str]) -> None:
    assert vocab_size(other) == size
    assert differing_parts(fingerprint(tokenizer()), fingerprint(other)) == differ
    assert differing_parts(fingerprint(other), fingerprint(other)) == []
    assert differing_parts("0" * 96, "1" * 96) == ["vocabulary", "merges"], "of another kind: in every part"


def test_ids_that_mean_other_text_are_refused_with_the_first_of_them() -> None:
    with pytest.raises(DataError, match=r"2 of 6 token ids .*: 1 is 'a' and 'b', 2 is 'b' and 'a'"):
        agree(tokenizer(), tokenizer(VOCAB | {"a": 2, "b": 1}))


@pytest.mark.parametrize(
    ("one", "other", "known", "said"),
    [
        (tokenizer(), tokenizer(eos_token="c", bos_token="a"), 6, ["bos is none and 'a'"]),
        (
            with_tokens("x"),
            with_tokens("y"),
            6,
            ["1 ids from 6 on are the student's alone, such as 'x' (6)", "teacher's alone, such as 'y' (6)"],
        ),
        (
            tokenizer(VOCAB | {"<|reserved_special_token_0|>": 6, "<|eot|>": 7}),
            tokenizer(VOCAB | {"<|pad|>": 6, "<|eot|>": 7}),
            8,
            ["6 is '<|reserved_special_token_0|>' and '<|pad|>'"],
        ),
        (tokenizer(), tokenizer(merges=MERGES[::-1]), 6, ["merges, normalizer or pre-tokenizer differ"]),
    ],
    ids=["names of special ids", "tokens at the end", "a reserved id that was named later", "other merges"],
)
def test_what_two_tokenizers_that_agree_differ_in_is_said(
    one: Any, other: Any, known: int, said: list[str]
) -> None:
    shared, lines = agree(one, other)
    assert shared == known
    assert all(words in line for line, words in zip(lines, said, strict=True))


CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def test_chat_templates_are_compared_by_what_they_render() -> None:
    one = tokenizer(chat_template=CHAT)
    comment, other = tokenizer(chat_template=CHAT + "{# why #}"), tokenizer(chat_template=CHAT + "!")
    assert fingerprint(one) == fingerprint(other) == fingerprint(tokenizer())
    assert chat_template_fingerprint(tokenizer()) is None
    assert chat_template_fingerprint(one) == chat_template_fingerprint(comment)
    assert chat_template_fingerprint(one) != chat_template_fingerprint(other)
    named = tokenizer(chat_template=CHAT)
    named.chat_template = {"default": CHAT, "tool_use": CHAT + "?"}
    assert chat_template_fingerprint(named) == chat_template_fingerprint(one)
    refusing = tokenizer(chat_template="{{ raise_exception('no') }}")
    assert rendered(refusing) == ["refused: TemplateError"] * 2


def test_the_ends_are_the_tokenizers_and_those_of_the_generation_config(tmp_path: Path) -> None:
    source, eos = ModelSource(path=str(tmp_path)), tokenizer()
    assert end_ids(source, eos) == [0]
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    assert end_ids(source, eos) == [0, 3]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert end_ids(source, eos) == [0, 1, 2]


def test_a_template_is_taken_from_a_model_that_is_named(tmp_path: Path) -> None:
    for name, template in (("base", None), ("chat", CHAT)):
        tokenizer(chat_template=template).save_pretrained(tmp_path / name)
    source = ModelSource(path=str(tmp_path / "base"), chat_template=str(tmp_path / "chat"))
    assert load_tokenizer(source).chat_template == CHAT


@pytest.mark.parametrize("content", ["", json.dumps({"chat_template": CHAT})])
def test_a_template_that_is_empty_or_json_is_refused_and_a_byte_order_mark_is_no_part_of_it(
    tmp_path: Path, content: str
) -> None:
    tokenizer(chat_template=CHAT).save_pretrained(tmp_path / "m")
    source = ModelSource(path=str(tmp_path / "m"), chat_template=str(tmp_path / "t.jinja"))
    (tmp_path / "t.jinja").write_text(content)
    with pytest.raises(ConfigError, match=r"t\.jinja is empty or JSON, and a template is Jinja: write"):
        load_tokenizer(source)
    for path in (tmp_path / "t.jinja", tmp_path / "m/chat_template.jinja"):
        path.write_text("\ufeff" + CHAT)
    for loaded in (source, ModelSource(path=source.path)):
        assert load_tokenizer(loaded).chat_template == CHAT


@torch.inference_mode()
def test_known_ids_keep_their_distribution_and_the_others_have_none() -> None:
    """A worker that does not sample has no logits to change."""
    before = torch.randn(5, 7)
    sampling, other = (SimpleNamespace(compute_logits=lambda _, x=x: x) for x in (before.clone(), None))
    never_sample_from(sampling, 4)
    after = sampling.compute_logits("hidden states")
    assert after.shape == (5, 7)
    torch.testing.assert_close(after.log_softmax(-1)[:, :4], before[:, :4].log_softmax(-1))
    assert (after.softmax(-1)[:, 4:] == 0).all()
    never_sample_from(other, 4)
    assert other.compute_logits("hidden states") is None
