"""The processes of a run: their names, GPUs, addresses and commands."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import typer
from small_config import make_config

from distill.cli.main import app
from distill.config import RunConfig
from distill.launch import roles
from distill.launch.roles import STARTERS, Ports, plan_servers, trainer_child
from distill.topology import KINDS, command, kind_of, parallel, places, process_of, processes, servers
from sync.base.address import TOKEN_VARIABLE
from sync.base.errors import ConfigError
from sync.base.memory import ALLOCATOR, sharing
from sync.base.settings import Settings

ENGINE = {"tensor-parallel-size": 2, "--pipeline_parallel_size": "3"}


def everything() -> RunConfig:
    return make_config(
        student={"replicas": 2, "engine_args": ENGINE},
        teachers={
            "t": {"path": "x", "replicas": 2, "devices": ["0,1", "5"], "route": ["a"]},
            "b": {"path": "x", "urls": ["http://h:1"], "follow_student_every": 1, "route": ["b"]},
            "c": {"path": "x", "device": "cpu", "route": ["c"]},
            "d": {"path": "x", "device": "cpu", "gpus": 1, "route": ["d"]},
        },
        environments={"game": {"environment": "m:f", "processes": 2, "gpus": 1}},
        evaluation={"replica": {"gpus": 4}},
        trainer={"ranks": 8, "nodes": 2},
    )


def test_every_process_has_its_name_gpus_and_address() -> None:
    found = processes(everything())
    assert {process.name: (process.gpus, process.nodes, process.url) for process in found} == {
        "student-0": (6, 1, None),
        "student-1": (6, 1, None),
        "teacher-t-0": (2, 1, None),
        "teacher-t-1": (1, 1, None),
        "teacher-b": (1, 1, "http://h:1"),
        "teacher-c": (0, 1, None),
        "teacher-d": (1, 1, None),
        "environment-game-0": (1, 1, None),
        "environment-game-1": (1, 1, None),
        "evaluation-replica": (4, 1, None),
        "evaluator": (1, 1, None),
        "trainer": (8, 2, None),
    }
    followers = ["student-0", "student-1", "teacher-b", "evaluation-replica", "evaluator"]
    assert [process.name for process in found if process.follows] == followers
    *_, evaluator, _ = processes(make_config(evaluation={"device": "cpu"}))
    assert (evaluator.name, evaluator.gpus) == ("evaluator", 0)


def test_on_machines_without_gpus_a_process_has_those_that_its_section_asks_for() -> None:
    config = make_config(student={"gpus": 3}, teachers={"t": {"path": "x", "devices": ["1,2"]}})
    found = {process.name: process.gpus for process in processes(config, gpus=False)}
    assert found == {"student-0": 3, "teacher-t": 2, "evaluator": 0, "trainer": 0}


def test_servers_are_at_their_urls_or_where_they_registered() -> None:
    config = make_config(student={"urls": ["http://h:1", "http://h:2"]}, teachers={"t": {"path": "x"}})
    assert [process.name for process in servers(config)] == ["teacher-t", "evaluator"]
    assert places(config, {"teacher-t": "http://t:1"}) == {
        "student": ["http://h:1", "http://h:2"],
        "teachers.t": ["http://t:1"],
        "evaluation.placement": [],
    }


def test_every_process_sees_the_gpus_of_its_entry_and_one_without_an_entry_is_refused(tmp_path: Path) -> None:
    config = make_config(
        run={"folder": tmp_path},
        student={"replicas": 2, "devices": ["0", "1, 2"]},
        teachers={"t": {"path": "x", "devices": ["3"]}},
    )
    with Ports() as ports:
        children = plan_servers(config, None, ports).children
    seen = {child.name: child.env.get("CUDA_VISIBLE_DEVICES") for child in children}
    assert seen == {"student-0": "0", "student-1": "1,2", "teacher-t": "3", "evaluator": None}
    with pytest.raises(ConfigError, match=r"student\.devices has 2 entries, and there is process 2"):
        processes(config.with_(student={"replicas": 3}))
    with pytest.raises(ConfigError, match=r"student\.devices has 2 entries, and there is process 3"):
        process_of(config, "student", 3)
    further = process_of(make_config(), "student", 3)
    assert (further.name, further.index, further.devices) == ("student-3", 3, None)


@pytest.mark.parametrize("own", [{}, {"MALLOC_MMAP_MAX_": "65536"}], ids=["unset", "set by the user"])
def test_every_role_on_a_cpu_keeps_its_freed_memory_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, str]
) -> None:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    deepspeed = Path(__file__).parents[3] / "configs/deepspeed/zero3_cpu.json"
    config = make_config(run={"folder": tmp_path}, trainer={"deepspeed": deepspeed})
    config.run_dir.mkdir(parents=True)
    with Ports() as ports:
        children = [*plan_servers(config, None, ports).children, trainer_child(config, "http://c", None)]
    started = {child.name: {name: child.env.get(name) for name in ALLOCATOR} for child in children}
    assert started == dict.fromkeys(("student-0", "teacher-t", "evaluator", "trainer"), ALLOCATOR | own)
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0+cu130")
    assert sharing(None).keys() == {"OMP_WAIT_POLICY"}, "memory of GPUs is left alone"


def test_a_process_is_started_by_the_command_of_its_section() -> None:
    found = processes(everything())
    assert {process.section: " ".join(command(process.section, process.index)) for process in found} == {
        "student": "student --index 1",
        "teachers.t": "teacher --name t --index 1",
        "teachers.b": "teacher --name b --index 0",
        "teachers.c": "teacher --name c --index 0",
        "teachers.d": "teacher --name d --index 0",
        "environments.game": "environment --name game --index 1",
        "evaluation.replica": "student --evaluation",
        "evaluation.placement": "evaluator",
        "trainer": "train",
    }
    assert parallel(ENGINE) == (2, 3)


def test_of_several_machines_of_a_trainer_a_run_starts_the_first_as_a_person_starts_the_others(
    tmp_path: Path,
) -> None:
    config = make_config(run={"folder": tmp_path}, trainer={"nodes": 2})
    child = trainer_child(config, "http://10.0.0.1:1", "secret")
    words = ["train", str(tmp_path / "test"), "--controller", "http://10.0.0.1:1", "--node", "0"]
    assert child.argv == [sys.executable, "-P", "-m", "distill.cli.main", *words]
    assert (child.env[TOKEN_VARIABLE], child.ends) == ("secret", True)


def test_a_role_is_told_every_setting_that_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A default in its place would be another value than the run's, without a word."""
    told: dict[str, Settings] = {}
    write = roles.write_role

    def noted(run_dir: Path, name: str, settings: Settings) -> Path:
        told[name] = settings
        return write(run_dir, name, settings)

    monkeypatch.setattr(roles, "write_role", noted)
    config = make_config(run={"folder": tmp_path}, environments={"game": {"environment": "m:f"}})
    with Ports() as ports:
        plan_servers(config, None, ports)
    trainer_child(config, "http://c", None)
    for name in ("student-0", "environment-game", "trainer"):
        assert told[name].model_fields_set == type(told[name]).model_fields.keys()


def test_every_section_of_servers_has_a_kind_with_a_command_and_what_starts_it() -> None:
    assert {id(kind_of(section)) for section in everything().places()} == {*map(id, KINDS.values())}
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for kind in KINDS.values():
        assert kind.role in STARTERS
        assert kind.command.split()[0] in commands


KEEPS = """
import psutil
from sync.base import memory

def resident():
    return psutil.Process().memory_info().rss / 2**20

memory.memory = lambda: ({left}, 1)
before = resident()
blocks = [bytearray(size << 16) for size in range(1, 100)]
apart = [bytearray(1000) for _ in blocks]  # they lie behind
del blocks
kept = resident() - before
memory.give_back()
print(kept, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize(("left", "given_back"), [("0.24", True), ("0.26", False)])
def test_freed_memory_is_kept_until_the_machine_runs_short_of_it(left: str, given_back: bool) -> None:
    command = [sys.executable, "-c", KEEPS.format(left=left)]
    output = subprocess.check_output(command, text=True, env=os.environ | ALLOCATOR)
    kept, after = map(float, output.split())
    mib = sum(range(1, 100)) / 16
    assert kept > 0.9 * mib
    assert after < 0.1 * mib if given_back else after > 0.9 * mib
