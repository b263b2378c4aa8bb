"""Real processes: sleepers that will not end, children that die, grandchildren, launchers that are killed."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import kill_target
import psutil
import pytest
from ports import free_port
from waiting import until

from distill import guardian
from distill.aio import cancel
from distill.cli.options import guarded
from distill.launch import supervise as supervision
from distill.launch.supervise import LONGEST_PAUSE_SECONDS, ChildFailed, ChildSpec, Phase, Supervisor
from sync.base.errors import how_it_ended

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
DEAF = "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
STUBBORN = [sys.executable, "-c", f"{DEAF}print('up', flush=True); time.sleep(600)"]
CHILDREN = f"""{DEAF}
for new in (False, True):
    subprocess.Popen([sys.executable, "-c", {DEAF + "time.sleep(600)"!r}], start_new_session=new)
print('up', flush=True); time.sleep(600)
"""
PARENT = [sys.executable, "-c", CHILDREN]


def below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if kill_target.lives(process)]


@pytest.fixture
async def supervise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a started supervisor, which is stopped at the end of the test; `watched`: ready, and watching."""
    made: list[Supervisor] = []
    watching: list[asyncio.Task[None]] = []

    async def start(specs, restarts=0, first_pause=0.01, watched=False, **options) -> Supervisor:
        monkeypatch.setattr(supervision, "FIRST_PAUSE_SECONDS", first_pause)
        supervisor = Supervisor(specs, tmp_path, restarts, **options)
        made.append(supervisor)
        await supervisor.start()
        if watched:
            await supervisor.ready()
            watching.append(asyncio.create_task(supervisor.watch()))
        return supervisor

    yield start
    await cancel(watching)
    for supervisor in made:
        await supervisor.stop(1)


async def spoke(supervisor: Supervisor, *names: str) -> None:
    """Wait until each child wrote "up"."""
    logs = [supervisor.children[name].log_path for name in names]
    await asyncio.to_thread(until, lambda: all(log.exists() and b"up" in log.read_bytes() for log in logs))


async def test_a_child_is_asked_to_end_before_it_is_killed(supervise):
    supervisor = await supervise([ChildSpec("calm", SLEEPER)], restarts=0)
    await spoke(supervisor, "calm")
    await supervisor.stop(grace=60)
    assert supervisor.children["calm"].status == 128 + signal.SIGTERM


async def test_every_child_and_grandchild_is_gone_after_stop_though_some_ignore_sigterm(supervise):
    supervisor = await supervise([ChildSpec("stubborn", STUBBORN), ChildSpec("parent", PARENT)], restarts=0)
    await supervisor.ready()
    await spoke(supervisor, "stubborn", "parent")
    processes = [p for child in supervisor.children.values() for p in below(child.process.pid)]
    assert len(processes) == 4
    await supervisor.stop(grace=0.2)
    await asyncio.to_thread(until, lambda: alive(processes) == [])


FAR_ABOVE = [f"(Core) ERROR 11-20 [core.py:1] {line}" for line in ("Traceback", "RuntimeError: head_dim=16")]
FAR_ABOVE += [f"    {i} vllm.EngineDeadError: see above" for i in range(30)]
FAILS = {
    f"printf '%s\\n' {shlex.join(FAR_ABOVE)}": "29 vllm(.|\n)*the first error .*: RuntimeError: head_dim=16",
    "sh -c 'echo no such model; exit 3'": "engine ended with status 3(.|\n)*no such model",
    "/no/such/program": "status 127(.|\n)*cannot be started",
    "sleep 600": "engine did not come up in time",
}


@pytest.mark.parametrize("line", FAILS, ids=["first error", "last lines", "no such program", "no answer"])
async def test_a_child_that_fails_at_its_start_is_named_with_why_and_not_started_again(
    supervise, tmp_path: Path, line: str
):
    (tmp_path / "engine.log").write_text("OldError: of an earlier start\n")
    spec = ChildSpec("engine", shlex.split(line), url="http://127.0.0.1:9")
    supervisor = await supervise([spec], 5, start_seconds=0.3 if line == "sleep 600" else 600)
    with pytest.raises(ChildFailed, match=FAILS[line]):
        await supervisor.ready()


def test_a_status_names_the_signal_whoever_passed_it_on_and_that_of_an_exit_none():
    for status in (-4, 128 + 4, 256 - 4):  # of a child, a guardian, the deepspeed launcher
        assert how_it_ended(status).startswith("was ended by SIGILL (illegal instruction), this processor")
    for status in (0, 1, 127, 128, 255, None):
        assert how_it_ended(status) == f"ended with status {status}"


async def test_a_death_is_mended_until_the_budget_is_spent(supervise):
    supervisor = await supervise([ChildSpec("flaky", SLEEPER)], restarts=2)
    await supervisor.ready()
    child, lives = supervisor.children["flaky"], set[int]()

    async def murder() -> None:
        while True:
            if child.process.pid not in lives:
                lives.add(child.process.pid)
                os.killpg(child.process.pid, signal.SIGKILL)
            await asyncio.sleep(0.01)

    murderer = asyncio.create_task(murder())
    with pytest.raises(ChildFailed, match=r"run\.restarts is used up"):
        await supervisor.watch()
    assert len(lives) == 3
    murderer.cancel()


async def test_a_child_killed_while_the_run_starts_is_started_again(supervise):
    lives: list[int] = []
    spec = ChildSpec("slow", SLEEPER, joined=lambda: len(lives) == 2)
    supervisor = await supervise([spec], restarts=1)
    await spoke(supervisor, "slow")
    waiting = asyncio.create_task(supervisor.ready())
    for _ in range(2):
        process = supervisor.children["slow"].process
        await asyncio.to_thread(until, lambda guardian=process.pid: below(guardian))
        lives.append(process.pid)
        if len(lives) == 1:
            below(process.pid)[0].kill()
            await asyncio.to_thread(until, lambda: supervisor.children["slow"].process.pid != lives[0])
    await waiting
    assert lives[0] != lives[1]


async def test_a_child_that_has_joined_and_fails_while_others_start_is_started_again(supervise, tmp_path):
    """A trainer can die on its first batch while an engine is still loading."""
    lives, late = [], asyncio.Event()
    mark = tmp_path / "started"
    fails_once = ["sh", "-c", f"test -e '{mark}' && exec sleep 600; touch '{mark}'; exit 3"]
    specs = [
        ChildSpec("trainer", fails_once, joined=lambda: True, prepare=lambda: lives.append(1)),
        ChildSpec("late", SLEEPER, joined=late.is_set),
    ]
    supervisor = await supervise(specs, restarts=1)
    starting = asyncio.create_task(supervisor.ready())
    await asyncio.to_thread(until, lambda: len(lives) == 2)
    assert not starting.done()
    late.set()
    await starting


def server(name: str, folder: Path, silent_at_first: float = 0.0) -> ChildSpec:
    """A child that answers /health, after a while."""
    (folder / "health").write_text("")
    port = free_port()
    words = ["-u", "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(folder), str(port)]
    argv = ["sh", "-c", f"sleep {silent_at_first}; exec {shlex.join([sys.executable, *words])}"]
    return ChildSpec(name, argv, url=f"http://127.0.0.1:{port}")


async def test_a_port_that_is_taken_when_a_server_binds_costs_a_restart(supervise, tmp_path: Path):
    """The thief lets go when the server has failed; any other failure at start ends the run."""
    spec = server("server", tmp_path)
    with socket.create_server(("127.0.0.1", int(spec.url.rpartition(":")[2]))):
        supervisor = await supervise([spec], restarts=50, first_pause=0.2)
        ready = asyncio.create_task(supervisor.ready())
        log = supervisor.children["server"].log_path
        await asyncio.to_thread(until, lambda: "already in use" in log.read_text())
    await ready
    assert supervisor.children["server"].phase is Phase.READY


async def test_a_death_costs_one_restart_though_the_others_are_ready_in_its_pause(supervise, monkeypatch):
    late, paused, sleep = asyncio.Event(), asyncio.Event(), asyncio.sleep
    pause = 20.0
    monkeypatch.setattr(asyncio, "sleep", lambda time: paused.wait() if time == pause else sleep(time))
    specs = [ChildSpec("early", SLEEPER), ChildSpec("late", SLEEPER, joined=late.is_set)]
    supervisor = await supervise(specs, restarts=1, first_pause=pause)
    await spoke(supervisor, "early", "late")
    early = supervisor.children["early"]
    waiting, first = asyncio.create_task(supervisor.ready()), early.process
    await asyncio.to_thread(until, lambda: early.phase is Phase.READY)
    os.killpg(first.pid, signal.SIGKILL)
    await asyncio.to_thread(until, lambda: supervisor._restarts_left == 0)
    late.set()
    await waiting
    assert early.process is first, "still in its pause"
    paused.set()
    watching = asyncio.create_task(supervisor.watch())
    await asyncio.to_thread(until, lambda: early.process is not first or watching.done())
    assert early.process is not first, watching
    await cancel([watching])


async def test_a_child_that_was_healthy_for_long_is_started_again_soon(tmp_path: Path):
    supervisor = Supervisor([ChildSpec("flaky", SLEEPER)], tmp_path, restarts=9)
    child = supervisor.children["flaky"]
    pauses = [child.next_pause() for _ in range(3)]
    child.ready_since = time.monotonic() - LONGEST_PAUSE_SECONDS - 1.0
    assert [*pauses, child.next_pause()] == [1.0, 2.0, 4.0, 1.0]


@pytest.mark.parametrize("deaths", [0, 1])
async def test_status_0_is_the_orderly_end_of_a_child_that_may_end(supervise, tmp_path: Path, deaths: int):
    mark, left = tmp_path / "died once", list[str]()
    once = ["sh", "-c", f"test -e '{mark}' && exit 0; touch '{mark}'; exit {deaths}"]
    spec = ChildSpec("trainer", once, ends=True, left=lambda: left.append("trainer"))
    supervisor = await supervise([spec], deaths)
    await supervisor.watch()
    assert await supervisor.children["trainer"].exit() == 0
    assert left == ["trainer"]


LAUNCHER = """
import asyncio, sys
from pathlib import Path
from distill.launch.supervise import ChildSpec, Supervisor

async def main():
    specs = [ChildSpec("stubborn", {stubborn!r}), ChildSpec("parent", {parent!r})]
    supervisor = Supervisor(specs, Path({logs!r}), 0)
    await supervisor.start()
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_launcher_killed_without_warning_leaves_nobody(tmp_path: Path):
    code = LAUNCHER.format(stubborn=STUBBORN, parent=PARENT, logs=str(tmp_path))
    launcher = subprocess.Popen([sys.executable, "-c", code])
    logs = [tmp_path / f"{name}.log" for name in ("stubborn", "parent")]
    until(lambda: all(log.exists() and b"up" in log.read_bytes() for log in logs))
    until(lambda: len(below(launcher.pid)) == 6)
    processes = below(launcher.pid)
    launcher.kill()
    launcher.wait()
    until(lambda: not alive(processes))


@pytest.mark.parametrize(("flags", "said"), [([], "asked\n"), ([guardian.KILL], "")])
def test_a_guardian_whose_launcher_is_gone_asks_its_command_to_end_unless_it_is_to_kill(
    flags: list[str], said: str
):
    code = (
        "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
        "print('up', flush=True)\nwhile True: time.sleep(1)"
    )
    read_end, write_end = os.pipe()
    words = [sys.executable, "-P", "-m", guardian.MODULE, "name", str(read_end), *flags, sys.executable]
    pipe: dict = {"stdout": subprocess.PIPE, "text": True, "pass_fds": (read_end,)}
    process = subprocess.Popen([*words, "-c", code], start_new_session=True, **pipe)
    os.close(read_end)
    assert process.stdout.readline() == "up\n"
    processes = below(process.pid)
    os.close(write_end)
    assert process.communicate(timeout=600)[0] == said
    assert process.returncode == 128 + signal.SIGKILL
    assert not alive(processes)


async def test_a_guardian_killed_without_warning_leaves_nobody_whatever_the_session(supervise):
    bystander = await asyncio.create_subprocess_exec(*SLEEPER, start_new_session=True)
    specs = [ChildSpec("parent", PARENT), ChildSpec("other", SLEEPER)]
    supervisor = await supervise(specs, 1, watched=True)
    await spoke(supervisor, "parent", "other")
    guardian, other = (supervisor.children[name].process for name in ("parent", "other"))
    processes, others = below(guardian.pid), below(other.pid)
    assert len(processes) == 3
    guardian.kill()
    await asyncio.to_thread(until, lambda: not alive(processes))
    await asyncio.to_thread(until, lambda: supervisor.children["parent"].process is not guardian)
    assert alive(others) == others, "nobody else is touched"
    assert bystander.returncode is None
    bystander.kill()
    await bystander.wait()


async def test_a_child_that_hangs_is_killed_and_started_again(supervise):
    told: list[object] = []
    spec = ChildSpec("hangs", SLEEPER, died=lambda: told.append((child.process, child.phase)))
    supervisor = await supervise([spec], restarts=1)
    await supervisor.ready()
    child = supervisor.children["hangs"]
    first = child.process
    assert supervisor.status() == {"hangs": ("ready", 0)}
    supervisor.kill_child("somebody else's")
    supervisor.kill_child("hangs")
    await asyncio.to_thread(until, lambda: child.process is not first and child.phase is Phase.READY)
    assert first.returncode == -signal.SIGKILL
    assert told == [(first, Phase.RESTARTING)], "before the next one is started"
    assert supervisor.status() == {"hangs": ("ready", 1)}


async def test_a_server_that_is_stopped_is_killed_and_started_again_and_its_neighbour_is_not(
    supervise, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    specs = [server("stopped", tmp_path), server("well", tmp_path)]
    supervisor = await supervise(specs, restarts=1, health_seconds=3.0, watched=True)
    stopped, well = supervisor.children["stopped"], supervisor.children["well"]
    first, other = stopped.process, well.process
    below(first.pid)[0].send_signal(signal.SIGSTOP)
    await asyncio.to_thread(until, lambda: stopped.process is not first and stopped.phase is Phase.READY)
    assert well.process is other
    said = "stopped: /health has not answered for run.health_timeout_seconds = 3 s, it is stalled"
    assert {said, "stopped is killed, to be restarted"} <= set(caplog.messages)


async def test_a_server_that_takes_long_to_start_is_not_taken_for_stalled(supervise, tmp_path: Path):
    supervisor = await supervise([server("slow", tmp_path, 2.0)], restarts=0, health_seconds=0.2)
    await supervisor.ready()
    assert supervisor.children["slow"].status is None


async def test_a_restarted_child_that_does_not_come_up_is_killed_and_started_again(supervise):
    starts: list[None] = []
    spec = ChildSpec(
        "late", SLEEPER, joined=lambda: len(starts) in (1, 3), prepare=lambda: starts.append(None)
    )
    supervisor = await supervise([spec], restarts=2, start_seconds=0.5, watched=True)
    child = supervisor.children["late"]
    supervisor.kill_child("late")
    await asyncio.to_thread(until, lambda: len(starts) == 3 and child.phase is Phase.READY)


# --- SIGTERM to a command that has started processes: they end with it, as after Ctrl-C

SCRIPT = """
import subprocess, sys
from distill.cli.options import guarded
class Popen(subprocess.Popen):  # subprocess itself is not interrupted: it would not know the child yet
    def communicate(self, *args, **options):
        print("waiting", flush=True)
        return super().communicate(*args, **options)
subprocess.Popen = Popen
sys.exit(guarded(lambda: subprocess.run(["sleep", "600"])))
"""


def test_what_a_command_has_started_ends_with_it() -> None:
    children: list[psutil.Process] = []
    ours = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE)
    try:
        assert ours.stdout.readline() == b"waiting\n"
        children = psutil.Process(ours.pid).children()
        assert children
        ours.send_signal(signal.SIGTERM)
        assert ours.wait(600) == 128 + signal.SIGTERM
        _, alive = psutil.wait_procs(children, 600)
        assert not alive
    finally:
        ours.kill()
        ours.stdout.close()
        for child in children:
            if child.is_running():
                child.kill()


def test_a_run_that_is_killed_by_a_second_signal_says_so_without_a_traceback(capsys) -> None:
    async def stopped_twice() -> None:
        asyncio.current_task().cancel()
        await asyncio.sleep(60)

    assert guarded(lambda: asyncio.run(stopped_twice())) == 130
    assert capsys.readouterr().err == "distill: stopped\n"
