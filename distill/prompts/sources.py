"""Sources of prompts (files, datasets, tasks, mixtures of them), and the split off of held-out prompts."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from operator import index as as_index
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import msgspec
import numpy as np

from distill import tasks
from distill.config import RunConfig
from distill.config.prompts import DatasetPrompts, EnvironmentPrompts, MixturePrompts, TaskPrompts
from distill.environments.rendering import Renderer
from distill.prompts.reward_pool import RewardPool
from distill.prompts.rewards import BUILT_IN, RewardSource, reward_source
from distill.prompts.rows import RowReader, RowsConfig, check_ids, plain_ids, rows_of
from distill.prompts.stream import Mixture, Prompt, PromptSource, by_weight, content_of, held_out_of
from distill.prompts.streaming import Starts, StreamSource, open_stream
from distill.tasks import Task, TaskPrompt
from sync.base.errors import ConfigError, DataError
from sync.base.hub import check_reachable
from sync.base.own_code import own_code
from sync.base.settings import ModelSource
from sync.wire.checks import ANY_ID

SAMPLE = 256
"""Prompts of each side of the split that are read where not all can be."""
CHECKED = 16
"""Prompts to train on of a task that are made and checked beforehand."""
_NO_IDS: Final = list[int]()


class TaskSource:
    """Endless prompts of a task. Raises DataError, naming the task, for a prompt that it cannot make."""

    def __init__(self, name: str, task: Task, seed: int, tokenizer: Any) -> None:
        self._name, self._task, self._seed, self._tokenizer = name, task, seed, tokenizer

    def __getitem__(self, index: int) -> Prompt:
        return self._made("prompt", self._task.prompt, str(index), index)

    def held_out(self, index: int) -> Prompt:
        """A prompt that no seed trains on."""
        return self._made("held_out", self._task.held_out, f"held-out-{index}", index)

    def _made(self, call: str, make: Callable[[int, int], TaskPrompt], name: str, index: int) -> Prompt:
        about = f"index {index}, seed {self._seed}"
        with own_code(f"prompts.task {self._name!r}, {call}()", about, "make one for every index"):
            made = make(self._seed, index)
            ids = made.token_ids
            ids = plain_ids(self._tokenizer, made.text) if ids is None else [*map(as_index, ids)]
        return Prompt(name, list(ids), "default", made.answer, made.text)

    def checked(self, count: int, longest: int) -> list[Prompt]:
        """So many held-out prompts. Raises DataError for one, or for a first one to train on, of no use."""
        held_out = [self.held_out(index) for index in range(count)]
        for prompt in [*held_out, *(self[index] for index in range(CHECKED))]:
            ids = prompt.token_ids
            try:
                check_ids(self._tokenizer, ids)
                if not 1 <= len(ids) <= longest:
                    raise DataError(
                        f"it has {len(ids)} tokens, allowed are 1 to {longest} (context length less "
                        "rollout.max_tokens): lower rollout.max_tokens, or have the task make others"
                    )
            except DataError as error:
                raise DataError(f"prompt {prompt.text!r:.60} of task {self._name}: {error}") from None
        return held_out


@dataclass(frozen=True)
class EnvironmentSource:
    """Tasks of an environment, from `first` on; the environment gives their prompts."""

    environment: str
    first: int

    def __getitem__(self, index: int) -> Prompt:
        task = self.first + index
        return Prompt(str(task), [], environment=self.environment, task=task)

    def without(self, prompts: Iterable[Prompt]) -> Self:
        """The tasks behind as many first ones as are among `prompts`, which are held out."""
        held_out = {prompt.task for prompt in prompts if prompt.environment == self.environment}
        return replace(self, first=max(self.first, len(held_out)))


@dataclass(frozen=True)
class CountedEnvironmentSource(EnvironmentSource):
    """Tasks of an environment that has so many of them, from `first` on."""

    tasks: int

    def __len__(self) -> int:
        return max(0, self.tasks - self.first)


class TableSource:
    """Rows whose token ids share one flat array: 4 bytes a token."""

    def __init__(self, rows: Iterable[Prompt]) -> None:
        flat, ends = array("i"), array("q", [0])
        self._without_ids: list[Prompt] = []
        for row in rows:
            flat.extend(row.token_ids)
            ends.append(len(flat))
            self._without_ids.append(msgspec.structs.replace(row, token_ids=_NO_IDS))
        self._flat, self._ends = np.frombuffer(flat, "i4") if flat else np.empty(0, "i4"), ends
        self._rows: Sequence[int] = range(len(self._without_ids))

    def subset(self, rows: Sequence[int]) -> TableSource:
        """Some of the rows, in that order; nothing is copied."""
        part = copy.copy(self)
        part._rows = [self._rows[row] for row in rows]
        return part

    def without(self, prompts: Iterable[Prompt]) -> TableSource:
        """All rows but those with one of these prompts."""
        gone = {content_of(prompt.token_ids) for prompt in prompts}
        return self.subset([row for row in range(len(self)) if content_of(self._ids(row)) not in gone])

    def distinct(self) -> list[list[int]]:
        """The rows of every prompt."""
        rows: dict[bytes, list[int]] = {}
        for row in range(len(self)):
            rows.setdefault(content_of(self._ids(row)), []).append(row)
        return [*rows.values()]

    def _ids(self, row: int) -> np.ndarray:
        return self._flat[self._ends[self._rows[row]] : self._ends[self._rows[row] + 1]]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def sources(self) -> set[str]:
        """Data sources of the whole table, so of what is held out as well."""
        return {prompt.source for prompt in self._without_ids}

    @property
    def longest(self) -> int:
        return max(self._ends[row + 1] - self._ends[row] for row in self._rows)

    def __getitem__(self, index: int) -> Prompt:
        prompt = self._without_ids[self._rows[index]]
        return msgspec.structs.replace(prompt, token_ids=self._ids(index).tolist())


# --- training and held-out prompts


class PromptSplit(NamedTuple):
    """Prompts of a run."""

    train: PromptSource
    held_out: list[Prompt]
    rewards: RewardSource | None
    """None: completions cannot be checked, or environments reward them all (`rewarded`)."""
    vocab_size: int = ANY_ID
    """Ids of the student's tokenizer."""
    notes: tuple[str, ...] = ()
    """What was dropped, in words."""
    by_environment: bool = False

    @property
    def rewarded(self) -> bool:
        """Whether every rollout has a reward."""
        return self.rewards is not None or self.by_environment


def keep_position(source: PromptSource, folder: Path, saved: Mapping[str, Starts]) -> None:
    """Have every stream remember in `folder` where its blocks begin, so that a resume is quick.

    `saved`: of an earlier start, by the name of the file.
    """
    parts = source.parts if isinstance(source, Mixture) else {"prompts": source}
    for name, part in parts.items():
        if isinstance(part, StreamSource):
            path = folder / f"stream-{name}.json"
            part.keep(path, saved.get(path.name))


def sample_prompts(split: PromptSplit) -> list[Prompt]:
    """A fixed sample: held-out prompts, then some of the training ones."""
    count = min(SAMPLE, len(split.train)) if isinstance(split.train, Sized) else SAMPLE
    return split.held_out[:SAMPLE] + [split.train[i] for i in range(count)]


def longest_prompt(split: PromptSplit) -> int:
    """Tokens of the longest prompt: of all rows, or of a sample of prompts that are not all known."""
    known = max(len(prompt.token_ids) for prompt in [*split.held_out, *sample_prompts(split)])
    return max(known, getattr(split.train, "longest", 0))


def data_sources(split: PromptSplit) -> set[str]:
    """Every data source, or those of a sample where prompts are not all known."""
    if isinstance(split.train, TableSource | Mixture):
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
    for name, section in config.environments.items():
        try:
            Renderer(tokenizer, section.chat_template_kwargs).check()
        except DataError as error:
            raise ConfigError(f"environments.{name} cannot be played: {error}") from error
    held_out_count, prompts = config.evaluation.prompts if config.evaluation else 0, config.prompts
    if not isinstance(prompts, MixturePrompts):
        return _open(config, prompts, tokenizer, longest, held_out_count)
    names, weights = [*prompts.parts], prompts.weights
    if unknown := weights.keys() - prompts.parts.keys():
        raise ConfigError(
            f"prompts.weights names {', '.join(sorted(unknown))}, the parts are {', '.join(names)}: use "
            "their names"
        )
    counts, splits = by_weight(held_out_count, [weights.get(name, 1.0) for name in names]), {}
    for name, count in zip(names, counts, strict=True):
        part = prompts.parts[name]
        if getattr(part, "source_field", None) is not None:
            raise ConfigError(
                f"prompts.parts.{name}.source_field is set, and the data source of a part is its name: "
                "leave it out"
            )
        splits[name] = _open(config, part, tokenizer, longest, count)
    return _mixed(config, prompts, splits)


def _open(
    config: RunConfig,
    prompts: TaskPrompts | RowsConfig | EnvironmentPrompts,
    tokenizer: Any,
    longest: int,
    held_out_count: int,
) -> PromptSplit:
    """The prompts of one source, of at most `longest` tokens each."""
    if isinstance(prompts, EnvironmentPrompts):
        name, count = prompts.environment, held_out_count
        train: PromptSource = EnvironmentSource(name, count)
        if prompts.tasks is not None:
            count = held_out_of(prompts.tasks, count)
            train = CountedEnvironmentSource(name, count, prompts.tasks)
        held_out = [EnvironmentSource(name, 0)[task] for task in range(count)]
        return PromptSplit(train, held_out, None, by_environment=True)
    rewards = reward_source(prompts, tokenizer, config.rollout.stop_token_ids)
    if isinstance(prompts, TaskPrompts):
        task = tasks.load(prompts.task, prompts.options)
        source = TaskSource(prompts.task, task, config.run.seed, tokenizer)
        held_out = source.checked(held_out_count, longest)
        return PromptSplit(source, held_out, rewards)
    reader = RowReader(prompts, tokenizer, longest, keeps_messages=bool(config.by_text))  # rendered again
    if isinstance(prompts, DatasetPrompts) and prompts.stream_rows is not None:
        stream, held_out = open_stream(prompts, reader, config.run.seed, held_out_count)
        split = PromptSplit(stream, held_out, rewards)
    else:
        table = TableSource(reader.prompts(rows_of(prompts)))
        if not len(table):
            raise DataError(
                f"0 prompts were found in {prompts.path} ({reader.note or 'it has no rows'}): a run "
                "needs at least one; check the path, the field and the filters"
            )
        split = split_table(table, held_out_count, config.run.seed, rewards)
    if rewards is not None and prompts.reward_fn not in BUILT_IN:
        line = RewardPool(rewards).check((split.held_out or [split.train[0]])[0])
        split = split._replace(notes=(*split.notes, f"prompts: {line}"))
    return split._replace(notes=(*reader.notes, *split.notes))


def _mixed(config: RunConfig, prompts: MixturePrompts, splits: dict[str, PromptSplit]) -> PromptSplit:
    """The prompts of a mixture: rewarded by its parts, or not at all where one of them has no reward."""
    _hold_out_together(prompts, splits)
    held_out = [
        msgspec.structs.replace(prompt, id=f"{name}/{prompt.id}", source=name)
        for name, split in splits.items()
        for prompt in split.held_out
    ]
    train = Mixture({name: split.train for name, split in splits.items()}, prompts.weights, config.run.seed)
    parts = {name: split.rewards for name, split in splits.items() if split.rewards is not None}
    missing = sorted(name for name, split in splits.items() if not split.rewarded)
    notes, rewards = [note for split in splits.values() for note in split.notes], None
    if missing and len(missing) < len(splits):
        without = f"{', '.join(missing)} of prompts.parts has none"
        notes.insert(0, f"prompts: completions have no reward, because {without}")
    if parts and not missing:
        seconds = max(part.seconds for part in parts.values())
        rewards = RewardSource(prompts, seconds, lambda prompt, ids: parts[prompt.source].read(prompt, ids))
    return PromptSplit(train, held_out, rewards, notes=tuple(notes), by_environment=not missing)


def _hold_out_together(prompts: MixturePrompts, splits: dict[str, PromptSplit]) -> None:
    """Parts train on no prompt and no task that another of them holds out. Raises ConfigError for one that
    has no other.

    Tasks that are generated hold theirs out by what they ask.
    """
    held_out = [prompt for split in splits.values() for prompt in split.held_out]
    for name, part in prompts.parts.items():
        if not isinstance(part, TaskPrompts):
            source: Any = splits[name].train
            splits[name] = splits[name]._replace(train=source.without(held_out))
            if isinstance(train := splits[name].train, Sized) and not len(train):
                raise ConfigError(
                    f"prompts.parts.{name}: another part holds out all of its prompts: give it more rows, or "
                    "lower evaluation.prompts"
                )


def split_table(
    table: TableSource, held_out_count: int, seed: int, rewards: RewardSource | None = None
) -> PromptSplit:
    """Hold out as many prompts, at most a tenth, with all of their rows; which ones depends on the seed and
    the number of prompts."""
    prompts = table.distinct()
    order = np.random.default_rng(seed).permutation(len(prompts)).tolist()
    count = held_out_of(len(prompts), held_out_count)
    held_out = [table[prompts[place][0]] for place in sorted(order[:count])]
    train = sorted(row for place in order[count:] for row in prompts[place])
    notes = (
        () if len(prompts) == len(table) else (f"prompts: {len(table):,} rows hold {len(prompts):,} prompts",)
    )
    return PromptSplit(table.subset(train), held_out, rewards, notes=notes)


# --- how long they may be


def text_config(source: ModelSource) -> Any:
    """transformers' config of a model's text part. Raises ConfigError when it cannot be read."""
    return model_config(source).get_text_config()


def model_config(source: ModelSource) -> Any:
    """transformers' config of a whole model. Raises ConfigError when it cannot be read."""
    check_reachable(source.path, source.revision, "model")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            source.path, revision=source.revision, trust_remote_code=source.trust_remote_code
        )
    except Exception as error:  # noqa: BLE001 - of its own code, or of the checks of three libraries
        raise ConfigError(
            f"the config of model {source.path!r} cannot be read ({error}): correct its config.json, or name "
            "another model"
        ) from None


def positions(source: ModelSource, key: str, limit: int | None = None) -> int:
    """Longest sequence of a model: its own limit, or `limit`, the value of `key`, when that is less.

    Raises ConfigError where neither is known.
    """
    known = getattr(text_config(source), "max_position_embeddings", None) or limit
    if known is None:
        raise ConfigError(f"the config of model {source.path!r} names no longest sequence: set {key}")
    return min(int(known), limit or int(known))


def student_limit(config: RunConfig) -> int:
    """Longest sequence of a replica: the model's own limit, or max-model-len when that is less."""
    limit = config.student.flags().get("max-model-len", 0)
    if not isinstance(limit, int):
        raise ConfigError(
            f"student.engine_args has max-model-len = {limit!r}, and prompts are measured against it: write "
            "the number of tokens"
        )
    return positions(config.student, "student.engine_args.max-model-len", limit if limit > 0 else None)


def longest_sequence(config: RunConfig) -> int:
    """Tokens of prompt and completion that the student, its replicas and every local teacher take."""
    limits = [student_limit(config)]
    for name, teacher in config.teachers.items():
        if not teacher.urls and teacher.prompt_transform is None:
            limits.append(teacher.max_length or positions(teacher, f"teachers.{name}.max_length"))
    return min(limits)
