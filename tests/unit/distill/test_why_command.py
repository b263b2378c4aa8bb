"""`distill why` of runs that answer, that do not, and that have ended: real sockets and locks."""

from __future__ import annotations

import asyncio
import fcntl
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from distill.aio import cancel
from distill.cli.main import app
from distill.cli.why import lines
from sync.base.address import CONTROLLER_FILE, TOKEN_FILE
from sync.base.errors import ConfigError, RemoteError
from sync.wire import TrainerHello

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
    async with asyncio.timeout(600):
        while len(run.why()) < 3:
            await run.events.changed.wait(0.01)
    shown = await asyncio.to_thread(CliRunner().invoke, app, ["why", str(folder)])
    await cancel([task])
    _, trainer, root = shown.output.splitlines()
    assert re.fullmatch(r"trainer waits \d+ s for batch 0: 0 of 8 rollouts", trainer)
    assert re.fullmatch(r"  ← dispatcher waits \d+ s for room: there is no replica", root)


def test_a_run_that_has_ended_says_how(tmp_path: Path) -> None:
    end = {"steps": 7, "error": None, "stop_reason": "all steps are done"}
    (made(tmp_path) / "summary.json").write_text(json.dumps(end))
    assert lines(tmp_path) == ["nothing: the run has ended at step 7: all steps are done"]
    (tmp_path / "summary.json").write_text(json.dumps(end | {"error": "a teacher is lost"}))
    assert lines(tmp_path) == ["nothing: the run has ended at step 7: a teacher is lost"]


def test_a_live_run_that_does_not_answer_is_an_error_with_its_process_and_a_killed_one_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.cli.why.SECONDS", 0.1)
    with (made(tmp_path) / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RemoteError, match=r"process 4711 has the run .* does not answer"):
            lines(tmp_path)
    (told,) = lines(tmp_path)
    assert told.startswith("nothing: the run has ended: its process is gone and wrote no summary, as after a")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        lines(tmp_path)
