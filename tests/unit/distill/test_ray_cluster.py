"""A Ray cluster without Ray: what is refused, what a client's command line holds, what an actor does."""

import importlib.util
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from distill.config.cluster import RayCluster
from distill.launch.cluster import Ray
from distill.launch.ray_actor import RoleActor
from distill.launch.ray_role import Order
from distill.preflight_checks.placement import Node
from distill.topology import Process
from sync.base.errors import ConfigError

CLUSTER = RayCluster(type="ray", address="10.0.0.1:6379", env=["OWN"])


@pytest.fixture
def _ray_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"onpolicy-distill\[ray\]"):
        Ray(CLUSTER)


@pytest.mark.usefixtures("_ray_is_there")
def test_a_variable_that_is_not_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OWN", raising=False)
    with pytest.raises(ConfigError, match=r"cluster\.env names OWN, not set here"):
        Ray(CLUSTER)


@pytest.mark.usefixtures("_ray_is_there")
def test_a_client_names_variables_and_finds_their_values_in_its_environment(monkeypatch) -> None:
    given = {"OWN": "value 1", "HF_TOKEN": "value 2", "DISTILL_TOKEN_FILE": "value 3", "OTHER": "value 4"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    nodes = [Node("10.0.0.2", 8, 64), Node("10.0.0.3", 8, 64)]
    line = Ray(CLUSTER).client(Process("trainer", 4, 2), nodes, ["distill", "-x"], {"OTHER": "value 4"})
    assert not any("value" in word for word in line)
    order = Order(**json.loads(line[-1]))
    assert (order.name, order.address, order.gpus) == ("trainer", "10.0.0.1:6379", 4)
    assert order.nodes == ["10.0.0.2", "10.0.0.3"]
    assert order.argv == ["distill", "-x"]
    assert {name for name in order.env if "HF_" not in name or name in given} == {*given}


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1", "127.0.0.1:ray"])
def test_an_address_without_a_cluster_is_refused_at_once(address: str) -> None:
    words = [sys.executable, "-P", "-m", "distill.launch.ray_role", json.dumps({"address": address})]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"cluster.address {address}: no Ray cluster is there" in done.stderr


SHOWS = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['GIVEN']); raise SystemExit(7)"
NAPS = "import time; print('up', flush=True); time.sleep(600)"


@pytest.mark.parametrize(
    ("code", "asked", "killed", "said", "status"),
    [
        (SHOWS, False, False, b"3 value\n", 7),
        (NAPS, True, False, b"", 128 + 15),
        (NAPS, False, True, b"up\n", 128 + 9),
    ],
    ids=["it ends by itself", "asked to end before it has started", "killed"],
)
def test_an_actor_hands_on_what_its_command_writes_and_how_it_ends(
    monkeypatch: pytest.MonkeyPatch, code: str, asked: bool, killed: bool, said: bytes, status: int
) -> None:
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": ["3"]})
    util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.2")
    ray = SimpleNamespace(get_runtime_context=lambda: context, util=util)
    monkeypatch.setitem(sys.modules, "ray", ray)
    actor = RoleActor()
    if asked:
        actor.terminate()
    assert actor.start("role", ["python", "-c", code], {"GIVEN": "value"}, "python", "/") == "10.0.0.2"
    line = b""
    while not line.endswith(b"\n") and (chunk := actor.output()):
        line += chunk
    assert line == said
    if killed:
        actor.kill()
    assert actor.status() == status
    assert actor.output() == b""
    actor.terminate()  # it comes too late, and hurts nobody
    actor._process.stdout.close()
