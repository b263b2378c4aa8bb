"""What overlapping is worth: the quickstart one stage after the other, and all stages at once.

Both are the same code on the same models with the same seed; `buffer.max_staleness` tells them apart. The
synchronous runs get both cores for whichever stage works (two threads a role), the asynchronous ones a thread
a role. Runs take turns, so that a noisy machine hurts both; a finished run is kept in the folder and not
repeated.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil

from sync.errors import DistillError

TARGET_KL: Final = 0.4
"""Nats a token, held out: both ways get there well before the end."""
SETTLED: Final = 20
"""Steps left out of step times: the first ones pay for warming up."""
EVERY: Final = 30
"""Steps between evaluations."""
WAYS: Final[dict[str, tuple[str, ...]]] = {
    "synchronous": (
        "buffer.max_staleness=0",
        "teachers.sorter.threads=2",
        "trainer.threads=2",
        "trainer.ranks=1",
        "student.env.OMP_NUM_THREADS=2",
    ),
    "asynchronous": (),
}


@dataclass(frozen=True)
class Trial:
    """One run of one way."""

    way: str
    seed: int
    step_ms: float
    """Median wall time between two steps."""
    seconds_to_target: float | None
    """From the first step to TARGET_KL, evaluations interpolated; None: never reached."""
    reverse_kl: float
    """At the end."""
    pass_rate: float
    trained_tokens_per_second: float
    cpu_share: float
    """Of all cores, between the first and the last step, whatever used them."""
    idle_seconds: dict[str, float]


def run(
    folder: Path = Path("runs/bench-async"), seeds: Sequence[int] = (0, 1, 2), steps: int = 240
) -> dict[str, Any]:
    """Run what is missing in `folder`; every trial and the medians. Raises DistillError when a run fails."""
    folder.mkdir(parents=True, exist_ok=True)
    trials = [_trial(folder, way, seed, steps) for seed in seeds for way in WAYS]
    medians = {way: _medians([trial for trial in trials if trial["way"] == way]) for way in WAYS}
    ratio = {
        name: medians["synchronous"][name] / medians["asynchronous"][name]
        for name in ("step_ms", "seconds_to_target")
        if medians["synchronous"][name] and medians["asynchronous"][name]
    }
    return {
        "trials": trials,
        "medians": medians,
        "synchronous_over_asynchronous": ratio,
        "target_kl": TARGET_KL,
    }


def _medians(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    numbers = (
        "step_ms",
        "seconds_to_target",
        "reverse_kl",
        "pass_rate",
        "trained_tokens_per_second",
        "cpu_share",
    )
    found = {name: [t[name] for t in trials if t[name] is not None] for name in numbers}
    return {name: median(values) if values else None for name, values in found.items()}


def _trial(folder: Path, way: str, seed: int, steps: int) -> dict[str, Any]:
    kept = folder / f"{way}-{seed}.json"
    if not kept.is_file():
        run_dir = folder / f"{way}-{seed}"
        shares = _run(run_dir, way, seed, steps)
        trial = measure(run_dir, way, seed, shares)
        kept.write_text(json.dumps(trial.__dict__, indent=2))
    return json.loads(kept.read_text())


def _run(run_dir: Path, way: str, seed: int, steps: int) -> list[tuple[float, float]]:
    """One quickstart; (time, share of all cores in use) once a second."""
    settings = [f"run.folder={run_dir.parent}", f"run.name={run_dir.name}", f"evaluation.every={EVERY}"]
    settings += [f"run.steps={steps}", f"trainer.overrides.scheduler.params.total_num_steps={steps}"]
    words = [word for setting in [*settings, *WAYS[way]] for word in ("--set", setting)]
    command = [sys.executable, "-P", "-m", "distill.cli.main", "quickstart", "--seed", str(seed), *words]
    shares: list[tuple[float, float]] = []
    done = threading.Event()
    sampler = threading.Thread(target=_sample, args=(shares, done))
    sampler.start()
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        done.set()
        sampler.join()
    if result.returncode != 0:
        raise DistillError(f"the {way} run of seed {seed} failed:\n{result.stderr[-2000:]}")
    return shares


def _sample(shares: list[tuple[float, float]], done: threading.Event) -> None:
    psutil.cpu_percent()
    while not done.wait(1.0):
        shares.append((time.time(), psutil.cpu_percent() / 100))


def measure(run_dir: Path, way: str, seed: int, shares: Sequence[tuple[float, float]]) -> Trial:
    """The figures of a finished run."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "eval/reverse_kl" in line]
    began, ended = steps[0]["time"], steps[-1]["time"]
    summary = json.loads((run_dir / "summary.json").read_text())
    gaps = [b["time"] - a["time"] for a, b in zip(steps[SETTLED:], steps[SETTLED + 1 :], strict=False)]
    within = [share for at, share in shares if began <= at <= ended]
    curve = [(_time_of(line["step"], steps), line["eval/reverse_kl"]) for line in evaluations]
    reached = crossing(curve, TARGET_KL)
    return Trial(
        way=way,
        seed=seed,
        step_ms=1000 * median(gaps),
        seconds_to_target=None if reached is None else reached - began,
        reverse_kl=summary["after"]["reverse_kl"],
        pass_rate=summary["after"]["pass_rate"],
        trained_tokens_per_second=summary["tokens"]["trained"] / (ended - began),
        cpu_share=median(within) if within else 0.0,
        idle_seconds=summary["idle_seconds"],
    )


def _time_of(step: float, steps: Sequence[dict[str, Any]]) -> float:
    """When the weights of `step` were made (an evaluation of them ends later)."""
    return next((line["time"] for line in steps if line["step"] >= step), steps[-1]["time"])


def crossing(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """Where a falling piecewise-linear curve of (time, value) first meets `target`; None: nowhere."""
    for (t0, v0), (t1, v1) in itertools.pairwise(curve):
        if v0 > target >= v1:
            return t0 + (t1 - t0) * (v0 - target) / (v0 - v1)
    return None


def table(figures: dict[str, Any]) -> str:
    """The medians side by side, and their ratios."""
    ways = figures["medians"]
    rows = [f"{'':28}" + "".join(f"{way:>16}" for way in ways)]
    for name in next(iter(ways.values())):
        cells = [ways[way][name] for way in ways]
        rows.append(f"{name:28}" + "".join(f"{'-' if c is None else format(c, '.3g'):>16}" for c in cells))
    for name, value in figures["synchronous_over_asynchronous"].items():
        rows.append(f"{name}: synchronous / asynchronous = {value:.2f}")
    return "\n".join(rows)
