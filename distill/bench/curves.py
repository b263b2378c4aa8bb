"""What learning curves say: tokens to a target, the best rung of a ladder, mean and spread, lines. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from distill.bench.trials import Point


class Spread(NamedTuple):
    """Mean and sample standard deviation (0 for a single value), and the values themselves."""

    mean: float
    deviation: float
    values: list[float]

    def text(self, form: str) -> str:
        """mean ± deviation, both in `form`."""
        return f"{self.mean:{form}} ± {self.deviation:{form}}"


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    return Spread(fmean(values), stdev(values) if len(values) > 1 else 0.0, list(values))


def tokens_to(points: Sequence[Point], target: float) -> float | None:
    """Tokens at which the reverse KL first is `target` or less; None: it never is.

    Between two evaluations log KL is taken as linear in tokens.
    """
    before: Point | None = None
    for point in points:
        if point.reverse_kl <= target:
            if before is None:
                return float(point.tokens)
            drop = math.log(before.reverse_kl / max(point.reverse_kl, 1e-12))
            share = math.log(before.reverse_kl / target) / drop
            return before.tokens + share * (point.tokens - before.tokens)
        before = point
    return None


def best_rung(cost: Callable[[int], float], start: int, reach: int) -> int:
    """The rung whose two neighbours cost more, climbing from `start`, at most `reach` rungs away from it.

    NaN counts as infinitely bad. `cost` should remember its answers: a rung may be asked for twice.
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


class Line(NamedTuple):
    """value = at_zero + slope · x, and how far the worst point is from it, as a share of the point."""

    at_zero: float
    slope: float
    worst: float

    def at(self, x: float) -> float:
        """The line's value at x."""
        return self.at_zero + self.slope * x


def fitted(points: Sequence[tuple[float, float]]) -> Line:
    """Least squares through (x, value) of at least two different x."""
    mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    at_zero = mean_y - slope * mean_x
    return Line(at_zero, slope, max(abs(at_zero + slope * x - y) / abs(y) for x, y in points))
