"""The record where machines share no memory: locked by its controller, who gives readers copies."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from in_memory import MemoryTrainer
from random_history import opened

from distill.record.reader import ask
from distill.record.store import RECORD, Store, open_read_only
from sync.base.address import CONTROLLER_FILE, TOKEN_FILE
from sync.base.errors import ConfigError

COUNT = "SELECT count(*) FROM rollout"


ELSEWHERE = """
import sys
from pathlib import Path
from sync.base import mounts

mounts.MOUNTS = Path(sys.argv.pop(1))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """On what is mounted as NFS, by what `mounts` says, here and to processes of this test."""
    (tmp_path / "mounts").write_text(f"/dev/sda / ext4 rw 0 0\nserver:/runs {tmp_path}/nfs nfs4 rw 0 0\n")
    monkeypatch.setattr("sync.base.mounts.MOUNTS", tmp_path / "mounts")
    return tmp_path / "nfs"


async def told(folder: Path, code: str, *words: str) -> str:
    """What a process prints on standard output and error."""
    line = [sys.executable, "-c", ELSEWHERE + code, str(folder.parent / "mounts"), *words]
    output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(*line, **output, env=environment)
    return (await process.communicate())[0].decode()


async def distill(folder: Path, command: str, *words: str) -> str:
    return await told(folder, "from distill.cli.main import main; main()", command, str(folder), *words)


async def test_a_run_that_goes_on_gives_its_readers_copies(folder: Path, controller, config, caplog) -> None:
    run = controller(config(run={"steps": 100_000}), token="secret", store=Store(folder, "batch"))
    assert f"{folder} is on a network file system (nfs4 at {folder}): the record is locked" in caplog.text
    trainer = MemoryTrainer(run.session, ranks=2, step_seconds=0.01)
    tasks = [asyncio.create_task(run.run()), asyncio.create_task(trainer.run())]
    await trainer.reached(3)
    answer = await distill(folder, "sql", COUNT)
    assert re.search(r"locked by the run's controller, and no copy .*with controller\.url", answer, re.DOTALL)
    (folder / CONTROLLER_FILE).write_text(json.dumps({"url": run.url}))
    answer = await distill(folder, "sql", COUNT)
    assert re.search("/v1/record answered 401: .*bearer token", answer)
    (folder / TOKEN_FILE).write_text("secret\n")
    answer = await distill(folder, "sql", f"{COUNT} WHERE scored")
    assert int(answer.split()[-1]) >= 3 * 8
    assert "record_damaged" not in await distill(folder, "audit")
    run.request_stop("enough")
    await asyncio.gather(*tasks)
    steps = run.record.state.reached
    assert steps is not None
    assert ask(folder, "SELECT count(*) FROM step")[1] == [(steps.step,)]
    assert not folder.joinpath(f"{RECORD}-wal").exists()


LEFT = """
import asyncio, os
from random_history import opened

async def write():
    record = opened(Path(sys.argv[1]))
    for _ in range(40):
        record.issue(3)
        await record.store.commit()
    os._exit(0)

asyncio.run(write())
"""


def kept(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("run.db*")}


async def test_the_log_that_a_kill_left_is_read_and_stays(folder: Path) -> None:
    assert "Error" not in await told(folder, LEFT, str(folder))
    before = kept(folder)
    assert before.keys() == {RECORD, f"{RECORD}-wal"}
    with closing(open_read_only(folder / RECORD)) as tables:
        assert tables.execute(COUNT).fetchone() == (120,)
    assert kept(folder) == before


LOCK = """
import fcntl, sys

fcntl.lockf(open(sys.argv[1], "r+b"), fcntl.LOCK_EX | fcntl.LOCK_NB, 510, (1 << 30) + 2)
"""


async def test_no_controller_begins_between_the_copies_of_rows_and_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Error" not in await told(folder, LEFT, str(folder))
    copy, locked = shutil.copy, dict[str, bool]()

    def watched(source: Path, target: Path | str) -> None:
        taken = subprocess.run([sys.executable, "-c", LOCK, folder / RECORD], capture_output=True)
        locked[source.name] = b"BlockingIOError" in taken.stderr
        copy(source, target)

    monkeypatch.setattr(shutil, "copy", watched)
    open_read_only(folder / RECORD).close()
    assert locked[f"{RECORD}-wal"]


async def test_a_second_controller_is_refused_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.record.store.BUSY_SECONDS", 0.1)
    first = opened(folder)
    await first.store.commit()
    with pytest.raises(ConfigError, match=re.escape(f"{folder / RECORD} is locked by another process")):
        opened(folder)
    first.store.close()
