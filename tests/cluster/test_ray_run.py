"""The quickstart under Ray, every engine real: on three namespaces, one of which is lost, and on loopback."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest
import ray_hosts
from kill_target import lives
from ray_hosts import RayHosts
from waiting import until
from whole_run import DISTILL, ROOT, ended_well, over, steps_of

from distill.quickstart import source

REASON = ray_hosts.missing()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.engine,
    pytest.mark.run,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(900),
]
STEPS, LOST_AT = 60, 15
ROLES = ("distill.cli", "distill.evaluation", "teacher_service", "student_trainer", "vllm", "distill.launch")


def command(folder: Path, *settings: str) -> list[str]:
    """`distill run` of the quickstart's file, in `folder`."""
    path, ours = source(0)
    more = [f"run.folder={folder}/runs", "run.name=on-ray", f"run.steps={STEPS}", "evaluation.every=30"]
    more += ["evaluation.prompts=64", "trainer.checkpoint_every=10", "tracking.wandb=disabled"]
    return [*DISTILL, "run", str(path), *over(*ours, *more, "cluster.type=ray", *settings)]


def test_a_run_completes_although_a_machine_is_lost(tmp_path: Path) -> None:
    log, run_dir = tmp_path / "run.log", tmp_path / "runs/on-ray"
    with RayHosts(tmp_path, [0, 0, 0]) as cluster:
        settings = [f"cluster.address={cluster.address}", "trainer.nodes=2", "trainer.ranks=1"]
        words = cluster.command(cluster.hosts[0], command(tmp_path, *settings))
        with log.open("wb") as output:
            run = subprocess.Popen(words, env=cluster.environment, cwd=ROOT, stdout=output, stderr=output)
        until(lambda: steps_of(run_dir) >= LOST_AT, 400.0, lambda: log.read_text()[-4000:], run)
        there = [host.processes("student_trainer") for host in cluster.hosts]
        assert sum(bool(found) for found in there) == 2, "the ranks are on two machines"
        lost = next(index for index in (1, 2) if there[index])
        cluster.kill(lost)
        assert run.wait(600) == 0, log.read_text()[-4000:]
        assert not cluster.hosts[lost].processes(), "what the lost machine ran is gone"
        left = {word: host.processes(word) for host in cluster.hosts for word in ROLES}
        assert not any(left.values()), left
    assert "takes another machine" in (run_dir / "logs/trainer.log").read_text()
    ended_well(run_dir, STEPS)


def test_a_run_on_a_head_of_its_own(tmp_path: Path) -> None:
    environment, run_dir = os.environ | {"PYTHONPATH": str(ROOT)}, tmp_path / "runs/on-ray"
    log = tmp_path / "run.log"
    with log.open("wb") as output:
        run = subprocess.Popen(command(tmp_path), env=environment, cwd=ROOT, stdout=output, stderr=output)
    until(lambda: steps_of(run_dir) >= LOST_AT, 400.0, lambda: log.read_text()[-4000:], run)
    below = psutil.Process(run.pid).children(recursive=True)
    assert any(process.name() == "raylet" for process in below)
    assert run.wait(400) == 0, log.read_text()[-4000:]
    assert not [*filter(lives, below)]
    ended_well(run_dir, STEPS)
