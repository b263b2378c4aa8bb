"""Medians of things done in turns, so that a noisy machine hurts all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

Timed = tuple[Callable[[], Any], Callable[[Any], object]]
"""(what makes the input, untimed; what is timed on it)"""


@dataclass(frozen=True)
class Rate:
    """GB of dense weights a second of one thread."""

    wall: float
    cpu: float
    """By the thread's CPU time: what the core would do undisturbed."""


def interleaved(works: Mapping[str, Timed], rounds: int, nbytes: int) -> dict[str, Rate]:
    """Median rate of each work on `nbytes` bytes; a round does each of them once. All ran before: warm."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, (prepare, work) in works.items():
            given = prepare()
            wall, cpu = time.perf_counter(), time.thread_time()
            work(given)
            seconds[name].append((time.perf_counter() - wall, time.thread_time() - cpu))
    return {
        name: Rate(*(nbytes / max(1e-9, median(column)) / 1e9 for column in zip(*taken, strict=True)))
        for name, taken in seconds.items()
    }


def plain(work: Callable[[], object]) -> Timed:
    """A work that needs nothing made."""
    return (lambda: None), (lambda _: work())
