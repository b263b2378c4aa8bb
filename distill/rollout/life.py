"""The life of a rollout from its prompt to the buffer: one coroutine for each, read from top to bottom.

    issued ─▶ completed by a replica │ by a teacher │ turn by turn against its environment
           ─▶ within the limits ─▶ screened ─▶ rewarded ─▶ scored, by a teacher if there is one
           ─▶ admitted to the buffer

    Lost ─▶ requeued with its prompt: its next life begins if attempts are left and its group is whole
    Unusable ─▶ quarantined and dropped     Unneeded (an Unusable without fault) ─▶ dropped
    Dropped ─▶ nothing: it was, when a turn of it was requeued

    what it waits for                       what else may come of it
    a replica: room, then a completion      lost, busy, hanging, unusable, broken off ─▶ Lost
                                            refused ─▶ Unneeded; ended by a limit ─▶ Lost or Unusable
    an environment, between two turns       gone ─▶ begins again; fails ─▶ Unusable
                                            too old for every batch by now ─▶ Unneeded
    a reward worker                         its function fails ─▶ Unusable
    a teacher: its queue, then an answer    away ─▶ asked until it is back
                                            refused, or unusable max_attempts times ─▶ Unusable

An episode, a rollout whose completion takes several turns, is played by `Episodes`:

    begin ─▶ a replica completes the context ─▶ continue ─▶ … ─▶ over, or ended by a limit
                └──────── again, turn by turn ────────┘

The controller holds the tokens of every turn: an environment that is gone costs what is under way, which
begins again from its task. Nothing of an episode is on record before it is scored.

One that is dropped breaks its group: members that are buffered go with it, others when they are screened or
admitted. What an episode said behind contexts that its environment rewrote has lives of its own, from the end
of the episode's on, and no row before it is admitted: a restart loses it. Its stage is what a rollout's
coroutine waits for; nothing else is kept of it but its row, of which it is pending until it is admitted or
dropped. A controller that starts again begins a life for every rollout that is pending.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import accumulate
from typing import Final, Literal

from msgspec.structs import replace

from distill import waits
from distill.config import AtLimit
from distill.environments.episode import (
    Environment,
    EnvironmentAnswer,
    EnvironmentLost,
    Episode,
    FinishReason,
    play,
)
from distill.interfaces import Common
from distill.metrics.timeline import Timeline
from distill.record.record import GROUP_BROKEN
from distill.record.rollout import Rollout
from distill.rollout.dispatcher import Dispatcher
from distill.rollout.ends import Dropped, Lost, Unneeded, Unusable
from distill.rollout.replica_pool import Replica
from distill.rollout.validation import repetitive
from distill.scoring import Scoring, TeacherGeneration, TeacherQueue
from distill.waits import PLAY
from sync.base.errors import DistillError, Unreachable, WireError
from sync.base.retry import Backoff
from sync.wire import Array, Generated, unpack

logger = logging.getLogger(__name__)
PAUSE: Final = 5.0
"""Longest pause, in seconds, before an episode begins again after its environment was gone."""


class Lives:
    """Runs for the length of the run: with it the dispatcher, which says when prompts may be issued, and the
    queues before the teachers.

    The capacity rule bounds the lives: a rollout is issued where the dispatcher has room for it.
    """

    def __init__(self, common: Common, dispatcher: Dispatcher) -> None:
        config = common.config
        self._record, self.dispatcher, self._rewards = common.record, dispatcher, common.parts.rewards
        self._config, self._guard, self._taught = config.rollout, config.guard, bool(config.teachers)
        self._budget, self._events = common.budget, common.events
        self.generation = TeacherQueue(TeacherGeneration(common), common)
        self.scoring = TeacherQueue(Scoring(common), common)
        self.episodes = Episodes(common, dispatcher)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self._group:
            for rollout in list(self._record.state.pending.values()):
                self._begin(self._record.requeue(rollout, "controller_restarted"))
            for queue in (self.generation, self.scoring):
                self._group.create_task(queue.run())
            await self.dispatcher.run(lambda count: self._begin(*self._record.issue(count)))

    def _begin(self, *rollouts: Rollout | None) -> None:
        for rollout in rollouts:
            if rollout is not None:
                self._group.create_task(self.life(rollout))

    async def life(self, rollout: Rollout) -> None:
        """The whole life of a rollout. One that `continues` was completed in the life of its episode."""
        following: list[Rollout | None] = []
        try:
            if rollout.by_teacher:
                rollout = await self.generation.answer(rollout)
            elif not rollout.continues:
                if not rollout.source_prompt.environment:
                    answer, _ = await self.dispatcher.complete(rollout)
                    reason, parts = answer.finish_reason, [rollout.completed(answer)]
                else:
                    reason, parts = await self.episodes.play(rollout)
                rollout, *parts = parts
                self._check_limits(rollout, reason)
                following = [*parts] if self._record.state.rules.group == 1 else []
            self._screen(rollout)
            rollout = await self._rewarded(rollout)
            self._record.admit(await self.scoring.answer(rollout) if self._taught else rollout.ended())
        except Lost as lost:
            following = [self._record.requeue(rollout, lost.reason, lost.tokens)]
        except Unusable as end:
            if end.quarantined:
                self._record.reject(rollout, end.reason, end.detail)
            else:
                self._record.drop([rollout.id], end.reason, end.detail, end.tokens)
        except Dropped:
            pass
        self._begin(*following)
        self._events.changed.wake()

    # --- the steps ----------------------------------------------------------------------------------------

    def _check_limits(self, rollout: Rollout, finish_reason: str) -> None:
        """Raise Lost or Unusable for what was broken off, or ended by a limit whose policy is that."""
        policy: AtLimit = "keep"
        reason: Literal["straggler", "over_long"] = "over_long"
        count, limit = rollout.own_length, "rollout.max_tokens"
        if finish_reason == "abort":
            raise Lost("aborted", count)
        if finish_reason == "length":
            policy = self._config.on_max_tokens
        elif finish_reason == "time":
            policy, reason, limit = self._config.on_timeout, "straggler", "rollout.completion_timeout_seconds"
        if environment := rollout.source_prompt.environment:
            limit = f"a limit of environments.{environment}"
        if policy == "drop":
            raise Unusable(reason, f"ended after {count} tokens by {limit}")
        if policy == "requeue" or (count == 0 and finish_reason != "stop"):
            raise Lost(reason, count)

    def _screen(self, rollout: Rollout) -> None:
        """Raise Unusable for a completion, of student or teacher, that must not be trained on."""
        state = self._record.state
        if state.is_broken(rollout.id):
            raise Unneeded("group_broken", GROUP_BROKEN, rollout.own_length)
        if rollout.length == 0:
            raise Unusable("empty", "a completion without tokens")
        if problem := state.span_problem(rollout.spans):
            raise Unusable("impossible_version", problem)
        if problem := repetitive(rollout.tokens, self._guard.repeats):
            raise Unusable("repetitive", problem)

    async def _rewarded(self, rollout: Rollout) -> Rollout:
        """With the reward of the run's function, if it has one; an episode has its environment's."""
        if self._rewards is None or rollout.source_prompt.environment:
            return rollout
        function = "the reward_fn"
        try:
            with waits.on(waits.REWARD, "the reward workers", lambda: rollout.id):
                reward = await self._rewards.reward(rollout.source_prompt, unpack(rollout.tokens).tolist())
        except DistillError as error:
            self._budget.function_failed(function, rollout.id, error)
            raise Unusable("function_failed", str(error)) from error
        self._budget.good(function)
        return replace(rollout, reward=reward.value)


# --- episodes ---------------------------------------------------------------------------------------------


class Episodes:
    """Plays the episodes of a run; `play` at any time.

    The capacity rule bounds what is in it. An episode is left while its environment plays, when what the
    student said last stands behind a token that no batch takes any more: a slow one makes room.
    """

    def __init__(self, common: Common, dispatcher: Dispatcher) -> None:
        config, environments = common.config, common.parts.environments
        self._record, self._dispatcher, self._budget = common.record, dispatcher, common.budget
        self._environments = {name: _Patient(each, common.timeline) for name, each in environments.items()}
        self._limits, self._backoff = common.limits, {name: Backoff(0.5, PAUSE) for name in environments}
        self._under_way: dict[str, Episode] = {}
        self._last: dict[str, Replica] = {}  # episode → the replica of its newest turn
        self._max_attempts, self._rewarded = config.rollout.max_attempts, config.objective.task is not None

    def leave_too_old(self) -> None:
        """Leave the episodes that are too old by now and wait for their environment. After every batch."""
        is_too_old, now = self._record.state.is_too_old, asyncio.get_running_loop().time()
        for environment in self._environments.values():
            for id, patience in environment.patience.items():
                said = self._under_way[id].sequences[-1].spans  # what it says next stands behind it
                if any(is_too_old(span.version) for span in said) and not patience.expired():
                    patience.reschedule(now)

    async def play(self, rollout: Rollout) -> tuple[FinishReason, list[Rollout]]:
        """An episode, played to its end: how that came, its completion, with `own` and the reward, and
        completions of their own for what it said behind contexts that its environment rewrote.

        It begins again, up to `max_attempts` times, when its environment is gone.

        Raises Unusable when the environment fails, or gives no reward where `objective.task` is set; Unneeded
        when it is left or its replica refuses it, Dropped.
        """
        name, lost = rollout.source_prompt.environment, 0
        assert name is not None, "only episodes are played"
        while True:
            episode = self._under_way[rollout.id] = Episode(rollout.id)
            try:
                generate = partial(self._turn, rollout)
                task, environment = rollout.source_prompt.task, self._environments[name]
                await play(environment, episode, task, generate, self._limits[name])
                if self._rewarded and episode.ended == "over" and episode.reward is None:
                    raise WireError(
                        f"episode {rollout.id} is over without a reward, which objective.task learns from: "
                        "return a number"
                    )
            except _Left:
                hard = self._record.state.rules.bound.hard
                detail = f"older than {hard} versions while its environment was playing"
                raise Unneeded("too_old", detail, episode.own_length) from None
            except DistillError as error:
                gone = isinstance(error, Unreachable | EnvironmentLost)
                lost += gone
                if not gone or lost == self._max_attempts:
                    self._budget.function_failed(f"environment {name}", rollout.id, error)
                    raise Unusable("environment_failed", str(error)) from error
                logger.warning("episode %s begins again: %s", rollout.id, error)
                with waits.on(PLAY, f"environment {name}", lambda: f"episode {rollout.id} begins again"):
                    await asyncio.sleep(self._backoff[name].next())
                self._requeue(rollout, Lost("environment_lost"))
            else:
                self._budget.good(f"environment {name}")
                self._backoff[name].reset()
                return episode.finish_reason, _played(rollout, episode)
            finally:
                del self._under_way[rollout.id]
                self._last.pop(rollout.id, None)

    async def _turn(self, rollout: Rollout, episode: Episode) -> Generated:
        """What a replica says next, by the replica of the turn before if it serves, for its KV cache.

        A turn that is lost is sent again, and the episode goes on. Raises Dropped when it was lost too often.
        """
        prompt = replace(rollout.source_prompt, token_ids=episode.context)
        turns, routes_from = tuple(episode.sequences[0].own), episode.sequences[-1].routes_from
        turn = replace(rollout, issued=prompt, own=turns, routes_from=routes_from)
        while True:
            try:
                answer, replica = await self._dispatcher.complete(turn, self._last.get(rollout.id))
                self._last[rollout.id] = replica
                count = answer.token_ids.shape[0]
                if answer.finish_reason == "abort" or count == 0:
                    raise Lost("aborted", count)
                return answer
            except Lost as lost:
                first = self._record.state.pending[rollout.id].since if turns else None
                self._requeue(rollout, lost)
                if first is not None:
                    self._record.state.sent([rollout.id], first)

    def _requeue(self, rollout: Rollout, lost: Lost) -> None:
        if not self._record.requeue(rollout, lost.reason, lost.tokens):
            raise Dropped


def _played(rollout: Rollout, episode: Episode) -> list[Rollout]:
    """A completion for every context."""
    played, earned = list[Rollout](), [0.0, *accumulate(episode.turn_rewards)]
    for place, sequence in enumerate(episode.sequences):
        name = rollout.id if place == 0 else f"{rollout.id}+{place}"
        prompt = replace(rollout.source_prompt, id=name, token_ids=sequence.prompt)
        before, earned = earned[: len(sequence.own)], earned[len(sequence.own) :]
        part = replace(
            rollout,
            id=name,
            issued=prompt,
            own=tuple(sequence.own),
            reward=episode.reward,
            earned=tuple(before) if any(before) else (),
            continues=place > 0,
        )
        played.append(part.completed(sequence.completion(name, episode.finish_reason)))
    return played


class _Left(Exception):
    """An episode was left while its environment played."""


class _Patient:
    """An environment whose calls under way are on the timeline, and are left when their patience ends."""

    def __init__(self, environment: Environment, timeline: Timeline) -> None:
        self.name, self._environment, self._timeline = environment.name, environment, timeline
        self.patience: dict[str, asyncio.Timeout] = {}  # with the episodes that it plays now

    @asynccontextmanager
    async def _playing(self, id: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(None) as self.patience[id]:
                self._note()
                with waits.on(PLAY, f"environment {self.name}", lambda: f"episode {id}"):
                    yield
        except TimeoutError:
            raise _Left from None
        finally:
            del self.patience[id]
            self._note()

    def _note(self) -> None:
        self._timeline.level(f"environment {self.name}", "play", len(self.patience))

    async def begin(self, id: str, task: int) -> EnvironmentAnswer:
        async with self._playing(id):
            return await self._environment.begin(id, task)

    async def proceed(
        self, id: str, turn: int, token_ids: Array, finish_reason: FinishReason
    ) -> EnvironmentAnswer:
        async with self._playing(id):
            return await self._environment.proceed(id, turn, token_ids, finish_reason)

    async def end(self, id: str) -> None:
        await self._environment.end(id)
