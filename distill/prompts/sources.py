"""Sources of prompts: a JSONL file, a `datasets` dataset, or a task that generates its own."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateError

from distill.config import DatasetPrompts, JsonlPrompts
from distill.prompts.rewards import answer_problem
from distill.prompts.stream import Prompt
from distill.tasks import Task
from sync.errors import DataError

Encode = Callable[[Any], Sequence[int]]
"""From a row's prompt field (a string, or a list of chat messages) to token ids."""


class TaskSource:
    """Endless prompts of a task."""

    def __init__(self, task: Task, seed: int, encode: Encode, name: str = "default") -> None:
        self._task = task
        self._seed = seed
        self._encode = encode
        self._name = name

    def __getitem__(self, index: int) -> Prompt:
        made = self._task.prompt(self._seed, index)
        ids = self._encode(made.text) if made.token_ids is None else made.token_ids
        return Prompt(str(index), list(ids), self._name, made.answer, made.text)


class TableSource:
    """Rows whose token ids share one flat array: 4 bytes a token."""

    def __init__(self, rows: Iterable[Prompt]) -> None:
        flat, ends = array("i"), array("q", [0])
        self._names: list[tuple[str, str, str | None, str]] = []
        for row in rows:
            flat.extend(row.token_ids)
            ends.append(len(flat))
            self._names.append((row.id, row.source, row.answer, row.text))
        self._flat, self._ends = np.frombuffer(flat, "i4") if flat else np.empty(0, "i4"), ends

    def __len__(self) -> int:
        return len(self._names)

    @property
    def sources(self) -> set[str]:
        """Data sources of its rows."""
        return {source for _, source, _, _ in self._names}

    def length(self, index: int) -> int:
        """Tokens of a row."""
        return self._ends[index + 1] - self._ends[index]

    def __getitem__(self, index: int) -> Prompt:
        name, source, answer, text = self._names[index]
        ids = self._flat[self._ends[index] : self._ends[index + 1]].tolist()
        return Prompt(name, ids, source, answer, text)


def text_encoder(tokenizer: Any, template: Literal["chat", "plain"]) -> Encode:
    """Encode with a transformers tokenizer; chat: its template, once, up to the assistant's turn.

    Raises DataError when the tokenizer has no chat template.
    """
    if template == "plain":
        return lambda text: tokenizer.encode(text)
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            'prompts.template is "chat" and the student\'s tokenizer has no chat template: '
            'set prompts.template = "plain", or name a Jinja file in student.chat_template'
        )

    def chat(prompt: str | list[dict[str, str]]) -> Sequence[int]:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    return chat


def read_jsonl(config: JsonlPrompts, encode: Encode, max_prompt: int) -> TableSource:
    """Every row of a JSONL file, in at most `max_prompt` tokens each.

    Raises DataError that names file and line for a row that cannot be used.
    """
    return TableSource(_prompts(_jsonl_rows(config.path), config, encode, max_prompt))


def read_dataset(config: DatasetPrompts, encode: Encode, max_prompt: int) -> TableSource:
    """Every row of a `datasets` dataset. Raises DataError that names the dataset, and a row's number."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        rows = load_dataset(config.path, config.name, split=config.split, revision=config.revision)
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(
            f"dataset {config.path!r} (name {config.name!r}, split {config.split!r}) cannot be loaded "
            f"({error.__cause__ or error}): correct prompts.path, name, split or revision"
        ) from error
    named = ((f"{config.path} row {i}", str(i), row) for i, row in enumerate(rows))
    return TableSource(_prompts(named, config, encode, max_prompt))


def _jsonl_rows(path: Path) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """(place for messages, name, row) of every line that is not blank."""
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
                row = json.loads(line.strip())
            except ValueError as error:  # malformed JSON, or bytes that are no UTF-8
                raise DataError(
                    f"{path}:{number}: not JSON ({error}): write one JSON object a line"
                ) from None
            if not isinstance(row, dict):
                raise DataError(
                    f"{path}:{number}: a JSON {type(row).__name__}, not an object: write one object a line"
                )
            yield f"{path}:{number}", str(number), row


def _prompts(
    rows: Iterable[tuple[str, str, Mapping[str, Any]]],
    config: JsonlPrompts | DatasetPrompts,
    encode: Encode,
    max_prompt: int,
) -> Iterator[Prompt]:
    for place, name, row in rows:
        value = _field(row, config.field, place)
        if not isinstance(value, str | list) or not value:
            raise DataError(
                f"{place}: field {config.field!r} is {value!r:.80}: a text or a list of chat messages must "
                "stand there"
            )
        if isinstance(value, list) and config.template == "plain":
            raise DataError(f'{place}: a list of chat messages needs prompts.template = "chat"')
        if isinstance(value, list) and not all(isinstance(m, dict) and m.get("role") for m in value):
            raise DataError(f"{place}: every chat message needs a role and a content: see {value!r:.80}")
        try:
            ids = list(encode(value))
        except TemplateError as error:
            raise DataError(
                f"{place}: the chat template refuses the messages ({error}): change the row, or name another "
                "template in student.chat_template"
            ) from None
        if not 1 <= len(ids) <= max_prompt:
            raise DataError(
                f"{place}: the prompt has {len(ids)} tokens, allowed are 1 to {max_prompt} (context length "
                "less rollout.max_tokens): shorten the row, or lower rollout.max_tokens"
            )
        source = "default" if config.source_field is None else str(_field(row, config.source_field, place))
        answer = None if config.answer_field is None else str(_field(row, config.answer_field, place))
        if answer is not None and (problem := answer_problem(config.reward_fn, answer)):
            raise DataError(f"{place}: {problem}: correct the row, or choose another reward_fn")
        yield Prompt(name, ids, source, answer, value if isinstance(value, str) else "")


def _field(row: Mapping[str, Any], field: str, place: str) -> Any:
    try:
        return row[field]
    except KeyError:
        raise DataError(
            f"{place}: no field {field!r}; the row has {', '.join(sorted(row))}: rename it, or name the one "
            "that is meant in [prompts]"
        ) from None
