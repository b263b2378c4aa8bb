"""Chat messages as people write them, checked and turned into what a chat template reads: role and text.

Rows, tasks, environments and `distill init` share these rules; each DataError names value, rule and remedy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sync.base.errors import DataError

Messages = list[dict[str, Any]]
"""Each with a role and a text content, and what else the template reads."""
ROLES: Final = ("system", "user", "assistant")
"""Roles that every chat template may be given; any other must be named in its text."""
INSTRUCTING: Final = ("system", "developer")
"""Roles of messages that instruct, and that no assistant answers."""
_SHAREGPT: Final = {"human": "user", "gpt": "assistant", "system": "system"}
"""What `from` holds in ShareGPT's messages, as a role."""
_LISTED: Final = re.compile(r"\s*\[\s*\{\s*(['\"])(?:role|content|from|value)\1\s*:")
"""How a list of messages begins that was written as a text."""
_WRITTEN: Final = re.compile(r"\s*[\[{\"]")
"""How a text begins that may be JSON of messages."""
_KEYS: Final = ({"role", "content"}, {"from", "value"})
_AS_JSON: Final = re.compile(r"arguments['\"\]]*\s*\|\s*tojson")
"""A template that writes a call's arguments as JSON."""


def content_text(content: Any) -> str:
    """The text of a message's content: a text, or a list of text parts, which are joined by line breaks.
    Raises DataError for null, a number, a mapping, and a part that is no text, such as an image."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"a message's content is {content!r:.80}: give a text, or a list of text parts")
    texts = []
    for part in content:
        kept = _without_null(part) if isinstance(part, dict) else {}
        text = part if isinstance(part, str) else kept.get("text")
        if not isinstance(text, str) or kept.get("type", "text") != "text":
            raise DataError(
                f"a part of a message's content is {part!r:.80}: only parts of type 'text' can be used; "
                "leave rows with images, audio or files out"
            )
        texts.append(text)
    return "\n".join(texts)


def listed(value: Any) -> Any:
    """The messages of a text that is a JSON list of them; any other value as it is. Raises DataError for
    messages in another notation, such as Python's, and for JSON of them that is no list."""
    if not isinstance(value, str) or not _WRITTEN.match(value):
        return value
    try:
        written = json.loads(value)
    except (ValueError, RecursionError):
        if not _LISTED.match(value):
            return value
        raise DataError(
            f"the text {value!r:.80} looks like a list of chat messages, and is not JSON: write it as JSON, "
            "or as a list"
        ) from None
    inner = listed(written)
    if isinstance(inner, list) and inner and all(map(_is_message, inner)):
        return inner
    if isinstance(inner, Mapping) and (_is_message(inner) or {"messages", "conversations"} & inner.keys()):
        raise DataError(
            f"the text {value!r:.80} is JSON of chat messages, and not a list of them: give the list alone"
        )
    return value


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and any(keys <= value.keys() for keys in _KEYS)


def checked(messages: Sequence[Any], template: str, drop_answer: bool) -> Messages:
    """The messages with text contents, up to the assistant's turn that is to be generated.

    Keys that hold null are dropped, as Parquet adds them; `from` and `value` of ShareGPT become role and
    content. `template`: the chat template's text, in which roles other than ROLES must be named.
    `drop_answer`: leave out the assistant's turn at the end. Raises DataError for messages that cannot be
    used: an unknown role, a content that is no text, no user's turn or an empty one, a last message that no
    assistant answers.
    """
    clean = [_message(message, template) for message in messages]
    if drop_answer and clean and clean[-1]["role"] == "assistant":
        clean.pop()
    if not any(message["role"] == "user" for message in clean):
        raise DataError(
            f"no message is the user's, roles are {[message['role'] for message in clean]}: give one, or "
            "leave the row out"
        )
    if (last := clean[-1]["role"]) == "assistant":
        raise DataError(
            f"the last message is the assistant's, {clean[-1]['content']!r:.60}, and the student would be "
            "shown it: set drop_answer = true in [prompts] to leave it out of the prompt"
        )
    if last in INSTRUCTING:
        raise DataError(f"the last message has role {last!r}, which no assistant answers: put it first")
    return clean


def _message(message: Any, template: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"a chat message is {message!r:.80}: give an object with role and content")
    fields = {key: value for key, value in message.items() if value is not None}
    if "role" not in fields and "from" in fields:
        name = fields.pop("from")
        fields["role"] = _SHAREGPT.get(name, name) if isinstance(name, str) else name
        if "content" not in fields and "value" in fields:
            fields["content"] = fields.pop("value")
    if "role" not in fields:
        raise DataError(f"a chat message has no role: {fields!r:.80}; give every one a role and a content")
    role = fields["role"]
    named = isinstance(role, str) and re.search(rf"(['\"]){re.escape(role)}\1", template)
    if role not in ROLES and not named:
        raise DataError(
            f"role {role!r:.40} is neither {', '.join(ROLES)} nor named in the chat template: correct it, or "
            "name a template that knows it in student.chat_template"
        )
    if calls := fields.get("tool_calls"):
        fields["tool_calls"] = _calls(calls, template)
        fields.setdefault("content", "")
    else:
        fields.pop("tool_calls", None)
    if "content" not in fields:
        raise DataError(
            f"the message of role {fields['role']!r} has no content (missing or null): give a text, or "
            "leave the row out"
        )
    fields["content"] = content_text(fields["content"])
    if fields["role"] == "user" and not fields["content"].strip():
        raise DataError("a user's message is empty: give it a text, or leave the row out")
    return fields


def _calls(calls: Any, template: str) -> Any:
    """Calls of tools as the template reads them. Raises DataError when it reads none."""
    if "tool_calls" not in template:
        raise DataError(
            "a message has tool_calls, which the chat template does not write: name a template that does in "
            "student.chat_template, or leave the row out"
        )
    if not isinstance(calls, list):
        raise DataError(f"tool_calls are {calls!r:.80}: give a list")
    calls = _without_null(calls)
    if _AS_JSON.search(template) and "is string" not in template:  # else a JSON text is quoted once more
        for call in calls:
            function = call.get("function", call) if isinstance(call, dict) else {}
            if isinstance(arguments := function.get("arguments"), str):
                try:
                    function["arguments"] = json.loads(arguments)
                except (ValueError, RecursionError):
                    raise DataError(f"arguments of a tool's call are {arguments!r:.60}: write JSON") from None
    return calls


def _without_null(value: Any) -> Any:
    """A copy of nested lists and mappings without keys that hold null."""
    if isinstance(value, Mapping):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value
