"""The smallest verifiers taskset: no environment and no harness of its own, a reward function."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["OneTurnTaskset"]


class OneTurnTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 5)


class OneTurnTaskset(vf.Taskset[OneTurnTask, vf.TasksetConfig]):
    def load(self) -> Iterator[OneTurnTask]:
        for prompt in ("?", "??"):
            yield OneTurnTask(vf.TaskData(prompt=prompt), self.config.task)
