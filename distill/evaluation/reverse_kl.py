"""The metric `reverse_kl`: KL(p‖q) of student p and teacher q, averaged over completion tokens.

Completions are sampled from p at temperature 1, so

    exact       Σ_v p(v) (log p(v) − log q(v)) over the whole vocabulary at each token, fp32; it needs the
                hidden states and the head of both
    estimate    log p(y) − log q(y) of the sampled token y: the same mean in expectation. With x_i the sum
                over the n_i tokens of completion i of m, and r = Σx / Σn, the standard error of r is
                sqrt(m/(m−1) · Σ e_i²) / Σn, e_i = x_i − r·n_i: completions are independent, their tokens are
                not; with several teachers e_i is less its mean over the completions of that teacher

Rows of a model beyond the tokenizer's vocabulary do not exist for it.

The evaluator computes the sums (`evaluator`), the controller what they come to. M completions in shapes.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, field

import numpy as np


@dataclass
class ReverseKL:
    """Sums over the completions that one teacher scored."""

    is_exact: bool
    sums: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Completion → sum of the divergence, or of log p − log q, over its tokens, and their number."""

    def add(self, completion: int, value: float, tokens: int) -> None:
        """Add the sum over some tokens of a completion."""
        before, count = self.sums.get(completion, (0.0, 0))
        self.sums[completion] = before + value, count + tokens

    def among(self, completions: Set[int]) -> ReverseKL:
        """Sums of these completions alone."""
        return ReverseKL(self.is_exact, {id: self.sums[id] for id in self.sums.keys() & completions})

    def variance(self, ratio: float) -> float:
        """Variance of the sum of e over all completions; `ratio`: the r of all teachers. 0: it is exact."""
        if self.is_exact or not self.sums:
            return 0.0
        x_M, n_M = np.array(list(self.sums.values())).T
        if len(x_M) == 1:
            return float(x_M[0] ** 2)  # nothing to compare it with
        rest_M = x_M - ratio * n_M
        return float(len(x_M) / (len(x_M) - 1) * ((rest_M - rest_M.mean()) ** 2).sum())


def total(parts: list[ReverseKL]) -> tuple[float | None, float | None]:
    """Mean over the tokens of all teachers, and its standard error, None where it is exact; both None where
    nothing was compared."""
    all_sums = [sums for part in parts for sums in part.sums.values()]
    if not all_sums:
        return None, None
    tokens = max(1, sum(count for _, count in all_sums))
    value = math.fsum(x for x, _ in all_sums) / tokens
    if all(part.is_exact for part in parts):
        return value, None
    return value, math.sqrt(sum(part.variance(value) for part in parts)) / tokens
