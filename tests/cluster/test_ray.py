"""Roles in actors of a Ray cluster of three network namespaces: what happens to them, and how soon.

A role here is a small script below the real client, actors, guardian and supervisor.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray_hosts
from ray_hosts import RayHosts
from waiting import until

from distill.config.cluster import RayCluster
from distill.launch.cluster import Ray
from distill.launch.supervise import ChildSpec, Supervisor
from distill.preflight_checks.placement import Node
from distill.topology import Process

log = logging.getLogger(__name__)
REASON = ray_hosts.missing()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(300),
]
ROLE = """
import os, signal, subprocess, sys, time
def leave(*_):
    print("asked to leave", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
child = subprocess.Popen(["sleep", "1000.25"], start_new_session=True)
print("role", os.getpid(), "index", os.environ.get("DISTILL_NODE_INDEX"), flush=True)
while True:
    time.sleep(0.1)
"""
GRANDCHILD = "sleep 1000.25"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHosts]:
    with RayHosts(tmp_path_factory.mktemp("ray"), [0, 2, 1]) as made:
        yield made


def line(
    cluster: RayHosts, argv: Sequence[str], *places: int, gpus: int = 0, env: Sequence[str] = ()
) -> list[str]:
    """The client of a role called "role-0", as it is run on the head."""
    nodes = [Node(cluster.hosts[index].address, 0, 1) for index in places]
    need = Process("role-0", gpus, len(nodes))
    ray = Ray(RayCluster(type="ray", address=cluster.address))
    return cluster.command(cluster.hosts[0], ray.client(need, nodes, argv, dict.fromkeys(env, "")))


def starts(path: Path) -> list[tuple[str, str]]:
    """(process id, index) of every role that has started, as a client's log has them."""
    return re.findall(r"^role (\d+) index (\w+)$", path.read_text(), re.MULTILINE) if path.exists() else []


class Client:
    """The client of a role of which every process has started, beside the test."""

    def __init__(self, cluster: RayHosts, folder: Path, *places: int) -> None:
        self.log, words = folder / "log", line(cluster, [sys.executable, "-c", ROLE], *places)
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(words, env=cluster.environment, stdout=output, stderr=output)
        until(lambda: len(starts(self.log)) == len(places), 90, self.text, self.process)

    def text(self) -> str:
        return self.log.read_text()


def role_processes(cluster: RayHosts, index: int) -> list[psutil.Process]:
    """Guardian, role and grandchild on a host."""
    return cluster.hosts[index].processes(GRANDCHILD) + cluster.hosts[index].processes("asked to leave")


def nothing_left(cluster: RayHosts) -> Callable[[], bool]:
    return lambda: not any(role_processes(cluster, index) for index in range(3))


def listed(cluster: RayHosts, index: int, **variables: str) -> subprocess.CompletedProcess[str]:
    """The machines of the cluster, asked for on a host."""
    order = json.dumps({"address": cluster.address})
    words = [sys.executable, "-P", "-m", "distill.launch.ray_role", order]
    line, env = cluster.command(cluster.hosts[index], words), cluster.environment | variables
    return subprocess.run(line, env=env, capture_output=True, text=True, check=False)


def test_the_machines_of_a_cluster_are_listed_this_one_first(cluster: RayHosts) -> None:
    for index in (0, 2):
        found = json.loads(listed(cluster, index).stdout)
        assert found[0]["address"] == cluster.hosts[index].address
        assert sorted((one["name"], one["gpus"], one["cpus"]) for one in found) == [
            ("10.78.0.1", 0, 1),
            ("10.78.0.2", 2, 1),
            ("10.78.0.3", 1, 1),
        ]


def test_a_cluster_refuses_who_has_another_token(cluster: RayHosts, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("another token\n")
    done = listed(cluster, 1, RAY_AUTH_TOKEN_PATH=str(tmp_path / "other"))
    assert done.returncode == 2
    assert "Ray does not let this process in" in done.stderr


def test_a_role_has_its_own_gpu_the_given_variables_and_its_status(cluster: RayHosts, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("")
    show = (
        "import json, os, time; print(json.dumps(dict(os.environ)), flush=True)\n"
        f"open({str(there)!r}, 'a').write('x')\n"
        f"while len(open({str(there)!r}).read()) < 3: time.sleep(0.1)\n"  # none gets another's GPU
        "raise SystemExit(7)"
    )
    environment = cluster.environment | {"GIVEN": "a secret of the tests"}
    words = [
        line(cluster, [sys.executable, "-c", show], 1, gpus=1, env=["GIVEN"]),
        line(cluster, [sys.executable, "-c", show], 1, gpus=1),
        line(cluster, [sys.executable, "-c", show], 1),
    ]
    running = [subprocess.Popen(one, env=environment, stdout=subprocess.PIPE, text=True) for one in words]
    said = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [7, 7, 7], said
    found = [json.loads(text[text.index("{") :]) for text in said]
    assert sorted(one["CUDA_VISIBLE_DEVICES"] for one in found) == ["", "0", "1"]
    assert [one.get("GIVEN") for one in found] == ["a secret of the tests", None, None]
    assert "a secret of the tests" not in str(words)
    for one in found:
        assert not [name for name in one if name.startswith("RAY_") or name == "OMP_NUM_THREADS"]


def test_sigterm_reaches_the_role_whose_status_is_the_clients(cluster: RayHosts, tmp_path: Path) -> None:
    client = Client(cluster, tmp_path, 1)
    client.process.terminate()
    assert client.process.wait(60) == 0
    assert client.text().endswith("asked to leave\n")
    until(nothing_left(cluster), 60)


def test_a_killed_client_takes_its_role_with_it(cluster: RayHosts, tmp_path: Path) -> None:
    client = Client(cluster, tmp_path, 1)
    client.process.kill()
    seconds = until(nothing_left(cluster), 60)
    log.info("client SIGKILL: all gone after %.2f s", seconds)
    assert "asked to leave" not in client.text()


def test_several_machines_end_together(cluster: RayHosts, tmp_path: Path) -> None:
    client = Client(cluster, tmp_path, 1, 2)
    roles = {index: pid for pid, index in starts(client.log)}
    assert set(roles) == {"0", "1"}
    os.kill(int(roles["1"]), signal.SIGKILL)
    assert client.process.wait(60) == 128 + 9
    assert "asked to leave" not in client.text(), "a trainer would end the run in order"
    assert nothing_left(cluster)()


class Supervised:
    """A role on host 1 below the supervisor of runs; `times` maps what its log has said to the clock."""

    def __init__(self, cluster: RayHosts, folder: Path, gpus: int = 0) -> None:
        words = line(cluster, [sys.executable, "-c", ROLE], 1, gpus=gpus)
        self.log = folder / "role-0.log"
        spec = ChildSpec("role-0", words, cluster.environment, joined=lambda: bool(starts(self.log)))
        self.supervisor = Supervisor([spec], folder, restarts=5, start_seconds=120)

    async def until(self, condition: Callable[[], object], seconds: float) -> float:
        return await asyncio.to_thread(until, condition, seconds, self.log.read_text)

    async def __aenter__(self) -> Supervised:
        await self.supervisor.start()
        await self.supervisor.ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.supervisor.stop(5)


async def test_a_killed_role_is_back_on_its_machine(cluster: RayHosts, tmp_path: Path) -> None:
    async with Supervised(cluster, tmp_path, gpus=2) as role:
        os.kill(int(starts(role.log)[0][0]), signal.SIGKILL)
        seconds = await role.until(lambda: len(starts(role.log)) == 2, 60)
        log.info("role SIGKILL: back after %.1f s", seconds)
        assert "takes another machine" not in role.log.read_text()
    until(nothing_left(cluster), 60)


async def test_a_short_cut_is_survived(cluster: RayHosts, tmp_path: Path) -> None:
    async with Supervised(cluster, tmp_path) as role:
        cluster.hosts[1].cut()
        await asyncio.sleep(3)
        cluster.hosts[1].heal()
        await asyncio.sleep(10)
        assert len(starts(role.log)) == 1
        assert role_processes(cluster, 1)
    until(nothing_left(cluster), 60)


async def test_a_role_moves_from_a_machine_whose_raylet_is_killed(cluster: RayHosts, tmp_path: Path) -> None:
    async with Supervised(cluster, tmp_path, gpus=1) as role:
        cluster.kill(1)
        gone = await role.until(lambda: not role_processes(cluster, 1), 60)
        back = gone + await role.until(lambda: len(starts(role.log)) == 2, 90)
        log.info("raylet SIGKILL: role gone after %.1f s, elsewhere after %.1f s", gone, back)
        said = role.log.read_text()
        assert "takes another machine: 10.78.0.2 is not in the cluster" in said
        assert "role-0 runs on 10.78.0.3" in said
        assert role.supervisor.children["role-0"].restarts == 1
    until(nothing_left(cluster), 60)
    until(lambda: not cluster.hosts[1].processes(), 30)
    cluster.start(1)


async def test_a_role_moves_from_a_machine_that_is_cut_off_and_leaves_it(
    cluster: RayHosts, tmp_path: Path
) -> None:
    async with Supervised(cluster, tmp_path) as role:
        cluster.hosts[1].cut()
        back = await role.until(lambda: len(starts(role.log)) == 2, 60)
        there = bool(role_processes(cluster, 1))
        cluster.hosts[1].heal()
        gone = await role.until(lambda: not role_processes(cluster, 1), 60)
        log.info("cut: elsewhere after %.1f s; still there: %s, gone %.1f s after healing", back, there, gone)
        assert len(starts(role.log)) == 2
    until(nothing_left(cluster), 60)
    until(lambda: not cluster.hosts[1].processes(), 60)
    cluster.start(1)


def listening(others: list[psutil.Process]) -> set[str]:
    """Addresses at which processes below this one listen, but for `others`."""
    found = set()
    for process in set(psutil.Process().children(recursive=True)) - set(others):
        with suppress(psutil.Error):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add(connection.laddr.ip.removeprefix("::ffff:"))
    return found


def test_a_head_of_its_own_is_on_loopback_and_leaves_nothing(tmp_path: Path) -> None:
    before, others = dict(os.environ), psutil.Process().children(recursive=True)
    with Ray(RayCluster(type="ray")) as own:
        (node,) = own.nodes
        assert (own.host, node.name) == ("127.0.0.1", "127.0.0.1")
        words = own.client(Process("role-0"), [node], [sys.executable, "-c", "raise SystemExit(5)"], {})
        env = os.environ | own.env
        assert subprocess.run(words, env=env, check=False, timeout=120).returncode == 5
        assert listening(others) == {"127.0.0.1"}
    assert not set(psutil.Process().children(recursive=True)) - set(others)
    assert dict(os.environ) == before


def test_a_head_ends_with_a_process_that_is_killed() -> None:
    code = (
        "import time\nfrom distill.launch.cluster import Ray\n"
        "from distill.config.cluster import RayCluster\n"
        "with Ray(RayCluster(type='ray')): print('up', flush=True); time.sleep(1000)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "up\n"
    below = psutil.Process(owner.pid).children(recursive=True)
    assert any(process.name() == "raylet" for process in below)
    owner.kill()
    owner.wait()
    seconds = until(lambda: not any(one.is_running() and one.status() != "zombie" for one in below), 60)
    log.info("owner SIGKILL: its head gone after %.1f s", seconds)
