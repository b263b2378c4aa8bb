"""`distill bench objective`: which objective learns a toy task in the fewest tokens, and in the least time.

One teacher and one student that hardly knows the task (`distill.tasks.spellings`), made once. Every
objective gets the learning rate that serves it best: seed 0 climbs a ladder of rates until both neighbours
leave a higher reverse KL, and the other seeds use the rung it found. Seeds choose prompts and samples.
Results are of this toy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.bench.curves import Spread, best_rung, spread, tokens_to
from distill.bench.objectives import OBJECTIVES, configured
from distill.bench.trials import Result, Setup, Trial, TrialFile
from sync.errors import ConfigError

if TYPE_CHECKING:
    from distill.bench.toy import World

log = logging.getLogger(__name__)
FIRST_RATE, RATE_FACTOR, REACH = 5e-4, 2.0, 3
"""The ladder: FIRST_RATE · RATE_FACTOR^rung, |rung| <= REACH."""

RunTrial = Callable[[Trial], Result]


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
) -> dict[str, Any]:
    """Run every trial that `folder` does not hold yet; the report, written there as JSON and as a picture.

    `lags`: ages, in optimizer steps, of the weights that write; rates are chosen at the first. `tokens`:
    completion tokens that each student is trained on. `models`: where made models are kept.
    Raises ConfigError.
    """
    import torch

    from distill.bench.objective_figure import draw, draw_lags
    from distill.bench.toy import open_world
    from sync.durable import write_json

    _check(objectives, seeds, lags)
    torch.set_num_threads(1)  # two that spin for shared cores cost more than they bring
    world, name = open_world(models, held_out)
    setup = Setup(name, tokens=tokens, rows=rows, k=k, held_out=held_out)
    file = TrialFile(folder / "trials.jsonl", setup)

    def result_of(trial: Trial) -> Result:
        from distill.bench.learning import learn

        return file.get(trial, lambda trial: learn(world, setup, trial, configured(trial.objective, k)))

    found = [row for objective in objectives for row in compare(objective, seeds, lags, target_kl, result_of)]
    report = _about(world, setup, seeds, lags, target_kl) | {"rows": found}
    write_json(folder / "objective.json", report)
    draw(report, folder / "objective.png")
    if len(lags) > 1:
        draw_lags(report, folder / "lags.png")
    return report


def _check(objectives: Sequence[str], seeds: int, lags: Sequence[int]) -> None:
    for objective in objectives:
        configured(objective, 1)
    if seeds < 1:
        raise ConfigError(f"{seeds} seeds: at least one is needed")
    if not lags or min(lags) < 0:
        raise ConfigError(f"lags {list(lags)}: name at least one, none below 0")


def compare(
    objective: str, seeds: int, lags: Sequence[int], target_kl: float, result_of: RunTrial
) -> list[dict[str, Any]]:
    """Rows of one objective, one per lag, at the rate that seed 0 finds best at the first lag.

    The teacher writes for `sft`, so no lag concerns it: it has one row.
    """
    tried: dict[int, float] = {}

    def final_kl(rung: int) -> float:
        tried[rung] = result_of(Trial(objective, rate_of(rung), 0, lags[0])).points[-1].reverse_kl
        return tried[rung]

    rate = rate_of(best_rung(final_kl, 0, REACH))
    rates = {f"{rate_of(rung):g}": kl for rung, kl in sorted(tried.items())}
    options = lags[:1] if objective == "sft" else lags
    rows = []
    for lag in options:
        results = [result_of(Trial(objective, rate, seed, lag)) for seed in range(seeds)]
        rows.append(
            {"objective": objective, "lag": lag, "rate": rate, "rates_tried": rates}
            | summary(results, target_kl)
        )
    return rows


def rate_of(rung: int) -> float:
    """Learning rate of a rung."""
    return FIRST_RATE * RATE_FACTOR**rung


def summary(results: Sequence[Result], target_kl: float) -> dict[str, Any]:
    """Figures of the seeds of one objective. None: a seed never reached the target."""
    reached = [tokens_to(result.points, target_kl) for result in results]
    steps = [sum(result.cpu_seconds.values()) for result in results]
    per_token = [step * r.steps / r.points[-1].tokens for step, r in zip(steps, results, strict=True)]
    seconds = [None if n is None else n * each for n, each in zip(reached, per_token, strict=True)]
    return {
        "age": spread([result.age for result in results]).mean,
        "reverse_kl": _dict(spread([result.points[-1].reverse_kl for result in results])),
        "pass_rate": _dict(spread([result.points[-1].pass_rate for result in results])),
        "tokens_to_target": _if_all(reached),
        "cpu_seconds_to_target": _if_all(seconds),
        "cpu_seconds_per_step": _dict(spread(steps)),
        "wall_seconds_per_step": _dict(spread([sum(result.wall_seconds.values()) for result in results])),
        "cpu_seconds_by_part": {
            part: spread([r.cpu_seconds[part] for r in results]).mean for part in results[0].cpu_seconds
        },
        "teacher_bytes_per_token": results[0].teacher_bytes,
        "support_mass": results[0].support_mass,
        "effective_samples": spread([result.effective_samples for result in results]).mean,
        "curves": [[point._asdict() for point in result.points] for result in results],
    }


def _if_all(values: Sequence[float | None]) -> dict[str, Any] | None:
    known = [value for value in values if value is not None]
    return _dict(spread(known)) if len(known) == len(values) else None


def _dict(found: Spread) -> dict[str, Any]:
    return found._asdict()


def _about(world: World, setup: Setup, seeds: int, lags: Sequence[int], target_kl: float) -> dict[str, Any]:
    import torch

    from distill.bench.learning import evaluated
    from distill.metrics.results import versions
    from distill.tasks import spellings

    start, teacher = (evaluated(world, model, 0) for model in (world.student, world.teacher))
    return {
        "benchmark": "objective",
        "task": spellings.__name__,
        "vocabulary": world.vocab,
        "outside_top_k": spellings.outside(2, setup.k),
        "setup": asdict(setup),
        "seeds": seeds,
        "lags": list(lags),
        "target_kl": target_kl,
        "student_at_start": start._asdict(),
        "teacher": teacher._asdict(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }


def table(report: dict[str, Any]) -> str:
    """The report as a Markdown table, with what is needed to read it."""
    setup, start, teacher = report["setup"], report["student_at_start"], report["teacher"]
    head = [
        f"vocabulary {report['vocabulary']:,}; outside the top {setup['k']}: {report['outside_top_k']:.1%} "
        f"of a perfect writer's probability; at the start: reverse KL {start['reverse_kl']:.2f}, pass rate "
        f"{start['pass_rate']:.2f}; teacher: pass rate {teacher['pass_rate']:.2f}",
        f"{setup['tokens']:,} tokens a student, {setup['rows']} rollouts a step, {setup['held_out']} held-"
        f"out prompts, {report['seeds']} seeds (mean ± standard deviation), {report['threads']} thread(s)",
        "",
        "| objective | lag | mean age | rate | reverse KL | pass rate "
        f"| tokens to {report['target_kl']:g} | s to it "
        "| ms a step | teacher's B a token |",
        f"|{' --- |' * 10}",
    ]
    return "\n".join(head + [_line(row) for row in report["rows"]])


def _line(row: dict[str, Any]) -> str:
    def cell(key: str, form: str, scale: float = 1.0) -> str:
        if row[key] is None:
            return "–"
        return f"{row[key]['mean'] * scale:{form}} ± {row[key]['deviation'] * scale:{form}}"

    cells = [
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
    return f"| {' | '.join(cells)} |"
