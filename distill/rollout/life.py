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

One that is dropped breaks its group: members that are buffered go with it, others when they are screened or
admitted. What an episode said behind contexts that its environment rewrote has lives of its own, from the end
of the episode's on, and no row before it is admitted: a restart loses it. Its stage is what a rollout's
coroutine waits for; nothing else is kept of it but its row, of which it is pending until it is admitted or
dropped. A controller that starts again begins a life for every rollout that is pending.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from msgspec.structs import replace

from distill import waits
from distill.config import AtLimit
from distill.interfaces import Common
from distill.record.record import GROUP_BROKEN
from distill.record.rollout import Rollout
from distill.rollout.dispatcher import Dispatcher
from distill.rollout.ends import Dropped, Lost, Unneeded, Unusable
from distill.rollout.episodes import Episodes
from distill.rollout.validation import repetitive
from distill.scoring import Scoring, TeacherGeneration, TeacherQueue
from sync.base.errors import DistillError
from sync.wire import unpack


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
                reason, (rollout, *parts) = await self._completed(rollout)
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

    async def _completed(self, rollout: Rollout) -> tuple[str, list[Rollout]]:
        """Why the student's completion ended, and it; behind it those of an episode whose context was
        rewritten."""
        if rollout.source_prompt.environment:
            return await self.episodes.play(rollout)
        answer, _ = await self.dispatcher.complete(rollout)
        return answer.finish_reason, [rollout.completed(answer)]

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
