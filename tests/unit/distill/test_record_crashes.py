"""A record under kills, power cuts, damage, full disks, copies and network file systems."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from disks import PAGE, fill, free, mounted, power_cut
from in_memory import MemoryTrainer
from random_history import PLAIN, History, differences, lived, opened, seen
from recorded import rows_of
from waiting import until

from distill.record.audit import audit
from distill.record.load import load
from distill.record.reader import ask
from distill.record.store import RECORD, Store, last_at, open_read_only
from sync.base.address import CONTROLLER_FILE, TOKEN_FILE
from sync.base.errors import ConfigError, DataError

HEADER = "run.db-wal"
FULL = 2
"""How SQLite forces every transaction to disk."""
TRIALS = 300
COUNT = "SELECT count(*) FROM rollout"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
"""Of processes that import what this one can."""


def loaded(folder: Path) -> tuple[int, dict[str, Any]]:
    """Number of the last record, and the state, each of whose arrays is read once."""
    with closing(Store(folder, "never")) as store:
        state = load(store.connection, PLAIN, store.read)
        for location in state.where.values():
            store.read(location)
        return last_at(store.connection), seen(state)


# --- kills ------------------------------------------------------------------------------------------------

LIVING = """
import asyncio, sys
from pathlib import Path
from random_history import PLAIN, History

async def live():
    history = History(Path(sys.argv[1]), int(sys.argv[2]), PLAIN)
    while True:
        await history.event()
        await history.record.store.commit()
        print(history.record.store.at, flush=True)

asyncio.run(live())
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_kill_at_any_moment_costs_nothing_that_was_committed(tmp_path: Path, seed: int) -> None:
    rng, command = random.Random(seed), [sys.executable, "-c", LIVING, str(tmp_path), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT) as process:
        for _ in range(rng.randrange(5, 120)):
            committed = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        *_, committed = [committed, *map(int, process.stdout.read().splitlines()[:-1])]
    at, state = loaded(tmp_path)
    assert at >= committed
    counters = state["counters"]
    counted = "SELECT sum(NOT continues), count(scored), sum(status = 'dropped') FROM rollout"
    assert rows_of(tmp_path, counted) == [(counters.issued, counters.scored, counters.dropped.total())]
    assert "record_damaged" not in audit(tmp_path).violations


# --- two controllers --------------------------------------------------------------------------------------

WRITING = """
import asyncio, os, sys
from pathlib import Path
from random_history import opened

async def write():
    record = opened(Path(sys.argv[1]))
    print("open", flush=True)
    for _ in range(int(sys.stdin.readline())):
        record.issue(3)
        await record.store.commit()
        print(record.store.at, flush=True)
    os._exit(0)

asyncio.run(write())
"""


def writer(folder: Path) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-c", WRITING, str(folder)], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT)
    assert process.stdout.readline() == "open\n"
    return process


@pytest.mark.parametrize("at_once", [False, True])
def test_of_two_controllers_on_one_folder_the_one_that_writes_later_stops(
    tmp_path: Path, at_once: bool
) -> None:
    """Where the lock of the folder does not hold, as between machines of some file systems."""
    both = [writer(tmp_path), writer(tmp_path)]
    for process in both if at_once else ():
        process.stdin.write("200\n")
        process.stdin.flush()
    said = [process.communicate("" if at_once else "200\n", timeout=600) for process in both]
    if not at_once:
        assert [process.returncode for process in both] == [0, 1]
    (stopped,) = (pair for pair, process in zip(said, both, strict=True) if process.returncode)
    assert stopped[0] == ""
    assert f"DataError: another controller has written to {tmp_path / RECORD} since this" in stopped[1]
    assert loaded(tmp_path)[0] == 201
    assert "record_damaged" not in audit(tmp_path).violations


# --- power cuts -------------------------------------------------------------------------------------------


async def committing(
    store: Store, seed: int, log_pages: int, noted: Callable[[int, bool, dict[str, Any]], None]
) -> None:
    """Events without restarts, a commit behind each; the log is moved into run.db whenever it has so many
    pages (0: never). `noted` is told of every commit: its number, whether it was durable, the state."""
    store.connection.execute(f"PRAGMA wal_autocheckpoint = {log_pages}")
    history, commit = History(store.folder, seed, PLAIN, store), store.commit

    async def commits(*, durable: bool = False) -> None:
        at = store.at
        await commit(durable=durable)
        noted(at, durable, seen(history.state))

    async def nothing(*_: object) -> None:
        pass

    store.commit, store.free, history.restart = commits, nothing, nothing  # type: ignore[assignment, method-assign]
    for _ in range(250):
        await history.event()
        await store.commit()


@dataclass
class Moment:
    """The record's files at one moment."""

    sizes: dict[str, int]
    forced: dict[str, int]
    """How much of each was forced to disk."""
    promised: int
    """Number of the last record that a durable commit has answered for."""


@dataclass
class Watched:
    """Follows what a store asks of the disk. The log of rows only grows: nothing is moved into run.db."""

    folder: Path
    forced: dict[str, int] = field(default_factory=dict)
    promised: int = 0
    moments: list[Moment] = field(default_factory=list)
    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Number of the last record → what the state was when it was committed."""

    def sizes(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in (self.folder / HEADER, *self.arrays())}

    def arrays(self) -> list[Path]:
        return list((self.folder / "arrays").iterdir())

    def note(self) -> None:
        self.moments.append(Moment(self.sizes(), dict(self.forced), self.promised))

    def write(self, file: int, data: memoryview) -> int:
        half = os.write(file, data[: -(-len(data) // 2)])
        self.note()
        return half

    def fdatasync(self, file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        self.forced[path.name] = path.stat().st_size

    async def live(self, seed: int) -> None:
        """Events without restarts, a commit behind each."""
        store = Store(self.folder, "batch", 1500, write=self.write)
        self.forced[HEADER] = (self.folder / HEADER).stat().st_size
        self.states[0] = seen(load(store.connection, PLAIN, store.read))

        def noted(at: int, durable: bool, state: dict[str, Any]) -> None:
            self.states[at] = state
            self.promised = at if durable else self.promised
            if store.connection.execute("PRAGMA synchronous").fetchone() == (FULL,):
                self.forced[HEADER] = (self.folder / HEADER).stat().st_size
            self.note()

        await committing(store, seed, 0, noted)
        shutil.copytree(self.folder, self.folder.with_name("whole"))
        store.close()


def test_a_power_cut_costs_the_unsynced_tail_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is a state that was committed, not before the last durable commit, and all its arrays."""
    rng, beyond, torn = random.Random(1), 0, 0
    watched = Watched(tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", watched.fdatasync)
        asyncio.run(watched.live(3))
    whole = tmp_path / "whole"
    log = (whole / HEADER).read_bytes()
    arrays = {path.name: path.read_bytes() for path in (whole / "arrays").iterdir()}
    assert len({moment.promised for moment in watched.moments}) > 10
    for _ in range(TRIALS):
        moment, folder = rng.choice(watched.moments), tmp_path / "cut"
        (folder / "arrays").mkdir(parents=True)
        shutil.copy(whole / RECORD, folder)
        for name, size in moment.sizes.items():
            data = (log if name == HEADER else arrays[name])[:size]
            left = power_cut(data, moment.forced.get(name, 0), rng)
            torn += left != data
            (folder / ("arrays" if name != HEADER else "") / name).write_bytes(left)
        at, state = loaded(folder)
        assert at >= moment.promised
        assert not differences(watched.states[at], state)
        beyond += at > moment.promised
        shutil.rmtree(folder)
    assert torn > TRIALS / 10
    assert beyond


@dataclass
class Committed:
    """The files of rows after a commit."""

    rows: bytes
    log: bytes
    state: dict[str, Any]


async def move_rows(folder: Path, seed: int) -> list[Committed]:
    """Every commit of a life with a log of ten pages."""
    store, commits = Store(folder, "batch", 1500), list[Committed]()

    def noted(at: int, durable: bool, state: dict[str, Any]) -> None:
        commits.append(Committed((folder / RECORD).read_bytes(), (folder / HEADER).read_bytes(), state))

    await committing(store, seed, 10, noted)
    store.close()
    return commits


def mixed(old: bytes, new: bytes, rng: random.Random) -> bytes:
    """Page by page the old one, the new one or, where they differ, a torn or a blank one; any size."""
    pages, left = range(-(-max(len(old), len(new)) // PAGE)), bytearray()
    for first, second in ((old[n * PAGE :][:PAGE], new[n * PAGE :][:PAGE]) for n in pages):
        torn = (second[: PAGE // 2] + first[PAGE // 2 :]).ljust(PAGE, b"\0")
        left += rng.choice([first or second, second, torn, bytes(PAGE)]) if first != second else first
    return bytes(left[: rng.randint(min(len(old), len(new)), max(len(old), len(new)))])


def test_a_power_cut_while_rows_are_moved_out_of_the_log_costs_nothing(tmp_path: Path) -> None:
    """SQLite forces the log to disk before it writes run.db, run.db before it begins the log anew, and the
    head of a new log before what overwrites the old one. What is between two of these is on disk or not."""
    rng, moved, overwritten = random.Random(2), 0, 0
    commits = asyncio.run(move_rows(tmp_path / "run", 3))
    cut = tmp_path / "cut"
    shutil.copytree(tmp_path / "run" / "arrays", cut / "arrays")

    def left(rows: bytes, log: bytes) -> dict[str, Any]:
        (cut / f"{RECORD}-shm").unlink(missing_ok=True)
        (cut / RECORD).write_bytes(rows)
        (cut / HEADER).write_bytes(log)
        return loaded(cut)[1]

    for before, after in pairwise(commits):
        for _ in range(5 if before.rows != after.rows else 0):
            moved += 1
            assert not differences(after.state, left(mixed(before.rows, after.rows, rng), after.log))
        if before.log[:32] != after.log[:32]:
            overwritten += 1
            log = after.log[:32] + mixed(before.log, after.log, rng)[32:]
            state = left(after.rows, log)
            assert not differences(before.state, state) or not differences(after.state, state)
    assert moved > 100
    assert overwritten > 20


# --- damage -----------------------------------------------------------------------------------------------


def test_a_blank_page_is_refused_or_changes_nothing_that_a_restart_knows(tmp_path: Path) -> None:
    state, refused = seen(lived(tmp_path / "run", 5, PLAIN, 150).state), 0
    whole = (tmp_path / "run" / RECORD).read_bytes()
    pages = range(len(whole) // PAGE)
    for page in pages:
        path = tmp_path / "run" / RECORD
        path.write_bytes(whole[: page * PAGE] + bytes(PAGE) + whole[(page + 1) * PAGE :])
        try:
            _, left = loaded(tmp_path / "run")
        except DataError:
            refused += 1
        else:
            assert not differences(state, left) or "record_damaged" in audit(tmp_path / "run").violations
        for name in ("run.db-wal", "run.db-shm"):
            (tmp_path / "run" / name).unlink(missing_ok=True)
    assert refused > len(pages) / 3


# --- disks ------------------------------------------------------------------------------------------------


async def test_a_full_disk_pauses_the_record_and_nothing_is_torn(tmp_path: Path, caplog) -> None:
    with mounted(tmp_path / "disk", 600) as disk:
        record = opened(disk, store=Store(disk, "batch", 8000, retry_seconds=0.005))
        record.issue(5)
        await record.store.commit(durable=True)
        fill(disk)
        record.issue(400)
        commit = asyncio.create_task(record.store.commit(durable=True))
        await asyncio.to_thread(until, lambda: "disk full" in caplog.text)
        assert not commit.done()
        assert rows_of(disk, COUNT) == [5]
        free(disk)
        await commit
        before = seen(record.state)
        record.store.close()
        assert not differences(before, loaded(disk)[1])
    assert caplog.text.count("disk full") == 1
    assert "has space again" in caplog.text


async def test_another_error_of_the_disk_is_raised(tmp_path: Path) -> None:
    def broken(_: int, data: memoryview) -> int:
        raise OSError(errno.EIO, "Input/output error")

    record = opened(tmp_path, store=Store(tmp_path, "never", write=broken))
    record.issue(1)
    with pytest.raises(OSError, match="Input/output"):
        await record.store.commit()
    record.store.close()


# --- copies -----------------------------------------------------------------------------------------------


async def test_a_copy_of_a_folder_while_it_is_written_goes_on_from_a_commit(tmp_path: Path) -> None:
    record = opened(tmp_path / "run")
    record.issue(5)
    await record.store.commit()
    committed = seen(record.state)
    record.issue(2)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    record.store.close()
    assert not differences(committed, loaded(tmp_path / "copy")[1])
    (tmp_path / "copy").rename(tmp_path / "renamed")
    assert not differences(committed, loaded(tmp_path / "renamed")[1])


async def test_a_record_is_read_from_a_disk_that_nothing_may_be_written_to(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 2000) as disk:
        record = opened(disk)
        record.issue(5)
        await record.store.commit()
        record.store.close()
        await asyncio.to_thread(subprocess.run, ["mount", "-o", "remount,ro", str(disk)], check=True)
        assert rows_of(disk, COUNT) == [5]


@pytest.mark.parametrize("changed", [True, False])
@pytest.mark.parametrize("later", [(), (0.05,), (0.05, 0.05), (0.05, 0.15)])
async def test_a_durable_commit_is_forced_whichever_commit_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: tuple[float, ...], changed: bool
) -> None:
    """Commits of 0.1 s, the others begun so many seconds before the durable one."""
    store = Store(tmp_path, "batch")
    write = store._write_arrays

    def slowly(waiting: Any) -> None:
        time.sleep(0.1)
        write(waiting)

    monkeypatch.setattr(store, "_write_arrays", slowly)
    others = []
    for seconds in later:
        store.begin()
        others.append(asyncio.create_task(store.commit()))
        await asyncio.sleep(seconds)
    if changed:
        store.begin()
    await store.commit(durable=True)
    assert not store._unsynced
    await asyncio.gather(*others)
    store.close()


# --- where machines share no memory: locked by its controller, who gives readers copies

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


async def told(folder: Path, code: str, *words: str, said: str = "") -> str:
    """What a process prints on standard output and error."""
    line = [sys.executable, "-c", ELSEWHERE + code, str(folder.parent / "mounts"), *words]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = await asyncio.create_subprocess_exec(*line, **pipes, env=ENVIRONMENT)
    return (await process.communicate(said.encode()))[0].decode()


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
    assert ask(folder, "SELECT count(*) FROM step")[1] == [(steps.step,)]
    assert not folder.joinpath(f"{RECORD}-wal").exists()


async def left_by_a_kill(folder: Path) -> dict[str, bytes]:
    """Rows and log of 40 commits, of three prompts each."""
    assert "Error" not in await told(folder, WRITING, str(folder), said="40\n")
    return rows_in(folder)


def rows_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("run.db*")}


async def test_the_log_that_a_kill_left_is_read_and_stays(folder: Path) -> None:
    before = await left_by_a_kill(folder)
    assert before.keys() == {RECORD, f"{RECORD}-wal"}
    assert rows_of(folder, COUNT) == [120]
    assert rows_in(folder) == before


LOCK = """
import fcntl, sys

fcntl.lockf(open(sys.argv[1], "r+b"), fcntl.LOCK_EX | fcntl.LOCK_NB, 510, (1 << 30) + 2)
"""


async def test_no_controller_begins_between_the_copies_of_rows_and_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await left_by_a_kill(folder)
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
