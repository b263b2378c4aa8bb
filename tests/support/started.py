"""A record and a controller that go on from a store's folder, what stages share, and whole runs in memory."""

from __future__ import annotations

import asyncio
from typing import Any

from in_memory import MemoryTrainer

from distill.aio import cancel
from distill.buffer import Rules
from distill.config import RunConfig
from distill.controller import Controller
from distill.events import ErrorBudget, Events
from distill.interfaces import Common, Components, Hooks
from distill.metrics.timeline import Timeline
from distill.prompts.stream import PromptStream
from distill.record.record import Record
from distill.record.resume import Start, resume
from distill.record.store import Store
from sync.wire import Sampling, Want


def begun(store: Store, prompts: PromptStream, rules: Rules, seed: int = 0) -> Record:
    return Record(store, prompts, resume(store.folder, Start("r", seed, rules, prompts), store.connection))


def controlled(
    config: RunConfig, parts: Components, hooks: Hooks = Hooks(), token: str | None = None
) -> Controller:
    start = Start.of(config, parts.prompts)
    goes_on = resume(parts.store.folder, start, parts.store.connection)
    return Controller(config, parts, goes_on, hooks, token)


def common_of(
    config: RunConfig,
    record: Any,
    sampling: Sampling = Sampling(max_tokens=8),
    want: Want = Want(),
    bad_answers: int = 1 << 30,
    **parts: Any,
) -> Common:
    """What the stages of a run share, for a test of some of them."""
    needed = {"replicas": {}, "teachers": {}, "route": lambda source: "t", "prompts": None, "store": None}
    components, events = Components(**{**needed, "want": want, **parts}), Events()
    return Common(config, components, record, sampling, Timeline(), ErrorBudget(bad_answers, events), events)


async def ended(run: Controller, **trainer: Any) -> tuple[dict[str, Any], MemoryTrainer]:
    """The summary of a whole run, and its trainer."""
    made = MemoryTrainer(run.session, **trainer)
    return await to_the_end(run, made), made


async def to_the_end(run: Controller, trainer: MemoryTrainer | None = None) -> dict[str, Any]:
    """The summary of a whole run; the first error of either side is raised."""
    trainer = trainer or MemoryTrainer(run.session)
    tasks = [asyncio.create_task(run.run()), asyncio.create_task(trainer.run())]
    try:
        async with asyncio.timeout(10_000):
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            summary: Any = tasks[0].result()
            return dict(summary)
    finally:
        await cancel(tasks)


async def killed_after(steps: int, run: Controller, trainer: MemoryTrainer) -> None:
    """Both are killed once the trainer has made so many."""
    tasks = [asyncio.create_task(run.run()), asyncio.create_task(trainer.run())]
    async with asyncio.timeout(600):
        await trainer.reached(steps)
    await cancel(tasks)
