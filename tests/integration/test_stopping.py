"""A whole run with every engine real: stopped, resumed to its end, audited; a child that cannot start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from distill.control.audit import audit
from distill.tasks.making import STUDENT, TEACHER, letter_tokenizer, untaught

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
GRACE_SECONDS = 20.0
STEPS = 14


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """`distill run` on two tiny random models."""
    folder = tmp_path_factory.mktemp("run")
    for name, recipe in {"student": STUDENT, "teacher": TEACHER}.items():
        untaught(recipe).save_pretrained(folder / name)
        letter_tokenizer().save_pretrained(folder / name)
    settings = {
        "run.folder": folder / "runs",
        "run.steps": STEPS,
        "run.grace_seconds": GRACE_SECONDS,
        "student.path": folder / "student",
        "teachers.sorter.path": folder / "teacher",
        "rollout.batch": 32,
        "trainer.ranks": 1,
        "evaluation.prompts": 64,
        "evaluation.every": 5,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "distill.cli.main", "run", "configs/quickstart.toml", *words]


@pytest.fixture(scope="module")
def run_dir(arguments: list[str]) -> Path:
    """Where that run lives."""
    folder = next(word for word in arguments if word.startswith("run.folder="))
    return Path(folder.partition("=")[2]) / "quickstart"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that a test started; none outlives it."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def begin(command: list[str], started: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    started.append(process)
    return process


def step_of(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines()[:-1] if path.exists() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


def below(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def gone(processes: list[psutil.Process]) -> bool:
    return not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_a_run_is_stopped_within_its_grace_and_resumed_without_loss(
    arguments: list[str], run_dir: Path, started: list[subprocess.Popen[str]]
) -> None:
    first = begin(arguments, started)
    while step_of(run_dir) < 4:
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.2)
    children = below(first)
    assert len(children) >= 8
    asked = time.monotonic()
    first.send_signal(signal.SIGTERM)
    said, _ = first.communicate(timeout=GRACE_SECONDS + 10)
    assert time.monotonic() - asked < GRACE_SECONDS + 5
    assert first.returncode == 130, said
    assert "go on with --resume" in said
    assert gone(children)
    assert (run_dir / "checkpoints" / "latest").is_file()
    stopped = json.loads((run_dir / "summary.json").read_text())
    assert 4 <= stopped["steps"] < STEPS

    second = begin([*arguments, "--resume"], started)
    said, _ = second.communicate()
    assert second.returncode == 0, said
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["lineages"]) == (STEPS, 2)
    assert summary["weights_identical"] is True
    assert summary["before"]["version"] == "L000-v00000000"
    assert summary["after"]["reverse_kl"] > 0
    assert summary["staleness"]["max"] <= summary["staleness"]["limit"]
    for name in ("final/model.safetensors", "best/config.json", "report.png", "timeline.jsonl"):
        assert (run_dir / name).is_file(), name
    found = audit(run_dir)
    assert found.ok, found
    assert found.trained == STEPS * 32


def test_a_child_that_cannot_start_ends_the_run_with_its_last_lines(
    arguments: list[str], started: list[subprocess.Popen[str]]
) -> None:
    settings = ["--set", "run.name=broken", "--set", "student.engine_args.no-such-flag=1"]
    process = begin([*arguments, *settings], started)
    said, _ = process.communicate()
    assert process.returncode == 1, said
    assert "student-0 ended with status 2" in said
    assert "unrecognized arguments: --no-such-flag=1" in said
    assert "Traceback" not in said
