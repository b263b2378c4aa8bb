"""What overlapping is worth: the quickstart one stage after the other, and all stages at once.

Both are the same code on the same models, prompts and seed, on the same two cores; `buffer.max_staleness`
tells them apart. The synchronous side gets both cores for whichever stage runs, or a thread a stage,
whichever is faster in short runs before the first trial. Trials take turns, so that a noisy machine hurts
both; one that is finished is kept in the folder and not repeated. Versions are evaluated after each run:
while it is timed, no evaluator works beside it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

from distill.bench import cpu_profile as watched
from distill.bench.eval_curve import CurvePoint, crossing, curve_points
from distill.loading import load_run_dir
from distill.metrics.plot import read_lines
from distill.metrics.results import versions
from sync.errors import ConfigError

log = logging.getLogger(__name__)
TARGET_KL: Final = 0.25
"""Nats a token, held out: both ways get there before the end."""
SETTLED: Final = 20
"""Steps left out of step times and rates: the first ones pay for warming up."""
EVERY: Final = 20
"""Steps between the versions that are evaluated."""
SHORT: Final = 60
"""Steps of the runs that choose the synchronous set-up."""
LAYOUT: Final = (
    "trainer.ranks=1",
    "evaluation=false",
    "tracking.wandb=disabled",
)
"""Both ways: one rank, for two share two cores with the other roles to no use."""
OVERLAPPED: Final[tuple[str, ...]] = ("buffer.max_staleness=2",)
IN_TURN: Final = ("buffer.max_staleness=0", "rollout.request_size=128")
TWO_THREADS: Final = ("teachers.sorter.threads=2", "trainer.threads=2", 'student.env.OMP_NUM_THREADS="2"')
SYNCHRONOUS: Final[dict[str, tuple[str, ...]]] = {
    "two threads a stage": IN_TURN + TWO_THREADS,
    "one thread a stage": IN_TURN,
}
"""Set-ups to choose from."""


@dataclass(frozen=True)
class Trial:
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
    """From the first step to TARGET_KL, evaluations interpolated; None: never reached."""
    reverse_kl: float | None
    """At the end; None: not evaluated."""
    pass_rate: float | None
    curve: list[tuple[float, float, float]]
    """Seconds since the first step, reverse KL, pass rate."""


def run(
    folder: Path = Path("runs/bench-async"), seeds: Sequence[int] = (0, 1, 2), steps: int = 240
) -> dict[str, Any]:
    """Run what is missing in `folder`; every trial and the medians, there also as JSON, table and picture.

    Raises ConfigError for too few steps, DistillError when a run fails.
    """
    from distill.bench.pipeline_figure import draw
    from sync.durable import write_json

    if steps < SETTLED + 2:
        raise ConfigError(f"{steps} steps: {SETTLED} are not counted, ask for {SETTLED + 2} or more")
    folder.mkdir(parents=True, exist_ok=True)
    short = min(SHORT, steps)
    rivals = {
        name: trial(folder, f"choose {name}", 0, short, settings, evaluate=False)
        for name, settings in SYNCHRONOUS.items()
    }
    best = min(rivals, key=lambda name: rivals[name].step_ms)
    ways = {"synchronous": SYNCHRONOUS[best], "asynchronous": OVERLAPPED}
    trials = [trial(folder, way, seed, steps, ways[way]) for seed in seeds for way in ways]
    report: dict[str, Any] = {
        "benchmark": "async",
        "steps": steps,
        "seeds": list(seeds),
        "target_kl": TARGET_KL,
        "layout": list(LAYOUT),
        "synchronous": best,
        "synchronous_step_ms": {name: rival.step_ms for name, rival in rivals.items()},
        "cores": cores(),
        "versions": versions(),
        "medians": {way: medians([one for one in trials if one.way == way]) for way in ways},
        "trials": [asdict(one) for one in trials],
    }
    report["synchronous_over_asynchronous"] = ratios(report["medians"])
    write_json(folder / "async.json", report)
    (folder / "async.md").write_text(table(report) + "\n")
    draw(report, folder / "async.png")
    return report


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def trial(
    folder: Path, way: str, seed: int, steps: int, settings: Sequence[str], evaluate: bool = True
) -> Trial:
    """One run, or what is kept of it: a trial of other settings or steps does not count."""
    name = f"{way.replace(' ', '-')}-{seed}"
    kept, words = folder / f"{name}.json", [*LAYOUT, *settings]
    if kept.is_file():
        found = Trial(**json.loads(kept.read_text()))
        if (found.settings, found.steps) == (words, steps):
            return found
    seen = watched.run(arguments(folder, name, seed, steps, words))
    result = measure(folder / name, way, seed, words, seen, evaluate)
    log.info("%s, seed %d: %.0f ms a step, reverse KL %s", way, seed, result.step_ms, result.reverse_kl)
    kept.write_text(json.dumps(asdict(result), indent=2))
    return result


def arguments(folder: Path, name: str, seed: int, steps: int, settings: Sequence[str]) -> list[str]:
    """Of `distill`, for one run of the quickstart."""
    every = [f"run.folder={folder}", f"run.name={name}", f"run.steps={steps}", *settings]
    return ["quickstart", "--seed", str(seed), *(word for one in every for word in ("--set", one))]


def measure(
    run_dir: Path,
    way: str,
    seed: int,
    settings: Sequence[str],
    seen: watched.Watched,
    evaluate: bool = True,
    settled_after: int = SETTLED,
) -> Trial:
    """The figures of a finished run; `evaluate` marks its versions, which takes some seconds."""
    lines = [line for line in read_lines(run_dir / "metrics.jsonl") if "loss" in line]
    summary = json.loads((run_dir / "summary.json").read_text())
    settled = lines[settled_after:]
    began, ended, count = settled[0]["time"], settled[-1]["time"], len(settled) - 1
    gaps = [b["time"] - a["time"] for a, b in pairwise(settled)]
    used, wall = seen.seconds(began, ended), ended - began
    held_out = evaluated(run_dir, len(lines)) if evaluate else []
    curve = [(at_step(mark.step, lines) - lines[0]["time"], *mark[1:]) for mark in held_out]
    return Trial(
        way=way,
        seed=seed,
        settings=list(settings),
        steps=len(lines),
        step_ms=1000 * median(gaps),
        mean_step_ms=1000 * wall / count,
        cpu_ms_per_step={role: 1000 * seconds / count for role, seconds in used.items()},
        cpu_share=sum(used.values()) / wall / cores(),
        others_share=(seen.machine_seconds(began, ended) - sum(used.values())) / wall / cores(),
        generated_tokens_per_second=rise(settled, "tokens/generated") / wall,
        trained_tokens_per_second=rise(settled, "tokens/trained") / wall,
        idle_seconds=summary["idle_seconds"],
        age=summary["staleness"]["mean"],
        seconds_to_target=crossing([point[:2] for point in curve], TARGET_KL),
        reverse_kl=held_out[-1].reverse_kl if held_out else None,
        pass_rate=held_out[-1].pass_rate if held_out else None,
        curve=curve,
    )


def rise(lines: Sequence[Mapping[str, float]], name: str) -> float:
    """By how much a counter grew from the first line to the last."""
    return lines[-1][name] - lines[0][name]


def evaluated(run_dir: Path, last: int) -> list[CurvePoint]:
    """Every EVERYth version of a finished run, and its last one."""
    from distill.evaluation.service import follow
    from distill.launch.run import claim_of

    config = load_run_dir(run_dir)
    return curve_points(config, follow(config, claim_of(config)), [*range(0, last, EVERY), last])


def at_step(step: int, lines: Sequence[Mapping[str, float]]) -> float:
    """When the weights of `step` were made; of step 0: when the first step ended."""
    return next((line["time"] for line in lines if line["step"] >= step), lines[-1]["time"])


NUMBERS: Final = {
    "step_ms": ("ms a step, median", ".0f"),
    "mean_step_ms": ("ms a step, mean", ".0f"),
    "seconds_to_target": ("seconds to the target KL", ".1f"),
    "reverse_kl": ("reverse KL at the end", ".3f"),
    "pass_rate": ("pass rate at the end", ".3f"),
    "generated_tokens_per_second": ("tokens generated a second", ",.0f"),
    "trained_tokens_per_second": ("tokens trained on a second", ",.0f"),
    "cpu_share": ("both cores busy with the run", ".1%"),
    "others_share": ("both cores busy with other programs", ".1%"),
    "age": ("mean age, versions", ".2f"),
}
"""Title and form of the figures that a table shows."""


def medians(trials: Sequence[Trial]) -> dict[str, Any]:
    """Of every number over the seeds, None where a seed has none; roles by name."""
    found: dict[str, Any] = {}
    for name in NUMBERS:
        values = [getattr(one, name) for one in trials]
        found[name] = None if None in values else median(values)
    for name in ("cpu_ms_per_step", "idle_seconds"):
        roles = getattr(trials[0], name)
        found[name] = {role: median(getattr(one, name).get(role, 0.0) for one in trials) for role in roles}
    return found


def ratios(found: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """How many times longer the synchronous way takes."""
    slow, fast = found["synchronous"], found["asynchronous"]
    names = ("step_ms", "mean_step_ms", "seconds_to_target")
    return {name: slow[name] / fast[name] for name in names if slow[name] and fast[name]}


def table(report: Mapping[str, Any]) -> str:
    """The medians side by side, as Markdown."""
    ways: Mapping[str, Mapping[str, Any]] = report["medians"]
    rows = [
        f"target {report['target_kl']:g} nats a token; {report['steps']} steps, seeds "
        f"{', '.join(map(str, report['seeds']))}, medians; {report['cores']} cores; synchronous: "
        f"{report['synchronous']}",
        "",
        f"| | {' | '.join(ways)} | ratio |",
        f"|{' --- |' * (len(ways) + 2)}",
    ]
    for name, (title, form) in NUMBERS.items():
        ratio = report["synchronous_over_asynchronous"].get(name)
        rows.append(_row(title, [way[name] for way in ways.values()], form, ratio))
    for name, title in (("cpu_ms_per_step", "CPU-ms a step"), ("idle_seconds", "idle seconds")):
        for role in next(iter(ways.values()))[name]:
            rows.append(_row(f"{title}: {role}", [way[name].get(role) for way in ways.values()], ".1f"))
    return "\n".join(rows)


def _row(title: str, values: Sequence[float | None], form: str, ratio: float | None = None) -> str:
    cells = ["–" if value is None else format(value, form) for value in values]
    return f"| {title} | {' | '.join(cells)} | {'' if ratio is None else format(ratio, '.2f')} |"
