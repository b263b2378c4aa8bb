"""Episodes: rollouts whose completion takes several turns against an environment.

    EpisodeIssued ─▶ begin ─▶ TurnReady ─▶ TurnGenerated ─▶ continue ─▶ … ─▶ EpisodePlayed
                                └──────────── again, turn by turn ────────┘

The controller holds the tokens of every turn: an environment that is gone costs what is under way, which
begins again from its task. Nothing of an episode is on record before it is scored.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Final, NamedTuple

from msgspec.structs import replace

from distill.config import RunConfig
from distill.environments.episode import (
    Environment,
    EnvironmentAnswer,
    EnvironmentLost,
    Episode,
    FinishReason,
    Limits,
    play,
)
from distill.events import EpisodeLost, EpisodePlayed, EpisodeTooOld, ErrorBudget, Events, TurnReady
from distill.interfaces import Components
from distill.metrics.timeline import Timeline
from distill.record.rollout import Rollout
from sync.base.errors import DistillError, Unreachable, WireError
from sync.base.retry import Backoff
from sync.wire import Array, Generated, Version

logger = logging.getLogger(__name__)
PAUSE: Final = 5.0
"""Longest pause, in seconds, before an episode begins again after its environment was gone."""


class Episodes:
    """Runs for the length of the run; `put` at any time. Out: TurnReady, EpisodePlayed, EpisodeLost,
    EpisodeTooOld, and RolloutRejected for an episode whose environment fails, or gives no reward where
    `objective.task` is set.

    The capacity rule bounds what is in it. An episode is left while its environment plays, when what the
    student said last stands behind a token that no batch takes any more: a slow one makes room.
    """

    def __init__(
        self,
        parts: Components,
        config: RunConfig,
        is_too_old: Callable[[Version], bool],
        timeline: Timeline,
        budget: ErrorBudget,
        events: Events,
    ) -> None:
        """`is_too_old`: whether a token of this version keeps its rollout out of every batch."""
        self._environments = {
            name: _Timed(environment, timeline) for name, environment in parts.environments.items()
        }
        self._limits = {
            name: Limits.of(environment, config.rollout.max_tokens, parts.context, parts.vocab_size)
            for name, environment in config.environments.items()
        }
        self._backoff = {name: Backoff(0.5, PAUSE) for name in parts.environments}
        self._is_too_old, self._budget, self._events = is_too_old, budget, events
        self._plays: dict[str, _Play] = {}
        self._waiting: asyncio.Queue[Rollout] = asyncio.Queue()
        self._turns: dict[str, asyncio.Future[Generated]] = {}  # of the episodes at a replica
        self._lost: Counter[str] = Counter()  # episode → how often its environment was gone
        self._most_lost, self._rewarded = config.rollout.max_attempts, config.objective.task is not None

    def put(self, rollout: Rollout) -> None:
        self._waiting.put_nowait(rollout)

    def generated(self, answer: Generated) -> None:
        """Go on with the episode whose turn this is."""
        self._turns[answer.id].set_result(answer)

    def broken(self, id: str) -> None:
        """Leave an episode that was dropped."""
        self._plays.pop(id, None)
        self._turns[id].set_exception(_Dropped(f"episode {id} was dropped"))

    def leave_too_old(self) -> None:
        """Leave the episodes that are too old by now and wait for their environment. After every batch."""
        for id, under_way in list(self._plays.items()):
            behind = under_way.episode.sequences[-1].spans  # what it says next stands behind all of these
            if id not in self._turns and any(self._is_too_old(span.version) for span in behind):
                del self._plays[id]
                self._lost.pop(id, None)
                under_way.task.cancel()
                self._events.emit(EpisodeTooOld(under_way.rollout, under_way.episode.own_length))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                rollout = await self._waiting.get()
                episode = Episode(rollout.id)
                task = group.create_task(self._play(rollout, episode))
                self._plays[rollout.id] = _Play(task, rollout, episode)

    async def _play(self, rollout: Rollout, episode: Episode) -> None:
        prompt = rollout.source_prompt
        name = prompt.environment
        assert name is not None, "the dispatcher sends only episodes here"
        server = f"environment {name}"
        try:
            generate = partial(self._turn, rollout)
            try:
                await play(self._environments[name], episode, prompt.task, generate, self._limits[name])
                if self._rewarded and episode.ended == "over" and episode.reward is None:
                    raise WireError(
                        f"episode {rollout.id} is over without a reward, which objective.task needs: return "
                        "a number, or leave objective.task out"
                    )
            finally:
                self._plays.pop(rollout.id, None)
        except _Dropped:
            return
        except (Unreachable, EnvironmentLost) as error:
            self._lost[rollout.id] += 1
            if self._lost[rollout.id] == self._most_lost:
                del self._lost[rollout.id]
                self._budget.function_failed(server, rollout, error, "environment_failed")
                return
            logger.warning("episode %s begins again: %s", rollout.id, error)
            await asyncio.sleep(self._backoff[name].next())
            self._events.emit(EpisodeLost(rollout))
        except DistillError as error:
            self._lost.pop(rollout.id, None)
            self._budget.function_failed(server, rollout, error, "environment_failed")
        else:
            self._lost.pop(rollout.id, None)
            self._budget.good(server)
            self._backoff[name].reset()
            self._events.emit(_played(rollout, episode))

    async def _turn(self, rollout: Rollout, episode: Episode) -> Generated:
        prompt = replace(rollout.source_prompt, token_ids=episode.context)
        turn = self._turns[rollout.id] = asyncio.get_running_loop().create_future()
        turns, routes_from = tuple(episode.sequences[0].own), episode.sequences[-1].routes_from
        self._events.emit(TurnReady(replace(rollout, issued=prompt, own=turns, routes_from=routes_from)))
        try:
            return await turn
        finally:
            del self._turns[rollout.id]


def _played(rollout: Rollout, episode: Episode) -> EpisodePlayed:
    """An episode that a limit ended has reward 0."""
    reward = episode.reward if episode.ended == "over" else 0.0
    rollouts, answers = [], []
    earned = [0.0, *accumulate(episode.turn_rewards)]
    for place, sequence in enumerate(episode.sequences):
        name = rollout.id if place == 0 else f"{rollout.id}+{place}"
        prompt = replace(rollout.source_prompt, id=name, token_ids=sequence.prompt)
        before, earned = earned[: len(sequence.own)], earned[len(sequence.own) :]
        rollouts.append(
            replace(
                rollout,
                id=name,
                issued=prompt,
                own=tuple(sequence.own),
                reward=reward,
                earned=tuple(before) if any(before) else (),
                continues=place > 0,
            )
        )
        answers.append(sequence.completion(name, episode.finish_reason))
    more = [played.completed(answer) for played, answer in zip(rollouts[1:], answers[1:], strict=True)]
    return EpisodePlayed(rollouts[0], answers[0], more)


class _Play(NamedTuple):
    """An episode under way."""

    task: asyncio.Task[None]
    rollout: Rollout
    episode: Episode


class _Dropped(DistillError):
    """The dispatcher dropped the episode."""


class _Timed:
    """An environment whose calls under way are on the timeline."""

    def __init__(self, environment: Environment, timeline: Timeline) -> None:
        self.name, self._environment, self._timeline, self._open = environment.name, environment, timeline, 0

    def _note(self, change: int) -> None:
        self._open += change
        self._timeline.level(f"environment {self.name}", "play", self._open)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        self._note(1)
        try:
            yield
        finally:
            self._note(-1)

    async def begin(self, id: str, task: int) -> EnvironmentAnswer:
        with self._noted():
            return await self._environment.begin(id, task)

    async def proceed(
        self, id: str, turn: int, token_ids: Array, finish_reason: FinishReason
    ) -> EnvironmentAnswer:
        with self._noted():
            return await self._environment.proceed(id, turn, token_ids, finish_reason)

    async def end(self, ids: list[str]) -> None:
        await self._environment.end(ids)
