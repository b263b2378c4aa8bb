"""Sources of prompts (a JSONL file, a `datasets` dataset, a task), and the split off of held-out prompts."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jinja2 import TemplateError

from distill import tasks
from distill.config import DatasetPrompts, JsonlPrompts, RunConfig, TaskPrompts
from distill.prompts.rewards import RewardFn, answer_problem, check_reward_fn, load_reward_fn, reward
from distill.prompts.stream import Prompt, PromptSource
from distill.tasks import Task, TaskPrompt
from sync.errors import ConfigError, DataError
from sync.wire.checks import ANY_ID

LARGEST_SHARE = 0.1
"""Of a table's rows that are held out at most."""
NOTHING_HELD_OUT = (
    "no prompt can be held out for evaluation (at most a tenth of the rows is): give 10 rows or more, or set "
    "evaluation = false"
)
SAMPLE = 256
"""Prompts of each side of the split that are looked at where not all can be."""
Encode = Callable[[Any], Sequence[int]]
"""From a row's prompt field (a string, or a list of chat messages) to token ids."""


class TaskSource:
    """Endless prompts of a task."""

    def __init__(self, task: Task, seed: int, encode: Encode) -> None:
        self._task, self._seed, self._encode = task, seed, encode

    def __getitem__(self, index: int) -> Prompt:
        return _encoded(str(index), self._task.prompt(self._seed, index), self._encode)


def _encoded(name: str, made: TaskPrompt, encode: Encode) -> Prompt:
    ids = encode(made.text) if made.token_ids is None else made.token_ids
    return Prompt(name, list(ids), "default", made.answer, made.text)


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


# --- training and held-out prompts ------------------------------------------------------------------------


class PromptSplit(NamedTuple):
    """Prompts of a run."""

    train: PromptSource
    held_out: list[Prompt]
    reward_fn: RewardFn | None
    """None: completions cannot be checked."""
    vocab_size: int = ANY_ID
    """Of the student's tokenizer."""


class Subset:
    """Some rows of a table."""

    def __init__(self, table: TableSource, rows: Sequence[int]) -> None:
        self._table, self._rows = table, rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def sources(self) -> set[str]:
        """Data sources of the whole table, so of what is held out as well."""
        return self._table.sources

    @property
    def longest(self) -> int:
        """Tokens of its longest prompt."""
        return max(self._table.length(int(row)) for row in self._rows)

    def __getitem__(self, index: int) -> Prompt:
        return self._table[int(self._rows[index])]


def sample_prompts(split: PromptSplit) -> list[Prompt]:
    """A fixed sample: held-out prompts, then some of the training ones."""
    count = min(SAMPLE, len(split.train)) if isinstance(split.train, Sized) else SAMPLE
    return split.held_out[:SAMPLE] + [split.train[i] for i in range(count)]


def longest_prompt(split: PromptSplit) -> int:
    """Tokens of the longest prompt: of a whole table, or of a sample where prompts are endless."""
    known = max(len(prompt.token_ids) for prompt in [*split.held_out, *sample_prompts(split)])
    return max(known, split.train.longest) if isinstance(split.train, Subset) else known


def data_sources(split: PromptSplit) -> set[str]:
    """Every data source of a table, or of a sample where prompts are endless."""
    if isinstance(split.train, Subset):
        return split.train.sources
    return {prompt.source for prompt in sample_prompts(split)}


def open_prompts(config: RunConfig, tokenizer: Any, context: int) -> PromptSplit:
    """Prompts as the config says, each at most `context` − rollout.max_tokens tokens long.

    Raises DataError (file and line of a row that cannot be used) or ConfigError.
    """
    longest = context - config.rollout.max_tokens
    if longest < 1:
        raise ConfigError(
            f"rollout.max_tokens is {config.rollout.max_tokens} and the context is {context} tokens: "
            "no room for a prompt is left; lower rollout.max_tokens"
        )
    wanted = config.evaluation.prompts if config.evaluation else 0
    if isinstance(config.prompts, TaskPrompts):
        return _task_prompts(config, config.prompts, tokenizer, longest, wanted)
    encode = text_encoder(tokenizer, config.prompts.template)
    reward_fn = load_reward_fn(config.prompts, tokenizer)
    if isinstance(config.prompts, JsonlPrompts):
        table = read_jsonl(config.prompts, encode, longest)
    else:
        table = read_dataset(config.prompts, encode, longest)
    split = split_table(table, wanted, config.run.seed, reward_fn)
    if reward_fn is not None:
        check_reward_fn(reward_fn, table[0])
    return split


def split_table(table: TableSource, wanted: int, seed: int, reward_fn: RewardFn | None = None) -> PromptSplit:
    """Hold out `wanted` rows, at most a tenth; which ones depends on the seed and the number of rows.

    Raises DataError for an empty table.
    """
    if not len(table):
        raise DataError("0 prompts were found: a run needs at least one row; check the path and the field")
    order = np.random.default_rng(seed).permutation(len(table))
    count = min(wanted, int(len(table) * LARGEST_SHARE))
    held_out = [table[int(row)] for row in sorted(order[:count])]
    return PromptSplit(Subset(table, sorted(order[count:].tolist())), held_out, reward_fn)


def _task_prompts(
    config: RunConfig, prompts: TaskPrompts, tokenizer: Any, longest: int, wanted: int
) -> PromptSplit:
    task, seed = tasks.load(prompts.task, prompts.options), config.run.seed
    encode = text_encoder(tokenizer, "plain")
    held_out = [_encoded(f"held-out-{i}", task.held_out(seed, i), encode) for i in range(wanted)]
    for prompt in held_out:
        if len(prompt.token_ids) > longest:
            raise DataError(
                f"prompt {prompt.text!r:.60} of task {prompts.task} has {len(prompt.token_ids)} tokens, "
                f"{longest} are left beside rollout.max_tokens: lower rollout.max_tokens"
            )
    reward_fn = partial(reward, f"prompts.task {prompts.task!r}, passes()", task.passes)
    return PromptSplit(TaskSource(task, seed, encode), held_out, reward_fn)
