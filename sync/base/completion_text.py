"""The text of a completion as code reads it: with its special tokens, such as markers of tool calls, and
without the token that ends it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CONTENT = "\u2603answer\u2603"
"""Stands for an assistant's content where a template is rendered to see what it writes around it."""


def text_reader(tokenizer: Any, stop_token_ids: Sequence[int] = ()) -> Callable[[Sequence[int]], str]:
    """What turns a completion's ids into its text.

    `stop_token_ids`: of the run; they end a completion besides those of `end_ids`.
    """
    ends = end_ids(tokenizer) | {*stop_token_ids}

    def text(token_ids: Sequence[int]) -> str:
        ids = [*token_ids]
        while ids and ids[-1] in ends:
            ids.pop()
        return str(tokenizer.decode(ids))

    return text


def end_ids(tokenizer: Any) -> set[int]:
    """Ids that end an answer: the tokenizer's own, those in the model's generation_config.json, and the
    special token that its chat template writes behind an assistant's content."""
    ends = {getattr(tokenizer, "eos_token_id", None), _end_of_turn(tokenizer)} | _of_the_model(tokenizer)
    return {token_id for token_id in ends if token_id is not None}


def special_ids(tokenizer: Any) -> set[int]:
    """Ids of special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token_id for token_id, token in added.items() if token.special}


def _end_of_turn(tokenizer: Any) -> int | None:
    """None: there is no chat template, or it writes no special token there."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    from jinja2 import TemplateError

    turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": CONTENT}]
    try:
        behind = tokenizer.apply_chat_template(turn, tokenize=False).rpartition(CONTENT)[2]
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError):  # rendering prompts says so
        return None
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
    special = special_ids(tokenizer)
    return next((token_id for token_id in ids if token_id in special), None)


def _of_the_model(tokenizer: Any) -> set[int]:
    if not (name := getattr(tokenizer, "name_or_path", "")):
        return set()
    from transformers.utils import cached_file

    lenient = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    path = cached_file(name, "generation_config.json", **lenient)
    ends = json.loads(Path(path).read_text()).get("eos_token_id") if path else None
    return {token_id for token_id in (ends if isinstance(ends, list) else [ends]) if token_id is not None}
