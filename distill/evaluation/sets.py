"""The sets of prompts that a version is evaluated on: the held-out split, and the named ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from distill import tasks
from distill.config import RunConfig
from distill.config.evaluation import HELD_OUT, EvaluationConfig, EvaluationSet
from distill.config.prompts import PromptsConfig, TaskPrompts, pass_threshold
from distill.prompts.reward_pool import RewardPool
from distill.prompts.rewards import BUILT_IN, RewardSource, reward_source
from distill.prompts.rows import RowReader, rows_of
from distill.prompts.sources import PromptSplit, TaskSource, longest_sequence
from distill.prompts.stream import Prompt
from distill.rollout.validation import sampling_of
from sync.base.errors import ConfigError, DataError
from sync.wire import Sampling

TASK_PROMPTS = 512
"""Prompts of a task where a set names no number."""


class PromptSet(NamedTuple):
    """Prompts, and how their completions are sampled and rewarded."""

    prompts: list[Prompt]
    completions: int
    """Completions of each prompt."""
    sampling: Sampling
    rewards: RewardSource | None
    """Source of rewards; None: the run has none, or its environments give them all."""
    config: PromptsConfig
    """Source of the prompts."""
    decode: Callable[[list[int]], str]
    """Text of token ids."""

    def passes(self, index: int, reward: float | None) -> bool:
        """Whether a completion of prompt `index` passes; without a reward it does not."""
        return reward is not None and reward >= pass_threshold(self.config, self.prompts[index].source)


def open_sets(config: RunConfig, split: PromptSplit, tokenizer: Any) -> dict[str, PromptSet]:
    """Every set by name, the held-out one first.

    Raises ConfigError or DataError, naming the set, for prompts that cannot be used.
    """
    if not split.held_out:
        raise ConfigError(
            "no prompt can be held out for evaluation (at most a tenth of the different ones is): give 10 of "
            "them or more, or set evaluation = false"
        )
    rollout, settings = config.rollout, config.evaluation or EvaluationConfig()
    sampling = Sampling(max_tokens=rollout.max_tokens, stop_token_ids=rollout.stop_token_ids)
    sets = {HELD_OUT: PromptSet(split.held_out, 1, sampling, split.rewards, config.prompts, tokenizer.decode)}
    for name, evaluation_set in settings.sets.items():
        sampling = sampling_of(rollout, evaluation_set)
        try:
            longest = longest_sequence(config) - sampling.max_tokens
            prompts, rewards = _open(config, evaluation_set, longest, tokenizer)
        except (ConfigError, DataError) as error:
            raise type(error)(f"evaluation.sets.{name}: {error}") from error
        completions, source = evaluation_set.completions, evaluation_set.source
        sets[name] = PromptSet(prompts, completions, sampling, rewards, source, tokenizer.decode)
    return sets


def _open(
    config: RunConfig, evaluation_set: EvaluationSet, longest: int, tokenizer: Any
) -> tuple[list[Prompt], RewardSource]:
    source = evaluation_set.source
    if (rewards := reward_source(source, tokenizer, config.rollout.stop_token_ids)) is None:
        raise ConfigError("it has no rewards, and a set is evaluated by them alone: set source.reward_fn")
    if isinstance(source, TaskPrompts):
        made = tasks.load(source.task, source.options)
        task = TaskSource(source.task, made, config.run.seed, tokenizer)
        prompts = task.checked(evaluation_set.prompts or TASK_PROMPTS, longest)
    else:
        reader = RowReader(source, tokenizer, longest)
        prompts = [*reader.prompts(rows_of(source))][: evaluation_set.prompts]
    if not prompts:
        raise DataError("0 prompts were found: check the path and the field")
    return prompts, rewards


def check_rewards(sets: Mapping[str, PromptSet]) -> None:
    """Try each named set's function, where it is the user's. Raises ConfigError."""
    for name, prompt_set in sets.items():
        function = prompt_set.rewards and getattr(prompt_set.rewards.prompts, "reward_fn", None)
        custom = function not in (None, *BUILT_IN)
        if custom and prompt_set.rewards and name != HELD_OUT:
            RewardPool(prompt_set.rewards).check(prompt_set.prompts[0])
