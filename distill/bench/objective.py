"""Which objective learns a toy task in the fewest tokens, and in the least time.

One teacher and one student that hardly knows the task (`distill.tasks.spellings`), made once. Every
objective gets the learning rate that serves it best: seed 0 climbs a ladder of rates until both neighbours
leave a higher reverse KL, and the other seeds use the rung it found. Seeds choose prompts and samples.
Results are of this toy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from pydantic import TypeAdapter

from distill.bench import plot
from distill.bench.runner import ROOT, Figures, TrialCache, crossing, markdown, spread, write_report
from student_trainer.objectives.config import ForwardTopK, ObjectiveConfig, StudentTopK, TopK
from sync.errors import ConfigError

if TYPE_CHECKING:
    from distill.bench.toy import Trial

OBJECTIVES: Final = ("sampled", "topk", "student_topk", "forward_topk", "full", "jsd", "skew", "sft")
FIRST_RATE, RATE_FACTOR, REACH = 5e-4, 2.0, 3
"""The ladder: FIRST_RATE · RATE_FACTOR^rung, |rung| <= REACH."""
RunTrial = Callable[["Trial"], Figures]


def configured(name: str, k: int) -> ObjectiveConfig:
    """The objective called `name` with its defaults, and `k` where it has one. Raises ConfigError."""
    if name not in OBJECTIVES:
        raise ConfigError(f"objective {name!r} is not known: choose from {', '.join(OBJECTIVES)}")
    config: ObjectiveConfig = TypeAdapter(ObjectiveConfig).validate_python({"type": name})
    return (
        config.model_copy(update={"k": k}) if isinstance(config, TopK | StudentTopK | ForwardTopK) else config
    )


def run(
    folder: Path,
    objectives: Sequence[str] = OBJECTIVES,
    *,
    seeds: int = 3,
    lags: Sequence[int] = (0,),
    tokens: int = 50_000,
    target_kl: float = 0.7,
    k: int = 64,
    rows: int = 64,
    held_out: int = 512,
    models: Path = Path(".cache"),
) -> Figures:
    """Run every trial that `folder` does not hold yet; the report, written there as JSON and as a picture.

    `lags`: ages, in optimizer steps, of the weights that generate; rates are chosen at the first. `tokens`:
    completion tokens that each student is trained on. `models`: where made models are kept.
    Raises ConfigError.
    """
    _check(objectives, seeds, lags)
    import torch

    from distill.bench.toy import Setup, evaluated, learn, open_world
    from distill.metrics.summary import versions
    from distill.tasks import spellings

    torch.set_num_threads(1)  # two that spin for shared cores cost more than they bring
    world, name = open_world(models, held_out)
    setup = Setup(name, tokens=tokens, rows=rows, k=k, held_out=held_out)
    cache = TrialCache(folder / "trials.jsonl", str(ROOT / "distill" / "bench" / "toy.py"))

    def result_of(trial: Trial) -> Figures:
        objective = configured(trial.objective, k)
        settings = asdict(setup) | trial._asdict()
        return cache.get(settings, lambda: learn(world, setup, trial, objective))

    found = [row for one in objectives for row in compare(one, seeds, lags, target_kl, result_of)]
    start, teacher = (asdict(evaluated(world, model, 0)) for model in (world.student, world.teacher))
    report: Figures = {
        "benchmark": "objective",
        "task": spellings.__name__,
        "vocabulary": world.vocab,
        "outside_top_k": spellings.outside(2, setup.k),
        "setup": asdict(setup),
        "seeds": seeds,
        "lags": list(lags),
        "target_kl": target_kl,
        "student_at_start": start,
        "teacher": teacher,
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "rows": found,
    }
    draw(report, folder / "objective.png")
    if len(lags) > 1:
        draw_lags(report, folder / "lags.png")
    return write_report(folder, "objective", report)


def _check(objectives: Sequence[str], seeds: int, lags: Sequence[int]) -> None:
    for objective in objectives:
        configured(objective, 1)
    if seeds < 1:
        raise ConfigError(f"{seeds} seeds: at least one is needed")
    if not lags or min(lags) < 0:
        raise ConfigError(f"lags {list(lags)}: name at least one, none below 0")


# --- trials of one objective ------------------------------------------------------------------------------


def compare(
    objective: str, seeds: int, lags: Sequence[int], target_kl: float, result_of: RunTrial
) -> list[Figures]:
    """Rows of one objective, one per lag, at the rate that seed 0 finds best at the first lag.

    The teacher generates for `sft`, so no lag concerns it: it has one row.
    """
    from distill.bench.toy import Trial

    tried: dict[int, float] = {}

    def final_kl(rung: int) -> float:
        result = result_of(Trial(objective, rate_of(rung), 0, lags[0]))
        tried[rung] = result["points"][-1]["reverse_kl"]
        return tried[rung]

    rate = rate_of(best_rung(final_kl, 0, REACH))
    rates = {f"{rate_of(rung):g}": kl for rung, kl in sorted(tried.items())}
    rows = []
    for lag in lags[:1] if objective == "sft" else lags:
        results = [result_of(Trial(objective, rate, seed, lag)) for seed in range(seeds)]
        about = {"objective": objective, "lag": lag, "rate": rate, "rates_tried": rates}
        rows.append(about | summary(results, target_kl))
    return rows


def rate_of(rung: int) -> float:
    """Learning rate of a rung."""
    return FIRST_RATE * RATE_FACTOR**rung


def best_rung(cost: Callable[[int], float], start: int, reach: int) -> int:
    """The rung whose two neighbours cost more, climbing from `start`, at most `reach` rungs away from it.

    NaN counts as infinitely bad. `cost` should remember its answers: it is called more than once for a rung.
    """

    def bad(rung: int) -> float:
        value = cost(rung)
        return math.inf if math.isnan(value) else value

    best = start
    while True:
        inside = [rung for rung in (best, best - 1, best + 1) if abs(rung - start) <= reach]
        better = min(inside, key=bad)
        if better == best:
            return best
        best = better


def tokens_to(points: Sequence[Mapping[str, float]], target: float) -> float | None:
    """Tokens at which the reverse KL first is `target` or less; None: it never is.

    Between two evaluations log KL is taken as linear in tokens.
    """
    curve = [(float(point["tokens"]), math.log(max(point["reverse_kl"], 1e-12))) for point in points]
    return crossing(curve, math.log(target))


def summary(results: Sequence[Figures], target_kl: float) -> Figures:
    """Figures of the seeds of one objective. None: a seed never reached the target."""
    last = [result["points"][-1] for result in results]
    reached = [tokens_to(result["points"], target_kl) for result in results]
    steps = [sum(result["cpu_seconds"].values()) for result in results]
    per_token = [
        step * result["steps"] / point["tokens"]
        for step, result, point in zip(steps, results, last, strict=True)
    ]
    seconds = [None if n is None else n * each for n, each in zip(reached, per_token, strict=True)]
    return {
        "age": fmean(result["age"] for result in results),
        "reverse_kl": spread([point["reverse_kl"] for point in last]),
        "pass_rate": spread([point["pass_rate"] for point in last]),
        "tokens_to_target": spread(reached),
        "cpu_seconds_to_target": spread(seconds),
        "cpu_seconds_per_step": spread(steps),
        "teacher_bytes_per_token": results[0]["teacher_bytes"],
        "curves": [result["points"] for result in results],
    }


# --- table and pictures -----------------------------------------------------------------------------------


def table(report: Mapping[str, Any]) -> str:
    """The report as a Markdown table, with what is needed to read it."""
    setup, start, teacher = report["setup"], report["student_at_start"], report["teacher"]
    head = ["objective", "lag", "mean age", "rate", "reverse KL", "pass rate"]
    head += [f"tokens to {report['target_kl']:g}", "s to it", "ms a step", "teacher's B a token"]
    return "\n".join(
        [
            f"vocabulary {report['vocabulary']:,}; outside the top {setup['k']}: "
            f"{report['outside_top_k']:.1%} of a perfect model's probability; at the start: reverse KL "
            f"{start['reverse_kl']:.2f}, pass rate {start['pass_rate']:.2f}; teacher: pass rate "
            f"{teacher['pass_rate']:.2f}",
            f"{setup['tokens']:,} tokens a student, {setup['rows']} rollouts a step, {setup['held_out']} "
            f"held-out prompts, {report['seeds']} seeds (mean ± standard deviation), {report['threads']} "
            "thread(s)",
            "",
            *markdown(head, [_cells(row) for row in report["rows"]]),
        ]
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    def cell(key: str, form: str, scale: float = 1.0) -> str:
        one = row[key]
        return "–" if one is None else f"{one['mean'] * scale:{form}} ± {one['deviation'] * scale:{form}}"

    return [
        f"`{row['objective']}`",
        str(row["lag"]),
        f"{row['age']:.1f}",
        f"{row['rate']:g}",
        cell("reverse_kl", ".3f"),
        cell("pass_rate", ".3f"),
        cell("tokens_to_target", ",.0f"),
        cell("cpu_seconds_to_target", ".1f"),
        cell("cpu_seconds_per_step", ".0f", 1000.0),
        f"{row['teacher_bytes_per_token']:.0f}",
    ]


_PALETTE = (plot.RED, plot.BLUE, plot.PURPLE, plot.ORANGE, plot.GREEN, plot.TEAL, plot.OCHRE, plot.GREY)
COLORS: Final = dict(zip(OBJECTIVES, _PALETTE, strict=True))


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the curves over tokens, each the mean of its seeds; the band reaches from least to most."""
    rows = [row for row in report["rows"] if row["lag"] == min(report["lags"])]
    with plot.panels(path, 1, 4.6) as (left, right):
        for axes, key in ((left, "reverse_kl"), (right, "pass_rate")):
            for row in sorted(rows, key=lambda row: float(row[key]["mean"])):
                tokens = np.array([[point["tokens"] for point in curve] for curve in row["curves"]]).mean(0)
                values = np.array([[point[key] for point in curve] for curve in row["curves"]])
                color, low, high = COLORS[row["objective"]], values.min(0), values.max(0)
                axes.fill_between(tokens / 1000, low, high, color=color, alpha=0.15, linewidth=0)
                axes.plot(tokens / 1000, values.mean(0), color=color, linewidth=1.8, label=row["objective"])
        plot.dress(left, "Exact reverse KL, nats a token", "tokens trained on, thousands")
        plot.dress(right, "Pass rate at temperature 1", "tokens trained on, thousands")
        left.set_yscale("log")
        plot.target_line(left, report["target_kl"])
        plot.legend(right)


def draw_lags(report: Mapping[str, Any], path: Path) -> None:
    """Write what each objective ends at over the lag; bars reach from the least to the most seed."""
    lags = sorted(report["lags"])
    with plot.panels(path, 1, 4.2) as (left, right):
        for axes, key in ((left, "reverse_kl"), (right, "pass_rate")):
            for name in dict.fromkeys(row["objective"] for row in report["rows"]):
                rows = [row for row in report["rows"] if row["objective"] == name]
                rows.sort(key=lambda row: int(row["lag"]))
                if len(rows) > 1:
                    mean = np.array([row[key]["mean"] for row in rows])
                    least, most = (np.array([of(row[key]["values"]) for row in rows]) for of in (min, max))
                    look = {"color": COLORS[name], "marker": "o", "capsize": 3, "label": name}
                    reach = np.stack([mean - least, most - mean])
                    axes.errorbar([row["lag"] for row in rows], mean, yerr=reach, **look)
            axes.set_xscale("symlog", linthresh=1)
            axes.set_xticks(lags, [str(lag) for lag in lags])
        plot.dress(left, "Exact reverse KL at the end, nats a token", "forced lag, optimizer steps")
        plot.dress(right, "Pass rate at the end", "forced lag, optimizer steps")
        plot.legend(left)
