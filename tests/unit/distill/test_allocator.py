"""Every role on a CPU keeps its freed memory, unless the user chose otherwise."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from small_config import make_config

from distill.launch.roles import Ports, plan_servers, trainer_child
from sync.base.memory import ALLOCATOR, allocator

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("own", [{}, {"MALLOC_MMAP_MAX_": "65536"}], ids=["unset", "set by the user"])
def test_every_role_on_a_cpu_keeps_its_memory_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, str]
) -> None:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    deepspeed = str(ROOT / "configs/deepspeed/zero3_cpu.json")
    config = make_config(run={"folder": str(tmp_path)}, trainer={"deepspeed": deepspeed})
    config.run_dir.mkdir(parents=True)
    with Ports() as ports:
        children = [*plan_servers(config, None, ports).children, trainer_child(config, "http://c", None)]
    started = {child.name: {name: child.env.get(name) for name in ALLOCATOR} for child in children}
    assert started == dict.fromkeys(("student-0", "teacher-t", "evaluator", "trainer"), ALLOCATOR | own)


def test_roles_on_gpus_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0+cu130")
    assert allocator() == {}


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
