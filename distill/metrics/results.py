"""What a run leaves in its folder, as plain Python: configuration, metrics, summary, evaluations, samples."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypedDict

import msgspec

from distill.config import RunConfig
from distill.config.loading import load_run_dir
from distill.metrics.names import SECTIONS
from distill.metrics.samples import read_samples
from sync.base.decoding import json_decoder
from sync.base.errors import DataError
from sync.base.jsonl import read_lines

log = logging.getLogger(__name__)
Row = dict[str, Any]
AXES: Final = ("step", "lineage", "time")
"""Of every line of metrics.jsonl."""
RUN_SECONDS: Final = "perf/run_seconds"


class MetricsRow(msgspec.Struct):
    """What every line of metrics.jsonl has beside its figures."""

    step: float
    time: float
    """Seconds since the epoch."""
    lineage: float = 0


class Summary(TypedDict):
    """summary.json: the figures of a run that has ended or was stopped (docs/running.md explains each)."""

    name: str
    seed: int
    objective: str
    folder: str
    model: str
    """Folder of the trained model."""
    steps: int
    completed: bool
    """All steps are done."""
    stop_reason: str
    error: str | None
    problems: list[str]
    """What the end of the run did not show; empty: everything was shown."""
    warnings: list[str]
    """What was wasted since the run's newest start, and what to change."""
    before: Row | None
    after: Row | None
    """Of the final version; None: it was not evaluated."""
    best: Row | None
    evaluations: list[Row]
    """reverse_kl in nats per token, pass_rate, truncated (share), sets by name."""
    seconds: dict[str, float]
    rollout: Row
    buffer: Row
    train: Row
    sync: Row
    perf: Row
    """These five hold figures by the second part of their name (`distill.metrics.names`)."""
    weights_identical: bool | None
    """None: it was not shown."""
    weights_identical_by_replica: dict[str, bool | None]
    weights_missing: list[str]
    weights_digest: str | None
    run: Row
    version: str | None
    lineages: int
    replica_joins: dict[str, int]
    versions: dict[str, str]
    threads: dict[str, int | None]
    machine: Row


class Run(NamedTuple):
    """The figures in a run's folder."""

    folder: Path
    summary: Row
    """As `Summary`; empty while the run goes on."""
    metrics: list[Row]
    """Rows of metrics.jsonl, of steps and of evaluations (`eval/…`), each with its `step` and `lineage`, none
    twice (`newest`); without figures that are null because they are not finite."""

    @property
    def config(self) -> RunConfig:
        """The configuration as it ran, without its secrets. Raises ConfigError when it cannot be read."""
        return load_run_dir(self.folder)

    @property
    def evaluations(self) -> list[Row]:
        """Every evaluation of `summary`, by version; empty while the run goes on."""
        return list(self.summary.get("evaluations", []))

    @property
    def samples(self) -> list[Row]:
        """Rollouts that were trained on, as `distill.metrics.samples.Sample`, in the order of training."""
        return [msgspec.to_builtins(sample) for sample in read_samples(self.folder)]


def read_run(folder: Path) -> Run:
    """Raises DataError for a folder without figures, and for one of an earlier version."""
    lines = read_lines(folder / "metrics.jsonl", MetricsRow)
    if not lines:
        raise DataError(f"{folder} holds no metrics.jsonl with figures: name the folder of a run")
    for step, name, value in ((line["step"], *figure) for line in lines for figure in line.items()):
        if name not in AXES and not name.startswith(tuple(f"{section}/" for section in SECTIONS)):
            raise DataError(
                f"{folder}/metrics.jsonl has the figure {name!r}, and names are in the sections "
                f"{', '.join(SECTIONS)} (distill/metrics/names.py): read it with the version that wrote it"
            )
        if not isinstance(value, int | float | None):
            raise DataError(f"{folder}/metrics.jsonl has no number as {name} of step {step}: it was altered")
    rows = [{name: value for name, value in line.items() if value is not None} for line in newest(lines)]
    return Run(folder, read_summary(folder), rows)


def read_summary(folder: Path) -> Row:
    """What summary.json of a run holds; empty while the run goes on. Raises DataError when it was altered."""
    path = folder / "summary.json"
    try:
        return json_decoder(Row).decode(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path}: {error}; the file was altered: remove it, or restore it") from None


class Earlier(NamedTuple):
    """The time that a run's starts have taken until now."""

    figures: Mapping[str, Any] = MappingProxyType({})
    """`Timeline.figures`, up to their last step; empty before there was one"""
    seconds: float = 0.0
    """in all"""


def earlier_starts(folder: Path) -> Earlier:
    """None of it is needed to resume: where files were altered, the next start counts alone, and says so."""
    try:
        lines, summary = read_lines(folder / "metrics.jsonl", MetricsRow), read_summary(folder)
    except DataError as error:
        log.warning("%s; the seconds of earlier starts are left out", error)
        return Earlier()
    figures: dict[str, Any] = {}
    newest = next((line for line in reversed(lines) if RUN_SECONDS in line), {})
    for name, value in newest.items():
        section, *places = name.split("/")
        if section == "perf" and (len(places) > 1 or name == RUN_SECONDS):
            inner = figures
            for place in places[:-1]:
                inner = inner.setdefault(place, {})
            inner[places[-1]] = value
    run_seconds: float = figures.get("run_seconds", 0.0)  # a start that was killed wrote no summary
    return Earlier(figures, max(run_seconds, (summary.get("seconds") or {}).get("total") or 0.0))


def newest(lines: Sequence[Row]) -> list[Row]:
    """Without what a later start of the trainer did again or left behind.

    Of each step the last row of training and the last one of an evaluation, and no row of training from the
    first step of a later lineage on.
    """
    kept: list[Row] = []
    seen: set[tuple[bool, int]] = set()
    first: dict[int, int] = {}
    for line in reversed(lines):
        step, lineage = line["step"], line.get("lineage", 0)
        trained = not any(name.startswith("eval/") for name in line)
        left = trained and any(step >= at for later, at in first.items() if later > lineage)
        if left or (trained, step) in seen:
            continue
        seen.add((trained, step))
        if trained:
            first[lineage] = min(step, first.get(lineage, step))
        kept.append(line)
    return kept[::-1]
