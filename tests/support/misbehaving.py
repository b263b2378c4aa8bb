"""A verifiers taskset whose tasks are named by what goes wrong in them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["MisbehavingEnvironment", "MisbehavingTaskset"]

TASKS = ("raises first", "raises later", "hangs first", "hangs later", "never asks", "rewrites", "behaves")


class MisbehavingData(vf.TaskData):
    wrong: str


class MisbehavingTask(vf.Task[MisbehavingData, vf.State, vf.TaskConfig]):
    pass


class MisbehavingTaskset(vf.Taskset[MisbehavingTask, vf.TasksetConfig]):
    def load(self) -> Iterator[MisbehavingTask]:
        for wrong in TASKS:
            data = MisbehavingData(prompt="?", system_prompt="higher", wrong=wrong)
            yield MisbehavingTask(data, self.config.task)


class MisbehavingConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class MisbehavingEnvironment(vf.Env[MisbehavingConfig]):
    async def run(self, task: MisbehavingTask, agents: vf.Agents) -> None:
        def go_wrong(how: str) -> bool:
            if task.data.wrong == f"raises {how}":
                raise KeyError("broken on purpose")
            return task.data.wrong == f"hangs {how}"

        async with agents.player.interaction(task) as talk:
            if go_wrong("first"):
                await asyncio.sleep(3600)
            if task.data.wrong == "never asks":
                return
            await talk.turn()
            if go_wrong("later"):
                await asyncio.sleep(3600)
            await talk.turn("lower")
        if task.data.wrong == "rewrites":
            async with agents.player.interaction(task) as talk:
                await talk.turn()
        talk.trace.record_reward("half", 0.5)
        talk.trace.record_reward("weighted", 1.0, 0.25)
        talk.trace.record_metric("length", 7.0)
