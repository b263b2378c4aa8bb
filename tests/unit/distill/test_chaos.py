"""Random deaths of everything in one process; what injects faults into real runs, and what measures."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import os
import random
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
import typer
from audited import check
from faults import CUT, MALFORMED, MALFORMED_BYTES, Relay, Relays, malformed, put_between
from in_memory import MemoryReplica, MemoryTeacher, MemoryTrainer
from kill_target import CONTROLLER, INJECT, KillTarget, processor_seconds, targets
from ports import PATIENCE, Handler, free_port, served
from recorded import rows_of
from small_config import make_config
from typer.testing import CliRunner
from waiting import until

from distill.aio import cancel
from distill.controller import Controller
from distill.guardian import MODULE
from distill.launch import cluster, run
from distill.launch.roles import Ports
from distill.launch.run_folder import RunFolder
from sync.base.errors import DistillError, Unreachable
from sync.wire import Version
from sync.wire.client import Peer
from tests import benchmarks
from tests.benchmarks.asynchronous import SCALES, settled
from tests.benchmarks.figures import comparison, with_json
from tests.benchmarks.sync import opened

ROOT = Path(__file__).parents[3]


class Chaos:
    """A run of `steps` whose parts are killed at random until it is done."""

    def __init__(self, build: Callable[..., Controller], config: object, seed: int, kills: int) -> None:
        self._build, self._config = build, config
        self._rng = random.Random(seed)
        self._kills = kills
        self.replicas = {name: MemoryReplica(seed=i, token_seconds=0.0005) for i, name in enumerate("ab")}
        self.teacher = MemoryTeacher()
        none: Any = None
        self.trainer = MemoryTrainer(none, ranks=2, checkpoint_every=3, step_seconds=0.002)
        self._begin()

    def _begin(self) -> None:
        self.controller = self._build(self._config, replicas=self.replicas, teachers={"t": self.teacher})
        self.controller.pool.retry_seconds = 0.02
        self._running = asyncio.create_task(self.controller.run())
        self.trainer.session = self.controller.session
        self._training = asyncio.create_task(self.trainer.run())

    async def _kill(self, part: str) -> None:
        match part:
            case "trainer":
                await cancel([self._training])
                self._training = asyncio.create_task(self.trainer.run())
            case "controller":
                await cancel([self._training, self._running])
                self._begin()
            case "replica":
                replica = self._rng.choice(list(self.replicas.values()))
                replica.die()
                await asyncio.sleep(0.01)
                replica.revive()
            case "teacher":
                self.teacher.up = False
                await asyncio.sleep(0.005)
                self.teacher.up = True

    async def run(self) -> dict:
        for _ in range(self._kills):
            await asyncio.sleep(self._rng.uniform(0.0, 0.04))
            if self._training.done():
                break
            await self._kill(self._rng.choice(["trainer", "controller", "replica", "teacher"]))
        async with asyncio.timeout(600):
            await self._training
            return await self._running


@pytest.mark.parametrize("seed", range(5))
async def test_random_kills_cost_nothing(controller, config, tmp_path: Path, seed: int) -> None:
    settings = config(run={"steps": 15})
    chaos = Chaos(controller, settings, seed, kills=10)
    summary = await chaos.run()
    assert summary["completed"]
    report = check(tmp_path, chaos.trainer.ledger)
    assert report.ok, report
    state = chaos.controller.record.state
    members = rows_of(tmp_path, "SELECT lineage, step, count(*) FROM member GROUP BY 1, 2")
    sizes = {Version(*version): count for *version, count in members}
    way = [sizes[Version(state.lineages.owner(state.lineage, step), step)] for step in range(15)]
    assert report.trained == sum(way)
    in_parts = rows_of(tmp_path, "SELECT max(is_part) FROM batch") == [1]
    assert in_parts or way == [8] * 15  # two kills in a row may meet the same batch
    assert report.oldest <= 2


# --- relays between roles, over real sockets: what passes, what is cut, what arrives malformed


BODY = bytes(range(128)) * 8


class Server(Handler):
    """Answers BODY, or "short"; /slow when `gate` is open."""

    gate: threading.Event
    asked: threading.Event

    def do_GET(self) -> None:
        if self.path == "/slow":
            self.asked.set()
            self.gate.wait(PATIENCE)
        self.answer(200, b"short" if self.path == "/short" else BODY)

    do_POST = do_GET


def test_clients_of_a_run_s_servers_and_its_trainer_connect_to_relays(tmp_path, monkeypatch) -> None:
    class Before:
        def before(self, role: str, url: str) -> str:
            return f"http://relay-of-{role}:{urlsplit(url).port}"

    for module, name in ((cluster, "plan_servers"), (run, "trainer_child")):
        monkeypatch.setattr(module, name, getattr(module, name))  # to be put back
    put_between(cast(Relays, Before()))
    far = {"path": "x", "urls": ["http://far:1"], "route": ["far"]}
    config = make_config(
        run={"folder": tmp_path},
        teachers={"t": {"path": "x", "port": free_port(), "route": ["near"]}, "far": far},
        trainer={"deepspeed": str(ROOT / "configs/deepspeed/zero3_cpu.json")},
    )
    with RunFolder.open(config, resume=False) as folder, Ports() as ports:
        _, plan = cluster.planned(config, None, folder, None, ports, print)
        child = run.trainer_child(config, "http://127.0.0.1:9", None)
    assert plan.where["teachers.t"] == [f"http://relay-of-teacher-t:{config.teachers['t'].port}"]
    assert plan.where["teachers.far"] == ["http://far:1"]
    assert [str(place).rpartition(":")[0] for place in plan.where["student"]] == ["http://relay-of-student-0"]
    assert child.name == "trainer"
    written = json.loads((config.run_dir / "roles/trainer.json").read_text())
    assert written["controller_url"] == "http://relay-of-controller:9"


@contextmanager
def relayed(folder: Path) -> Iterator[tuple[str, type[Server]]]:
    """URL of a relay before a server, told by files in `folder`."""
    handler = type("Bound", (Server,), {"gate": threading.Event(), "asked": threading.Event()})
    with served(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        yield Relays(folder).before("teacher-a.b", f"http://127.0.0.1:{server.server_port}"), handler
        handler.gate.set()


async def test_a_request_under_way_is_cut_and_the_next_one_passes(tmp_path: Path) -> None:
    with relayed(tmp_path) as (url, server):
        async with Peer(url) as peer:
            asked = asyncio.create_task(peer.once("/slow", b"", PATIENCE))
            await asyncio.to_thread(server.asked.wait, PATIENCE)
            (tmp_path / f"teacher-a.b.{CUT}").touch()
            with pytest.raises(Unreachable, match=r"ServerDisconnectedError|ClientOSError"):
                await asked
            await asyncio.to_thread(until, lambda: not (tmp_path / f"teacher-a.b.{CUT}").exists())
            assert await peer.once("/", None, PATIENCE) == BODY


def test_one_long_answer_arrives_malformed_with_its_length_and_headers(tmp_path: Path) -> None:
    (tmp_path / "old.cut").touch()
    order = tmp_path / f"teacher-a.b.{MALFORMED}"
    with relayed(tmp_path) as (url, _), httpx.Client(trust_env=False) as client:
        assert not list(tmp_path.iterdir()), "orders for an earlier launcher are forgotten"
        assert client.get(url).content == BODY, "nothing is to go wrong"
        order.touch()
        found = [b"short"]
        while found[-1] in (b"short", BODY):
            assert client.get(f"{url}/short").content == b"short"
            found.append(client.get(url).content)
        until(lambda: not order.exists())
        assert client.get(url).content == BODY
    differing = [a != b for a, b in zip(found[-1], BODY, strict=True)]
    assert sum(differing) == MALFORMED_BYTES
    assert found[-1] == malformed(BODY, differing.index(True))


@pytest.mark.parametrize(("role", "hit"), [("environment-guess", True), ("student-0", False)])
def test_a_short_answer_is_malformed_where_turns_are_short(role: str, hit: bool) -> None:
    relay, turn = Relay(role, "http://127.0.0.1:9"), b"HTTP/1.1 200 OK\r\n\r\n" + BODY[:60]
    relay.sound.clear()
    passed = relay.passed(0, turn, answers=True)
    assert relay.sound.is_set() == hit
    assert (passed != turn) == hit
    assert len(passed) == len(turn)


# --- whose processes a killed role has: what it leaves to its guardian is not its successor


LAUNCHER = f"""
import os, subprocess, sys
pipe, held = os.pipe()
server = ["sh", "-c", "sleep 600 & exec sleep 601"]
guardians = [[sys.executable, "-m", "{MODULE}", role, str(pipe), *server] for role in sys.argv[1:]]
for started in [subprocess.Popen(guardian, pass_fds=[pipe]) for guardian in guardians]:
    started.wait()
"""


def test_a_process_that_a_killed_server_leaves_behind_does_not_replace_it(tmp_path: Path) -> None:
    with KillTarget([sys.executable, "-c", LAUNCHER, "student-0"], tmp_path, timeout=PATIENCE) as target:
        target.start()
        target.wait(lambda: any("600" in one.cmdline() for one in target.below()), "the server's engine")
        server = next(iter(target.processes()))
        guardian = psutil.Process(server.ppid())
        guardian.send_signal(signal.SIGSTOP)
        target.kill("student-0", random.Random(0))
        target.wait(lambda: bool(target.processes() - {server}), "the guardian's adopting it")
        target.timeout = 1.0
        with pytest.raises(DistillError, match="another student-0 is not there in time"):
            target.wait_replaced("student-0")


def test_processor_time_is_told_by_role_and_workers_of_rewards_are_none_whose_work_is_waited_for(
    tmp_path: Path,
) -> None:
    launcher = [sys.executable, "-c", LAUNCHER, "student-0", "rewards"]
    with KillTarget(launcher, tmp_path, timeout=PATIENCE) as target:
        target.start()
        target.wait(lambda: len(target.processes()) == 2, "both servers")
        assert target.roles() == ["student-0"]
        server = next(iter(target.processes()))
        taken = processor_seconds(psutil.Process(server.ppid()).ppid())
    assert taken.keys() == {CONTROLLER, "student-0", "rewards"}
    before = psutil.Process().cpu_times()  # of the tests so far: a launcher may take less than a tick
    user, kernel = processor_seconds(os.getpid())[CONTROLLER]
    after = psutil.Process().cpu_times()
    assert 0 < before.user <= user <= after.user
    assert before.system <= kernel <= after.system


# --- command lines of the benchmarks; the benchmarks themselves are started by hand


NAMES = re.findall(r"^    (\w+)   ", str(benchmarks.__doc__), re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_says_what_it_takes(name: str) -> None:
    module, app = importlib.import_module(f"tests.benchmarks.{name}"), typer.Typer()
    app.command()(with_json(module.run, module.table))
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0, shown.output
    assert "--json" in shown.output


@pytest.mark.parametrize("problem", ["", "3 are lost"])
def test_a_benchmark_prints_a_table_and_writes_its_figures_before_a_problem_in_them_ends_it(
    tmp_path: Path, problem: str
) -> None:
    def run(count: int = 1) -> dict[str, int]:
        return {"count": count}

    app, file = typer.Typer(), tmp_path / "x.json"
    app.command()(with_json(run, lambda figures: f"{figures['count']} of them", lambda _: problem))
    shown = CliRunner().invoke(app, ["--count", "3", "--json", str(file)])
    assert (shown.output, str(shown.exception or "")) == ("3 of them\n", problem)
    assert json.loads(file.read_text()) == {"count": 3}


@pytest.mark.parametrize("scale", SCALES)
def test_the_runs_that_choose_a_precision_are_long_enough_for_a_time_of_a_step(scale: str) -> None:
    assert len(settled([{}] * SCALES[scale].probe_steps)) >= 2


def test_a_ratio_above_one_is_in_favour_of_the_new_variant() -> None:
    variants = {"old": {"ms": 30.0, "rate": 2.0, "age": None}, "new": {"ms": 20.0, "rate": 3.0, "age": None}}
    rows = {"ms": ("ms", -1), "rate": ("rate", 1), "age": ("age", 0)}
    lines = comparison("old", "new", variants, rows)
    assert lines[2:] == ["| ms | 30 | 20 | 1.50 |", "| rate | 2 | 3 | 1.50 |"]


@pytest.mark.parametrize("name", ["bucket", "s3"])
def test_a_server_of_a_store_is_a_process_beside_the_benchmark(name: str, tmp_path: Path) -> None:
    with opened(name, tmp_path) as store:
        store.create("run/key", b"content")
        assert store.read("run/key") == b"content"


def test_twelve_faults_are_of_all_six_kinds() -> None:
    kinds = [*INJECT]
    roles = ["student-0", "teacher-t", "trainer", "evaluator"]
    for seed in range(5):
        endless = targets(random.Random(seed), kinds, roles, ["engine of student-0"])
        assert sorted(kind for kind, _ in itertools.islice(endless, 12)) == sorted(2 * kinds)
