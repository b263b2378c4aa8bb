"""`distill why` of runs that answer, that do not, and that have ended: real sockets and locks."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from in_memory import MemoryTrainer
from typer.testing import CliRunner

from distill.aio import cancel
from distill.cli.main import app
from distill.cli.why import lines
from sync.base.address import CONTROLLER_FILE, TOKEN_FILE
from sync.base.errors import ConfigError, RemoteError
from sync.wire import TrainerHello
from teacher_service.client import TeacherClient

NONE = "trainer waits for nothing: none has begun"
TOKEN = "a-token-that-only-the-run-and-its-people-know"


def made(folder: Path, url: str = "http://127.0.0.1:1") -> Path:
    """A run's folder; nobody holds its lock."""
    (folder / "config.json").write_text("{}")
    (folder / "lock").write_text("4711\n")
    (folder / CONTROLLER_FILE).write_text(json.dumps({"url": url}))
    return folder


async def test_a_live_run_says_what_its_trainer_waits_for_to_whoever_has_its_token(
    controller, config, tmp_path: Path
) -> None:
    run = controller(config(controller={"port": 0}), token=TOKEN, replicas={})
    folder, task = made(tmp_path, run.url), asyncio.create_task(run.run())
    with pytest.raises(RemoteError, match="401"):
        await asyncio.to_thread(lines, folder)
    (folder / TOKEN_FILE).write_text(TOKEN)
    assert (await asyncio.to_thread(lines, folder))[:2] == ["no step yet", NONE]
    await run.session.hello(TrainerHello(1, None, "m", "test"))
    run.session.requested = 0
    run.session.wake()
    async with asyncio.timeout(60):
        while len(run.why()) < 3:
            await run.events.changed.wait(0.01)
    shown = await asyncio.to_thread(CliRunner().invoke, app, ["why", str(folder)])
    await cancel([task])
    _, trainer, root = shown.output.splitlines()
    assert re.fullmatch(r"trainer waits \d+ s for batch 0: 0 of 8 rollouts", trainer)
    assert re.fullmatch(r"  ← dispatcher waits \d+ s for room: there is no replica", root)


SERVICE = """
import asyncio
import numpy as np
from served_teacher import serving
from table_engine import TableEngine

async def main():
    async with serving(TableEngine(np.full((50, 50), -np.log(50.0)))) as url:
        print(url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def teacher_process() -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A teacher's service in a process of its own, and its URL."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command, pipe = (sys.executable, "-c", SERVICE), asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, env=environment)
    try:
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        process.kill()
        await process.wait()


async def test_a_process_that_is_stopped_is_the_root_of_what_a_live_run_waits_for(
    controller, config, tmp_path: Path
) -> None:
    settings = config(run={"steps": 100_000}, controller={"port": 0})
    async with teacher_process() as (process, url), TeacherClient("t", [url]) as teacher:
        run = controller(settings, token=TOKEN, teachers={"t": teacher})
        folder = made(tmp_path, run.url)
        (folder / TOKEN_FILE).write_text(TOKEN)
        trainer = MemoryTrainer(run.session, step_seconds=0.01)
        tasks = [asyncio.create_task(part) for part in (run.run(), trainer.run())]
        while run.record.state.reached is None or run.record.state.reached.step < 3:
            await run.events.changed.wait(0.1)
        process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(60):
            while not any(re.match("  ← scoring waits [1-9]", line) for line in run.why()):
                await run.events.changed.wait(0.1)
        stopped = await asyncio.to_thread(lines, folder)
        process.send_signal(signal.SIGCONT)
        step = run.record.state.reached.step
        while run.record.state.reached.step == step:
            await run.events.changed.wait(0.1)
        await cancel(tasks)
    _, waiting, root, *_ = stopped
    assert re.fullmatch(rf"trainer waits \d+ s for batch {step}: \d of 8 rollouts", waiting)
    assert re.fullmatch(r"  ← scoring waits \d+ s for teacher t: \d+ rollouts( \(and \d more\))?", root)


def test_a_run_that_has_ended_says_how(tmp_path: Path) -> None:
    end = {"steps": 7, "error": None, "stop_reason": "all steps are done"}
    (made(tmp_path) / "summary.json").write_text(json.dumps(end))
    assert lines(tmp_path) == ["nothing: the run has ended at step 7: all steps are done"]
    (tmp_path / "summary.json").write_text(json.dumps(end | {"error": "a teacher is lost"}))
    assert lines(tmp_path) == ["nothing: the run has ended at step 7: a teacher is lost"]


def test_a_run_that_was_killed_is_not_taken_for_a_live_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("distill.cli.why.SECONDS", 0.1)
    assert lines(made(tmp_path)) == [
        "nothing: the run has ended: its process is gone and wrote no summary, as after a kill: "
        "go on with --resume"
    ]


def test_a_live_run_that_does_not_answer_is_an_error_with_its_process(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("distill.cli.why.SECONDS", 0.1)
    with (made(tmp_path) / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RemoteError, match=r"process 4711 has the run .* does not answer"):
            lines(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        lines(tmp_path)
