"""Who completes which prompt: the student, or the teacher for a share of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

_AUTHORS, _WORDS = 1, 2
"""Streams of random numbers of a run's seed, beside that of the prompts' order."""


def authors(seed: int, batch: int, on_policy: float) -> Callable[[int], bool]:
    """Tells of a prompt, by its number in the order of issue, whether the teacher completes it.

    Of each `batch` consecutive numbers the teacher has (1 − on_policy) · batch, rounded so that the sum over
    all of them is right; which ones depends on `seed`.
    """
    if on_policy >= 1:
        return lambda number: False
    return lambda number: number % batch in _written(seed, number // batch, batch, on_policy)


@lru_cache(maxsize=16)
def _written(seed: int, block: int, batch: int, on_policy: float) -> frozenset[int]:
    """Places in one block that the teacher has."""
    share = (1 - on_policy) * batch
    count = math.floor((block + 1) * share + 1e-6) - math.floor(block * share + 1e-6)
    order = np.random.default_rng([seed, block, _AUTHORS]).permutation(batch)
    return frozenset(order[:count].tolist())


def seed_of(seed: int, number: int) -> int:
    """What the completion of this number is drawn with, 0 … 2^32 - 1: asked again it is the same."""
    return int(np.random.SeedSequence([seed, number, _WORDS]).generate_state(1)[0])
