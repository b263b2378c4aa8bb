"""What syncing costs a real run: the quickstart, cut short, and the figures that it writes itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any, Final

from sync.errors import DistillError

STEPS: Final = 80
SETTLED: Final = 20
"""Steps left out: the first ones pay for warming up."""


def run(folder: Path, steps: int = STEPS) -> dict[str, Any]:
    """Figures of a quickstart of `steps` steps in `folder`. Raises DistillError when it fails."""
    settings = [
        f"run.folder={folder}",
        "run.name=quickstart",
        f"run.steps={steps}",
        f"evaluation.every={steps}",
        "evaluation.prompts=64",
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-P", "-m", "distill.cli.main", "quickstart", *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise DistillError(f"the quickstart failed, so it has no figures:\n{result.stderr[-2000:]}")
    return figures(folder / "quickstart")


def figures(run_dir: Path, settled: int = SETTLED) -> dict[str, Any]:
    """From a finished run's metrics.jsonl and summary.json.

    Raises DistillError when it has too few steps for medians.
    """
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line][settled:]
    if len(steps) < 3:
        raise DistillError(f"{run_dir} has {len(steps)} steps after the first {settled}: run more steps")
    sync = json.loads((run_dir / "summary.json").read_text())["sync"]
    seconds = (steps[-1]["time"] - steps[0]["time"]) / (len(steps) - 1)
    blocked = [line["seconds/publish"] for line in steps]
    return {
        "steps": len(steps),
        "step_seconds": seconds,
        "pause_seconds": sync["pause_seconds"],
        "apply_seconds": sync["apply_seconds"],
        "stage_seconds": sync["stage_seconds"],
        "swaps_per_step": sync["updates"] / sync["versions"],
        "trainer_blocked_seconds": median(blocked),
        "trainer_blocked_share": sum(blocked[1:]) / (steps[-1]["time"] - steps[0]["time"]),
        "publish_seconds": sync["publish_seconds"],
        "bytes_full": sync["bytes_full"],
        "bytes_delta": sync["bytes_delta"],
    }
