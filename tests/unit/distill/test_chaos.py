"""Random deaths of everything in one process; the guarantees hold, and a program says so."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from audited import check
from in_memory import MemoryReplica, MemoryTeacher, MemoryTrainer
from recorded import rows_of

from distill.controller import Controller
from sync.wire import Version


class Chaos:
    """A run of `steps` whose parts are killed at random until it is done."""

    def __init__(self, build: Callable[..., Controller], config: object, seed: int, kills: int) -> None:
        self._build, self._config = build, config
        self._rng = random.Random(seed)
        self._kills = kills
        self.replicas = {name: MemoryReplica(seed=i, token_seconds=0.0005) for i, name in enumerate("ab")}
        self.teacher = MemoryTeacher()
        self._control()
        self.trainer = MemoryTrainer(self.controller.session, ranks=2, checkpoint_every=3, step_seconds=0.002)
        self._train()

    def _control(self) -> None:
        self.controller = self._build(self._config, replicas=self.replicas, teachers={"t": self.teacher})
        self.controller.pool._retry_seconds = 0.02
        self._running = asyncio.create_task(self.controller.run())

    def _train(self) -> None:
        self.trainer.session = self.controller.session
        self._training = asyncio.create_task(self.trainer.run())

    async def _end(self, task: asyncio.Task) -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _kill_trainer(self) -> None:
        await self._end(self._training)
        self._train()

    async def _kill_controller(self) -> None:
        await self._end(self._training)
        await self._end(self._running)
        self._control()
        self._train()

    async def _kill_replica(self) -> None:
        replica = self._rng.choice(list(self.replicas.values()))
        replica.die()
        await asyncio.sleep(0.01)
        replica.revive()

    async def _kill_teacher(self) -> None:
        self.teacher.up = False
        await asyncio.sleep(0.005)
        self.teacher.up = True

    async def run(self) -> dict:
        kills = [self._kill_trainer, self._kill_controller, self._kill_replica, self._kill_teacher]
        for _ in range(self._kills):
            await asyncio.sleep(self._rng.uniform(0.0, 0.04))
            if self._training.done():
                break
            await self._rng.choice(kills)()
        async with asyncio.timeout(120):
            await self._training
            return await self._running


@pytest.mark.parametrize("seed", range(5))
async def test_random_kills_cost_nothing(controller, config, tmp_path: Path, seed: int) -> None:
    settings = config(run={"steps": 15})
    chaos = Chaos(controller, settings, seed, kills=10)
    summary = await chaos.run()
    assert summary["completed"]
    report = check(tmp_path, chaos.trainer.ledger)
    assert report.ok, report
    state = chaos.controller.record.state
    members = rows_of(tmp_path, "SELECT lineage, step, count(*) FROM member GROUP BY 1, 2")
    sizes = {Version(*version): count for *version, count in members}
    way = [sizes[Version(state.lineages.owner(state.lineage, step), step)] for step in range(15)]
    assert report.trained == sum(way)
    in_parts = rows_of(tmp_path, "SELECT max(is_part) FROM batch") == [1]
    assert in_parts or way == [8] * 15  # two kills in a row may meet the same batch
    assert report.oldest <= 2
