"""Rewards of completions, before they are scored."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from distill.events import CompletionRewarded, ErrorBudget, Events
from distill.interfaces import Rewards
from distill.record.rollout import Rollout
from sync.base.errors import DistillError
from sync.wire import unpack


class Rewarding:
    """Completed rollouts in, CompletionRewarded out. `run()` for the whole length of the run; `put` any time.

    The capacity rule bounds what is in it. A rollout whose reward function fails is rejected.
    """

    def __init__(self, rewards: Rewards | None, budget: ErrorBudget, events: Events) -> None:
        """`rewards` None: rollouts pass as they are. Those of an environment always do."""
        self._rewards, self._budget, self._events = rewards, budget, events
        self._waiting: asyncio.Queue[Rollout] = asyncio.Queue()

    def put(self, rollout: Rollout) -> None:
        if self._rewards is None or rollout.source_prompt.environment:
            self._events.emit(CompletionRewarded(rollout))
        else:
            self._waiting.put_nowait(rollout)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._reward(await self._waiting.get()))

    async def _reward(self, rollout: Rollout) -> None:
        assert self._rewards is not None, "put passes the rollout on"
        try:
            reward = await self._rewards.reward(rollout.source_prompt, unpack(rollout.tokens).tolist())
        except DistillError as error:
            self._budget.function_failed("the reward_fn", rollout, error)
            return
        self._budget.good("the reward_fn")
        self._events.emit(CompletionRewarded(replace(rollout, reward=reward.value)))
