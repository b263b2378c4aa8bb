"""Threads of the roles that share this machine's cores: how many, for which runs, and who gets them."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from sized_models import dense
from small_config import make_config
from transformers import GPT2Config, MambaConfig, PretrainedConfig

from distill import hardware
from distill.config import RunConfig
from distill.config.loading import load_run_dir, with_settings
from distill.launch.roles import Ports, plan_servers, trainer_child
from distill.metrics.summary import threads
from distill.model_facts import shape_of
from distill.planning import forecast
from distill.planning import threads as module
from distill.planning.estimate import find_roles
from distill.planning.threads import decide_threads, is_planned, threads_each
from distill.preflight_checks import machine
from sync.base.errors import ConfigError
from sync.base.memory import THREADS
from sync.base.settings import ModelSource, Placement

ROOT = Path(__file__).parents[3]
NOBODY = {"student": None, "trainer": None, "teacher v1.5": None, "evaluator": None}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return dense(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def twelve_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Twelve, of a machine without GPUs; the least of models is worth a second thread."""
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    monkeypatch.delenv(THREADS, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12))
    monkeypatch.setattr(machine, "installed_for_cpu", lambda: True)
    monkeypatch.setattr(module, "LEAST_WORK", 0.0)


def run_on(model: str, **sections: Any) -> RunConfig:
    trainer = {"deepspeed": ROOT / "configs/deepspeed/zero3_cpu.json", **sections.pop("trainer", {})}
    student = {"path": model, **sections.pop("student", {})}
    teacher = {"path": model, **sections.pop("teacher", {})}
    config = make_config(student=student, trainer=trainer, teachers={"v1": teacher}, **sections)
    return with_settings(config.model_copy(update={"teachers": {"v1.5": config.teachers["v1"]}}), [])


def saved(folder: Path, config: PretrainedConfig) -> str:
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("cores", "replicas", "training", "each"),
    [
        (1, 1, 8, (1, 1, 1)),
        (2, 1, 8, (1, 1, 2)),
        (2, 1, 4.5, (1, 1, 2)),
        (2, 1, 4.4, (1, 1, 1)),
        (8, 1, 8, (2, 1, 5)),
        (9, 1, 8, (2, 1, 6)),
        (8, 3, 8, (1, 1, 4)),
    ],
)
def test_threads_go_to_the_slowest_stage(
    cores: int, replicas: int, training: float, each: tuple[int, ...]
) -> None:
    """Two cores for 3 + 1 + t seconds: the trainer has two threads where t > 1.05 (4 + t) / 2, or 4.42."""
    work = {"student": 3.0 / replicas, "teacher t": 1.0, "trainer": training}
    counts = {"student": replicas, "teacher t": 1, "trainer": 1}
    assert threads_each(work, counts, cores, {}) == dict(zip(work, each, strict=True))


@pytest.mark.parametrize(
    ("fixed", "each"),
    [
        ({"student": 10}, (10, 1, 2)),
        ({"trainer": 1}, (1, 1, 1)),
        ({"trainer": 6}, (3, 1, 6)),
        ({"teacher t": 4}, (2, 4, 6)),
    ],
)
def test_set_threads_stay_and_the_others_share_what_is_left(
    fixed: dict[str, int], each: tuple[int, ...]
) -> None:
    """Up to where the slowest stage is as fast as it can be."""
    work = {"student": 3.0, "teacher t": 1.0, "trainer": 8.0}
    assert threads_each(work, dict.fromkeys(work, 1), 12, fixed) == dict(zip(work, each, strict=True))


def test_what_a_thread_computes_in_no_time_has_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_WORK", 1.0)
    for seconds, count in ((0.9, 1), (2.0, 4)):
        work = dict.fromkeys(("student", "trainer"), seconds)
        assert threads_each(work, dict.fromkeys(work, 1), 8, {}) == dict.fromkeys(work, count)


def test_every_role_that_has_no_threads_gets_those_of_the_fastest_step(model: str) -> None:
    config, (line,) = decide_threads(run_on(model, trainer={"ranks": 1}))
    counts = threads(config)
    assert sum(count or 0 for role, count in counts.items() if role != "evaluator") == 12
    assert counts["evaluator"] == counts["teacher v1.5"]
    assert line == "threads on 12 cores: " + ", ".join(f"{role} {count}" for role, count in counts.items())
    assert decide_threads(config) == (config, [])
    head_alone, _ = decide_threads(
        run_on(model, teacher={"engine": "vllm", "engine_url": "http://127.0.0.1:1"})
    )
    assert threads(head_alone)["teacher v1.5"] == 1


def test_stages_one_after_the_other_have_all_cores_each(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_on(model, trainer={"ranks": 2}, buffer={"max_staleness": 0})
    assert [*threads(decide_threads(config)[0]).values()] == [12, 6, 12, 12]
    another = config.model_copy(update={"teachers": {**config.teachers, "b": config.teachers["v1.5"]}})
    assert [*threads(decide_threads(another)[0]).values()] == [12, 6, 6, 6, 6]
    monkeypatch.setattr(module, "LEAST_WORK", 1e9)
    assert [*threads(decide_threads(config)[0]).values()] == [1, 1, 1, 1]


def test_what_the_user_sets_stays(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_by_user = {"student": {"threads": 5}, "teacher": {"env": {THREADS: "6,2"}}}
    config, _ = decide_threads(run_on(model, **set_by_user, trainer={"ranks": 1}))
    assert (config.student.threads, config.teachers["v1.5"].threads) == (5, None)
    assert threads(config)["teacher v1.5"] == 6
    assert config.trainer.threads == 2, "one is left of twelve, and the trainer is the slowest by far"
    config, [line] = decide_threads(run_on(model, teacher={"env": {THREADS: "0"}}))
    assert line.startswith("threads on 12 cores: "), "no number of threads"
    monkeypatch.setenv(THREADS, "3")
    config = run_on(model)
    assert decide_threads(config) == (config, [])
    planned = find_roles(config, hardware.core(), [])
    assert {role.devices for role in planned.values()} == {3, 6}, "of two ranks together"


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"student": {"urls": ["http://127.0.0.1:1"]}},
        {"trainer": {"nodes": 2}},
        {"controller": {"trainer": "external"}},
        {"cluster": {"type": "external"}},
        {"trainer": {"hostfile": "/dev/null"}},
        {"teacher": {"engine": "mine:Engine"}},
        {"student": {"engine_args": {"tensor-parallel-size": 2}}},
        {"objective": {"type": "sft"}},
        {},
    ],
    ids=str,
)
def test_a_run_that_is_not_on_these_cores_alone_is_left_alone(
    model: str, elsewhere: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not elsewhere:
        monkeypatch.setattr(machine, "installed_for_cpu", lambda: False)
    config = run_on(model, **elsewhere)
    assert decide_threads(config) == (config, [])
    assert threads(config) == NOBODY


def test_a_run_that_cannot_be_planned_goes_on_with_what_its_libraries_take(
    model: str, tmp_path: Path
) -> None:
    config = run_on(model, student={"path": str(tmp_path)})
    unplanned, (line,) = decide_threads(config)
    assert unplanned == config
    assert line.startswith("threads: not chosen, for the run cannot be planned: ")
    shape = shape_of(ModelSource(path=saved(tmp_path / "gpt2", GPT2Config(n_embd=8, n_layer=2, n_head=2))))
    assert (shape.layers, shape.attention, shape.routed) == (2, 8.0, 0.0)
    with pytest.raises(ConfigError, match="what mamba computes is not known"):
        shape_of(ModelSource(path=saved(tmp_path / "mamba", MambaConfig(hidden_size=8, num_hidden_layers=1))))


def test_a_plan_names_threads_that_are_notably_faster_than_those_set(model: str) -> None:
    config = run_on(model, trainer={"threads": 1, "ranks": 1}, student={"threads": 9}, teacher={"threads": 9})
    planned = forecast.forecast(config, "cpu", 8, 8, None)
    assert is_planned(config)
    words = [word for word in shlex.split(planned.advice) if "=" in word]
    changed = forecast.forecast(with_settings(config, words), "cpu", 8, 8, None)
    times = planned.plan.step_seconds / changed.plan.step_seconds
    assert planned.advice.startswith(f"Threads with which a step is {times:.2f} times as fast: --set ")
    assert times > forecast.NOTABLE
    assert {role: threads(with_settings(config, words))[role] for role in ("student", "trainer")} == {
        role: planned.threads[role] for role in ("student", "trainer")
    }
    assert changed.advice == ""


def test_every_role_computes_with_its_threads_and_an_evaluations_replica_with_its_own_or_the_students(
    model: str, tmp_path: Path
) -> None:
    config = run_on(
        model,
        run={"name": "test", "steps": 1, "folder": tmp_path},
        trainer={"threads": 4},
        student={"threads": 2},
        teacher={"threads": 3},
        evaluation={"replica": {"threads": 6}, "placement": {"threads": 5}},
    )
    own = config.with_(student={"threads": None, "env": {THREADS: "2"}}, evaluation={"replica": Placement()})
    config.run_dir.mkdir(parents=True)
    for run, alone in ((config, "6"), (own, "2")):
        with Ports() as ports:
            children = [*plan_servers(run, None, ports).children, trainer_child(run, "http://c", None)]
        assert {child.name: (child.env[THREADS], child.env["OMP_WAIT_POLICY"]) for child in children} == {
            "student-0": ("2", "PASSIVE"),
            "teacher-v1.5": ("3", "PASSIVE"),
            "evaluation-replica": (alone, "PASSIVE"),
            "evaluator": ("5", "PASSIVE"),
            "trainer": ("4", "PASSIVE"),
        }


def test_a_run_that_began_with_threads_of_its_evaluator_keeps_them(model: str, tmp_path: Path) -> None:
    config = run_on(model, run={"name": "test", "steps": 1, "folder": tmp_path})
    config.run_dir.mkdir()
    record = config.model_dump(mode="json")
    record["evaluation"] |= {"threads": 3}
    (config.run_dir / "config.json").write_text(json.dumps(record))
    assert threads(load_run_dir(config.run_dir))["evaluator"] == 3


@pytest.mark.parametrize(("limit", "count"), [("max 100000", 12), ("250000 100000", 2), ("9 100000", 1)])
def test_the_cores_of_a_container_are_those_that_it_may_use(tmp_path: Path, limit: str, count: int) -> None:
    assert hardware.cores() == 12
    (tmp_path / "cpu.max").write_text(limit)
    assert hardware.cores() == count
