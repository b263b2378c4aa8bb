"""Figures of prompts with k completions each, and their 95 % confidence intervals.

pass@1 is the mean over prompts of the share of a prompt's completions that pass; avg@k the mean of the mean
reward; maj@k the share of prompts whose most frequent answer passes, where answers that tie share the vote.

Intervals are over prompts, whose completions are not independent. With m_i the mean of prompt i of P, m their
mean and s² = Σ(m_i − m)²/P:

    shares    Wilson's score interval of m with the effective size n = m(1−m)·P/s², at least P (completions
              of a prompt agree) and at most P·k (they are independent); for k = 1 it is Wilson's interval
    means     m ± 1.96·s/√P
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sync.wire import Estimate

Z = 1.959964
"""Of 95 %."""


def share(mean_P: np.ndarray, k: int) -> Estimate:
    """Mean of shares in [0, 1], each over k completions, with Wilson's interval."""
    p, size = float(mean_P.mean()), float(len(mean_P))
    if 0 < p < 1:
        spread = float(((mean_P - p) ** 2).mean())
        size = min(size * k, p * (1 - p) * size / spread) if spread > 0 else size * k
    centre, divisor = p + Z**2 / (2 * size), 1 + Z**2 / size
    half = Z * math.sqrt(p * (1 - p) / size + Z**2 / (4 * size**2))
    return Estimate(p, max(0.0, (centre - half) / divisor), min(1.0, (centre + half) / divisor))


def mean(mean_P: np.ndarray) -> Estimate:
    """Mean of numbers of any scale."""
    value, half = float(mean_P.mean()), Z * float(mean_P.std()) / math.sqrt(len(mean_P))
    return Estimate(value, value - half, value + half)


def majority(answers: Sequence[str | None], passes: Sequence[bool]) -> float:
    """Share of the vote on one prompt that passes; completions without an answer do not vote."""
    votes: dict[str, list[bool]] = {}
    for answer, passed in zip(answers, passes, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(passed)
    most = max(map(len, votes.values()), default=0)
    leading = [sum(passed) / most for passed in votes.values() if len(passed) == most]
    return sum(leading) / max(1, len(leading))
