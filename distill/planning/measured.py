"""A finished run in place of a plan's assumptions.

    timeline.jsonl   seconds of each stage's spans, all starts of the run together
    metrics.jsonl    tokens and rows of each step, when it ended, tokens that each teacher scored
    summary.json     steps, age, bytes of versions

A stage is `speed` times faster than the plan of that run's own configuration on the same device; a plan of
another configuration is scaled by the same factor. So a plan of the run itself gives the run's own seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, Final, NamedTuple

from distill.metrics.results import read_run
from distill.planning.estimate import GENERATE, SCORE, TRAIN, Calibration, Lengths, Plan
from sync.errors import DataError
from sync.jsonl import read_lines

PAUSE: Final = 10.0
"""Times the median interval between two steps: a longer one is a restart or a resume, and left out."""


class Measured(NamedTuple):
    """What a run's files say, per optimizer step where nothing else is said."""

    lengths: Lengths
    seconds: dict[str, float]
    """Stage → seconds: mean over replicas, longest of the teachers; train with publishing and checkpoints."""
    step_seconds: float
    """Between two steps' ends, with pauses for evaluations."""
    age: float
    delta: float | None
    """Bytes of a delta over those of a full snapshot; None: it published none."""


def measure(run_dir: Path) -> Measured:
    """Raises DataError for a folder without the files of a run of two steps or more."""
    run = read_run(run_dir)
    steps, summary = [row for row in run.metrics if "train/rows" in row], run.summary
    if len(steps) < 2:
        raise DataError(f"--measured {run_dir}: metrics.jsonl has {len(steps)} steps, and 2 are needed")
    if missing := {"buffer", "sync"} - summary.keys():
        raise DataError(f"--measured {run_dir}: summary.json lacks {', '.join(sorted(missing))}")
    made, sync = max(line["step"] for line in steps), summary["sync"]
    shares = sync["bytes_delta"] and sync["bytes_full"] and sync["bytes_delta"] / sync["bytes_full"]
    return Measured(
        _lengths(run_dir, steps),
        _stage_seconds(run_dir, made),
        _interval([line["time"] for line in steps]),
        summary["buffer"]["age_mean"],
        shares or None,
    )


def _lengths(run_dir: Path, steps: Sequence[dict[str, Any]]) -> Lengths:
    completion = sum(line["train/tokens"] for line in steps) / sum(line["train/rows"] for line in steps)
    counts: dict[str, float] = defaultdict(float)
    for name, value in steps[-1].items():
        if name.startswith("teacher/"):
            counts[name.rpartition("/")[2]] += value
    if not counts["sequences"]:
        raise DataError(f"--measured {run_dir}: its last step counts no scored sequence")
    whole = counts["tokens"] / counts["sequences"]
    return Lengths(max(1.0, whole - completion), completion, f"measured in {run_dir.name}")


def _stage_seconds(run_dir: Path, steps: float) -> dict[str, float]:
    by_role: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in read_lines(run_dir / "timeline.jsonl"):
        if span["what"] == GENERATE and span["role"].startswith("teacher "):
            continue  # a teacher's completions
        kind = {"publish": TRAIN, "checkpoint": TRAIN}.get(span["what"], span["what"])
        by_role[kind][span["role"]] += span["end"] - span["start"]
    if missing := [kind for kind in (GENERATE, SCORE, TRAIN) if not by_role[kind]]:
        raise DataError(f"--measured {run_dir}: timeline.jsonl has no span of {', '.join(missing)}")
    return {
        GENERATE: mean(by_role[GENERATE].values()) / steps,
        SCORE: max(by_role[SCORE].values()) / steps,
        TRAIN: sum(by_role[TRAIN].values()) / steps,
    }


def _interval(ends: Sequence[float]) -> float:
    between = [late - early for early, late in pairwise(sorted(ends))]
    usual = PAUSE * median(between)
    return mean(seconds for seconds in between if seconds <= usual)


def calibrate(run: Measured, planned: Plan, bottleneck: float) -> Calibration:
    """What replaces the assumptions.

    `planned`: that run's configuration, without a calibration. `bottleneck`: `step_seconds` of its stages at
    the measured seconds.
    """
    speed = {kind: seconds / run.seconds[kind] for kind, seconds in planned.longest.items()}
    return Calibration(speed, bottleneck / run.step_seconds, run.delta)
