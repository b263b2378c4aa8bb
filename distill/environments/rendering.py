"""Token ids of the messages of an episode, each made once, behind the ids that the student sampled.

The first prompt is the chat template's. A later turn is what the template puts behind the assistant's
content: the end of its message, the new messages, and the beginning of the next answer. Earlier tokens are
never made again, so a student that spells "10" as "1", "0" keeps its own ids, and the KV prefix stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sync.base.errors import DataError

Message = Mapping[str, Any]
"""A chat message: role, content, and what else the template reads."""
_PLACEHOLDER = "\u2603answer\u2603"
"""Stands for the assistant's content; no template writes it."""


class Renderer:
    """Renders with one tokenizer and its chat template; `options`: further variables of the template."""

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] = {}) -> None:
        self._tokenizer, self._options = tokenizer, dict(options)
        self._special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Ids of the first prompt, up to where the student answers."""
        return self._ids(self._text(messages, tools))

    def added(
        self, answer: Sequence[int], messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> list[int]:
        """Ids behind the student's `answer`, its end token included, up to where it answers next.

        The end token is what the template writes behind the content, be it the tokenizer's or a turn's own.
        Raises DataError when the template does not write the assistant's content as it is.
        """
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PLACEHOLDER}]
        before, placeholder, behind = self._text([*turn, *messages], tools).rpartition(_PLACEHOLDER)
        if not placeholder or _PLACEHOLDER in before:
            raise DataError(
                "the chat template does not write an assistant's content once and as it is, so no turn can "
                "follow it: set the student's chat_template to one that does"
            )
        ids = self._ids(behind)
        end_is_there = answer and ids and answer[-1] == ids[0] and ids[0] in self._special
        return ids[1:] if end_is_there else ids

    def text(self, token_ids: Sequence[int]) -> str:
        """What the student said, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _text(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        kwargs = {**self._options, "tokenize": False, "add_generation_prompt": True}
        return str(self._tokenizer.apply_chat_template(list(messages), tools=tools, **kwargs))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
