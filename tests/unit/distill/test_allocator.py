"""Every role on a CPU keeps its freed memory, unless the user chose otherwise."""

from importlib import metadata
from pathlib import Path

import pytest

from distill.config import RunConfig
from distill.launch.roles import Ports, plan_servers, trainer_child
from sync.base.memory import ALLOCATOR, allocator
from tests.support.small_config import make_config

ROOT = Path(__file__).parents[3]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    settings = {"deepspeed": str(ROOT / "configs/deepspeed/zero3_cpu.json"), "micro_batch_tokens": 32}
    config = make_config(run={"folder": str(tmp_path)}, trainer=settings)
    config.run_dir.mkdir(parents=True)
    return config


def environments(config: RunConfig) -> dict[str, dict[str, str]]:
    """Role → variables of the allocator that it starts with."""
    with Ports() as ports:
        children = [*plan_servers(config, None, ports).children, trainer_child(config, "http://c", None)]
    return {
        child.name: {name: value for name, value in child.env.items() if name in ALLOCATOR}
        for child in children
    }


def test_every_role_on_a_cpu_keeps_its_memory(config: RunConfig) -> None:
    started = environments(config)
    assert started.keys() == {"student-0", "teacher-t", "evaluator", "trainer"}
    assert all(variables == ALLOCATOR for variables in started.values()), started


def test_the_users_own_values_win(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "65536")
    for variables in environments(config).values():
        assert variables == ALLOCATOR | {"MALLOC_MMAP_MAX_": "65536"}


def test_roles_on_gpus_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0+cu130")
    assert allocator() == {}
