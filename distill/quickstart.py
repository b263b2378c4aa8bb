"""`distill quickstart`: two tiny models from scratch, a whole asynchronous run, and what came of it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from rich.console import Console

from distill.config import RunConfig
from distill.config.loading import load, read
from distill.launch.run_folder import RunFolder, holds_run
from distill.tasks import Models
from sync.base.errors import DistillError

CACHE = Path(".cache")
ROOT = Path(__file__).parent.parent
Task = Literal["sort_letters", "guess", "calculate"]
"""Modules of distill.tasks that make models."""
SOURCES: Final[dict[Task, Path]] = {
    "sort_letters": Path("configs/quickstart.toml"),
    "guess": Path("configs/quickstart_guess.toml"),
    "calculate": Path("configs/quickstart_calculate.toml"),
}
"""Configuration of a task, with one teacher; its name is the run's, before the seed."""


def prepare(
    seed: int, overrides: Sequence[str], console: Console, task: Task = "sort_letters"
) -> tuple[RunConfig, float]:
    """The quickstart's configuration on models made for `seed`, and the seconds that making them took."""
    # what is wrong with them is said before a minute has passed
    load(_file(SOURCES[task]), [f"run.seed={seed}", *overrides])
    began = time.monotonic()
    with console.status("making a teacher and a student from scratch (once, about a minute)"):
        path, ours = source(seed, task)
    seconds = time.monotonic() - began
    return load(path, [*ours, *overrides]), seconds


def source(seed: int, task: Task = "sort_letters") -> tuple[Path, list[str]]:
    """The quickstart's file and its overrides: the models of `seed`, which are made first if necessary."""
    path = _file(SOURCES[task])
    models, tables = make_models(CACHE, seed, task), read(path)
    teacher = next(iter(tables["teachers"]))
    overrides = [
        f"run.seed={seed}",
        f"run.name={path.stem.replace('_', '-')}-{seed}",
        f"student.path={models.student}",
        f"teachers.{teacher}.path={models.teacher}",
        f"trainer.deepspeed={path.parent / 'deepspeed' / 'zero3_cpu.json'}",
    ]
    for name, environment in tables.get("environments", {}).items():
        if "python" in environment:
            overrides += [f"run.code_folder={path.parent / 'environments'}"]
            overrides += [f"environments.{name}.python={path.parent.parent / environment['python']}"]
    return path, overrides


def _file(config: Path) -> Path:
    return config if config.is_file() else ROOT / config


def make_models(folder: Path, seed: int, task: Task = "sort_letters") -> Models:
    """Make the task's models in a subprocess, so that this process stays light."""
    command = [sys.executable, "-P", "-m", f"distill.tasks.{task}", str(folder), str(seed)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode != 0:
        raise DistillError(f"the models could not be made:\n{done.stderr[-2000:]}")
    teacher, student = done.stdout.split("\n")[-3:-1]
    return Models(Path(teacher), Path(student))


def make_room(config: RunConfig) -> None:
    """Rename an earlier quickstart's folder, so that the command can be repeated."""
    folder = config.run_dir
    if not holds_run(folder):
        return
    with RunFolder.open(config, resume=True):  # raises when it is in use
        pass
    number = next(n for n in itertools.count(1) if not folder.with_name(f"{folder.name}.{n}").exists())
    folder.rename(folder.with_name(f"{folder.name}.{number}"))
