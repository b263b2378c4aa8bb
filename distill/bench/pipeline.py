"""What overlapping is worth: the quickstart one stage after the other, and all stages at once.

Both are the same code on the same models, prompts and seed, on the same two cores; `buffer.max_staleness`
tells them apart. The synchronous side gets both cores for whichever stage runs, or a thread a stage,
whichever is faster in short runs before the first trial. Trials take turns, so that a noisy machine hurts
both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final

from distill.bench import runs
from distill.bench.runner import Figures, Row, TrialCache, comparison, medians

STEPS, SHORT = 240, 60
"""Of a trial, and of the runs that choose the synchronous layout."""
LAYOUT: Final = ("trainer.ranks=1", "evaluation=false", "tracking.wandb=disabled")
"""Both ways: one rank, as two would share two cores with the other roles."""
OVERLAPPED: Final = (*LAYOUT, "buffer.max_staleness=2")
ONE_THREAD: Final = (*LAYOUT, "buffer.max_staleness=0", "rollout.request_size=128")
TWO_THREADS: Final = (
    *ONE_THREAD,
    "teachers.sorter.threads=2",
    "trainer.threads=2",
    'student.env.OMP_NUM_THREADS="2"',
)
SYNCHRONOUS: Final = {"one thread per stage": ONE_THREAD, "two threads per stage": TWO_THREADS}
"""Layouts to choose from."""
ROWS: Final = {
    "step_ms": Row("ms per step, median", ".0f", -1),
    "mean_step_ms": Row("ms per step, mean", ".0f", -1),
    "seconds_to_target": Row(f"seconds to a reverse KL of {runs.TARGET_KL}", ".1f", -1),
    "reverse_kl": Row("reverse KL at the end", ".3f"),
    "pass_rate": Row("pass rate at the end", ".1%"),
    "generated_per_second": Row("tokens generated per second", ",.0f", 1),
    "trained_per_second": Row("tokens trained per second", ",.0f", 1),
    "cpu_share": Row("cores busy with the run", ".1%"),
    "others_share": Row("cores busy with other programs", ".1%"),
    "age": Row("mean age, versions", ".2f"),
}
BY_ROLE: Final = {"cpu_ms_per_step": "CPU ms per step", "idle_seconds": "idle seconds"}


def run(folder: Path, seeds: int = 3) -> Figures:
    """Run what is missing in `folder`; every trial, and the medians. Raises DistillError when a run fails."""
    folder = folder.absolute()
    cache = TrialCache(folder / "trials.jsonl")
    short = {name: trial(cache, folder, words, 0, SHORT) for name, words in SYNCHRONOUS.items()}
    best = min(short, key=lambda name: short[name]["step_ms"])
    ways = {"synchronous": SYNCHRONOUS[best], "asynchronous": OVERLAPPED}
    trials: dict[str, list[Figures]] = {way: [] for way in ways}
    for seed in range(seeds):
        for way, words in ways.items():
            trials[way].append(trial(cache, folder, words, seed, STEPS))
    return {
        "synchronous": best,
        "synchronous_step_ms": {name: one["step_ms"] for name, one in short.items()},
        "medians": {way: summary(of) for way, of in trials.items()},
        "trials": trials,
    }


def trial(cache: TrialCache, folder: Path, words: Sequence[str], seed: int, steps: int) -> Figures:
    """One run, evaluated unless it is short, or what is kept of it."""

    def make() -> Figures:
        profile = runs.run_quickstart(folder, "trial", seed, steps, words)
        found = runs.measure(folder / "trial", profile)
        return found if steps < STEPS else found | runs.learned(folder / "trial")

    return cache.get({"seed": seed, "steps": steps, "settings": words}, make)


def summary(trials: Sequence[Figures]) -> Figures:
    """Medians over the seeds, None where a seed has none; of roles as "cpu_ms_per_step trainer"."""
    found = medians(trials, ROWS)
    for name in BY_ROLE:
        for role in trials[0][name]:
            found[f"{name} {role}"] = median(one[name].get(role, 0.0) for one in trials)
    return found


def table(report: Figures) -> str:
    """The medians side by side, as Markdown; a ratio above 1: the asynchronous way is better."""
    ways = report["medians"]
    rows, old, new = dict(ROWS), ways["synchronous"], ways["asynchronous"]
    for key in old.keys() - ROWS.keys():
        name, role = key.split(" ", 1)
        rows[key] = Row(f"{BY_ROLE[name]}: {role}")
    times = ", ".join(f"{name} {ms:.0f}" for name, ms in report["synchronous_step_ms"].items())
    head = f"medians; synchronous: {report['synchronous']} (ms per step: {times})"
    return "\n".join([head, "", *comparison(old, new, rows, list(ways))])
