"""Which objective learns a toy task in the fewest tokens, and in the least time.

One teacher and one student that hardly knows the task (`distill.tasks.spellings`), made once. Every objective
gets the learning rate that serves it best: seed 0 climbs a ladder of rates until both neighbours leave a
higher reverse KL, and the other seeds use the rung it found. Seeds choose prompts and samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

import numpy as np
import torch

from distill.bench.runner import COLORS, Figures, TrialCache, crossing, dress, markdown, panels
from distill.bench.toy import OBJECTIVES, Trial, configured, evaluated, learn, open_world
from distill.tasks import spellings
from sync.base.errors import ConfigError

TARGET_KL: Final = 0.7
FIRST_RATE, RATE_FACTOR, REACH = 5e-4, 2.0, 3
"""The ladder: FIRST_RATE · RATE_FACTOR^rung, |rung| <= REACH."""


# --- all trials -------------------------------------------------------------------------------------------


def run(folder: Path, objectives: Sequence[str], lags: Sequence[int], seeds: int = 3) -> Figures:
    """Run every trial that `folder` does not hold yet, and draw objective.png or lags.png there.

    `lags`: ages, in optimizer steps, of the weights that generate; rates are chosen at the first. Models are
    kept in .cache. Raises ConfigError.
    """
    objectives = objectives or OBJECTIVES
    for name in objectives:
        configured(name, 1)
    if min(lags) < 0:
        raise ConfigError(f"lags {list(lags)}: none may be below 0")
    torch.set_num_threads(1)  # two that spin for shared cores cost more than they bring
    world, setup = open_world(Path(".cache"))
    cache = TrialCache(folder / "trials.jsonl")

    def result_of(trial: Trial) -> Figures:
        return cache.get(setup._asdict() | trial._asdict(), lambda: learn(world, setup, trial))

    rows = [row for one in objectives for row in compare(one, seeds, lags, result_of)]
    start, teacher = (evaluated(world, model, 0) for model in (world.student, world.teacher))
    (draw if len(lags) == 1 else draw_lags)(rows, folder)
    return {
        "vocabulary": world.vocab,
        "outside_top_k": spellings.outside(2, setup.k),
        "setup": setup._asdict(),
        "student_at_start": start,
        "teacher": teacher,
        "rows": rows,
    }


def compare(
    objective: str, seeds: int, lags: Sequence[int], result_of: Callable[[Trial], Figures]
) -> list[Figures]:
    """Rows of one objective, one per lag, at the rate that seed 0 finds best at the first lag.

    The teacher generates for `sft`, so no lag concerns it: it has one row.
    """

    def final_kl(rung: int) -> float:
        trial = Trial(objective, FIRST_RATE * RATE_FACTOR**rung, 0, lags[0])
        return float(result_of(trial)["points"][-1]["reverse_kl"])

    rate = FIRST_RATE * RATE_FACTOR ** best_rung(final_kl)
    rows = []
    for lag in lags[:1] if objective == "sft" else lags:
        results = [result_of(Trial(objective, rate, seed, lag)) for seed in range(seeds)]
        rows.append({"objective": objective, "lag": lag, "rate": rate} | summary(results))
    return rows


def best_rung(cost: Callable[[int], float]) -> int:
    """The rung whose two neighbours cost more, climbing from 0, at most REACH away; NaN is worst."""
    best = 0
    while True:
        near = [rung for rung in (best, best - 1, best + 1) if abs(rung) <= REACH]
        costs = {rung: cost(rung) for rung in near}
        better = min(near, key=lambda rung: math.inf if math.isnan(costs[rung]) else costs[rung])
        if better == best:
            return best
        best = better


def summary(results: Sequence[Figures]) -> Figures:
    """Figures of the seeds of one objective. None: a seed never reached the target.

    Between two evaluations log KL is taken as linear in tokens.
    """
    last = [result["points"][-1] for result in results]
    curves = [
        [(point["tokens"], math.log(max(point["reverse_kl"], 1e-12))) for point in result["points"]]
        for result in results
    ]
    reached = [crossing(curve, math.log(TARGET_KL)) for curve in curves]
    steps = [sum(result["cpu_seconds"].values()) for result in results]
    pace = [
        one * result["steps"] / point["tokens"]
        for one, result, point in zip(steps, results, last, strict=True)
    ]
    seconds = [n and n * each for n, each in zip(reached, pace, strict=True)]
    return {
        "age": fmean(result["age"] for result in results),
        "reverse_kl": spread(point["reverse_kl"] for point in last),
        "pass_rate": spread(point["pass_rate"] for point in last),
        "tokens_to_target": spread(reached),
        "cpu_seconds_to_target": spread(seconds),
        "cpu_ms_per_step": spread(1000 * one for one in steps),
        "teacher_bytes_per_token": results[0]["teacher_bytes"],
        "curves": [result["points"] for result in results],
    }


def spread(values: Iterable[float | None]) -> Figures | None:
    """Mean, sample standard deviation (0 for a single value) and values; None: a value is missing."""
    known = list(values)
    if None in known:
        return None
    return {"mean": fmean(known), "deviation": stdev(known) if len(known) > 1 else 0.0, "values": known}  # type: ignore[arg-type, type-var]


# --- table and pictures -----------------------------------------------------------------------------------

CELLS: Final = {
    "reverse_kl": ("reverse KL", ".3f"),
    "pass_rate": ("pass rate", ".3f"),
    "tokens_to_target": (f"tokens to {TARGET_KL:g}", ",.0f"),
    "cpu_seconds_to_target": ("s to it", ".1f"),
    "cpu_ms_per_step": ("ms per step", ".0f"),
}


def table(report: Mapping[str, Any]) -> str:
    """The report as a Markdown table, with what is needed to read it."""
    start, teacher = report["student_at_start"], report["teacher"]
    head = ["objective", "lag", "mean age", "rate", *(title for title, _ in CELLS.values()), "B per token"]
    about = (
        f"vocabulary {report['vocabulary']:,}; outside the top k: {report['outside_top_k']:.1%} of the "
        f"optimal policy's probability; at the start: reverse KL {start['reverse_kl']:.2f}, pass rate "
        f"{start['pass_rate']:.2f}; teacher: pass rate {teacher['pass_rate']:.2f}; mean ± standard deviation"
    )
    rows = [
        [f"`{row['objective']}`", str(row["lag"]), f"{row['age']:.1f}", f"{row['rate']:g}"]
        + [_cell(row[name], form) for name, (_, form) in CELLS.items()]
        + [f"{row['teacher_bytes_per_token']:.0f}"]
        for row in report["rows"]
    ]
    return "\n".join([about, "", *markdown(head, rows)])


def _cell(one: Figures | None, form: str) -> str:
    return f"{one['mean']:{form}} ± {one['deviation']:{form}}" if one else "–"


def draw(rows: Sequence[Figures], folder: Path) -> None:
    """Draw objective.png: curves over tokens, each the mean of its seeds; bands from least to most."""
    with panels(folder / "objective.png", 1, 4.2) as (left, right):
        for row, color in zip(rows, COLORS, strict=False):
            for axes, key in ((left, "reverse_kl"), (right, "pass_rate")):
                tokens, values = (
                    np.array([[point[name] for point in curve] for curve in row["curves"]])
                    for name in ("tokens", key)
                )
                x = tokens.mean(0) / 1000
                axes.fill_between(x, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0)
                axes.plot(x, values.mean(0), color=color, label=row["objective"])
        left.set_yscale("log")
        left.axhline(TARGET_KL, color="grey", linestyle=":")
        dress(left, "Exact reverse KL, nats per token", "tokens trained on, thousands")
        dress(right, "Pass rate at temperature 1", "tokens trained on, thousands")


def draw_lags(rows: Sequence[Figures], folder: Path) -> None:
    """Draw lags.png: where each objective ends, over the lag; bars from the least to the most seed."""
    with panels(folder / "lags.png", 1, 4.2) as (left, right):
        for name, color in zip(dict.fromkeys(row["objective"] for row in rows), COLORS, strict=False):
            own = sorted((row for row in rows if row["objective"] == name), key=lambda row: int(row["lag"]))
            for axes, key in ((left, "reverse_kl"), (right, "pass_rate")):
                values = np.array([row[key]["values"] for row in own])
                mean = values.mean(1)
                reach = np.stack([mean - values.min(1), values.max(1) - mean])
                lags = [row["lag"] for row in own]
                axes.errorbar(lags, mean, yerr=reach, color=color, marker="o", capsize=3, label=name)
                axes.set_xscale("symlog", linthresh=1)
        dress(left, "Exact reverse KL at the end, nats per token", "forced lag, optimizer steps")
        dress(right, "Pass rate at the end", "forced lag, optimizer steps")
