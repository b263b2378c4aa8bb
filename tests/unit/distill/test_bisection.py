"""Batches that trainers die on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from audited import check
from in_memory import MemoryPrompts, MemoryTrainer, rows_in

from distill.aio import cancel
from distill.controller import Controller
from distill.interfaces import Hooks
from distill.metrics.samples import Quarantine
from distill.prompts.stream import PromptStream
from sync.wire import BatchRequest, Stop, TrainBatch, Version


class Died(Exception):
    """The trainer's process is gone."""


class Dying(MemoryTrainer):
    """Dies whenever its batch holds one of `bad`, before the step is made."""

    bad: frozenset[str] = frozenset()
    by_chance = 0
    """Deaths at step 2 that are no rollout's fault."""
    deaths: int = 0

    async def _step(self, version: Version, shares: list[TrainBatch]) -> Version:
        bad = self.bad & {id for rows in rows_in(shares) for id in rows.ids}
        if bad or (version.step == 2 and self.deaths < self.by_chance):
            self.deaths += 1
            raise Died
        return await super()._step(version, shares)


async def until_done(run: Controller, trainer: Dying, deaths: int = 100) -> dict[str, Any] | None:
    """The trainer is started again after each death; None: it died `deaths` times, and the controller too."""
    running = asyncio.create_task(run.run())
    try:
        async with asyncio.timeout(600):
            while trainer.deaths < deaths:
                with suppress(Died):
                    assert isinstance(await trainer.run(), Stop)
                    return await running
            return None
    finally:
        await cancel([running])


async def sound(run: Controller, trainer: Dying) -> dict[str, Any]:
    """The summary of a run that the audit finds nothing wrong with."""
    summary = await until_done(run, trainer)
    assert summary is not None
    report = check(run.record.store.folder, trainer.ledger)
    assert report.ok, report.violations
    return summary


@pytest.fixture
def build(controller, config) -> Callable[..., Controller]:
    settings = config(run={"steps": 16}, buffer={"max_staleness": 8}, evaluation={"every": 0})
    return lambda **more: controller(settings, **more)


@pytest.mark.parametrize(
    ("bad", "most"),
    [
        ({"0:13:0"}, 6),  # two deaths, then at most one for each halving of a batch of 8, the last one alone
        ({"0:0:0", "0:7:0"}, 10),
    ],
)
async def test_what_a_trainer_dies_on_is_found_and_everything_else_is_trained_once(
    build, bad: set[str], most: int
) -> None:
    quarantine: list[Quarantine] = []
    run = build(hooks=Hooks(quarantined=quarantine.append))
    trainer = Dying(run.session, checkpoint_every=1)
    trainer.bad = frozenset(bad)
    summary = await sound(run, trainer)
    assert summary["completed"]
    assert {one.id for one in quarantine} == bad
    assert {one.reason for one in quarantine} == {"poisoned"}
    assert summary["rollout"]["dropped"]["poisoned"] == len(bad)
    assert trainer.deaths <= most
    trained = {*trainer.trained}
    assert len(trainer.trained) == len(trained)
    assert not bad & trained
    assert {f"0:{i}:0" for i in range(16)} - bad <= trained


@pytest.mark.parametrize("deaths", [1, 2, 3, 4])
async def test_a_controller_that_starts_again_goes_on_with_the_parts(build, deaths: int) -> None:
    first = build()
    trainer = Dying(first.session)
    trainer.bad = frozenset({"0:11:0"})
    assert await until_done(first, trainer, deaths) is None
    again = build()
    trainer.session = again.session
    summary = await sound(again, trainer)
    assert summary["rollout"]["dropped"]["poisoned"] == 1
    assert trainer.deaths <= 7  # the death that ended the first controller too is none of the batch's


@pytest.mark.parametrize(("deaths", "sizes"), [(1, [8] * 16), (2, [8, 8, 4, 4] + [8] * 12)])
async def test_deaths_that_are_nobodys_fault_cost_no_rollout(build, deaths: int, sizes: list[int]) -> None:
    """One alone leaves the batch as it is."""
    run = build()
    trainer = Dying(run.session, checkpoint_every=1)
    trainer.by_chance = deaths
    summary = await sound(run, trainer)
    assert summary["rollout"]["dropped"] == {}
    assert [len(ids) for steps in trainer.ledger.values() for ids in steps.values()] == sizes


async def test_the_next_part_is_formed_once_the_one_before_it_was_trained(build) -> None:
    """So that a death tells which part it was, though a trainer asks for its next batch while it trains."""
    ahead: list[int] = []

    class Prefetching(Dying):
        async def _step(self, version: Version, shares: list[TrainBatch]) -> Version:
            expected = Version(version.lineage, version.step + 1)
            asked = asyncio.create_task(self.session.batch(BatchRequest(expected, 0, 1)))
            await asyncio.wait({asked}, timeout=0.05)
            if parts := run.record.state.bisection.parts:
                ahead.append(len(parts))
                assert not asked.done()
                asked.cancel()
            return await super()._step(version, shares)

    run = build()
    trainer = Prefetching(run.session, checkpoint_every=1)
    trainer.bad = frozenset({"0:6:0"})
    summary = await sound(run, trainer)
    assert summary["rollout"]["dropped"]["poisoned"] == 1
    assert ahead


async def test_a_death_before_the_first_batch_is_none_of_a_batch(build) -> None:
    class Early(Dying):
        async def _batch(self, version: Version, rank: int) -> TrainBatch | Stop:
            if self.deaths < 4:
                self.deaths += 1
                raise Died
            return await super()._batch(version, rank)

    run = build()
    trainer = Early(run.session)
    await sound(run, trainer)
    assert {len(ids) for ids in trainer.ledger[4].values()} == {8}


async def test_groups_of_completions_are_tried_and_quarantined_whole(controller, config) -> None:
    sections = {"rollout": {"per_prompt": 4, "batch": 16}, "buffer": {"max_staleness": 8}}
    task = {"type": "sampled", "task": {"baseline": "group"}}
    settings = config(run={"steps": 12}, objective=task, **sections)
    prompts = PromptStream(MemoryPrompts(), seed=0, per_prompt=4)
    run = controller(settings, prompts=prompts, reward_fn=lambda prompt, tokens: 1.0)
    trainer = Dying(run.session, checkpoint_every=1)
    trainer.bad = frozenset({"0:2:1"})
    summary = await sound(run, trainer)
    assert summary["rollout"]["dropped"]["poisoned"] == 4
    assert all(len(ids) % 4 == 0 for steps in trainer.ledger.values() for ids in steps.values())
    assert not any(name.startswith("0:2:") for name in trainer.trained)
