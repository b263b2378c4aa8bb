"""A run in place of a plan's assumptions, finished or not.

    timeline.jsonl   seconds of each stage's spans
    metrics.jsonl    tokens and rows of each step, when it ended, its age, tokens that each teacher scored,
                     bytes of versions
    samples.jsonl    tokens of sequences, of a run without a teacher

Steady steps alone are measured: not the first seconds, which pay for warming up, nor steps on batches that
were generated before there was a trainer, nor those at a run's end for which nothing is generated. A stage is
`speed` times faster than the plan of that run's own configuration on the same device; a plan of another
configuration is scaled by the same factor. So a plan of the run itself gives the run's own seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from statistics import mean, median
from typing import Any, Final, NamedTuple

from distill.config import RunConfig
from distill.metrics.results import read_run
from distill.metrics.samples import read_samples
from distill.metrics.timeline import Span
from distill.planning.estimate import GENERATE, SCORE, TRAIN, Calibration, Lengths, Plan
from sync.base.errors import ConfigError, DataError
from sync.base.jsonl import read_lines

WARM_UP_SECONDS: Final = 10.0
"""After the first step's end: not measured."""
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
    steps = sorted((row for row in run.metrics if "train/rows" in row), key=itemgetter("time"))
    if len(steps) < 2:
        raise DataError(f"--measured {run_dir}: metrics.jsonl has {len(steps)} steps, and 2 are needed")
    steps = _steady(steps, ended=run.summary.get("completed", False))
    ends = [row["time"] for row in steps]
    full, delta = (steps[-1].get(f"sync/bytes_{kind}") for kind in ("full", "delta"))
    before, *steps = steps
    stages = (GENERATE, SCORE, TRAIN) if _taught(steps) else (GENERATE, TRAIN)
    seconds = _stage_seconds(run_dir, ends[0], ends[-1], stages)
    between = [late - early for early, late in pairwise(ends)]
    longest = PAUSE * median(between)
    return Measured(
        _lengths(run_dir, before, steps),
        {kind: of_all / len(steps) for kind, of_all in seconds.items()},
        mean(interval for interval in between if interval <= longest),
        mean(row["buffer/age_mean"] for row in steps),
        delta / full if full and delta else None,
    )


def check_student_generates(config: RunConfig, option: str) -> None:
    """Raise ConfigError for a run that measures no generation by replicas; `option`: what it was named by."""
    if config.objective.on_policy == 0:
        raise ConfigError(
            f"{option} measures the student's generation, and with objective.on_policy = 0 teachers generate "
            "every completion: plan without it, or from a run with on_policy above 0"
        )


def _steady(steps: list[dict[str, Any]], ended: bool) -> list[dict[str, Any]]:
    """The step before the measured ones, and those; at most half of them are left out at the beginning.

    A trainer's first step finds as many batches as may be outstanding, and so does its last: generation has
    `ended` by then.
    """
    waiting = [1 + int(row.get("buffer/depth", 0)) for row in (steps[0], steps[-1])]
    warm = sum(row["time"] < steps[0]["time"] + WARM_UP_SECONDS for row in steps)
    steady = steps[min(max(warm, waiting[0]), len(steps) // 2) - 1 :]
    return steady[: max(2, len(steady) - waiting[1])] if ended else steady


def _lengths(run_dir: Path, before: dict[str, Any], steps: Sequence[dict[str, Any]]) -> Lengths:
    """`before`: the step before them. What teachers scored up to it, as for the preflight, is left out.

    Teachers count from a start on: a step of an earlier start leaves out nothing.
    """
    completion = sum(line["train/tokens"] for line in steps) / sum(line["train/rows"] for line in steps)
    if not _taught(steps):
        if not (lengths := [len(sample.prompt) + len(sample.tokens) for sample in read_samples(run_dir)]):
            raise DataError(f"--measured {run_dir}: it has no teacher and no samples, which tell the lengths")
        return Lengths(max(1.0, mean(lengths) - completion), completion, f"measured in {run_dir.name}")
    counts: dict[str, float] = defaultdict(float)
    for name, value in steps[-1].items():
        if name.startswith("teacher/"):
            early = before.get(name, 0.0)
            counts[name.rpartition("/")[2]] += value - (early if value >= early else 0.0)
    if not counts["sequences"]:
        raise DataError(f"--measured {run_dir}: its last step counts no scored sequence")
    whole = counts["tokens"] / counts["sequences"]
    return Lengths(max(1.0, whole - completion), completion, f"measured in {run_dir.name}")


def _taught(steps: Sequence[dict[str, Any]]) -> bool:
    """Whether the run has a teacher."""
    return any(name.startswith("teacher/") for name in steps[-1])


def _stage_seconds(run_dir: Path, begin: float, end: float, stages: Sequence[str]) -> dict[str, float]:
    """Of each of `stages`, between two moments."""
    by_role: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in read_lines(run_dir / "timeline.jsonl", Span):
        if span["what"] == GENERATE and span["role"].startswith("teacher "):
            continue  # a teacher's completions
        what: str = span["what"]
        kind = {"publish": TRAIN, "checkpoint": TRAIN}.get(what, what)
        by_role[kind][span["role"]] += max(0.0, min(end, span["end"]) - max(begin, span["start"]))
    if missing := [kind for kind in stages if not sum(by_role[kind].values())]:
        raise DataError(f"--measured {run_dir}: timeline.jsonl has no span of {', '.join(missing)}")
    of_roles: dict[str, Callable[[Collection[float]], float]] = {GENERATE: mean, SCORE: max, TRAIN: sum}
    return {kind: of_roles[kind](by_role[kind].values()) for kind in stages}


def calibrate(run: Measured, planned: Plan, bottleneck: float) -> Calibration:
    """What replaces the assumptions.

    `planned`: that run's configuration, without a calibration. `bottleneck`: `step_seconds` of its stages at
    the measured seconds.
    """
    speed = {kind: seconds / run.seconds[kind] for kind, seconds in planned.longest.items()}
    return Calibration(speed, bottleneck / run.step_seconds, run.delta)
