"""`distill why`: the chain of waits of a run that stands still, for each of the reasons that it may have."""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from episodes import GuessEnvironment
from in_memory import MemoryEvaluator, MemoryReplica, MemoryTeacher, MemoryTrainer

from distill.aio import cancel
from distill.controller import Controller
from distill.interfaces import Hooks
from distill.prompts.sources import EnvironmentSource
from distill.prompts.stream import PromptStream
from distill.record.store import Store
from distill.waits import ROOT_SECONDS
from sync.base.errors import Overloaded, RemoteError
from sync.wire import (
    EVALUATION_ID,
    GenerateRequest,
    Heartbeat,
    TrainerHello,
    UpdateReply,
    UpdateRequest,
    Version,
)

pytestmark = pytest.mark.virtual_time
STEPS = {"steps": 10_000}
BATCH, ROOM = "trainer waits for batch.*", "← dispatcher waits for room: "


@asynccontextmanager
async def standing_still(
    run: Controller, trouble: Callable[[], object], trainer: MemoryTrainer | None = None
) -> AsyncIterator[list[str]]:
    """What `distill why` says 40 s after a trouble that begins after the fifth step."""
    trainer = trainer or MemoryTrainer(run.session, step_seconds=0.1)
    run.pool.poll_seconds = run.pool.retry_seconds = 0.5
    tasks = [asyncio.create_task(part) for part in (run.run(), trainer.run())]
    async with asyncio.timeout(1000):
        while run.record.state.reached is None or run.record.state.reached.step < 5:
            await run.events.changed.wait(0.1)
    trouble()
    await asyncio.sleep(40.0)
    yield run.why()
    await cancel(tasks)


def words(line: str) -> str:
    """A line without its seconds, which must be about 40."""
    for seconds in re.findall(r"(\d+) s\b", line):
        assert 35 <= int(seconds) <= 41, line
    return re.sub(r" \d+ s\b", "", line).strip()


def chain(lines: list[str]) -> list[str]:
    """The trainer's wait and those below it."""
    return [words(line) for line in lines[1:] if not line.startswith("beside it")]


class Stopped(MemoryTeacher):
    """A teacher whose process is stopped: it answers nothing."""

    stopped = False

    async def score(self, *arguments: Any, **more: Any) -> Any:
        if self.stopped:
            await asyncio.Event().wait()
        return await super().score(*arguments, **more)


async def test_a_stopped_teacher_which_after_long_is_started_again_and_people_are_told(
    controller, config
) -> None:
    teacher, stalled, alerts = Stopped(), list[str](), list[str]()
    hooks = Hooks(stalled=stalled.append, alert=lambda title, text: alerts.append(f"{title}: {text}"))
    run = controller(config(run=STEPS), hooks, teachers={"t": teacher})
    async with standing_still(run, lambda: setattr(teacher, "stopped", True)) as lines:
        first, *_, last = chain(lines)
        assert re.fullmatch(r"trainer waits for batch \d+: \d of 8 rollouts", first)
        assert last == "← scoring waits for teacher t: 4 rollouts (and 1 more)"
        await asyncio.sleep(ROOT_SECONDS - 60)
        assert not stalled
        await asyncio.sleep(40)
    assert stalled == ["teacher-t"]
    assert re.fullmatch(r"the run stands still: scoring waits 9\d\d s for teacher t: 4 rollouts", alerts[-1])


async def test_a_full_disk(controller, config, tmp_path: Path) -> None:
    run = controller(config(run=STEPS), store=Store(tmp_path, "never", retry_seconds=5.0))

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = run.record.store
    flush = store._flush
    async with standing_still(run, lambda: setattr(store, "_flush", full)) as lines:
        store._flush = flush  # type: ignore[method-assign]
        assert chain(lines)[-1].startswith(
            f"← record waits for disk space: the record in {tmp_path} does not fit"
        )
        assert run.timeline.figures()["waited_seconds"]["trainer"]["record"] > 0


class Troubled(MemoryReplica):
    """A replica with a trouble: it takes no requests, its completions do not end, or its updates."""

    trouble = ""

    async def generate(self, request: GenerateRequest) -> Any:
        held_out = any(prompt.id.startswith(EVALUATION_ID) for prompt in request.prompts)
        if self.trouble == "full":
            raise Overloaded("no place", 100.0)
        if self.trouble == "long" or (self.trouble == "long for evaluations" and held_out):
            await asyncio.Event().wait()
        async for answer in super().generate(request):
            yield answer

    async def update(self, request: UpdateRequest, timeout: float) -> UpdateReply:
        if self.trouble == "slow store":
            await asyncio.Event().wait()
        if self.trouble == "refuses":
            raise RemoteError("the disk of its mirror is full")
        return await super().update(request, timeout)


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        ("full", [ROOM + "r0 refused a request and is asked again soon"]),
        ("long", ["← generation waits for r0: 4 of 4 completions.*"]),
        ("refuses", [BATCH, ROOM + r"r0 refuses updates \(the disk of its mirror is full\)"]),
        ("slow store", [BATCH, ROOM + r"r0 is at L000-v\d+", r"← r0 waits for the store: it loads .*"]),
        (
            "long for evaluations",
            [
                BATCH,
                ROOM + "r0 is held",
                r"← r0 waits for evaluation: it is held at L000-v\d+",
                r"← evaluation waits for r0: completions of L000-v\d+",
                "← generation waits for r0: .*",
            ],
        ),
    ],
)
async def test_a_replica_in_trouble(controller, config, trouble: str, told: list[str]) -> None:
    """The last lines of the chain; from the trainer's own on, where that is named."""
    replica = Troubled()
    evaluator = MemoryEvaluator() if "evaluations" in trouble else None
    settings = config(run=STEPS, rollout={"stall_timeout_seconds": 600})
    run = controller(settings, replicas={"r0": replica}, evaluator=evaluator)
    async with standing_still(run, lambda: setattr(replica, "trouble", trouble)) as lines:
        found = chain(lines)
        assert told[0] != BATCH or len(found) == len(told)
        for line, expected in zip(found[-len(told) :], told, strict=True):
            assert re.fullmatch(expected, line)


async def test_a_trainer_in_its_checkpoint(controller, config) -> None:
    run = controller(config(run=STEPS))
    trainer = MemoryTrainer(run.session, step_seconds=0.1)

    def saves() -> None:
        trainer.step_seconds = 1000.0
        does = {"trainer": ("it saves the checkpoint of L000-v00000005", 0.0)}
        task = run.session.event(Heartbeat(version=Version(0, 0), rank=0, does=does))
        asyncio.get_running_loop().create_task(task)

    async with standing_still(run, saves, trainer) as lines:
        assert chain(lines) == [
            "trainer waits for nothing",
            "← trainer: it saves the checkpoint of L000-v00000005, for",
        ]


async def test_a_trainer_that_begins_is_not_said_to_have_ended(controller) -> None:
    run = controller()
    run.trainer_died()
    await run.session.hello(TrainerHello(world_size=1, checkpoint=None, fingerprint="model", run="test"))
    assert run.waits.why() == ["trainer waits for nothing"]


async def test_an_environment_that_sleeps(controller, config) -> None:
    environment = GuessEnvironment()
    settings = config(
        run=STEPS, environments={"guess": {"environment": "tests:guess"}}, rollout={"max_tokens": 2},
        evaluation={"every": 0},
    )  # fmt: skip
    run = controller(
        settings, environments={"guess": environment}, vocab_size=50,
        prompts=PromptStream(EnvironmentSource("guess", 0), seed=0),
        replicas={"r0": MemoryReplica(longest=2)},
    )  # fmt: skip
    async with standing_still(run, lambda: setattr(environment, "seconds", 1000.0)) as lines:
        last = chain(lines)[-1]
        assert re.fullmatch(r"← play waits for environment guess: episode \S+ \(and \d+ more\)", last)


async def test_all_replicas_gone(controller, config) -> None:
    replicas = {f"r{n}": MemoryReplica(seed=n, token_seconds=0.01) for n in range(2)}
    run = controller(config(run=STEPS), replicas=replicas)
    async with standing_still(run, lambda: [replica.die() for replica in replicas.values()]) as lines:
        first, room, process = chain(lines)
        assert first.startswith("trainer waits for batch")
        assert room == "← dispatcher waits for room: r0 is absent; r1 is absent"
        assert re.fullmatch(r"← r\d waits for the process at memory", process)


async def test_nothing_to_wait_for(controller, config) -> None:
    run = controller(config(run=STEPS))
    trainer = MemoryTrainer(run.session, step_seconds=1.0)
    async with standing_still(run, lambda: None, trainer) as lines:
        assert re.fullmatch(r"step 4\d of 10000, [01] s ago", lines[0])
        assert lines[1] == "trainer waits for nothing"
