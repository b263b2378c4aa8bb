"""Who is where: registration, leases and the rule of boots; announcers and real processes below them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from in_memory import MemoryReplica
from ports import Handler, free_port, refusing, served
from small_config import make_config

from distill import registry
from distill.aio import cancel
from distill.config import ControllerConfig
from distill.config.loading import load
from distill.controller import Controller
from distill.launch.run_folder import RunFolder, write_role
from distill.launch.single_role import Gang, Lease, joining
from distill.registry import EXIT_REFUSED
from distill.rollout.replica_pool import Phase
from sync.base import durable
from sync.base.address import Address, controller_url, own_address
from sync.base.errors import ConfigError, Overloaded, RemoteError, Replaced, WrongServer
from sync.wire import ServerLease, ServerLeaves, ServerRegisters, ServerStatus, Version

ROOT = Path(__file__).parents[3]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that have passed, as the registry sees them."""
    now = [0.0]
    monkeypatch.setattr(registry.time, "monotonic", lambda: now[0])
    return now


def says(url: str | None, boot: str | None, name: str = "teacher-t") -> ServerRegisters:
    return ServerRegisters(run="test", url=url, name=name, boot=boot)


def machine(index: int, boot: str) -> ServerRegisters:
    return says(f"http://10.0.0.{index}:{1000 + index}", boot, f"trainer-{index}")


async def met(run: Controller, boots: str) -> list[ServerLease]:
    """Machine 0, 1, … of the trainer register, each as one of these boots."""
    return [await run.registry.register(machine(index, boot)) for index, boot in enumerate(boots)]


async def passes(run: Controller, clock: list[float], seconds: float) -> None:
    """This much time, in which the controller looks at leases as often as it always does."""
    while seconds > 0:
        clock[0] += (step := min(seconds, registry.LEASE_SECONDS / 5))
        seconds -= step
        await run.registry.expire()


async def test_a_name_is_the_process_s_that_renews_it_and_another_must_leave(controller, clock) -> None:
    teacher = Address("teacher-t")
    run = controller(expected={"teacher-t": teacher})
    join = run.registry.register
    assert str(teacher) == "teacher-t (not registered)"
    lease = ServerLease(name="teacher-t", seconds=registry.LEASE_SECONDS)
    assert await join(says("http://a:1/", "first")) == lease
    assert teacher.url == "http://a:1"
    waited = 0
    with pytest.raises(Replaced, match=r"teacher-t is at http://a:1, .* give this one another --index or"):
        while True:  # as a supervised process that was started under the same name
            with contextlib.suppress(Overloaded):
                await join(says("http://b:1", "second"))
            await passes(run, clock, registry.LEASE_SECONDS / 3)
            assert await join(says("http://a:1", "first")) == lease
            waited += 1
    assert 3 <= waited <= 5, "a process that is being killed is given the length of a lease"
    assert teacher.url == "http://a:1"
    await join(says("http://a:2", "first"))  # it may move
    assert teacher.url == "http://a:2"
    for url, boot, words in [
        ("http://me:secret@a:2", "first", "one with a user's name: leave that out"),
        ("http://c:1", None, "remove it first"),
    ]:
        with pytest.raises(RemoteError, match=words):
            await join(says(url, boot))
    with pytest.raises(WrongServer, match="controller of run 'test', and a process of run 'other' registers"):
        await join(ServerRegisters(run="other", url="http://a:1", name="teacher-t", boot="x"))


async def test_the_name_of_a_dead_process_is_another_s_once_its_lease_ends(controller, clock) -> None:
    teacher = Address("teacher-t")
    run = controller(expected={"teacher-t": teacher})
    join = run.registry.register
    await join(says("http://a:1", "first"))
    await passes(run, clock, registry.LEASE_SECONDS / 3)
    for url in (None, "http://b:1"):  # it is starting; it answers
        with pytest.raises(Overloaded, match="this process gets the name when that one's lease of 15 s ends"):
            await join(says(url, "second"))
    await passes(run, clock, registry.LEASE_SECONDS)
    assert (await join(says(None, "second"))).seconds == 0
    assert teacher.url is None, "who asks is not there yet"
    await join(says("http://b:1", "second"))
    with pytest.raises(Overloaded):  # it was not dead but asleep
        await join(says("http://a:1", "first"))
    for _ in range(4):
        await passes(run, clock, registry.LEASE_SECONDS / 3)
        await join(says("http://b:1", "second"))
    with pytest.raises(Replaced, match="teacher-t is at http://b:1"):
        await join(says("http://a:1", "first"))


async def test_a_lease_that_ends_forgets_the_url_and_its_process_may_come_back(controller, clock) -> None:
    """What a person registers has no lease."""
    teacher = Address("teacher-t")
    run = controller(connect=lambda there: MemoryReplica(url=str(there)), expected={"teacher-t": teacher})
    await run.registry.register(says("http://a:1", "first"))
    await run.registry.register(says("http://c:1", "third", "student-5"))
    await run.registry.register(says("http://d:1", None, "student-6"))
    assert [*run.pool.replicas] == ["r0", "student-5", "student-6"]
    await passes(run, clock, registry.LEASE_SECONDS - 0.1)
    assert teacher.url == "http://a:1"
    await passes(run, clock, 0.2)
    assert teacher.url is None
    assert [*run.pool.replicas] == ["r0", "student-6"]
    await run.registry.register(says("http://a:1", "first"))
    await run.registry.leave(ServerLeaves(name="teacher-t", boot="another"))
    assert teacher.url == "http://a:1"
    await run.registry.leave(ServerLeaves(name="teacher-t", boot="first"))
    assert teacher.url is None


async def test_a_name_that_metrics_could_not_carry_is_refused(controller) -> None:
    """Names of metrics are paths: perf/busy_seconds/student-a/b would be figures of an a with a b."""
    run = controller(connect=lambda there: MemoryReplica(url=str(there)), expected={})
    with pytest.raises(RemoteError, match="no server 'student-a/b' is expected to register"):
        await run.registry.register(says("http://c:1", None, "student-a/b"))
    await run.registry.register(says("http://c:1", None, "student-spare.1"))
    assert [*run.pool.replicas] == ["r0", "student-spare.1"]


async def test_a_replica_is_listed_with_what_it_serves_and_its_load(controller) -> None:
    run = controller()
    replica = run.pool.replicas["r0"]
    replica.phase, replica.version, replica.in_flight = Phase.SERVING, Version(0, 3), 2
    assert run.registry.listing().servers == [ServerStatus("r0", "memory", "serving", Version(0, 3), 2)]


async def test_a_new_process_joins_in_place_of_a_configured_replica_that_was_removed(controller) -> None:
    first = Address("student-0")
    run = controller(
        replicas={"student-0": MemoryReplica(url="first"), "student-1": MemoryReplica(url="other")},
        connect=lambda there: MemoryReplica(url=str(there)),
        expected={"student-0": first},
    )
    running = asyncio.create_task(run.pool.run())
    await run.registry.register(says("http://c:1", "one", "student-0"))
    await run.registry.leave(ServerLeaves(name="student-0"))
    assert [one.name for one in run.registry.listing().servers] == ["student-1"]
    with pytest.raises(Replaced, match="student-0 was removed"):
        await run.registry.register(says("http://c:1", "one", "student-0"))
    added = await run.registry.register(ServerRegisters(run=None, url="http://added:1", name=None, boot=None))
    assert added.name == "student-2", "the name of the configuration is kept for its process"
    await run.registry.register(says("http://c:2", "two", "student-0"))
    assert run.pool.replicas["student-0"].engine.url == "http://c:2"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_replica_may_be_removed_while_the_lease_of_another_ends(controller, clock) -> None:
    run = controller(connect=lambda there: MemoryReplica(url=str(there)), expected={})
    for name in ("student-5", "student-6"):
        await run.registry.register(says(f"http://{name}:1", name, name))
    await passes(run, clock, registry.LEASE_SECONDS - 0.1)
    clock[0] += 0.2
    remove, removing, other_left = run.pool.remove, asyncio.Event(), asyncio.Event()

    async def slowly(name: str) -> None:
        await remove(name)
        if name == "student-5":
            removing.set()
            await other_left.wait()

    run.pool.remove = slowly
    ending = asyncio.create_task(run.registry.expire())
    await removing.wait()
    left = await run.registry.leave(ServerLeaves(name="student-6"))
    other_left.set()
    await ending
    assert not {"student-5", "student-6"} & {one.name for one in left.servers}


@pytest.mark.parametrize(("boot", "warns"), [(None, True), ("one", False)])
async def test_a_person_is_told_of_a_replica_that_does_not_answer(
    controller, caplog: pytest.LogCaptureFixture, boot: str | None, warns: bool
) -> None:
    run = controller(connect=lambda there: MemoryReplica(url=str(there), up=False), expected={})
    lease = await run.registry.register(says("http://c:1", boot, "student-5"))
    told = registry.UNANSWERED.format(name="student-5", url="http://c:1")
    assert lease.warning == (told if warns else None)
    assert (told in caplog.messages) is warns
    assert "student-5" in run.pool.replicas


async def renewed(run: Controller, clock: list[float], boot: str) -> ServerLease:
    """Machine 0, a third of a lease later."""
    await passes(run, clock, registry.LEASE_SECONDS / 3 + 0.01)
    return await run.registry.register(machine(0, boot))


async def test_the_trainers_machines_meet_when_all_are_there_and_end_as_a_whole(controller, clock) -> None:
    run = controller(make_config(trainer={"nodes": 2}))
    join = run.registry.register
    first, second = "http://10.0.0.0:1000", "http://10.0.0.1:1001"
    assert (await join(machine(0, "a"))).gang == [first, None]
    assert (await join(machine(1, "b"))).gang == (await join(machine(0, "a"))).gang == [first, second]
    assert [(one.name, one.url) for one in run.registry.listing().servers[1:]] == [
        ("trainer-0", first),
        ("trainer-1", second),
    ]
    with pytest.raises(Overloaded, match=r"trainer-1 is at http://10\.0\.0\.1:1001"):
        await join(machine(1, "c"))  # machine 1 was started again
    for _ in range(2):
        assert (await renewed(run, clock, "a")).gang == [first, second]
    await passes(run, clock, registry.LEASE_SECONDS / 3)
    assert (await join(machine(1, "c"))).gang == [None, second]
    with pytest.raises(Replaced, match=r"trainer-0 was removed.* or with another of the trainer's machines"):
        await join(machine(0, "a"))
    assert (await join(machine(0, "d"))).gang == [first, second]
    for _ in range(2):
        await renewed(run, clock, "d")
    with pytest.raises(Replaced):  # machine 1 is silent
        await renewed(run, clock, "d")
    with pytest.raises(RemoteError, match=r"no server 'trainer-2' is expected .* trainer-0, trainer-1"):
        await join(machine(2, "e"))
    with pytest.raises(RemoteError, match=r"trainer-1 is no server .*: start `distill train --node 1` there"):
        await join(says(second, None, "trainer-1"))  # nobody renews what people add, and no ranks are there


async def test_a_trainer_that_its_launcher_starts_again_waits_for_no_lease(controller, clock) -> None:
    run = controller(make_config(trainer={"nodes": 2}))
    await met(run, "ab")
    run.trainer_died()
    for index, boot in enumerate("cd"):
        assert (await run.registry.register(machine(index, boot))).gang[index] is not None
        with pytest.raises(Replaced):
            await run.registry.register(machine(index, "ab"[index]))


async def test_a_machine_that_leaves_before_all_are_there_is_missing(controller, clock) -> None:
    run = controller(make_config(trainer={"nodes": 2}))
    await run.registry.register(machine(1, "a"))
    await passes(run, clock, registry.LEASE_SECONDS + 0.1)
    assert (await run.registry.register(machine(1, "b"))).gang == [None, "http://10.0.0.1:1001"]
    await run.registry.leave(ServerLeaves(name="trainer-1", boot="b"))
    assert (await run.registry.register(machine(0, "c"))).gang == ["http://10.0.0.0:1000", None]


async def test_a_controller_that_did_not_listen_ends_no_lease(controller, clock) -> None:
    teacher = Address("teacher-t")
    run = controller(make_config(trainer={"nodes": 2}), expected={"teacher-t": teacher})
    await run.registry.register(says("http://a:1", "first"))
    await met(run, "ab")
    clock[0] += 3 * registry.LEASE_SECONDS  # stopped, or its machine was
    await run.registry.expire()
    assert teacher.url == "http://a:1"
    assert all(None not in lease.gang for lease in await met(run, "ab"))
    for _ in range(2):
        await renewed(run, clock, "a")
    with pytest.raises(Replaced):  # machine 1 is silent from there on
        await renewed(run, clock, "a")


@pytest.mark.parametrize("differs", ["os.getpid", "socket.gethostname"])
def test_a_role_that_writes_its_file_while_another_does_makes_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, differs: str
) -> None:
    """Another process, here or on a machine that shares the run's folder."""
    settings, rename = load(ROOT / "configs/quickstart.toml").trainer, durable.rename

    def after_another(*paths: Path) -> None:
        with monkeypatch.context() as there:
            there.setattr(differs, lambda: "another")
            there.setattr(durable, "rename", rename)
            write_role(tmp_path, "trainer", settings)
        rename(*paths)

    monkeypatch.setattr(durable, "rename", after_another)
    write_role(tmp_path, "trainer", settings)
    assert [path.name for path in (tmp_path / "roles").iterdir()] == ["trainer.json"]


def test_a_controller_that_listens_everywhere_says_no_url_that_nobody_reaches(tmp_path: Path) -> None:
    with RunFolder(tmp_path, (tmp_path / "lock").open("w")) as folder:
        folder.keep_url(ControllerConfig(), "http://127.0.0.1:1")
        assert controller_url(tmp_path) == "http://127.0.0.1:1"
        folder.keep_url(ControllerConfig(host="0.0.0.0"), "http://0.0.0.0:1")
        with pytest.raises(ConfigError, match=r"controller\.url if controller\.host is 0\.0\.0\.0"):
            controller_url(tmp_path)
        folder.keep_url(ControllerConfig(host="0.0.0.0", url="http://node:1"), "http://node:1")
        assert controller_url(tmp_path) == "http://node:1"


async def test_a_machine_whose_ranks_ended_well_is_not_missed(controller, clock) -> None:
    run = controller(make_config(trainer={"nodes": 2}))
    await met(run, "ab")
    await run.registry.leave(ServerLeaves(name="trainer-1", boot="b"))
    for _ in range(5):
        assert None not in (await renewed(run, clock, "a")).gang
    assert (await run.registry.register(machine(1, "c"))).gang == [None, "http://10.0.0.1:1001"]


async def test_the_only_machine_of_a_trainer_may_be_silent_beyond_its_lease(controller, clock) -> None:
    run = controller(make_config(controller={"trainer": "external"}))
    assert (await run.registry.register(machine(0, "a"))).gang == ["http://10.0.0.0:1000"]
    await passes(run, clock, 2 * registry.LEASE_SECONDS)  # such as a network that is cut
    assert (await run.registry.register(machine(0, "a"))).gang == ["http://10.0.0.0:1000"]
    with pytest.raises(Overloaded, match=r"trainer-0 is at http://10\.0\.0\.0:1000"):
        await run.registry.register(machine(0, "b"))
    for _ in range(4):
        await renewed(run, clock, "a")
    with pytest.raises(Replaced, match="renews it: give this one another --node, or end that one"):
        await run.registry.register(machine(0, "b"))
    await run.registry.leave(ServerLeaves(name="trainer-0", boot="a"))
    assert (await run.registry.register(machine(0, "b"))).gang == ["http://10.0.0.0:1000"]


# --- announcers ---------------------------------------------------------------------------------------------

SERVER = """
import http.server, subprocess, sys
subprocess.Popen(["sleep", "1000"])
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    log_message = lambda *_: None
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""
ANNOUNCER = f"""
import asyncio, sys
from functools import partial
from pathlib import Path
from distill.launch.single_role import Lease, run_registered
from distill.launch.supervise import ChildSpec
from sync.base.address import controller_url
folder, port = sys.argv[1:]
there = partial(controller_url, Path(folder))
child = ChildSpec("teacher-t", [sys.executable, "-c", {SERVER!r}, port])
lease = Lease("test", child.name, f"http://127.0.0.1:{{port}}", there)
sys.exit(asyncio.run(run_registered(child, lease, 5.0)))
"""
RANKS = """
import pathlib, signal, sys
pathlib.Path(sys.argv[1]).write_text(sys.argv[2])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.pause()
"""
MACHINE = f"""
import signal, sys
from functools import partial
from pathlib import Path
from small_config import make_config
from distill.launch import single_role
from distill.launch.supervise import ChildSpec
from sync.base.address import controller_url
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
folder, node, nodes = sys.argv[1:]
ranks = [sys.executable, "-c", {RANKS!r}, f"{{folder}}/{{node}}"]
single_role.trainer_process = lambda config, url, node=0, meeting="": ChildSpec("trainer", [*ranks, meeting])
settings = make_config(trainer={{"nodes": int(nodes)}})
single_role.train(settings, partial(controller_url, Path(folder)), int(node))
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts ANNOUNCER at a port, or MACHINE i of n, in the run's folder; whatever is left is killed."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])}
    with contextlib.ExitStack() as left:

        def popen(script: str, *words: int) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-c", script, str(tmp_path), *map(str, words)]
            process = subprocess.Popen(command, cwd=ROOT, env=env)
            left.callback(process.wait)
            left.callback(process.kill)
            return process

        yield popen


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Callable[[Controller], asyncio.Task[Any]]]:
    """Starts a controller, and writes where it is into the run's folder."""
    tasks: list[asyncio.Task[Any]] = []

    def start_controller(run: Controller) -> asyncio.Task[Any]:
        tasks.append(asyncio.create_task(run.run()))
        (tmp_path / "controller.json").write_text(json.dumps({"url": run.url}))
        return tasks[-1]

    yield start_controller
    await cancel(tasks)


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "LEASE_SECONDS", 3.0)


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


async def until(condition) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.05)


async def test_announcers_register_renew_and_take_their_servers_with_them(
    controller, start, serve, short_leases
) -> None:
    address = Address("teacher-t")
    run = controller(expected={"teacher-t": address})
    serve(run)
    holder = run.registry._holders["teacher-t"]
    first, second = free_port(), free_port()

    one = start(ANNOUNCER, first)
    await until(lambda: address.url == f"http://127.0.0.1:{first}")
    lease = holder.expires
    await until(lambda: lease < holder.expires < math.inf)  # it renews

    below = family(one)
    assert len(below) == 3  # guardian, server, its child
    one.kill()
    two = start(ANNOUNCER, second)
    await until(lambda: not [process for process in below if process.is_running()])
    await until(lambda: address.url == f"http://127.0.0.1:{second}")

    below = family(two)
    await run.registry.leave(ServerLeaves(name="teacher-t"))  # as a person takes it out
    assert await asyncio.to_thread(two.wait, 600) == EXIT_REFUSED
    assert not [process for process in below if process.is_running()]

    three = start(ANNOUNCER, second)
    await until(lambda: address.url == f"http://127.0.0.1:{second}")
    three.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(three.wait, 600) == 128 + signal.SIGTERM
    assert address.url is None, "it has left"


@pytest.mark.parametrize(
    ("name_of_run", "words"),
    [("other", "controller of run 'test', and a process"), ("test", "no server 'teacher-x' is expected")],
)
async def test_a_refusal_that_no_retry_mends_ends_a_role_at_once(
    controller, serve, name_of_run: str, words: str
) -> None:
    run = controller()
    serve(run)

    async def loads() -> bool:
        raise AssertionError("a server that is refused need not load first")

    lease = Lease(name_of_run, "teacher-x", "http://127.0.0.1:1", lambda: run.url)
    with pytest.raises(RemoteError, match=words):
        await asyncio.wait_for(lease.keep(ready=loads), 60)


async def test_a_role_whose_name_another_process_renews_waits_for_its_lease_and_ends(
    controller, serve, short_leases
) -> None:
    address = Address("teacher-t")
    serve(run := controller(expected={"teacher-t": address}))
    urls = "http://127.0.0.1:1", "http://127.0.0.1:2"
    first, second = (Lease("test", "teacher-t", url, lambda: run.url) for url in urls)
    renewing = asyncio.create_task(first.keep())
    await until(lambda: address.url == urls[0])
    with pytest.raises(Replaced, match="the process there renews it"):
        await asyncio.wait_for(second.keep(), 60)
    assert address.url == urls[0]
    await cancel([renewing])


async def test_a_url_that_is_no_controller_s_ends_a_role_at_once() -> None:
    with served(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as stranger:
        url = f"http://127.0.0.1:{stranger.server_port}"
        with pytest.raises(WrongServer, match=f"{url} is an HTTP server .*, and the controller of a run was"):
            await asyncio.wait_for(Lease("test", "teacher-t", url, lambda: url).keep(), 60)


async def test_a_controller_that_is_not_there_yet_is_waited_for_and_one_that_moved_is_told_again(
    controller, serve, short_leases, tmp_path, caplog
) -> None:
    with refusing() as before:  # where it was when it last started
        (tmp_path / "controller.json").write_text(json.dumps({"url": before}))
        lease = Lease("test", "teacher-t", "http://127.0.0.1:1", partial(controller_url, tmp_path))
        keeping = asyncio.create_task(lease.keep())
        for _ in range(2):
            await until(lambda: "teacher-t is not registered" in caplog.text)
            address = Address("teacher-t")
            running = serve(controller(expected={"teacher-t": address}))
            await until(lambda there=address: there.url == "http://127.0.0.1:1")
            caplog.clear()
            await cancel([running])
    assert not keeping.done()
    await cancel([keeping])


@pytest.mark.parametrize(
    ("there", "says"),
    [
        ({"trainer": {"nodes": 2}}, "trainer.nodes is 1 here and 2 at the controller"),
        ({}, "this run starts its trainer itself"),
    ],
)
async def test_a_machine_that_the_controller_does_not_expect_ends_with_one_message_and_loads_nothing(
    controller, start, serve, tmp_path, capfd: pytest.CaptureFixture[str], there: Any, says: str
) -> None:
    serve(controller(make_config(**there)))
    refused = start(MACHINE, 0, 1)
    assert await asyncio.to_thread(refused.wait, 600) == EXIT_REFUSED
    (line,) = capfd.readouterr().err.splitlines()
    assert says in line
    assert not (tmp_path / "0").exists()


async def test_the_only_machine_of_a_trainer_has_its_name_until_its_terminal_is_gone(
    controller, start, serve, tmp_path
) -> None:
    """Then its ranks save their checkpoint."""
    run, ranks = controller(make_config(controller={"trainer": "external"})), tmp_path / "0"
    serve(run)
    alone = start(MACHINE, 0, 1)
    await until(lambda: ranks.exists() and ranks.read_text() == run.registry.listing().servers[-1].url)
    alone.send_signal(signal.SIGHUP)
    assert await asyncio.to_thread(alone.wait, 600) == 0
    assert run.registry.listing().servers[-1].url is None, "it has left"


# --- the trainer's machines ---------------------------------------------------------------------------------


async def test_machines_start_their_ranks_together_and_lose_them_together(
    controller, start, serve, short_leases, tmp_path
) -> None:
    run = controller(make_config(trainer={"nodes": 2}))
    serve(run)

    def machines(*nodes: int) -> list[subprocess.Popen[bytes]]:
        return [start(MACHINE, node, 2) for node in nodes]

    def met() -> bool:
        """Whether both have started their ranks, and told them where machine 0 is."""
        place = run.registry.listing().servers[1].url
        told = [tmp_path / str(node) for node in range(2)]
        return all(file.exists() and file.read_text() == place for file in told)

    (alone,) = machines(1)
    await until(lambda: run.registry.listing().servers[2].url is not None)
    alone.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(alone.wait, 600) == 128 + signal.SIGTERM
    assert run.registry.listing().servers[2].url is None, "else machine 0 would start ranks that wait for it"

    first, second = machines(0, 1)
    await until(met)
    below = family(first) + family(second)
    assert len(below) == 4  # a guardian each, and ranks
    meeting = urlsplit((tmp_path / "0").read_text())
    with pytest.raises(OSError, match="in use"):  # rank 0 does not listen there yet
        socket.create_server((str(meeting.hostname), meeting.port or 0))
    second.kill()
    assert await asyncio.to_thread(first.wait, 600) == 128 + signal.SIGKILL, "its ranks could wait for ever"
    await until(lambda: not [process for process in below if process.is_running()])

    for node in range(2):
        (tmp_path / str(node)).unlink()
    first, second = machines(0, 1)
    await until(met)
    second.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(second.wait, 600) == 0
    assert run.registry._holders["trainer-1"].expires == math.inf, "ranks that ended well are not missed"
    first.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(first.wait, 600) == 0


def test_a_machine_that_meets_another_than_before_starts_its_ranks_again() -> None:
    """A controller that starts anew cannot tell that a machine was started again meanwhile."""

    def lease(*urls: str | None) -> ServerLease:
        return ServerLease(name="trainer-0", seconds=15.0, gang=[*urls])

    gang = Gang(2, 60.0)
    assert gang.told(lease("http://a:1", None)) == "machines [1] of the trainer have not registered"
    assert not gang.met.is_set()
    assert gang.told(lease("http://a:1", "http://b:1")) == ""
    assert gang.places == ["http://a:1", "http://b:1"]
    gang.told(lease("http://a:1", None))  # a new controller, which the other has not told yet
    gang.told(lease("http://a:1", "http://b:1"))
    with pytest.raises(Replaced, match=r"machines \[1\] of the trainer were started again"):
        gang.told(lease("http://a:1", "http://b:2"))


# --- how a role finds the controller -----------------------------------------------------------------------


def test_a_role_listens_where_its_controller_reaches_it(tmp_path: Path) -> None:
    config = load(ROOT / "configs/quickstart.toml", ["run.start_seconds=0.1"])  # for a controller to come
    assert joining(config, None, None) == (config, None)
    moved, found = joining(config, None, "http://127.0.0.1:8400")
    assert found is not None
    assert found() == "http://127.0.0.1:8400"
    assert moved.student.host == own_address("http://127.0.0.1:8400") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"controller\.json does not say where the controller is"):
        joining(config, tmp_path, None)
    (tmp_path / "controller.json").write_text('{"url": "http://127.0.0.1:1"}')
    found = joining(config, tmp_path, None)[1]
    assert found is not None
    assert found() == "http://127.0.0.1:1"
    (tmp_path / "controller.json").write_text('{"url": "http://127.0.0.1:2"}')  # it was started elsewhere
    assert found() == "http://127.0.0.1:2"
