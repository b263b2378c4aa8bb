"""What a chat template and a tokenizer make of prompts: rendering, and checks of what they make."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sync.base.errors import DataError

_CHECKED = ("system", "developer", "user", "tool")
"""Roles whose content a template must write; it may shorten the assistant's, such as its reasoning."""


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> list[int]:
    """Ids of checked messages, up to where the assistant answers.

    Raises DataError when the template leaves a message's text out, and for ids that no prompt may have.
    """
    text = rendered(tokenizer, messages, kwargs)
    for message in messages:
        if message["role"] in _CHECKED and message["content"].strip() not in text:
            raise DataError(
                f"the chat template leaves out what the message of role {message['role']!r} says, "
                f"{message['content']!r:.60}: change the row, or name another template in "
                "student.chat_template"
            )
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    check_ids(tokenizer, ids)
    return ids


def rendered(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any], opened: bool = True
) -> str:
    """The template's text; `opened`: up to where the assistant answers."""
    return str(
        tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=opened, **kwargs)
    )


def control_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """Finds the texts of special tokens, which the tokenizer reads as such in any text; None: it has none."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    texts = sorted((token.content for token in added if token.special), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def check_not_rendered(text: str, control: re.Pattern[str] | None) -> None:
    """Raise DataError for a text that is a chat already, so that a template would wrap it once more."""
    if control is not None and (begins := control.match(text.lstrip())) and begins.group() != text.strip():
        raise DataError(
            f"the text begins with the control token {begins.group()!r}, as a chat does that a template has "
            'rendered already: set template = "plain" in [prompts], or give its messages'
        )


def check_ids(tokenizer: Any, ids: Sequence[int]) -> None:
    """Raise DataError for a prompt that begins twice, or that ends before the answer begins."""
    begin, end = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos"))
    if begin is not None and list(ids[:2]) == [begin, begin]:
        raise DataError(
            f"the prompt begins with {tokenizer.convert_ids_to_tokens(begin)!r} twice: leave it out of the "
            "row or of the chat template"
        )
    if end is not None and len(ids) > 1 and ids[-1] == end:
        raise DataError(
            f"the prompt ends with the end token {tokenizer.convert_ids_to_tokens(end)!r}, behind which "
            "nothing follows: leave it out of the row, correct the chat template, or set "
            "add_eos_token = false in tokenizer_config.json"
        )
