"""One quickstart as a user starts it: run, profiled from outside, evaluated afterwards, measured.

Versions are evaluated after the run: while it is timed, no evaluator works beside it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple, TypedDict

import numpy as np
import psutil

from distill.bench.process_tree import descendants, role_processes
from distill.bench.runner import Figures, cores, crossing
from distill.config import EvaluationConfig, RunConfig
from distill.evaluation.models import Weights, build
from distill.launch.run import claim_of
from distill.loading import load_run_dir
from sync.errors import DistillError
from sync.jsonl import read_lines
from sync.subscribe import Subscriber
from sync.wire import Version

TARGET_KL: Final = 0.25
"""Nats a token, held out: every way gets there before the end."""
SETTLED: Final = 20
"""Steps left out of step times and rates: the first ones pay for warming up."""
EVERY: Final = 20
"""Steps between the versions that are evaluated."""


SAMPLE_SECONDS: Final = 0.5
LIST_EVERY: Final = 10
"""Samples between two listings of processes: listing costs more than reading their clocks."""


@dataclass(frozen=True)
class CpuProfile:
    """Processor seconds of one process tree: what work costs even when other programs share the machine."""

    times: list[float] = field(default_factory=list)
    """Of the samples; seconds since the epoch."""
    used: dict[str, list[float]] = field(default_factory=dict)
    """Used up to each sample, by role; 0 while a role has no process yet."""
    machine: list[float] = field(default_factory=list)
    """Used up to each sample by everything on this machine."""

    def between(self, began: float, ended: float) -> tuple[dict[str, float], float]:
        """Seconds of every role, and of the whole machine, between two moments."""

        def rise(used: Sequence[float]) -> float:
            at = np.interp([began, ended], self.times, used) if self.times else np.zeros(2)
            return float(at[1] - at[0])

        return {role: rise(used) for role, used in self.used.items()}, rise(self.machine)


def run_quickstart(folder: Path, name: str, seed: int, steps: int, settings: Sequence[str]) -> CpuProfile:
    """Run the quickstart for so many steps in `folder`/`name`. Raises DistillError when it fails."""
    return profiled(arguments(folder, name, seed, steps, settings))


def arguments(folder: Path, name: str, seed: int, steps: int, settings: Sequence[str]) -> list[str]:
    """Of `distill`, for one run of the quickstart."""
    every = [f"run.folder={folder}", f"run.name={name}", f"run.steps={steps}", *settings]
    return ["quickstart", "--seed", str(seed), *(word for one in every for word in ("--set", one))]


def profiled(words: Sequence[str]) -> CpuProfile:
    """Run `distill` with these arguments to its end. Raises DistillError with its output when it fails."""
    command = [sys.executable, "-P", "-m", "distill.cli.main", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    profile, done = CpuProfile(), threading.Event()
    sampler = threading.Thread(target=_sample, args=(process.pid, profile, done))
    sampler.start()
    try:
        output, _ = process.communicate()
    finally:
        done.set()
        sampler.join()
        process.kill()
        process.wait()
    if process.returncode != 0:
        raise DistillError(f"distill {' '.join(words)} ended with {process.returncode}:\n{output[-2000:]}")
    return profile


def _sample(pid: int, profile: CpuProfile, done: threading.Event) -> None:
    roles: dict[str, list[psutil.Process]] = {}
    while not done.wait(SAMPLE_SECONDS):
        if len(profile.times) % LIST_EVERY == 0:
            roles = _processes(pid)
        profile.times.append(time.time())
        profile.machine.append(_machine_seconds())
        for role, processes in roles.items():
            used = profile.used.setdefault(role, [0.0] * (len(profile.times) - 1))
            used.append(max([sum(map(_cpu_seconds, processes)), *used[-1:]]))
        for used in profile.used.values():
            used += used[-1:] * (len(profile.times) - len(used))


def _processes(pid: int) -> dict[str, list[psutil.Process]]:
    """Of every role, with those that they started themselves, such as an engine's core."""
    try:
        found = {"controller": [psutil.Process(pid)]}
    except psutil.NoSuchProcess:
        return {}
    for role, processes in role_processes(pid).items():
        found[role] = [*processes, *(child for one in processes for child in descendants(one.pid))]
    return found


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _machine_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "steal", 0.0))


# --- evaluation after the run -----------------------------------------------------------------------------


class CurvePoint(NamedTuple):
    """One version on held-out prompts."""

    step: int
    reverse_kl: float
    """Nats a token, exact."""
    pass_rate: float


def curve_points(config: RunConfig, weights: Weights, steps: Sequence[int]) -> list[CurvePoint]:
    """Evaluate versions of the first lineage, oldest first; step 0 is the student's own folder.

    Always the same prompts with the same randomness, and the default ones when the run evaluated nothing.
    Raises SnapshotError for a version that is not there.
    """
    if config.evaluation is None:
        config = config.model_copy(update={"evaluation": EvaluationConfig(batch=512, threads=1)})
    bench, found = build(config, weights), []
    for step in steps:
        report = bench.evaluate(Version(0, step))
        assert report.pass_rate is not None, "every task has a reward_fn"
        found.append(CurvePoint(step, report.reverse_kl, report.pass_rate))
    return found


def learning(points: Sequence[CurvePoint], lines: Sequence[Mapping[str, float]]) -> Figures:
    """The curve over seconds since the first step, and its figures; None without points.

    `lines`: of the steps, with "step" and "time".
    """

    def seconds(step: int) -> float:
        at = next((line["time"] for line in lines if line["step"] >= step), lines[-1]["time"])
        return at - lines[0]["time"]

    curve = [(seconds(point.step), point.reverse_kl, point.pass_rate) for point in points]
    return {
        "seconds_to_target": crossing([point[:2] for point in curve], TARGET_KL),
        "reverse_kl": points[-1].reverse_kl if points else None,
        "pass_rate": points[-1].pass_rate if points else None,
        "curve": curve,
    }


# --- figures of a run -------------------------------------------------------------------------------------


class RunFigures(TypedDict):
    """One run of one way; everything but the curve is of the steps after SETTLED."""

    way: str
    seed: int
    settings: list[str]
    steps: int
    step_ms: float
    """Median wall time between two steps."""
    mean_step_ms: float
    cpu_ms_per_step: dict[str, float]
    """Processor time of each role."""
    cpu_share: float
    """Of all cores, used by the run's own processes."""
    others_share: float
    """Of all cores, used by everything else on the machine: a trial is worth little where this is high."""
    generated_tokens_per_second: float
    trained_tokens_per_second: float
    idle_seconds: dict[str, float]
    """Of the whole run, by role."""
    age: float
    """Mean age of what was trained on, in versions."""
    seconds_to_target: float | None
    """From the first step to TARGET_KL, evaluations interpolated; None: never reached, or not evaluated."""
    reverse_kl: float | None
    """At the end; None: not evaluated."""
    pass_rate: float | None
    curve: list[tuple[float, float, float]]
    """Seconds since the first step, reverse KL, pass rate."""


def step_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl, one per optimizer step."""
    return [line for line in read_lines(run_dir / "metrics.jsonl") if "loss" in line]


def median_gap_ms(lines: Sequence[Mapping[str, float]]) -> float:
    """Between two steps."""
    return 1000 * median(b["time"] - a["time"] for a, b in pairwise(lines))


def measure(
    run_dir: Path,
    way: str,
    seed: int,
    settings: Sequence[str],
    profile: CpuProfile,
    evaluate: bool = True,
    settled_after: int = SETTLED,
) -> RunFigures:
    """The figures of a finished run; `evaluate` scores its versions, which takes some seconds."""
    lines = step_lines(run_dir)
    summary = json.loads((run_dir / "summary.json").read_text())
    first, last, count = lines[settled_after], lines[-1], len(lines) - settled_after - 1
    used, machine = profile.between(first["time"], last["time"])
    wall, busy = last["time"] - first["time"], sum(used.values())
    points = []
    if evaluate:
        config = load_run_dir(run_dir)
        steps = [*range(0, len(lines), EVERY), len(lines)]
        points = curve_points(config, Subscriber(config.subscriber("evaluator"), claim_of(config)), steps)
    return RunFigures(
        way=way,
        seed=seed,
        settings=list(settings),
        steps=len(lines),
        step_ms=median_gap_ms(lines[settled_after:]),
        mean_step_ms=1000 * wall / count,
        cpu_ms_per_step={role: 1000 * seconds / count for role, seconds in used.items()},
        cpu_share=busy / wall / cores(),
        others_share=(machine - busy) / wall / cores(),
        generated_tokens_per_second=(last["tokens/generated"] - first["tokens/generated"]) / wall,
        trained_tokens_per_second=(last["tokens/trained"] - first["tokens/trained"]) / wall,
        idle_seconds=summary["idle_seconds"],
        age=summary["staleness"]["mean"],
        **learning(points, lines),  # type: ignore[typeddict-item]
    )
