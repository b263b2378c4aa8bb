"""Environments of type "python": an async function of yours plays one episode.

    async def play(task: int, talk: Talk, **options) -> float | None

It talks to the student by `talk.say` and returns the reward, None for none, or a table with "reward" and
further figures. Every episode is a task of the service's event loop: a function that blocks (time.sleep, long
computations) stops all episodes, so await, or use asyncio.to_thread. What the same task says must be the same
again: take randomness from random.Random(task), not from the module.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from distill.environments.config import EnvironmentConfig
from distill.environments.episode import EnvironmentAnswer, FinishReason
from distill.environments.rendering import Message, Renderer
from sync.base.errors import ConfigError, DataError
from sync.base.own_code import load_function, own_code
from sync.wire import Array, EpisodeFailed, EpisodeOver, Turn, pack, unpack
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

    def __init__(self, id: str, renderer: Renderer) -> None:
        self._id, self._renderer = id, renderer
        self._turn = self._length = 0
        self._answered: list[int] = []
        self.rewards: list[float] = []
        """Rewards of the answers so far."""
        self._answers: asyncio.Queue[Reply] = asyncio.Queue()
        self.out: asyncio.Queue[EnvironmentAnswer] = asyncio.Queue()
        """For the service: turns, and how the episode ended."""

    async def say(self, said: str | Message | Sequence[Message], tools: Sequence[Any] | None = None) -> Reply:
        """Give the student a turn; the first makes the prompt. A string is a user's message.

        `tools`: what the chat template is to show as tools, the same in every turn. One turn at a time.
        """
        messages: Any = [{"role": "user", "content": said}] if isinstance(said, str) else said
        messages = [messages] if isinstance(messages, Mapping) else messages
        with own_code("talk.say", f"turn {self._turn}", "say what the template takes"):
            ids = (
                self._renderer.added(self._answered, messages, tools)
                if self._turn
                else self._renderer.prompt(messages, tools)
            )
        self.out.put_nowait(
            Turn(id=self._id, turn=self._turn, token_ids=pack(np.array(ids, "i4")), keep=self._length)
        )
        reply = await self._answers.get()
        self._turn, self._answered = self._turn + 1, reply.token_ids
        self.rewards.append(0.0)
        self._length += len(ids) + len(reply.token_ids)
        return reply

    def reward(self, value: float) -> None:
        """Reward the newest answer: it counts for its tokens and those of turns before, not for later ones.
        The reward of the episode is what the function returns, and the sum of these."""
        self.rewards[-1] += _figure("talk.reward", value)

    def answer(self, token_ids: list[int], finish_reason: FinishReason) -> None:
        """For the service: what the student answered to the last turn."""
        self._answers.put_nowait(Reply(self._renderer.text(token_ids), token_ids, finish_reason))


class PythonEnvironment:
    """Plays episodes with the function that `config.environment` names. See `episode.Environment`."""

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
        self._episodes: dict[str, tuple[Talk, asyncio.Task[None]]] = {}

    async def __aenter__(self) -> PythonEnvironment:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end([*self._episodes])

    async def begin(self, id: str, task: int) -> EnvironmentAnswer:
        talk = Talk(id, self._renderer)
        self._episodes[id] = talk, asyncio.create_task(self._play(id, task, talk), name=f"episode {id}")
        return await self._next(id, talk)

    async def proceed(
        self, id: str, turn: int, token_ids: Array, finish_reason: FinishReason
    ) -> EnvironmentAnswer:
        talk, _ = self._episodes[id]
        talk.answer(unpack(token_ids).tolist(), finish_reason)
        return await self._next(id, talk)

    async def end(self, ids: list[str]) -> None:
        """Cancel these, those that are under way."""
        tasks = [self._episodes.pop(id)[1] for id in ids if id in self._episodes]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)  # one may ignore it

    async def _next(self, id: str, talk: Talk) -> EnvironmentAnswer:
        said = await talk.out.get()
        if not isinstance(said, Turn):
            self._episodes.pop(id, None)
        return said

    async def _play(self, id: str, task: int, talk: Talk) -> None:
        try:
            with own_code(self._named, f"task {task}", _REMEDY):
                result = await self._function(task, talk, **self._options)
                talk.out.put_nowait(_over(id, result, talk.rewards))
        except DataError as error:
            talk.out.put_nowait(EpisodeFailed(id=id, error=str(error)))


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
    if not any(turn_rewards):
        return EpisodeOver(id=id, reward=reward, metrics=metrics)
    total = (reward or 0.0) + sum(turn_rewards)
    return EpisodeOver(id=id, reward=total, turn_rewards=turn_rewards, metrics=metrics)
