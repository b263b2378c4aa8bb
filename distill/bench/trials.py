"""Trials of one student each, and the file that remembers them: a finished trial is never run twice.

    trials.jsonl      {"setup": {...}, "trial": {...}, "points": [...], ...}      one line per finished trial

A line is written when its trial ends, so a stopped benchmark goes on where it was; a last line that a crash
cut off is not read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sync.jsonl import read_lines

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setup:
    """What all trials of a benchmark share; trials of another set-up do not count as done."""

    models: str
    """Name of the folder of the made models: it changes with their recipe."""
    tokens: int = 50_000
    """Completion tokens that a student is trained on."""
    rows: int = 64
    """Completions of one step."""
    k: int = 64
    evaluations: int = 5
    """After the one at the start."""
    held_out: int = 512
    """Prompts of an evaluation."""
    head_chunk: int = 1024


class Trial(NamedTuple):
    """One student."""

    objective: str
    rate: float
    """Learning rate."""
    seed: int
    """Of prompts and samples."""
    lag: int = 0
    """Age of the weights that write, in optimizer steps."""


class Point(NamedTuple):
    """One evaluation."""

    tokens: int
    """Completion tokens trained on so far."""
    reverse_kl: float
    pass_rate: float


@dataclass(frozen=True)
class Result:
    """What came of a trial."""

    trial: Trial
    points: list[Point]
    steps: int
    wall_seconds: dict[str, float]
    """Median of a step, by what was done: generate, score, train."""
    cpu_seconds: dict[str, float]
    """The same in processor time, which a busy machine does not stretch."""
    teacher_bytes: float
    """Per token, of the arrays that a teacher sends."""
    effective_samples: float
    """Effective sample size of the importance weights, as a share of the tokens."""
    support_mass: float | None
    """Mean mass that the student gave to the k tokens; None: the objective has none."""
    age: float = 0.0
    """Of the weights that wrote, when a token was trained on: optimizer steps, mean over all tokens."""


class TrialFile:
    """Results of one set-up in a JSONL file."""

    def __init__(self, path: Path, setup: Setup) -> None:
        self._path, self._setup = path, setup
        if path.exists():
            _without_cut_line(path)
        self._done = {result.trial: result for result in _read(path, setup)}

    def get(self, trial: Trial, run: Callable[[Trial], Result]) -> Result:
        """The trial's result: from the file, or from `run` and then in the file."""
        if trial not in self._done:
            log.info("%s", _title(trial))
            result = run(trial)
            self._append(result)
            last = result.points[-1]
            log.info("%s: reverse KL %.3f, pass rate %.2f", _title(trial), last.reverse_kl, last.pass_rate)
            self._done[trial] = result
        return self._done[trial]

    def _append(self, result: Result) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = {"setup": asdict(self._setup)} | asdict(result)
        named = {"trial": result.trial._asdict(), "points": [point._asdict() for point in result.points]}
        with self._path.open("a") as file:
            file.write(json.dumps(line | named) + "\n")


def _title(trial: Trial) -> str:
    return f"{trial.objective}, rate {trial.rate:g}, seed {trial.seed}, lag {trial.lag}"


def _without_cut_line(path: Path) -> None:
    """Remove a last line that a crash cut off."""
    text = path.read_bytes()
    if not text.endswith(b"\n"):
        path.write_bytes(text[: text.rfind(b"\n") + 1])


def _read(path: Path, setup: Setup) -> list[Result]:
    rows = read_lines(path)
    return [_result(row) for row in rows if row.pop("setup") == asdict(setup)]


def _result(row: dict[str, Any]) -> Result:
    points = [Point(**point) for point in row.pop("points")]
    return Result(trial=Trial(**row.pop("trial")), points=points, **row)
