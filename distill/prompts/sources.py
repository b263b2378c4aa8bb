"""Sources of prompts (a JSONL file, a `datasets` dataset, a task), and the split off of held-out prompts."""

from __future__ import annotations

import copy
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jinja2 import TemplateError

from distill import tasks
from distill.config import DatasetPrompts, JsonlPrompts, RunConfig, TaskPrompts
from distill.prompts.reward_pool import RewardPool
from distill.prompts.rewards import BUILT_IN, RewardSource, answer_problem, reward_source
from distill.prompts.stream import Prompt, PromptSource
from distill.tasks import Task, TaskPrompt
from sync.errors import ConfigError, DataError
from sync.settings import ModelSource
from sync.wire.checks import ANY_ID
from teacher_service.router import own_code

LARGEST_SHARE = 0.1
"""Of a table's rows that are held out at most."""
NOTHING_HELD_OUT = (
    "no prompt can be held out for evaluation (at most a tenth of the rows is): give 10 rows or more, or set "
    "evaluation = false"
)
SAMPLE = 256
"""Prompts of each side of the split that are read where not all can be."""
Encode = Callable[[Any], Sequence[int]]
"""From a row's prompt field (a string, or a list of chat messages) to token ids."""


class TaskSource:
    """Endless prompts of a task. Raises DataError, naming the task, for a prompt that it cannot make."""

    def __init__(self, name: str, task: Task, seed: int, encode: Encode) -> None:
        self._name, self._task, self._seed, self._encode = name, task, seed, encode

    def __getitem__(self, index: int) -> Prompt:
        return self._made("prompt", self._task.prompt, str(index), index)

    def held_out(self, index: int) -> Prompt:
        """A prompt that no seed trains on."""
        return self._made("held_out", self._task.held_out, f"held-out-{index}", index)

    def _made(self, call: str, make: Callable[[int, int], TaskPrompt], name: str, index: int) -> Prompt:
        about = f"index {index}, seed {self._seed}"
        with own_code(f"prompts.task {self._name!r}, {call}()", about, "make one for every index"):
            made = make(self._seed, index)
        ids = self._encode(made.text) if made.token_ids is None else made.token_ids
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
        self._rows: Sequence[int] = range(len(self._names))

    def subset(self, rows: Sequence[int]) -> TableSource:
        """Some of the rows, in that order; nothing is copied."""
        part = copy.copy(self)
        part._rows = [self._rows[row] for row in rows]
        return part

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def sources(self) -> set[str]:
        """Data sources of the whole table, so of what is held out as well."""
        return {source for _, source, _, _ in self._names}

    @property
    def longest(self) -> int:
        return max(self._ends[row + 1] - self._ends[row] for row in self._rows)

    def __getitem__(self, index: int) -> Prompt:
        row = self._rows[index]
        name, source, answer, text = self._names[row]
        return Prompt(name, self._flat[self._ends[row] : self._ends[row + 1]].tolist(), source, answer, text)


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
        try:
            value = row[config.field]
            source = "default" if config.source_field is None else str(row[config.source_field])
            answer = None if config.answer_field is None else str(row[config.answer_field])
        except KeyError as missing:
            raise DataError(
                f"{place}: no field {missing}; the row has {', '.join(sorted(row))}: rename it, or name the "
                "one that is meant in [prompts]"
            ) from None
        ids = _token_ids(value, config, encode, place)
        if not 1 <= len(ids) <= max_prompt:
            raise DataError(
                f"{place}: the prompt has {len(ids)} tokens, allowed are 1 to {max_prompt} (context length "
                "less rollout.max_tokens): shorten the row, or lower rollout.max_tokens"
            )
        if answer is not None and (problem := answer_problem(config.reward_fn, answer)):
            raise DataError(f"{place}: {problem}: correct the row, or choose another reward_fn")
        yield Prompt(name, ids, source, answer, value if isinstance(value, str) else "")


def _token_ids(value: Any, config: JsonlPrompts | DatasetPrompts, encode: Encode, place: str) -> list[int]:
    """Token ids of a row's prompt. Raises DataError for what is neither a text nor chat messages."""
    if not isinstance(value, str | list) or not value:
        raise DataError(
            f"{place}: field {config.field!r} is {value!r:.80}: give a text or a list of chat messages"
        )
    if isinstance(value, list) and config.template == "plain":
        raise DataError(f'{place}: a list of chat messages needs prompts.template = "chat"')
    if isinstance(value, list) and not all(isinstance(m, dict) and m.get("role") for m in value):
        raise DataError(f"{place}: every chat message needs a role and a content: see {value!r:.80}")
    try:
        return list(encode(value))
    except TemplateError as error:
        raise DataError(
            f"{place}: the chat template refuses the messages ({error}): change the row, or name another "
            "template in student.chat_template"
        ) from None


# --- training and held-out prompts


class PromptSplit(NamedTuple):
    """Prompts of a run."""

    train: PromptSource
    held_out: list[Prompt]
    rewards: RewardSource | None
    """None: completions cannot be checked."""
    vocab_size: int = ANY_ID
    """Of the student's tokenizer."""


def sample_prompts(split: PromptSplit) -> list[Prompt]:
    """A fixed sample: held-out prompts, then some of the training ones."""
    count = min(SAMPLE, len(split.train)) if isinstance(split.train, Sized) else SAMPLE
    return split.held_out[:SAMPLE] + [split.train[i] for i in range(count)]


def longest_prompt(split: PromptSplit) -> int:
    """Tokens of the longest prompt: of a whole table, or of a sample where prompts are endless."""
    known = max(len(prompt.token_ids) for prompt in [*split.held_out, *sample_prompts(split)])
    return max(known, split.train.longest) if isinstance(split.train, TableSource) else known


def data_sources(split: PromptSplit) -> set[str]:
    """Every data source of a table, or of a sample where prompts are endless."""
    if isinstance(split.train, TableSource):
        return split.train.sources
    return {prompt.source for prompt in sample_prompts(split)}


def open_prompts(config: RunConfig, tokenizer: Any, context: int | None = None) -> PromptSplit:
    """Prompts as the config says, each at most `context` − rollout.max_tokens tokens long.

    `context` None: `longest_sequence`.

    Raises DataError (file and line of a row that cannot be used) or ConfigError.
    """
    context = context or longest_sequence(config)
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
    rewards = reward_source(config.prompts, tokenizer)
    if isinstance(config.prompts, JsonlPrompts):
        table = read_jsonl(config.prompts, encode, longest)
    else:
        table = read_dataset(config.prompts, encode, longest)
    split = split_table(table, wanted, config.run.seed, rewards)
    if rewards is not None and config.prompts.reward_fn not in BUILT_IN:
        RewardPool(rewards).check(table[0])
    return split


def split_table(
    table: TableSource, wanted: int, seed: int, rewards: RewardSource | None = None
) -> PromptSplit:
    """Hold out `wanted` rows, at most a tenth; which ones depends on the seed and the number of rows.

    Raises DataError for an empty table.
    """
    if not len(table):
        raise DataError("0 prompts were found: a run needs at least one row; check the path and the field")
    order = np.random.default_rng(seed).permutation(len(table))
    count = min(wanted, int(len(table) * LARGEST_SHARE))
    held_out = [table[row] for row in sorted(order[:count].tolist())]
    return PromptSplit(table.subset(sorted(order[count:].tolist())), held_out, rewards)


def _task_prompts(
    config: RunConfig, prompts: TaskPrompts, tokenizer: Any, longest: int, wanted: int
) -> PromptSplit:
    task = tasks.load(prompts.task, prompts.options)
    source = TaskSource(prompts.task, task, config.run.seed, text_encoder(tokenizer, "plain"))
    held_out = [source.held_out(i) for i in range(wanted)]
    for prompt in held_out:
        if len(prompt.token_ids) > longest:
            raise DataError(
                f"prompt {prompt.text!r:.60} of task {prompts.task} has {len(prompt.token_ids)} tokens, "
                f"{longest} are left beside rollout.max_tokens: lower rollout.max_tokens"
            )
    return PromptSplit(source, held_out, reward_source(prompts, tokenizer))


# --- how long they may be


def text_config(source: ModelSource) -> Any:
    """transformers' config of a model, of its text part. Raises ConfigError when it cannot be read."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            source.path, revision=source.revision, trust_remote_code=source.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"the config of model {source.path!r} cannot be read: {error}") from None
    return config.get_text_config()


def student_limit(config: RunConfig) -> int:
    """Longest sequence of a replica: the model's own limit, or max-model-len when that is less."""
    own = int(text_config(config.student).max_position_embeddings)
    given = config.student.flags().get("max-model-len", own)
    if not isinstance(given, int):
        raise ConfigError(
            f"student.engine_args has max-model-len = {given!r}, and prompts are measured against it: write "
            "the number of tokens"
        )
    return min(own, given) if given > 0 else own


def longest_sequence(config: RunConfig) -> int:
    """Tokens of prompt and completion that the student, its replicas and every local teacher take."""
    limits = [student_limit(config)]
    for teacher in config.teachers.values():
        if not teacher.urls and teacher.prompt_transform is None:
            limits.append(teacher.max_length or int(text_config(teacher).max_position_embeddings))
    return min(limits)
