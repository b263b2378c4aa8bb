"""A short run of a configuration, for its speed: `distill plan CONFIG --probe`.

Every role is started as in a run, steps are trained until SECONDS of them can be measured, and all of it is
stopped. Left out is what a plan leaves out: evaluations, checkpoints, trackers. Versions go to a folder.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rich.console import Console

from distill.aio import cancel, until
from distill.config import RunConfig
from distill.config.cluster import LocalCluster
from distill.launch.run import run
from distill.metrics.results import MetricsRow
from distill.topology import processes
from sync.base.errors import ConfigError, Interrupted
from sync.base.jsonl import read_lines
from sync.base.settings import DirectoryStoreConfig
from sync.wire.peers import Role

NAME: Final = "probe"
SECONDS: Final = 40.0
"""From the end of the first step; of those a plan leaves out what `distill.planning.measured` does."""
LEAST_STEPS: Final = 6
"""However long they take."""
POLL_SECONDS: Final = 2.0
"""Between two readings of the figures, in the process of the run that is measured."""


async def probe(config: RunConfig, folder: Path, say: Callable[[str], None]) -> Path:
    """The folder, in `folder`, of a run that has been stopped; `say` gets its state as it changes.

    Raises ConfigError for roles that run elsewhere, DistillError when the run fails.
    """
    check_here(config)
    short = shortened(config, folder)
    say("starting every role")
    running = asyncio.create_task(run(short, console=Console(quiet=True)))
    try:
        await until(_measurable(short.run_dir / "metrics.jsonl", say), [running])
    except Interrupted:
        raise Interrupted("the probe was stopped, and nothing of it is kept") from None
    finally:
        await cancel([running])
        if config.student.mirror_folder is not None:
            await asyncio.to_thread(shutil.rmtree, short.mirrors.parent, ignore_errors=True)
    return short.run_dir


def check_here(config: RunConfig) -> None:
    """Raises ConfigError for roles that this machine does not start."""
    elsewhere = {
        f"cluster.type is {config.cluster.type!r}": not isinstance(config.cluster, LocalCluster),
        f"trainer.nodes is {config.trainer.nodes}": config.trainer.nodes > 1,
        f"controller.trainer is {config.controller.trainer!r}": config.controller.trainer != "launch",
    }
    for process in processes(config.with_(evaluation=None)):
        if process.url and process.keeps != "nothing":  # it would refuse the run after the probe
            also = " and it follows the student" * (process.role == Role.TEACHER)
            elsewhere[f"{process.section}.urls is set{also}"] = True
    if reasons := [what for what, applies in elsewhere.items() if applies]:
        raise ConfigError(
            f"--probe starts all that keeps a run's state on this machine, and {', '.join(reasons)}: begin "
            "the run, and plan with --measured RUN_DIR after some steps"
        )


def shortened(config: RunConfig, folder: Path) -> RunConfig:
    """The configuration of the probe's run in `folder`; its steps are the run's, for the schedule."""
    mirrors = config.student.mirror_folder
    changes = {
        "run": {"name": NAME, "folder": folder},
        "trainer": {"checkpoint_every": 0, "checkpoint_minutes": 0},
        "weights": {"store": DirectoryStoreConfig()},
        "student": {"mirror_folder": mirrors and mirrors / folder.name},
        "tracking": {"wandb": "disabled", "tensorboard": False, "samples_every": 0},
        "guard": {"patience": sys.maxsize},  # a run that is held takes no more steps
    }
    teachers = {name: {"keep_folder": None} for name in config.teachers}
    return config.with_(**changes, teachers=teachers, evaluation=None)


async def _measurable(path: Path, say: Callable[[str], None]) -> None:
    """Return when there are enough steps."""
    steps, seconds = 0, 0.0
    while steps < LEAST_STEPS or seconds < SECONDS:
        await asyncio.sleep(POLL_SECONDS)
        ends = [line["time"] for line in read_lines(path, MetricsRow) if "train/rows" in line]
        if len(ends) > steps:
            steps, seconds = len(ends), ends[-1] - ends[0]
            say(f"{steps} steps in {seconds:.0f} s")
