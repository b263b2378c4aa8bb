"""Run trials of named variants in turns, keep the finished ones, and compare medians with a baseline.

interleaved          short works in this process, in turns: a noisy machine slows all variants alike
TrialCache           long trials, one JSON line each: a benchmark that was stopped resumes
crossing, spread, medians, ratios                summaries
markdown, comparison, write_report               tables and files
serving                                          servers of a benchmark
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, Final, Literal, NamedTuple

from distill.launch.supervise import ChildSpec, Supervisor
from sync.durable import write_json
from sync.jsonl import JsonLines, read_lines

log = logging.getLogger(__name__)
Figures = dict[str, Any]
"""What a trial found, or a report: JSON values by name."""
ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("sync", "teacher_service", "student_trainer", "distill")
NOT_MEASURED: Final = (ROOT / "distill" / "bench", ROOT / "distill" / "cli")
START_SECONDS: Final = 300.0


# --- short works in this process --------------------------------------------------------------------------


class Seconds(NamedTuple):
    """Of one piece of work."""

    wall: float
    cpu: float
    """Of the calling thread: what the core would need undisturbed."""


class Work(NamedTuple):
    """A variant: `run` is timed on what `prepare`, untimed, returns."""

    run: Callable[..., object]
    prepare: Callable[[], Any] | None = None
    """None: `run` takes nothing."""


def interleaved(works: Mapping[str, Work], rounds: int) -> dict[str, list[Seconds]]:
    """Time every work once in each round. The caller has run them all before, to warm up."""
    found: dict[str, list[Seconds]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            given = [work.prepare()] if work.prepare else []
            wall, cpu = time.perf_counter(), time.thread_time()
            work.run(*given)
            found[name].append(Seconds(time.perf_counter() - wall, time.thread_time() - cpu))
    return found


# --- long trials ------------------------------------------------------------------------------------------


class TrialCache:
    """Finished trials in a JSONL file: {"key": …, "settings": {…}, "result": {…}}, one line each.

    The key digests the settings and the source of the packages: a trial of other settings or of other code is
    run again. A last line that a crash cut off counts as not there. Raises DataError for a file that was
    altered.
    """

    def __init__(self, path: Path, *sources: str) -> None:
        """`sources`: files of this folder that decide results too."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._source = path, source_hash(sources)
        self._found = {line["key"]: line["result"] for line in read_lines(path)}

    def get(self, settings: Mapping[str, Any], run: Callable[[], Figures]) -> Figures:
        """The result of a trial: from the file, or from `run` and then in the file."""
        key = digest(settings, self._source)
        if key not in self._found:
            log.info("trial: %s", settings)
            result = run()
            lines = JsonLines(self._path)
            lines.write({"key": key, "settings": settings, "result": result})
            lines.close()
            self._found[key] = json.loads(json.dumps(result))
        return self._found[key]


@cache
def source_hash(sources: Sequence[str] = ()) -> str:
    """Digest of the four packages' modules, without benchmarks and command line, and of `sources`."""
    modules = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    measured = [path for path in modules if not any(path.is_relative_to(folder) for folder in NOT_MEASURED)]
    return digest(*(path.read_text() for path in [*measured, *map(Path, sources)]))


def digest(*values: Any) -> str:
    """Of JSON values: it changes when they do."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


# --- summaries --------------------------------------------------------------------------------------------


def spread(values: Sequence[float | None]) -> Figures | None:
    """Mean, sample standard deviation (0 for a single value) and values; None: a value is missing."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return {"mean": fmean(known), "deviation": stdev(known) if len(known) > 1 else 0.0, "values": known}


def crossing(curve: Iterable[tuple[float, float]], target: float) -> float | None:
    """x at which a piecewise-linear curve of (x, value) first is at `target` or below; None: nowhere."""
    points = list(curve)
    if points and points[0][1] <= target:
        return points[0][0]
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 > target >= y1:
            return x0 + (x1 - x0) * (y0 - target) / (y0 - y1)
    return None


class Number(NamedTuple):
    """How a figure of a comparison is printed."""

    title: str
    form: str
    better: Literal["lower", "higher"] | None = None
    """None: no ratio is taken."""


def medians(trials: Sequence[Mapping[str, Any]], names: Iterable[str]) -> Figures:
    """Of every figure over the trials; None where a trial has none."""
    values = {name: [trial[name] for trial in trials] for name in names}
    return {name: None if None in of else median(of) for name, of in values.items()}


def ratios(
    baseline: Mapping[str, Any], variant: Mapping[str, Any], numbers: Mapping[str, Number]
) -> dict[str, float]:
    """How many times better than the baseline a variant is: above 1 is better. Of figures that both have."""
    found = {}
    for name, number in numbers.items():
        old, new = baseline[name], variant[name]
        if number.better and old and new:
            found[name] = old / new if number.better == "lower" else new / old
    return found


# --- tables and files -------------------------------------------------------------------------------------


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def cell(value: float | None, form: str) -> str:
    """A figure as it is printed; – for none."""
    return "–" if value is None else format(value, form)


def comparison(
    variants: Mapping[str, Mapping[str, Any]], better: Mapping[str, float], numbers: Mapping[str, Number]
) -> list[str]:
    """A table of variants side by side, with the ratios where there are some; without empty rows."""
    rows = []
    for name, (title, form, _) in numbers.items():
        values = [figures[name] for figures in variants.values()]
        if any(value is not None for value in values):
            ratio = f"{better[name]:.2f}" if name in better else ""
            rows.append([title, *(cell(value, form) for value in values), ratio])
    return markdown(["", *variants, "ratio"], rows)


def write_report(folder: Path, name: str, report: Figures, text: str | None = None) -> Figures:
    """Write NAME.json, and NAME.md where there is a text; the report."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{name}.json", report)
    if text is not None:
        (folder / f"{name}.md").write_text(text + "\n")
    return report


# --- processes --------------------------------------------------------------------------------------------


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


@contextlib.asynccontextmanager
async def serving(children: Sequence[ChildSpec], logs: Path) -> AsyncIterator[Supervisor]:
    """Servers that answer /health, meanwhile. Raises DistillError when one does not come up."""
    supervisor = Supervisor(children, logs, restarts=0)
    try:
        await supervisor.start()
        await supervisor.ready(START_SECONDS)
        yield supervisor
    finally:
        await supervisor.stop(10.0)
