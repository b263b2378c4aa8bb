"""Held-out episodes, played with the replica that generates the other completions of an evaluation.

A lost episode begins again, until its environment has been gone for GONE_SECONDS. One that the environment
fails begins again too, `rollout.max_attempts` times; then it is kept with the error, and has no reward.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple

from distill.aio import cancel
from distill.config import RunConfig
from distill.environments.episode import Environment, EnvironmentLost, Episode, Limits, play
from distill.prompts.stream import Prompt
from sync.base.errors import DataError, DistillError, RemoteError, Unreachable
from sync.base.retry import Backoff
from sync.wire import Generated

log = logging.getLogger(__name__)
GONE_SECONDS: Final = 600.0
"""Within which an environment must be back, after a restart too."""
Generate = Callable[[Episode], Awaitable[Generated]]
"""The student's checked answer to a turn."""


class Played(NamedTuple):
    """An episode that has ended."""

    episode: Episode
    error: str | None = None
    """Why its environment failed it; None: it did not."""


class Playing:
    """Plays the held-out tasks of a run, at most `rollout.max_in_flight` at once."""

    def __init__(
        self, config: RunConfig, environments: Mapping[str, Environment], context: int, vocab_size: int
    ) -> None:
        """`context`: the longest sequence that student and teachers take."""
        self._environments, self._rollout, self._guard = environments, config.rollout, config.guard
        self._limits = {
            name: Limits.of(environment, config.rollout.max_tokens, context, vocab_size)
            for name, environment in config.environments.items()
        }

    async def run(self, prompts: Mapping[str, Prompt], generate: Generate) -> dict[str, Played]:
        """An episode for each prompt, by its id.

        Raises what `generate` raises, RemoteError when an environment stays away, DataError when one fails
        `guard.bad_answers` tasks in a row, or all.
        """
        gate = asyncio.Semaphore(self._rollout.max_in_flight)
        in_a_row, limit = 0, min(self._guard.bad_answers, len(prompts))

        async def one(id: str, prompt: Prompt) -> Played:
            nonlocal in_a_row
            async with gate:
                played = await self._played(id, prompt, generate)
            in_a_row = 0 if played.error is None else in_a_row + 1
            if played.error is not None and in_a_row >= limit:
                raise DataError(
                    f"{played.error}; the last of {in_a_row} tasks in a row: mend the environment"
                )
            return played

        tasks = {id: asyncio.create_task(one(id, prompt)) for id, prompt in prompts.items()}
        try:
            await asyncio.gather(*tasks.values())
        finally:
            await cancel(tasks.values())
        return {id: task.result() for id, task in tasks.items()}

    async def _played(self, id: str, prompt: Prompt, generate: Generate) -> Played:
        name, replica_failed, until = prompt.environment, False, time.monotonic() + GONE_SECONDS
        assert name is not None, "a prompt that is completed once is not played"

        async def answer(episode: Episode) -> Generated:
            nonlocal replica_failed, until
            until = time.monotonic() + GONE_SECONDS  # it has just spoken
            try:
                return await generate(episode)
            except DistillError:
                replica_failed = True
                raise

        backoff, failures = Backoff(0.5, 10.0), 0
        while True:
            episode = Episode(id)
            try:
                await play(self._environments[name], episode, prompt.task, answer, self._limits[name])
                return Played(episode)
            except DistillError as error:
                if replica_failed:
                    raise
                told = f"environment {name} failed task {prompt.task}: {error}"
                log.warning("%s", told)
                if not isinstance(error, Unreachable | EnvironmentLost):
                    failures += 1
                    if failures >= self._rollout.max_attempts:
                        return Played(episode, told)
                elif time.monotonic() > until:
                    raise RemoteError(
                        f"environment {name} was not up for {GONE_SECONDS:.0f} s: {error}"
                    ) from error
            await asyncio.sleep(backoff.next())
