"""What the benchmarks share.

command                a benchmark's command line
interleaved            short works in this process, in turns: noise slows all variants alike
TrialCache             long trials, one JSON line each: a benchmark that was stopped resumes
crossing, medians      summaries
markdown, comparison   tables
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import typer

from distill.cli.options import guarded, write_figures
from sync.base.jsonl import JsonLines, read_lines
from tests.benchmarks import ROOT

log = logging.getLogger(__name__)
Figures = dict[str, Any]
"""What a trial found, or a report: JSON values by name."""
PACKAGES: Final = ("sync", "teacher_service", "student_trainer", "distill")
START_SECONDS: Final = 300.0


def command(name: str, run: Callable[..., Figures], table: Callable[[Figures], str]) -> None:
    """Run a benchmark with the options that its parameters are; print its table, write its figures."""
    logging.basicConfig(format="%(asctime)s %(message)s")
    log.setLevel(logging.INFO)

    @functools.wraps(run)
    def measured(*values: Any, **options: Any) -> None:
        figures = run(*values, **options)
        typer.echo(table(figures))
        write_figures(Path(f"runs/bench-{name}.json"), figures)

    sys.exit(guarded(lambda: typer.run(measured)))


# --- trials -----------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """A variant: `run` is timed on what `prepare`, untimed, returns."""

    run: Callable[..., object]
    prepare: Callable[[], Any] | None = None
    """None: `run` takes nothing."""


def interleaved(
    works: Mapping[str, Work], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds by `clock` of every work, once in each round. The caller has run all before, to warm up."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            given = [work.prepare()] if work.prepare else []
            began = clock()
            work.run(*given)
            found[name].append(clock() - began)
    return found


class TrialCache:
    """Finished trials in a JSONL file: {"key": …, "settings": {…}, "result": {…}}, one line each.

    The key digests the settings and the packages' sources: after a change of either, a trial runs again. A
    last line that a crash tore counts as not there. Raises DataError for a file that was altered.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._found = {line["key"]: line["result"] for line in read_lines(path)}

    def get(self, settings: Figures, run: Callable[[], Figures]) -> Figures:
        """The result of a trial: from the file, or from `run` and then in the file."""
        key = _digest(sources(), json.dumps(settings, sort_keys=True))
        if key not in self._found:
            log.info("trial: %.200s", settings)
            line = {"key": key, "settings": settings, "result": run()}
            lines = JsonLines(self._path)
            lines.write(line)
            lines.close()
            self._found[key] = json.loads(json.dumps(line["result"]))
        return self._found[key]


@functools.cache
def sources() -> str:
    """Digest of the four packages' modules."""
    modules = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return _digest(*(path.read_text() for path in modules))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


# --- summaries --------------------------------------------------------------------------------------------


def crossing(curve: Iterable[tuple[float, float]], target: float) -> float | None:
    """x at which a piecewise-linear curve of (x, value) first is at `target` or below; None: nowhere."""
    points = list(curve)
    if points and points[0][1] <= target:
        return points[0][0]
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 > target >= y1:
            return x0 + (x1 - x0) * (y0 - target) / (y0 - y1)
    return None


def medians(trials: Sequence[Figures], names: Iterable[str]) -> Figures:
    """Of every figure over the trials; None where a trial has none."""
    values = {name: [trial[name] for trial in trials] for name in names}
    return {name: None if None in of else median(of) for name, of in values.items()}


class Row(NamedTuple):
    """How a figure of a comparison is printed."""

    title: str
    form: str = ".1f"
    better: int = 0
    """+1: more is better, -1: less; 0: no ratio is printed."""


def comparison(variants: Mapping[str, Figures], rows: Mapping[str, Row]) -> list[str]:
    """A table of variants by name, without empty rows; of two with a ratio, above 1: the second is better."""
    lines, ratio = [], ["ratio"] if len(variants) == 2 else []
    for key, (title, form, better) in rows.items():
        found = [of.get(key) for of in variants.values()]
        if any(one is not None for one in found):
            cells = ["–" if one is None else format(one, form) for one in found]
            if ratio:
                old, new = found
                cells.append(f"{(new / old) ** better:.2f}" if better and old and new else "")
            lines.append([title, *cells])
    return markdown(["", *variants, *ratio], lines)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
