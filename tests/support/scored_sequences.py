"""Sequences for a table teacher, and whether their scores are the table's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from table_engine import random_table

from sync.wire import Scored, ScoreSequence, pack, unpack

V = 11
TABLE = random_table(V)


def sequences(n: int, length: int = 6, seed: int = 0) -> list[ScoreSequence]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, V, (n, length)).astype(np.int32)
    return [ScoreSequence(f"{seed}-{i}", pack(ids[i]), 2) for i in range(n)]


def right(given: Sequence[ScoreSequence], results: Iterable[Any]) -> bool:
    """Whether every result is the table's scores of the sequence at its place."""
    for sequence, result in zip(given, results, strict=True):
        ids = unpack(sequence.token_ids)
        assert isinstance(result, Scored)
        np.testing.assert_array_equal(unpack(result.logprob), TABLE[ids[1:-1], ids[2:]])
    return True
