"""Figures of prompts with k completions each, and their 95 % confidence intervals.

pass@1 is the mean over prompts of the share of a prompt's completions that pass; avg@k the mean of the mean
reward; maj@k the share of prompts whose most frequent answer passes, where answers that tie share the vote.

Intervals are over prompts, whose completions are not independent. With m_i the mean of prompt i of P, m their
mean and s² = Σ(m_i − m)²/(P−1):

    shares    Wilson's score interval of m with the effective size n = m(1−m)·P/s², at least P (completions
              of a prompt agree) and at most P·k (they are independent); for k = 1 it is Wilson's interval
    means     m ± t·s/√P, t of Student's distribution with P−1 degrees of freedom; one prompt has no interval
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sync.wire import Estimate

Z = 1.959964
"""Quantile of the normal distribution, for intervals of 95 %."""


def share(mean_P: np.ndarray, k: int) -> Estimate:
    """Mean of shares in [0, 1], each over k completions, with Wilson's interval."""
    p, size = float(mean_P.mean()), float(len(mean_P))
    if 0 < p < 1 and size > 1:
        spread = float(mean_P.var(ddof=1))
        size = min(size * k, max(size, p * (1 - p) * size / spread)) if spread > 0 else size * k
    centre, divisor = p + Z**2 / (2 * size), 1 + Z**2 / size
    half = Z * math.sqrt(p * (1 - p) / size + Z**2 / (4 * size**2))
    return Estimate(p, max(0.0, (centre - half) / divisor), min(1.0, (centre + half) / divisor))


def mean(mean_P: np.ndarray) -> Estimate:
    """Mean of numbers of any scale; of one number, the interval is that number."""
    value, free = float(mean_P.mean()), len(mean_P) - 1
    if free == 0:
        return Estimate(value, value, value)
    half = _student(free) * float(mean_P.std(ddof=1)) / math.sqrt(free + 1)
    return Estimate(value, value - half, value + half)


def _student(free: int) -> float:
    """Z of Student's distribution, by Cornish and Fisher's expansion: within 1 % from two degrees on."""
    z, powers = Z, [1 / free**n for n in range(1, 5)]
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term * power for term, power in zip(terms, powers, strict=True))


def majority(answers: Sequence[str | None], passes: Sequence[bool]) -> float:
    """Share of the vote on one prompt that passes; completions without an answer do not vote."""
    votes: dict[str, list[bool]] = {}
    for answer, passed in zip(answers, passes, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(passed)
    count = max(map(len, votes.values()), default=0)
    leading = [sum(passed) / count for passed in votes.values() if len(passed) == count]
    return sum(leading) / max(1, len(leading))
