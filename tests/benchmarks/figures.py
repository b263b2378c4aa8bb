"""What the benchmarks share: command line, runs of the quickstart, kept trials, tables."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import typer
from kill_target import processor_seconds
from whole_run import DISTILL, over

from distill.cli.options import JsonFile, guarded, write_figures
from distill.metrics.results import Run, read_run
from sync.base.errors import DistillError
from sync.base.jsonl import JsonLines, read_lines
from tests.benchmarks import ROOT

log = logging.getLogger(__name__)
Figures = dict[str, Any]
"""What a trial measured, or a report: JSON values by name."""
START_SECONDS: Final = 300.0
Folder = Annotated[Path, typer.Option(help="Where runs and finished trials lie.", file_okay=False)]
Seeds = Annotated[int, typer.Option(min=1, help="Trials of each kind; medians are taken.")]


def command(*parts: Callable[..., Any]) -> None:
    """Run a benchmark; its parts are the arguments of `with_json`."""
    logging.basicConfig(format="%(asctime)s %(message)s")
    log.setLevel(logging.INFO)
    sys.exit(guarded(lambda: typer.run(with_json(*parts))))


def with_json(
    run: Callable[..., Figures],
    table: Callable[[Figures], str],
    problem: Callable[[Figures], str] = lambda figures: "",
) -> Callable[..., None]:
    """The command of a benchmark, with `--json` beside its own options: it prints a table of what `run`
    returns, and exits with 1 for what `problem` says of it; empty: nothing."""

    @functools.wraps(run)
    def measured(json_file: Path | None, **options: Any) -> None:
        figures = run(**options)
        typer.echo(table(figures))
        write_figures(json_file, figures)
        if text := problem(figures):
            raise DistillError(text)

    extra = inspect.Parameter("json_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=JsonFile)
    signature = inspect.signature(run, eval_str=True)
    measured.__signature__ = signature.replace(parameters=[*signature.parameters.values(), extra])
    measured.__annotations__ = run.__annotations__ | {"json_file": JsonFile}
    return measured


def interleaved(
    works: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds by `clock` of every work, once in each round. The caller has run all before, to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            began = clock()
            work()
            seconds[name].append(clock() - began)
    return seconds


class TrialCache:
    """Finished trials in a JSONL file: {"key": …, "settings": {…}, "result": {…}}, one line each.

    The key digests the settings and the packages' sources: after a change of either, a trial runs again.
    Raises DataError for a file that was altered.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path = self.folder / "trials.jsonl"
        self._results = {line["key"]: line["result"] for line in read_lines(self._path)}

    def get(self, settings: Figures, run: Callable[[], Figures]) -> Figures:
        """The result of a trial: from the file, or from `run` and then in the file."""
        key = hashlib.sha256((_sources() + json.dumps(settings, sort_keys=True)).encode()).hexdigest()[:16]
        if key not in self._results:
            log.info("trial: %.200s", settings)
            line = {"key": key, "settings": settings, "result": run()}
            with closing(JsonLines(self._path)) as lines:
                lines.write(line)
            self._results[key] = json.loads(json.dumps(line["result"]))
        return self._results[key]


@functools.cache
def _sources() -> str:
    """The four packages' modules and the benchmarks."""
    packages = ("sync", "teacher_service", "student_trainer", "distill", "tests/benchmarks")
    return "\0".join(path.read_text() for name in packages for path in sorted((ROOT / name).rglob("*.py")))


def run_steps(
    run_dir: Path, source: tuple[Path, list[str]], steps: int, settings: Sequence[str]
) -> tuple[Run, list[tuple[float, Figures]]]:
    """Run a file with overrides in a process of its own, in `run_dir`; an older run there is renamed. What
    it left, and `processor_seconds` at many times.

    Raises DistillError with the end of its output when it fails.
    """
    if run_dir.exists():
        run_dir.rename(run_dir.with_name(f"{run_dir.name}-{time.time_ns()}"))
    path, overrides = source
    words = [*overrides, f"run.folder={run_dir.parent}", f"run.name={run_dir.name}", f"run.steps={steps}"]
    line, looks = [*DISTILL, "run", str(path), *over(*words, *settings)], list[tuple[float, Figures]]()
    with run_dir.with_suffix(".log").open("w+") as output:
        process = subprocess.Popen(line, stdout=output, stderr=output)
        while process.poll() is None:
            looks.append((time.time(), processor_seconds(process.pid)))
            time.sleep(0.5)
        output.seek(0)
        if process.returncode != 0:
            raise DistillError(f"{run_dir} ended with {process.returncode}:\n{output.read()[-2000:]}")
    return read_run(run_dir), looks


def step_lines(run: Run) -> list[dict[str, Any]]:
    """Its metrics, one line per optimizer step."""
    return [line for line in run.metrics if "train/loss" in line]


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def medians(trials: Sequence[Figures], names: Iterable[str]) -> Figures:
    """Of every figure over the trials; None where a trial has none."""
    values = {name: [trial.get(name) for trial in trials] for name in names}
    return {name: None if None in figures else median(figures) for name, figures in values.items()}


def comparison(
    old: str, new: str, variants: Mapping[str, Figures], rows: Mapping[str, tuple[str, int]]
) -> list[str]:
    """A table of two variants by name, without empty rows; a ratio above 1: `new` is better.

    `rows`: key → (title, +1: more is better, -1: less; 0: no ratio is printed).
    """
    lines = list[Figures]()
    for key, (title, better) in rows.items():
        before, after = (variants[name].get(key) for name in (old, new))
        if (before, after) != (None, None):
            ratio = f"{(after / before) ** better:.2f}" if better and before and after else ""
            lines.append({"": title, old: before, new: after, "ratio": ratio})
    return listing(lines)


def listing(rows: Sequence[Figures]) -> list[str]:
    """A table as lines of Markdown, whose head are the keys of the rows; without rows no lines."""
    cells = [[*rows[0]], ["---"] * len(rows[0]), *(map(cell, row.values()) for row in rows)] if rows else []
    return [f"| {' | '.join(line)} |" for line in cells]


def cell(value: Any) -> str:
    """Three digits of a number below a thousand."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "–" if value is None else str(value)
