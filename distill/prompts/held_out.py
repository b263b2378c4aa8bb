"""The split of prompts into training and held-out ones, with their reward function."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from distill import tasks
from distill.config import JsonlPrompts, RunConfig, TaskPrompts
from distill.prompts.rewards import RewardFn, check_reward_fn, load_reward_fn, reward
from distill.prompts.sources import TableSource, TaskSource, read_dataset, read_jsonl, text_encoder
from distill.prompts.stream import Prompt, PromptSource
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
    held_out = []
    for index in range(wanted):
        made = task.held_out(seed, index)
        ids = list(encode(made.text) if made.token_ids is None else made.token_ids)
        if len(ids) > longest:
            raise DataError(
                f"prompt {made.text!r:.60} of task {prompts.task} has {len(ids)} tokens, "
                f"{longest} are left beside rollout.max_tokens: lower rollout.max_tokens"
            )
        held_out.append(Prompt(f"held-out-{index}", ids, "default", made.answer, made.text))
    reward_fn = partial(reward, f"prompts.task {prompts.task!r}, passes()", task.passes)
    return PromptSplit(TaskSource(task, seed, encode), held_out, reward_fn)
