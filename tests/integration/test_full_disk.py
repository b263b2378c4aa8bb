"""One real run whose disks fill up one after the other: small file systems in memory, if they may be mounted.

That of the record's arrays, the checkpoints', the store's, and the run folder's own. Each is filled, looked
at, and freed; before the first two are freed the next one is full, so that the run does not end between them.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from disks import fill, free, mounted
from kill_target import KillTarget
from run_on_letters import BATCH, NAME, command
from whole_run import ended_well

from distill.record.audit import audit
from student_trainer import checkpoint
from student_trainer.ranks import Ranks

pytestmark = [pytest.mark.engine, pytest.mark.run, pytest.mark.faults, pytest.mark.filterwarnings("ignore")]
STEPS = 80
ALONE = Ranks(0, 1, torch.device("cpu"))
SIZES = {"": 192, "arrays": 24, "checkpoints": 48, "store": 48}
"""MiB of each file system."""
REST_SECONDS = 4.0
"""Several times as long as a step takes."""


def comes_to_rest(kill_target: KillTarget) -> None:
    """What was handed out already is trained; then no step is reported for `REST_SECONDS`."""
    step, since = kill_target.step(), time.monotonic()
    deadline = since + 120
    while time.monotonic() < since + REST_SECONDS:
        if (now := kill_target.step()) != step:
            step, since = now, time.monotonic()
        assert time.monotonic() < deadline, "steps go on although the disk is full"
        assert step < STEPS, "the run ended although the disk is full"
        time.sleep(0.1)


def says(kill_target: KillTarget, log: str, words: str) -> None:
    path = kill_target.run_dir / "logs" / log
    kill_target.wait(lambda: words in path.read_text(), f"{words!r} in {log}")
    assert words in path.read_text(), "the run is over"


def test_every_full_disk_pauses_the_run_which_then_completes(tmp_path: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(mounted(tmp_path / "disk", SIZES[""] << 10))
        run_dir = tmp_path / "disk" / NAME
        disks = {name: run_dir / name for name in SIZES}
        for name in ("arrays", "checkpoints", "store"):
            stack.enter_context(mounted(disks[name], SIZES[name] << 10))
        words = command(tmp_path / "disk", STEPS, "run.min_free_disk_gib=0")
        kill_target = stack.enter_context(KillTarget(words, run_dir))
        fill_each(kill_target, disks)
        report, summary = audit(run_dir), ended_well(run_dir, STEPS)
        assert (report.trained, report.open_prompts) == (STEPS * BATCH, [])
        logs = [(run_dir / f"logs/{name}.log").read_text()[-6000:] for name in ("launcher", "trainer")]
        assert summary["lineages"] == 1, "\n".join(["the trainer died:", *logs])


def fill_each(kill_target: KillTarget, disks: dict[str, Path]) -> None:
    """Start the run, and fill each disk once until it ends."""
    kill_target.start()
    kill_target.wait(lambda: kill_target.step() >= 2, "step 2")
    fill(disks["arrays"])
    says(kill_target, "launcher.log", "disk full: the record in")
    comes_to_rest(kill_target)
    fill(disks["checkpoints"])
    free(disks["arrays"])
    says(kill_target, "launcher.log", "has space again, the run continues")

    says(kill_target, "trainer.log", "disk full: checkpoint")
    newest, altered = checkpoint.find(disks["checkpoints"], ALONE)
    assert not altered
    assert newest is None or newest.is_dir(), "the newest one is whole"
    fill(disks["store"])
    free(disks["checkpoints"])
    says(kill_target, "trainer.log", "has space again, training continues")

    says(kill_target, "trainer.log", "waits for space, the run pauses")
    free(disks["store"])
    says(kill_target, "trainer.log", "has space again, the run continues")

    fill(disks[""])
    comes_to_rest(kill_target)
    free(disks[""])
    kill_target.end()
    newest, _ = checkpoint.find(disks["checkpoints"], ALONE)
    assert newest.name.endswith(f"{STEPS:08d}")
