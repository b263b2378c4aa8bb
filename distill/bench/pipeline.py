"""What overlapping is worth: the quickstart one stage after the other, and all stages at once.

Both are the same code on the same models, prompts and seed, on the same two cores; `buffer.max_staleness`
tells them apart. The synchronous side gets both cores for whichever stage runs, or a thread a stage,
whichever is faster in short runs before the first trial. Trials take turns, so that a noisy machine hurts
both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from distill.bench import plot
from distill.bench.runner import (
    Figures,
    Number,
    TrialCache,
    comparison,
    cores,
    medians,
    ratios,
    write_report,
)
from distill.bench.runs import SETTLED, TARGET_KL, measure, run_quickstart
from distill.metrics.summary import versions
from sync.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHORT: Final = 60
"""Steps of the runs that choose the synchronous layout."""
LAYOUT: Final = ("trainer.ranks=1", "evaluation=false", "tracking.wandb=disabled")
"""Both ways: one rank, as two would share two cores with the other roles."""
OVERLAPPED: Final[tuple[str, ...]] = ("buffer.max_staleness=2",)
IN_TURN: Final = ("buffer.max_staleness=0", "rollout.request_size=128")
TWO_THREADS: Final = ("teachers.sorter.threads=2", "trainer.threads=2", 'student.env.OMP_NUM_THREADS="2"')
SYNCHRONOUS: Final = {"two threads a stage": IN_TURN + TWO_THREADS, "one thread a stage": IN_TURN}
"""Layouts to choose from."""
NUMBERS: Final = {
    "step_ms": Number("ms a step, median", ".0f", "lower"),
    "mean_step_ms": Number("ms a step, mean", ".0f", "lower"),
    "seconds_to_target": Number("seconds to the target KL", ".1f", "lower"),
    "reverse_kl": Number("reverse KL at the end", ".3f"),
    "pass_rate": Number("pass rate at the end", ".3f"),
    "generated_tokens_per_second": Number("tokens generated a second", ",.0f", "higher"),
    "trained_tokens_per_second": Number("tokens trained on a second", ",.0f", "higher"),
    "cpu_share": Number("both cores busy with the run", ".1%"),
    "others_share": Number("both cores busy with other programs", ".1%"),
    "age": Number("mean age, versions", ".2f"),
}
BY_ROLE: Final = {"cpu_ms_per_step": "CPU-ms a step", "idle_seconds": "idle seconds"}


def run(
    folder: Path = Path("runs/bench-async"), seeds: Sequence[int] = (0, 1, 2), steps: int = 240
) -> Figures:
    """Run what is missing in `folder`; every trial and the medians, there also as JSON, table and picture.

    Raises ConfigError for too few steps, DistillError when a run fails.
    """
    if steps < SETTLED + 2:
        raise ConfigError(f"{steps} steps: {SETTLED} are left out of the figures: run {SETTLED + 2} or more")
    cache = TrialCache(folder / "trials.jsonl")
    short = {
        name: trial(cache, folder, f"choose {name}", 0, min(SHORT, steps), settings, evaluate=False)
        for name, settings in SYNCHRONOUS.items()
    }
    best = min(short, key=lambda name: short[name]["step_ms"])
    ways = {"synchronous": SYNCHRONOUS[best], "asynchronous": OVERLAPPED}
    trials = [trial(cache, folder, way, seed, steps, ways[way]) for seed in seeds for way in ways]
    by_way = {way: summary([one for one in trials if one["way"] == way]) for way in ways}
    report: Figures = {
        "benchmark": "async",
        "steps": steps,
        "seeds": list(seeds),
        "target_kl": TARGET_KL,
        "layout": list(LAYOUT),
        "synchronous": best,
        "synchronous_step_ms": {name: one["step_ms"] for name, one in short.items()},
        "cores": cores(),
        "versions": versions(),
        "medians": by_way,
        "ratios": ratios(by_way["synchronous"], by_way["asynchronous"], NUMBERS),
        "trials": trials,
    }
    draw(report, folder / "async.png")
    return write_report(folder, "async", report, table(report))


def trial(
    cache: TrialCache,
    folder: Path,
    way: str,
    seed: int,
    steps: int,
    settings: Sequence[str],
    evaluate: bool = True,
) -> Figures:
    """One run, or what is kept of it."""
    words, name = [*LAYOUT, *settings], f"{way.replace(' ', '-')}-{seed}"

    def make() -> Figures:
        profile = run_quickstart(folder, name, seed, steps, words)
        return dict(measure(folder / name, way, seed, words, profile, evaluate))

    return cache.get({"way": way, "seed": seed, "steps": steps, "settings": words}, make)


def summary(trials: Sequence[Mapping[str, Any]]) -> Figures:
    """Medians over the seeds, None where a seed has none; roles by name."""
    roles = {name: [one[name] for one in trials] for name in BY_ROLE}
    return medians(trials, NUMBERS) | {
        name: {role: median(one.get(role, 0.0) for one in found) for role in found[0]}
        for name, found in roles.items()
    }


def table(report: Mapping[str, Any]) -> str:
    """The medians side by side, as Markdown; a ratio above 1: the asynchronous way is better."""
    ways, numbers = report["medians"], dict(NUMBERS)
    flat = {way: dict(figures) for way, figures in ways.items()}
    for name, title in BY_ROLE.items():
        for role in next(iter(ways.values()))[name]:
            numbers[f"{name} {role}"] = Number(f"{title}: {role}", ".1f")
            for way, figures in ways.items():
                flat[way][f"{name} {role}"] = figures[name].get(role)
    head = (
        f"target {report['target_kl']:g} nats a token; {report['steps']} steps, seeds "
        f"{', '.join(map(str, report['seeds']))}, medians; {report['cores']} cores; synchronous: "
        f"{report['synchronous']}"
    )
    return "\n".join([head, "", *comparison(flat, report["ratios"], numbers)])


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the picture; every trial is a line, the bars are medians."""
    colors = {"synchronous": plot.GREY, "asynchronous": plot.BLUE}
    with plot.panels(path, 1, 4.2, width_ratios=(3, 2)) as (left, right):
        for one in report["trials"]:
            label = one["way"] if one["seed"] == report["seeds"][0] else None
            seconds, kl = ([point[place] for point in one["curve"]] for place in (0, 1))
            left.plot(seconds, kl, color=colors[one["way"]], linewidth=1.6, label=label)
        plot.target_line(left, report["target_kl"])
        left.set_yscale("log")
        plot.dress(left, "Exact reverse KL, held out, nats a token", "seconds since the first step")
        plot.legend(left)
        _draw_steps(right, report["medians"])


def _draw_steps(axes: Axes, by_way: Mapping[str, Mapping[str, Any]]) -> None:
    """Processor time of a step by role, and its wall time as a line."""
    colors = (plot.BLUE, plot.ORANGE, plot.GREEN, plot.PURPLE)
    for height, found in enumerate(by_way.values()):
        start = 0.0
        for (role, used), color in zip(found["cpu_ms_per_step"].items(), colors, strict=False):
            axes.barh(height, used, left=start, color=color, height=0.5, label=None if height else role)
            start += used
        wall = found["mean_step_ms"]
        axes.plot([wall, wall], [height - 0.4, height + 0.4], color=plot.INK, linewidth=2)
        axes.text(wall, height + 0.42, f"{wall:.0f} ms", ha="center", color=plot.INK)
    axes.set_yticks(range(len(by_way)), list(by_way))
    plot.dress(axes, "A step: processor time by role, and wall time, ms", grid="x")
    plot.legend(axes, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=4)
