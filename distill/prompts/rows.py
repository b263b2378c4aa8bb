"""From rows of a file or dataset to prompts: chat template, filters by length, errors that name the row."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, NamedTuple

from jinja2 import TemplateError

from distill.config.prompts import DatasetPrompts, JsonlPrompts
from distill.prompts.rewards import answer_problem, is_prose
from distill.prompts.stream import Prompt
from sync.base.errors import ConfigError, DataError
from sync.base.hub import check_reachable
from sync.base.messages import INSTRUCTING, checked, listed

RowsConfig = JsonlPrompts | DatasetPrompts
FEWEST_SEEN: Final = 32
"""Rows of a stream from which on a majority of unusable ones ends it."""
log = logging.getLogger(__name__)
_OURS: Final = ("messages", "add_generation_prompt")
"""Variables of a chat template that the encoder sets itself."""
REFUSALS: Final = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""What a template may raise for messages that it does not take."""
_RENDERED: Final = re.compile(r"\s*(?:(?:<s>|<bos>)?\s*\[INST\]|<start_of_turn>|<\||<\uff5c)")
"""How a chat begins that a template of some family has rendered."""
_OPEN: Final = re.compile(r"(?:\b(?:Assistant|ASSISTANT|AI)|### Response):\s*$")
"""How a text ends that leaves the next turn to the assistant by itself."""
_PLAIN: Final = ("system", "developer", "user")
"""Roles whose content a template writes as it is; it may shorten an assistant's, a tool's may be JSON."""
_MARK: Final = "\u2603{}\u2603"
"""Stands for a message's content where a template is tried."""
_SHOWN_FIELDS: Final = 8
Kind = tuple[tuple[str, ...], ...]
"""Of a conversation: role and keys of each of its messages."""


class Row(NamedTuple):
    """One row, and how it is named in errors and in ids."""

    place: str
    name: str
    fields: Mapping[str, Any]


# --- the template


def render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any], written: set[Kind]
) -> list[int]:
    """Ids of checked messages, up to where the assistant answers.

    `written`: kinds of conversations that the template is known to write; this one's is added. Raises
    DataError when it leaves a message's text out, and for ids that no prompt may have.
    """
    text = rendered(tokenizer, messages, kwargs)
    for message in messages:  # it may read contents, and drop some of them
        if message["role"] in _PLAIN and message["content"].strip() not in text:
            raise DataError(
                f"the chat template leaves out what the message of role {message['role']!r} says, "
                f"{message['content']!r:.60}: change the row, or name another template in "
                "student.chat_template"
            )
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    check_ids(tokenizer, ids)
    if (kind := tuple((message["role"], *sorted(message)) for message in messages)) not in written:
        check_written(tokenizer, messages, kwargs)
        written.add(kind)
    return ids


def check_written(tokenizer: Any, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> None:
    """Raise DataError for a template that does not write the content of every one of such messages once."""
    marked = [{**message, "content": _MARK.format(place)} for place, message in enumerate(messages)]
    try:
        text = rendered(tokenizer, marked, kwargs)
    except REFUSALS:  # it reads contents, such as those of tools; those of the row it has taken
        return
    for message in marked:
        count = text.count(message["content"])
        if count != 1 and not message.get("tool_calls"):
            roles = ", ".join(other["role"] for other in messages)
            raise DataError(
                f"of messages of roles {roles} the chat template writes what the message of role "
                f"{message['role']!r} says {count} times: change the row, or name another template in "
                "student.chat_template"
            )


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
    if begins := _RENDERED.match(text):
        raise DataError(
            f"the text begins with {text[: begins.end() + 20]!r}, as a chat of another family does that a "
            "template has rendered already: give its messages"
        )


def check_ids(tokenizer: Any, ids: Sequence[int]) -> None:
    """Raise DataError for a prompt that begins twice, ends before the answer begins, or holds unknown ids."""
    begin, end = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos"))
    size = len(tokenizer)
    if any(not 0 <= id_ < size for id_ in ids) and (odd := {*ids} - {*tokenizer.get_vocab().values()}):
        raise DataError(
            f"the prompt holds id {min(odd)}, for which the tokenizer has no token: correct the task that "
            "made it, or the post_processor in tokenizer.json"
        )
    if begin is not None and list(ids[:2]) == [begin, begin]:
        raise DataError(
            f"the prompt begins with {tokenizer.convert_ids_to_tokens(begin)!r} twice: leave it out of the "
            "row or of the chat template"
        )
    if end is not None and len(ids) > 1 and ids[-1] == end:
        raise DataError(
            f"the prompt ends with the end token {tokenizer.convert_ids_to_tokens(end)!r}, behind which "
            "nothing follows: leave it out of the row, correct the chat template, or "
            "turn add_eos_token off in tokenizer_config.json"
        )


def row_encoder(tokenizer: Any, config: RowsConfig) -> Callable[[Any], Sequence[int]]:
    """From a row's prompt field (a string, or a list of chat messages) to token ids, with a transformers
    tokenizer; chat: its template, once, up to the assistant's turn.

    What it returns raises DataError, without the row's place, for a prompt that cannot be used. Raises
    DataError when the tokenizer has no chat template, ConfigError for settings it does not read.
    """
    system, suffix, kwargs = config.system_prompt, config.prompt_suffix, config.chat_template_kwargs
    control = control_tokens(tokenizer)
    if config.template == "plain":
        if system is not None or kwargs or config.drop_answer:
            raise ConfigError(
                "prompts.system_prompt, chat_template_kwargs and drop_answer go through a chat template, and "
                'prompts.template is "plain": set template = "chat", or leave them out'
            )

        def plain(text: str) -> Sequence[int]:
            ids = plain_ids(tokenizer, text + suffix)
            check_ids(tokenizer, ids)
            return ids

        return plain
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            'prompts.template is "chat" and the student\'s tokenizer has no chat template: '
            'set prompts.template = "plain", or name a Jinja file in student.chat_template'
        )
    template = str(tokenizer.chat_template)
    for name in kwargs:
        if name in _OURS or not re.search(rf"\b{re.escape(name)}\b", template):
            raise ConfigError(
                f"prompts.chat_template_kwargs sets {name!r}, which the student's chat template does not "
                "read, or which is set from the prompt: leave it out, or correct its name"
            )

    written = set[Kind]()

    def chat(prompt: str | list[Any]) -> Sequence[int]:
        if isinstance(prompt := listed(prompt), str):
            check_not_rendered(prompt, control)
        return render(tokenizer, conversation(prompt, config, template), kwargs, written)

    return chat


def conversation(prompt: str | list[Any], config: RowsConfig, template: str) -> list[dict[str, Any]]:
    """Messages that a row's prompt is rendered from by a chat template. Raises DataError."""
    if isinstance(prompt := listed(prompt), str):
        prompt = [{"role": "user", "content": prompt}]
    messages = checked(prompt, template, config.drop_answer)
    if config.prompt_suffix and messages[-1]["role"] != "user":
        raise DataError(
            "prompts.prompt_suffix is appended to the last message, which must be the user's, and this "
            f"is {messages[-1]!r:.80}: change the row, or leave the suffix out"
        )
    messages[-1]["content"] += config.prompt_suffix
    if config.system_prompt is not None and messages[0]["role"] not in INSTRUCTING:
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    return messages


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text as it is: one that begins with the token of a beginning is given no second one."""
    begin = getattr(tokenizer, "bos_token", None)
    begun = begin is not None and text.startswith(begin)
    return list(tokenizer.encode(text, add_special_tokens=False) if begun else tokenizer.encode(text))


# --- rows


@dataclass
class RowReader:
    """Prompts of rows, in at most `longest` tokens each, and a count of what the filters drop."""

    config: RowsConfig
    tokenizer: Any
    longest: int
    """Context less rollout.max_tokens."""
    keeps_messages: bool = False
    """Whether prompts keep what they are rendered from (`Prompt.messages`)."""
    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Reason → rows."""
    noticed: Counter[str] = field(default_factory=Counter)
    """What is odd about rows that are used → rows."""
    unread: Counter[str] = field(default_factory=Counter)
    """Field of rows, or key of their messages, that nothing reads → rows."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a filter that lets prompts pass which do not fit, and what `row_encoder`
        does."""
        self._encode, self._control = row_encoder(self.tokenizer, self.config), control_tokens(self.tokenizer)
        self._template = str(getattr(self.tokenizer, "chat_template", None) or "")
        ids = (getattr(self.tokenizer, f"{name}_token_id", None) for name in ("unk", "bos", "eos", "pad"))
        unknown, *others = ids
        self._unknown = None if unknown in others else unknown  # else it has another meaning too
        upper, least = self.config.max_prompt_tokens, self.config.min_prompt_tokens
        if upper is not None and not least <= upper <= self.longest:
            raise ConfigError(
                f"prompts.max_prompt_tokens is {upper}, and it must lie between min_prompt_tokens = {least} "
                f"and {self.longest}, the context less rollout.max_tokens: change it, or lower that"
            )

    def prompts(self, rows: Iterable[Row]) -> Iterator[Prompt]:
        """The prompts that pass the filters. Raises DataError for a row that cannot be used."""
        return (prompt for row in rows if (prompt := self.prompt(row)) is not None)

    def usable(self, rows: Iterable[Row], first: bool = True) -> Iterator[Prompt]:
        """The same of a stream, which cannot be checked beforehand: a row that cannot be used is dropped.

        Raises DataError for the last such row when they are more than half of FEWEST_SEEN rows or more, if
        these are the `first` rows: where a resume begins must not decide whether it goes on.
        """
        failed = 0
        for read, row in enumerate(rows, 1):
            try:
                prompt = self.prompt(row)
            except DataError as error:
                self.dropped["unusable"] += 1
                failed += 1
                log.warning("dropped: %s", error)
                if first and read >= FEWEST_SEEN and failed > read / 2:
                    raise DataError(f"{failed} of {read} rows cannot be used, such as {error}") from None
            else:
                if prompt is not None:
                    yield prompt

    def prompt(self, row: Row) -> Prompt | None:
        """The prompt of a row; None: its length is filtered out. Raises DataError that names a row."""
        config, place = self.config, row.place
        self.read += 1
        try:
            value = row.fields[config.field]
            source = "default" if config.source_field is None else _text(row, config.source_field)
            answer = None if config.answer_field is None else _answer(row, config)
        except KeyError as missing:
            raise DataError(
                f"{place}: no field {missing}; the row has {', '.join(sorted(row.fields))}: rename it, or "
                "name the one that is meant in [prompts]"
            ) from None
        ids, least, upper = self._token_ids(value, place), config.min_prompt_tokens, config.max_prompt_tokens
        if len(ids) < least or (upper is not None and len(ids) > upper):
            reason = f"shorter than {least}" if len(ids) < least else f"longer than {upper}"
            self.dropped[f"{reason} tokens"] += 1
            return None
        if not 1 <= len(ids) <= self.longest:
            raise DataError(
                f"{place}: the prompt has {len(ids)} tokens, allowed are 1 to {self.longest} (context length "
                "less rollout.max_tokens): shorten the row, lower rollout.max_tokens, or set "
                "prompts.max_prompt_tokens to drop such rows"
            )
        if answer is not None and (problem := answer_problem(config.reward_fn, answer)):
            raise DataError(f"{place}: {problem}: correct the row, or choose another reward_fn")
        if answer is not None and is_prose(config.reward_fn, answer):
            self.noticed[
                "have words in their reference answer, which math-verify takes for letters: give the answer "
                "alone, or within \\boxed{}"
            ] += 1
        chat = config.template == "chat"
        self.unread.update(self._unread(row, value))
        if self._unknown in ids:
            self.noticed["hold characters that the tokenizer has no token for"] += 1
        if chat and isinstance(value, str) and _OPEN.search(value):
            self.noticed["end as a chat does that was rendered already, and are a user's turn here"] += 1
        if chat and self._control and (token := self._control.search(_all_text(value))):
            self.noticed[f"hold a control token in their text, such as {token.group()!r}"] += 1
        text, messages = value if isinstance(value, str) else "", ""
        if chat and self.keeps_messages:
            messages = json.dumps([conversation(value, config, self._template), config.chat_template_kwargs])
        return Prompt(row.name, ids, source, answer, text, messages=messages)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was dropped, and what is odd, in words."""
        odd = [f"prompts: {rows:,} rows of {self.config.path} {what}" for what, rows in self.noticed.items()]
        if self.unread:
            shown = self.unread.most_common(_SHOWN_FIELDS)
            named = ", ".join(f"{name} ({rows:,} of {self.read:,} rows)" for name, rows in shown)
            more = f" and {len(self.unread) - len(shown)} more" if len(self.unread) > len(shown) else ""
            odd.append(f"prompts: nothing reads these of {self.config.path}: {named}{more}")
        return (*([self.note] if self.note else []), *odd)

    def _unread(self, row: Row, value: Any) -> set[str]:
        """Names of what a row holds and nothing reads."""
        read = (self.config.field, self.config.source_field, self.config.answer_field)
        names = {repr(name) for name, content in row.fields.items() if content and name not in read}
        messages = [message for message in value if isinstance(message, Mapping)]
        keys = {key for message in messages for key in message if message[key]}
        return names | {
            f"{key!r} of messages"
            for key in keys - _READ
            if not re.search(rf"\b{re.escape(str(key))}\b", self._template)
        }

    @property
    def note(self) -> str | None:
        """What was dropped, in words; None: nothing was."""
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.dropped.items()))
        total = f"{self.dropped.total():,} of {self.read:,} rows"
        return f"prompts: {total} of {self.config.path} dropped: {reasons}" if reasons else None

    def _token_ids(self, value: Any, place: str) -> list[int]:
        """Token ids of a row's prompt. Raises DataError for what is neither a text nor chat messages."""
        if not isinstance(value, str | list) or not value:
            raise DataError(
                f"{place}: field {self.config.field!r} is {value!r:.80}: give a text or a list of chat "
                "messages"
            )
        if isinstance(value, list) and self.config.template == "plain":
            raise DataError(f'{place}: a list of chat messages needs prompts.template = "chat"')
        try:
            return list(self._encode(value))
        except DataError as error:
            raise DataError(f"{place}: {error}") from None
        except REFUSALS as error:
            kind = type(error).__name__
            raise DataError(
                f"{place}: chat template or tokenizer refuse {value!r:.80} ({kind}: {error}): "
                "change the row, or name another template in student.chat_template"
            ) from None


_READ: Final = {"role", "content", "from", "value", "tool_calls"}
"""Keys of messages that are read whatever the template."""


def _all_text(value: Any) -> str:
    """Every text within a prompt's field."""
    if isinstance(value, list):
        return "\n".join(map(_all_text, value))
    if isinstance(value, dict):
        return "\n".join(map(_all_text, value.values()))
    return value if isinstance(value, str) else ""


class WrittenFloat(float):
    """A number with the text that its file has for it, such as 0.50."""

    text: str

    def __new__(cls, text: str) -> WrittenFloat:
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __str__(self) -> str:
        return self.text


def _answer(row: Row, config: RowsConfig) -> str:
    """The reference answer as its file has it.

    Raises DataError for a value whose text a table no longer knows, where the reward compares texts.
    """
    name = config.answer_field or ""
    value = row.fields[name]
    if isinstance(value, float) and value != value:
        raise DataError(f"{row.place}: field {name!r} is not a number (NaN): give one, or leave the row out")
    no_text = isinstance(value, float) and not isinstance(value, WrittenFloat)
    no_text = no_text or not isinstance(value, str | int | float | Decimal | None)
    if isinstance(value, bool) and isinstance(config, DatasetPrompts):
        no_text = True
    compared = config.reward_fn in ("exact", "contains") or not isinstance(value, bool | float)
    if compared and no_text and not isinstance(value, Collection):
        raise DataError(
            f"{row.place}: field {name!r} is {value!r:.40} of type {type(value).__name__}, whose text is not "
            "known (a column of whole numbers with gaps becomes floats, one of dates in JSON becomes times): "
            'write the answers as texts, read them from JSON Lines with prompts.type = "jsonl", or compare '
            'numbers with reward_fn = "number"'
        )
    return _text(row, name)


def _text(row: Row, name: str) -> str:
    """A field of a row as text. Raises DataError for null, and for a collection."""
    value = row.fields[name]
    if value is None or (isinstance(value, Collection) and not isinstance(value, str)):
        raise DataError(
            f"{row.place}: field {name!r} is {value!r:.80}: give a text or a number, or leave the row out"
        )
    text = json.dumps(value) if isinstance(value, bool) else str(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{row.place}: field {name!r} holds half a character, {text[error.start]!r}, as a text that was "
            "cut within an emoji does: correct the row"
        ) from None
    return text


# --- where they are read from


def rows_of(config: RowsConfig) -> Iterator[Row]:
    """Every row that a source names."""
    return jsonl_rows(config.path) if isinstance(config, JsonlPrompts) else dataset_rows(config)


def jsonl_rows(path: Path) -> Iterator[Row]:
    """Every row of a JSONL file. Raises DataError that names file and line."""
    try:
        lines = path.open("rb")
    except OSError as error:
        raise DataError(
            f"prompts.path {path} cannot be read ({error.strerror}): name an existing file"
        ) from None
    with lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = line.decode("utf-8-sig").strip()
                row = json.loads(text, parse_float=WrittenFloat, object_pairs_hook=_fields)
            except (ValueError, RecursionError) as error:  # malformed JSON, or bytes that are no UTF-8
                raise DataError(
                    f"{path}:{number}: not JSON ({error}): write one JSON object a line, in UTF-8; a folder "
                    'of Parquet, Arrow, CSV or compressed files is read by prompts.type = "dataset"'
                ) from None
            if not isinstance(row, dict):
                raise DataError(
                    f"{path}:{number}: a JSON {type(row).__name__}, not an object: write one object a line"
                )
            yield Row(f"{path}:{number}", str(number), row)


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError where it has a key twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError(f"an object has a key twice, its keys are {[key for key, _ in pairs]!s:.80}")
    return fields


def open_dataset(config: DatasetPrompts) -> Any:
    """A `datasets.Dataset`, or an IterableDataset with `stream_rows`. Raises DataError that names it."""
    from datasets import load_dataset, load_dataset_builder
    from datasets.exceptions import DatasetsError

    if Path(config.path).is_file():
        raise DataError(
            f"prompts.path {config.path} is a file: name the folder that holds it, or set prompts.type = "
            '"jsonl" for JSON Lines'
        )
    if config.path.count("/") == 1:  # other names may be those of builders
        check_reachable(config.path, config.revision, "dataset")
    streaming = config.stream_rows is not None
    try:
        builder = load_dataset_builder(config.path, config.name, revision=config.revision)
        text = {name: str for name in (config.field, config.answer_field, config.source_field) if name}
        as_text: dict[str, Any] = {}
        if builder.name == "csv":  # else 007 is 7, and NA is null
            as_text = {"converters": text, "keep_default_na": False, "na_values": [""]}
        dataset = load_dataset(
            config.path,
            config.name,
            split=config.split,
            revision=config.revision,
            streaming=streaming,
            **as_text,
        )
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(
            f"dataset {config.path!r} (name {config.name!r}, split {config.split!r}) cannot be loaded "
            f"({error.__cause__ or error}): correct prompts.path, name, split or revision"
        ) from error
    for name in text:
        if labels := getattr((dataset.features or {}).get(name), "names", None):
            raise DataError(
                f"dataset {config.path!r}: field {name!r} holds numbers, which stand for "
                f"{', '.join(labels):.80}: write these texts in their place"
            )
    return dataset


def dataset_rows(config: DatasetPrompts) -> Iterator[Row]:
    """Every row of a dataset, by number."""
    return (Row(f"{config.path} row {i}", str(i), row) for i, row in enumerate(open_dataset(config)))
