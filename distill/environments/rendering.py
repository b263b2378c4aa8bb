"""Token ids of the messages of an episode, each made once, behind the ids that the student sampled.

The first prompt is the chat template's. A later turn is what the template puts behind the assistant's
content: the end of its message, the new messages, and the beginning of the next answer. Earlier tokens are
never made again, so a student that spells "10" as "1", "0" keeps its own ids, and the KV prefix stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sync.base.errors import DataError
from sync.base.messages import content_text
from sync.base.own_code import own_code
from sync.base.tokenizers import CONTENT, special_ids, text_reader

Message = Mapping[str, Any]
"""A chat message: role, content, and what else the template reads."""


class Renderer:
    """Renders with one tokenizer and its chat template; `options`: further variables of the template;
    `stop_token_ids`: of the run, which end a turn too.

    Its methods raise DataError for messages that are none, and for those that the template refuses or
    leaves out.
    """

    def __init__(
        self, tokenizer: Any, options: Mapping[str, Any] = {}, stop_token_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._options = tokenizer, dict(options)
        self._special = special_ids(tokenizer)
        self.text = text_reader(tokenizer, stop_token_ids)
        """What the student said, of its ids."""
        self._written: set[tuple[Any, ...]] = set()
        """Kinds of messages that the template writes, by where they stand."""

    def check(self) -> None:
        """Render two turns of a user's."""
        said = {"role": "user", "content": "?"}
        self.prompt([said])
        self.added([], [said])

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Ids of the first prompt, up to where the student answers."""
        return self._ids(self._text([], messages, tools))

    def added(
        self, answer: Sequence[int], messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> list[int]:
        """Ids behind the student's `answer`, its end token included, up to where it answers next.

        The end token is what the template writes behind the content, be it the tokenizer's or a turn's own.
        """
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": CONTENT}]
        before, placeholder, behind = self._text(turn, messages, tools).rpartition(CONTENT)
        if not placeholder or CONTENT in before:
            raise DataError(
                "the chat template does not write an assistant's content once and as it is, so no turn can "
                "follow it: set the student's chat_template to one that does"
            )
        ids = self._ids(behind)
        end_is_there = answer and ids and answer[-1] == ids[0] and ids[0] in self._special
        return ids[1:] if end_is_there else ids

    def _text(
        self, before: Sequence[Message], messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> str:
        """The template's text of a turn, behind the messages `before` it."""
        turn = [*before, *_turn(messages)]
        text = self._rendered(turn, tools)
        for place in range(len(before), len(turn)):
            message = turn[place]
            kind = (turn[place - 1]["role"] if place else None, *sorted(message), message["role"])
            if kind not in self._written:
                try:
                    without: str | None = self._rendered([*turn[:place], *turn[place + 1 :]], tools)
                except DataError:  # the others are refused without it, so it counts
                    without = None
                if without == text:
                    raise DataError(
                        f"the student's chat template leaves a message of role {message['role']!r} out, "
                        f"{message.get('content')!r:.60}: say it in another role, or set the student's "
                        "chat_template"
                    )
                self._written.add(kind)
        return text

    def _rendered(self, messages: list[Message], tools: Sequence[Any] | None) -> str:
        roles = ", ".join(message["role"] for message in messages)
        remedy = "say messages of roles that it takes in this order, or set the student's chat_template"
        kwargs = {**self._options, "tokenize": False, "add_generation_prompt": True}
        with own_code("the student's chat template", f"messages of roles {roles}", remedy):
            return str(self._tokenizer.apply_chat_template(messages, tools=tools, **kwargs))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _turn(messages: Any) -> list[Message]:
    """The messages of a turn with texts as contents. Raises DataError for what is none."""
    if not isinstance(messages, Sequence) or not messages or isinstance(messages, str | bytes):
        raise DataError(
            f"a turn is {messages!r:.80}: give a text, a message with role and content, or a list of messages"
        )
    turn: list[Message] = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"a message is {message!r:.80}: give a role and a content")
        content = message.get("content")
        whole = content is None and message.get("tool_calls")
        turn.append({**message} if whole else {**message, "content": content_text(content)})
    if turn[-1]["role"] == "assistant":
        raise DataError(
            f"the last message is the assistant's, {turn[-1].get('content')!r:.60}, and the student is to "
            "answer: leave it out, or end with another role"
        )
    return turn
