"""Environments of type "python": an async function of yours plays one episode.

    async def play(task: int, talk: Talk, **options) -> float | None

It talks to the student by `talk.say` and returns the reward, None for none, or a table with "reward" and
further figures. Every episode is a task of the service's event loop: a function that blocks (time.sleep, long
computations) stops all episodes, so await, or use asyncio.to_thread. What the same task says must be the same
again: take randomness from random.Random(task), not from the module.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, NamedTuple

from distill.environments.config import EnvironmentConfig
from distill.environments.episode import FinishReason
from distill.environments.host import Playing
from distill.environments.rendering import Message, Renderer
from sync.base.errors import ConfigError, DataError
from sync.base.own_code import load_function, own_code
from sync.wire import EpisodeOver
from sync.wire.checks import LARGEST_REWARD

_REMEDY = "take every task, and return a reward, None, or a table of numbers"


class Reply(NamedTuple):
    """The student's answer to a turn."""

    text: str
    """Text with its special tokens, such as markers of tool calls, without the one that ends it."""
    token_ids: list[int]
    """Ids as sampled, the end token included."""
    finish_reason: FinishReason
    """length, time: it was cut off, and goes on as if it had ended."""


class Talk:
    """An episode as its function sees it."""

    def __init__(self, playing: Playing, renderer: Renderer) -> None:
        self._playing, self._renderer = playing, renderer
        self._context: list[int] = []
        self._answered: list[int] = []
        self._saying = False
        self.rewards: list[float] = []
        """Rewards of the answers so far."""

    async def say(self, said: str | Message | Sequence[Message], tools: Sequence[Any] | None = None) -> Reply:
        """Give the student a turn; the first makes the prompt. A string is a user's message.

        `tools`: what the chat template is to show as tools, the same in every turn. One turn at a time.
        """
        messages: Any = [{"role": "user", "content": said}] if isinstance(said, str) else said
        messages = [messages] if isinstance(messages, Mapping) else messages
        with own_code("talk.say", f"turn {len(self.rewards)}", "say what the template takes"):
            ids = (
                self._renderer.added(self._answered, messages, tools)
                if self.rewards
                else self._renderer.prompt(messages, tools)
            )
            if not ids:
                raise DataError("it has no token: say something")
            if self._saying:
                raise DataError("the student has not answered the turn before: await each talk.say")
        self._saying = True
        token_ids, finish_reason = await self._playing.complete(self._context + ids)
        self._saying = False
        self._context, self._answered = [*self._context, *ids, *token_ids], token_ids
        self.rewards.append(0.0)
        return Reply(self._renderer.text(token_ids), token_ids, finish_reason)

    def reward(self, value: float) -> None:
        """Reward the newest answer: it counts for its tokens and those of turns before, not for later ones.
        The reward of the episode is what the function returns, and the sum of these."""
        self.rewards[-1] += _figure("talk.reward", value)


class PythonEnvironment:
    """Plays episodes with the function that `config.environment` names: a `host.Host`."""

    def __init__(self, name: str, config: EnvironmentConfig, renderer: Renderer) -> None:
        """Raises ConfigError for what is no async function, or takes other options."""
        field, where = f"environments.{name}", config.environment
        self.name = name
        self._function, self._options = load_function(where, f"{field}.environment"), config.options
        self._named, self._renderer = f"{field}.environment {where!r}", renderer
        self.tasks: int | None = getattr(self._function, "tasks", None)
        if not inspect.iscoroutinefunction(self._function):
            raise ConfigError(
                f"{self._named} is no async function: write `async def play(task, talk)`, and await talk.say"
            )
        try:
            inspect.signature(self._function).bind(0, None, **self._options)
        except TypeError as error:
            raise ConfigError(
                f"{self._named} cannot be called with a task, a talk and {field}.options ({error}): give it "
                "the options that it takes"
            ) from None

    def serving(self) -> AbstractAsyncContextManager[object]:
        return nullcontext()

    async def play(self, playing: Playing, task: int) -> EpisodeOver:
        talk = Talk(playing, self._renderer)
        with own_code(self._named, f"task {task}", _REMEDY):
            return _over(playing.id, await self._function(task, talk, **self._options), talk.rewards)


def _figure(name: str, value: Any) -> float:
    """A reward as a float. Raises DataError for one that is not finite, or too large."""
    number = float(value)
    if not abs(number) <= LARGEST_REWARD:
        raise DataError(f"{name} is {value!r:.40}: give a number within ±{LARGEST_REWARD:g}")
    return number


def _over(id: str, result: Any, turn_rewards: list[float]) -> EpisodeOver:
    figures = dict(result) if isinstance(result, Mapping) else {"reward": result}
    reward = figures.pop("reward", None)
    metrics = {str(name): float(value) for name, value in figures.items()}
    if reward is not None:
        reward = _figure("the reward", reward)
    rewards = turn_rewards if any(turn_rewards) else []
    total = (reward or 0.0) + sum(rewards) if rewards else reward
    return EpisodeOver(id=id, reward=total, turn_rewards=rewards, metrics=metrics)
