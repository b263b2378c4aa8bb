"""Replicas that refuse, hang, slow down, die or are held: the bound holds, and the others go on at once."""

from __future__ import annotations

import asyncio
import random
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from in_memory import MemoryReplica, MemoryTrainer

from distill.aio import cancel
from distill.controller import Controller
from distill.record.store import Store
from sync.base.errors import DistillError, RemoteError
from sync.wire import Generated, GeneratePrompt, GenerateRequest, UpdateReply, UpdateRequest

pytestmark = pytest.mark.virtual_time
TROUBLE, PAUSE = (3.0, 12.0), 1.5
"""Seconds that a trouble lasts, and the most between two steps: a sound replica needs 0.3 for a batch."""
KINDS = ("slow", "dead", "refusing", "hung", "held")


class Troubled(MemoryReplica):
    """A replica with a trouble of the kind `is_`; "well": none, "long": its completions do not end."""

    is_ = "well"

    async def pass_time(self, seconds: float = 0.0) -> None:
        while self.is_ == "hung":
            await super().pass_time(0.05)
        await super().pass_time(seconds * (20 if self.is_ == "slow" else 1))

    async def _complete(self, prompt: GeneratePrompt, request: GenerateRequest) -> Generated:
        completion = await super()._complete(prompt, request)
        while self.is_ == "long":
            await super().pass_time(0.05)
        return completion

    async def update(self, request: UpdateRequest, timeout: float) -> UpdateReply:
        await self.pass_time(0.02)
        if self.is_ == "refusing":
            raise RemoteError("the disk of its mirror is full")
        return await super().update(request, timeout)


async def trouble(run: Controller, name: str, engine: Troubled, kinds: tuple[str, ...], seed: str) -> None:
    """One trouble after the other, until cancelled."""
    chance = random.Random(seed)
    while True:
        await asyncio.sleep(chance.uniform(0.5, 2.0))
        engine.is_, seconds = chance.choice(kinds), chance.uniform(*TROUBLE)
        if engine.is_ == "dead":
            engine.die()
        if engine.is_ == "held" and (target := run.record.state.target):
            try:
                async with run.pool.hold(target.version, 0.0):
                    await asyncio.sleep(seconds)
            except DistillError:
                continue
        else:
            await asyncio.sleep(seconds)
        if engine.is_ == "dead":
            engine.revive()
        engine.is_ = "well"


async def steps_amid(
    run: Controller, kinds: tuple[str, ...], seed: int
) -> tuple[list[float], dict[str, Any]]:
    """Times of the steps, and the run's summary; all replicas but the first are in trouble."""
    trainer, times = MemoryTrainer(run.session, step_seconds=0.02), list[float]()
    run.pool.poll_seconds = run.pool.retry_seconds = 0.1
    running, training = asyncio.create_task(run.run()), asyncio.create_task(trainer.run())
    others = [
        asyncio.create_task(trouble(run, name, replica.engine, kinds, f"{seed} {name}"))  # type: ignore[arg-type]
        for name, replica in list(run.pool.replicas.items())[1:]
    ]
    while not training.done():
        async with asyncio.timeout(100):
            stepped = asyncio.create_task(trainer.stepped.wait())
            await asyncio.wait({training, stepped}, return_when=asyncio.FIRST_COMPLETED)
        stepped.cancel()
        times.append(time.monotonic())
    await cancel(others)
    for replica in run.pool.replicas.values():
        replica.engine.is_, replica.engine.up = "well", True  # type: ignore[attr-defined]
    summary = await running
    assert len(trainer.trained) == len({*trainer.trained}) == 8 * summary["steps"]
    return times[:-1], summary


@pytest.mark.parametrize("kinds", [("refusing",), ("hung",), ("held",), KINDS])
@pytest.mark.parametrize("seed", range(4))
async def test_the_bound_holds_and_steps_go_on_whatever_becomes_of_the_other_replicas(
    controller, config, kinds: tuple[str, ...], seed: int
) -> None:
    replicas = {f"r{n}": Troubled(seed=n, token_seconds=0.01) for n in range(3)}
    limit = 1 + seed
    settings = config(
        run={"steps": 100}, buffer={"max_staleness": limit, "depth": ("full", "adaptive")[seed % 2]},
        rollout={"stall_timeout_seconds": 600},
    )  # fmt: skip
    run = controller(settings, replicas=replicas)
    times, summary = await steps_amid(run, kinds, seed)
    assert summary["steps"] == 100
    assert summary["buffer"]["age_max"] <= limit
    assert max(after - before for before, after in pairwise(times)) < PAUSE


async def seconds_of(run: Controller, steps: int, troubled: str = "", is_: str = "") -> float:
    """Time that a run's steps take from the fifth on, when this replica gets a trouble."""
    trainer, times = MemoryTrainer(run.session, step_seconds=0.01), list[float]()
    run.pool.poll_seconds = run.pool.retry_seconds = 0.1
    tasks = [asyncio.create_task(part) for part in (run.run(), trainer.run())]
    async with asyncio.timeout(1000):
        while len(times) < steps:
            await trainer.stepped.wait()
            times.append(time.monotonic())
            if troubled and len(times) == 5:
                run.pool.replicas[troubled].engine.is_ = is_  # type: ignore[attr-defined]
    await cancel(tasks)
    return times[-1] - times[4]


async def test_steps_go_on_at_half_the_pace_beside_a_replica_that_refuses_every_update(
    controller, config, tmp_path: Path
) -> None:
    settings = config(
        run={"steps": 1000}, buffer={"max_staleness": 1}, weights={"timeout_seconds": 600},
        rollout={"request_size": 1, "max_in_flight": 2},
    )  # fmt: skip
    seconds = []
    for kind in ("well", "refusing"):
        replicas = {f"r{n}": Troubled(seed=n, token_seconds=0.05) for n in range(2)}
        run = controller(settings, replicas=replicas, store=Store(tmp_path / kind, "never"))
        seconds.append(await seconds_of(run, 60, "r1", kind))
    assert 1.7 < seconds[1] / seconds[0] < 2.3


async def test_steps_go_on_beside_an_evaluation_that_holds_long_completions(controller, config) -> None:
    replicas = {f"r{n}": Troubled(seed=n, token_seconds=0.05) for n in range(2)}
    run = controller(config(run={"steps": 1000}, buffer={"max_staleness": 1}), replicas=replicas)
    in_flight = list[int]()

    async def evaluation() -> None:
        while run.session.requested < 4 or min(r.in_flight for r in run.pool.replicas.values()) < 4:
            await run.events.changed.wait(0.01)
        for replica in replicas.values():
            replica.is_ = "long"
        async with run.pool.hold(run.record.state.target.version, 10.0) as held:
            for name in replicas.keys() - {held.name}:
                replicas[name].is_ = "well"
            for _ in range(50):
                await asyncio.sleep(0.1)
                in_flight.append(held.in_flight)
            await asyncio.sleep(1e6)

    task = asyncio.create_task(evaluation())
    seconds = await seconds_of(run, 60)
    assert not task.done()
    assert len(in_flight) == 50
    assert min(in_flight) >= 4
    assert 5 < seconds < 60
    await cancel([task])
