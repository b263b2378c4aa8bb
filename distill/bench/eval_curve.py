"""Exact reverse KL and pass rate of a run's versions, taken after the run: nothing is timed with it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from distill.config import EvaluationConfig, RunConfig
from distill.evaluation.models import Weights, build
from sync.wire import Version


class CurvePoint(NamedTuple):
    """One version on held-out prompts."""

    step: int
    reverse_kl: float
    pass_rate: float


class Folders:
    """Versions that are model folders of their own, by step."""

    def __init__(self, folders: Mapping[int, Path]) -> None:
        self._folders = folders

    def folder(self, version: Version) -> Path:
        return self._folders[version.step]


def curve_points(config: RunConfig, weights: Weights, steps: Sequence[int]) -> list[CurvePoint]:
    """Versions of the first lineage, oldest first; step 0 is the student's own folder.

    Always the same prompts with the same randomness, and the default ones when the run evaluated nothing.
    Raises SnapshotError for a version that is not there.
    """
    if config.evaluation is None:
        config = config.model_copy(update={"evaluation": EvaluationConfig(batch=512, threads=1)})
    evaluator, found = build(config, weights), []
    for step in steps:
        report = evaluator.evaluate(Version(0, step))
        assert report.pass_rate is not None, "every task has a reward_fn"
        found.append(CurvePoint(step, report.reverse_kl, report.pass_rate))
    return found


def crossing(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """Where a falling piecewise-linear curve of (time, value) first meets `target`; None: nowhere."""
    for (t0, v0), (t1, v1) in itertools.pairwise(curve):
        if v0 > target >= v1:
            return t0 + (t1 - t0) * (v0 - target) / (v0 - v1)
    return None
