"""Roles as forks: each has its own command, environment and output, ends as it says, and leaves nobody."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from distill.launch import fork_server
from distill.launch.fork_server import Forked, ForkServers
from distill.launch.guardian import adopt_orphans, guarded_role

LIBRARY = "import os\nwhere, os.environ['SET_BY_LIBRARY'] = os.getpid(), 'yes'\n"
ROLE = """
import os, sys, signal, threading, library
assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals()
assert os.environ["SET_BY_LIBRARY"] == "yes"
assert {int(one) for one in os.listdir("/proc/self/fd")} <= {0, 1, 2, 3}, os.listdir("/proc/self/fd")
print(*sys.argv[1:], os.environ["WHO"], "HOME" in os.environ, library.where, os.getppid(), os.getpid())
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
if sys.argv[1] == "raise":
    raise ValueError("told to")
if sys.argv[1] == "interrupt":
    raise KeyboardInterrupt
if sys.argv[1] == "exit":
    threading.Timer(0.2, lambda: print("a thread is waited for")).start()
    sys.exit(7)
if sys.argv[1] == "say":
    sys.exit("why it ends")
signal.pause()
"""


class Launcher:
    """Fork servers and what a supervisor gives them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "role.log"
        self.pipe, self.write_end = os.pipe()
        self.forks = ForkServers()

    async def start(self, *words: str, **environment: str) -> Forked | None:
        command = [sys.executable, "-m", "role", *words]
        given = {"PYTHONPATH": str(self.folder), "DISTILL_OURS": "late", **environment}
        with self.log.open("ab") as output:
            return await self.forks.fork("role-0", command, given, output.fileno(), self.pipe)

    def said(self) -> list[str]:
        return self.log.read_text().split("\n") if self.log.exists() else []


@pytest.fixture
async def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Launcher]:
    (tmp_path / "library.py").write_text(LIBRARY)
    (tmp_path / "role.py").write_text(ROLE)
    monkeypatch.setitem(fork_server.IMPORTS, "role", ("library",))
    monkeypatch.setattr(fork_server, "installed_for_cpu", lambda: True)
    adopt_orphans()
    made = Launcher(tmp_path)
    yield made
    made.forks.close()
    os.close(made.write_end)
    adopt_orphans(False)


def spoke(launcher: Launcher, lines: int) -> list[str]:
    deadline = time.monotonic() + 60
    while len(launcher.said()) <= lines:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return launcher.said()


def collect(pid: int) -> None:
    """As another user of this process may; the event loop does not see it."""
    os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("word", "status", "last"),
    [
        ("exit", 7, "a thread is waited for"),
        ("raise", 1, "ValueError: told to"),
        ("interrupt", 130, "KeyboardInterrupt"),
        ("say", 1, "why it ends"),
    ],
)
async def test_a_fork_ends_as_an_interpreter_does(
    launcher: Launcher, word: str, status: int, last: str
) -> None:
    role = await launcher.start(word, WHO="me")
    assert role is not None
    assert await role.wait() == role.returncode == status
    assert launcher.said()[-2] == last


async def test_forks_share_imports_and_nothing_else(launcher: Launcher) -> None:
    roles = [await launcher.start("wait", str(i), WHO="us", DISTILL_INDEX=str(i)) for i in range(2)]
    other = await launcher.start("wait", "2", WHO="other")
    said = sorted(line.split() for line in (spoke(launcher, 3))[:3])
    assert [line[:4] for line in said] == [
        ["wait", str(i), who, "False"] for i, who in enumerate(("us", "us", "other"))
    ]
    assert said[0][4] == said[1][4] != said[2][4]  # where `library` was imported
    for role, line in zip([*roles, other], said, strict=True):
        guardian = psutil.Process(role.pid)
        assert (int(line[5]), guardian.ppid(), os.getsid(role.pid)) == (role.pid, os.getpid(), role.pid)
        assert guarded_role(guardian) == "role-0"
        (work,) = guardian.children()
        assert " -m role wait" in " ".join(work.cmdline())
        os.killpg(role.pid, signal.SIGTERM)
        assert await role.wait() == 128 + signal.SIGTERM


async def test_nothing_is_left_when_the_launcher_or_the_guardian_is_gone(launcher: Launcher) -> None:
    roles = [await launcher.start("wait", WHO="x") for _ in range(2)]
    spoke(launcher, 2)
    works = [psutil.Process(role.pid).children()[0] for role in roles]
    roles[0].kill()
    assert await roles[0].wait() == -signal.SIGKILL
    works[0].wait(60)
    os.write(launcher.write_end, b"k")
    assert await roles[1].wait() == 128 + signal.SIGKILL
    assert not works[1].is_running()


async def test_without_its_server_a_role_is_executed(
    launcher: Launcher, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fork_server.IMPORTS, "role", ("no_such_library",))
    assert await launcher.start("wait", WHO="x") is None
    assert "role-0 starts without its fork server, which is gone:" in caplog.text
    assert "No module named 'no_such_library'" in caplog.text


async def test_a_fork_that_another_collected_has_ended(launcher: Launcher) -> None:
    role = await launcher.start("wait", WHO="x")
    assert role is not None
    role.kill()
    collect(role.pid)
    assert await role.wait() == 255


async def test_a_stalled_server_is_given_up(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await launcher.start("wait", WHO="x")
    assert first is not None
    (made,) = launcher.forks._servers.values()
    server = psutil.Process(made._pid)
    server.suspend()
    monkeypatch.setattr(fork_server, "IMPORT_SECONDS", 0.2)
    assert [await launcher.start("wait", WHO="x") for _ in range(2)] == [None, None]
    assert not server.is_running()
    assert first.returncode is None  # what it forked goes on
    first.kill()
    assert await first.wait() == -signal.SIGKILL


async def test_what_imports_nothing_shared_and_all_on_gpus_are_executed(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launcher.log.open("ab") as output:
        sleeper = ["sleep", "1"]
        assert await launcher.forks.fork("role-0", sleeper, {}, output.fileno(), launcher.pipe) is None
    monkeypatch.setattr(fork_server, "installed_for_cpu", lambda: False)
    assert await launcher.start("wait", WHO="x") is None
