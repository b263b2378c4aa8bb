"""Threads of the roles that share this machine's cores: how many, for which runs, and who gets them."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from sized_models import dense
from small_config import make_config

from distill.config import RunConfig
from distill.config.loading import with_settings
from distill.launch.roles import Ports, plan_servers, trainer_child
from distill.metrics.summary import threads
from distill.planning import forecast
from distill.planning import threads as module
from distill.planning.estimate import Role, Stage
from distill.planning.threads import decide_threads, is_here, threads_each
from distill.preflight_checks import machine
from sync.base.memory import THREADS

ROOT = Path(__file__).parents[3]
NOBODY = {"student": None, "trainer": None, "teacher v1.5": None, "evaluator": None}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return dense(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def twelve_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve, of a machine without GPUs; the least of models is worth a second thread."""
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
    work = {"replicas": 3.0, "teacher t": 1.0, "trainer": training}  # of one thread, all processes together
    counts = {"replicas": replicas, "teacher t": 1, "trainer": 1}
    roles = {name: Role(name, count, 2, {}) for name, count in counts.items()}
    stages = [Stage(name, "kind", 0.0, seconds / 2, 2) for name, seconds in work.items()]
    assert threads_each(stages, roles, cores) == dict(zip(work, each, strict=True))


def test_what_a_thread_computes_in_no_time_has_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_WORK", 1.0)
    roles = {name: Role(name, 1, 1, {}) for name in ("replicas", "trainer")}
    for seconds, count in ((0.9, 1), (2.0, 4)):
        stages = [Stage(name, "kind", 0.0, seconds, 1) for name in roles]
        assert threads_each(stages, roles, 8) == dict.fromkeys(roles, count)


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
    monkeypatch.setattr(module, "LEAST_WORK", 1e9)
    assert [*threads(decide_threads(config)[0]).values()] == [1, 1, 1, 1]


def test_what_the_user_sets_stays(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = decide_threads(run_on(model, student={"threads": 5}, teacher={"env": {THREADS: "7"}}))
    assert (config.student.threads, config.teachers["v1.5"].threads) == (5, None)
    assert threads(config)["teacher v1.5"] == 7
    assert config.trainer.threads is not None
    monkeypatch.setenv(THREADS, "3")
    config = run_on(model)
    assert decide_threads(config) == (config, [])


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"student": {"urls": ["http://127.0.0.1:1"]}},
        {"trainer": {"nodes": 2}},
        {"controller": {"trainer": "external"}},
        {"cluster": {"type": "external"}},
        {"teacher": {"engine": "mine:Engine"}},
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


def test_a_plan_names_threads_that_are_notably_faster_than_those_set(model: str) -> None:
    config = run_on(model, trainer={"threads": 1, "ranks": 1}, student={"threads": 9}, teacher={"threads": 9})
    planned = forecast.forecast(config, "cpu", 8, 8, None)
    assert is_here(config)
    words = [word for word in shlex.split(planned.advice) if "=" in word]
    changed = forecast.forecast(with_settings(config, words), "cpu", 8, 8, None)
    times = planned.plan.step_seconds / changed.plan.step_seconds
    assert planned.advice.startswith(f"Threads with which a step is {times:.2f} times as fast: --set ")
    assert times > forecast.NOTABLE
    assert {role: threads(with_settings(config, words))[role] for role in ("student", "trainer")} == {
        role: planned.threads[role] for role in ("student", "trainer")
    }
    assert changed.advice == ""


def test_every_role_computes_with_its_threads_and_an_evaluations_replica_with_the_students(
    model: str, tmp_path: Path
) -> None:
    config = run_on(
        model,
        run={"name": "test", "steps": 1, "folder": tmp_path},
        trainer={"threads": 4},
        student={"threads": 2},
        teacher={"threads": 3},
        evaluation={"replica": {}, "placement": {"threads": 5}},
    )
    config.run_dir.mkdir(parents=True)
    with Ports() as ports:
        children = [*plan_servers(config, None, ports).children, trainer_child(config, "http://c", None)]
    assert {child.name: (child.env[THREADS], child.env["OMP_WAIT_POLICY"]) for child in children} == {
        "student-0": ("2", "PASSIVE"),
        "teacher-v1.5": ("3", "PASSIVE"),
        "evaluation-replica": ("2", "PASSIVE"),
        "evaluator": ("5", "PASSIVE"),
        "trainer": ("4", "PASSIVE"),
    }
