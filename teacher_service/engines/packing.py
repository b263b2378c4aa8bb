"""Token sequences of unequal length in few padded rectangles, and where their scored positions lie.

Letters in shapes: L tokens of a sequence, B rows and W columns of a rectangle, C scored positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from teacher_service.engines.base import Item

PAD_ID = 0
"""Any valid id: padding is on the right and attention is causal, so it changes no scored position."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """One forward pass: some items of a batch, right-padded; `rows` are their indices in the batch."""

    rows: list[int]
    width: int


def rectangles(lengths: Sequence[int], budget: int, overhead: int) -> list[Rectangle]:
    """Group sequences, longest first, so that no rectangle has more than `budget` padded tokens.

    A rectangle is closed when its padding would pass `overhead`, the tokens that one more forward pass costs.
    A sequence longer than the budget gets a rectangle of its own.
    """
    result: list[Rectangle] = []
    padding = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if result:
            width, rows = result[-1].width, result[-1].rows
            padding += width - lengths[i]
            if padding <= overhead and width * (len(rows) + 1) <= budget:
                rows.append(i)
                continue
        result.append(Rectangle([i], lengths[i]))
        padding = 0
    return result


def padded_ids(items: Sequence[Item], width: int) -> np.ndarray:
    """int64 [B, W] token ids, padded on the right."""
    lengths_B = np.array([len(item.token_ids_L) for item in items])
    ids_BW = np.full((len(items), width), PAD_ID, np.int64)
    ids_BW[np.arange(width) < lengths_B[:, None]] = np.concatenate([item.token_ids_L for item in items])
    return ids_BW


def packed_ids(items: Sequence[Item]) -> tuple[np.ndarray, np.ndarray]:
    """int64 [1, sum L] token ids one sequence after the other, and positions that begin at 0 in each."""
    ids = np.concatenate([item.token_ids_L for item in items]).astype(np.int64)
    positions = np.concatenate([np.arange(len(item.token_ids_L)) for item in items])
    return ids[None], positions[None]


def hidden_rows(items: Sequence[Item], starts: np.ndarray) -> np.ndarray:
    """int64 [C]: flat index of the hidden state that predicts each scored position.

    `starts` [B] is where each item's first token lies in the flat array of hidden states. Position i is
    predicted one place earlier, at i - 1.
    """
    counts_B = np.array([item.positions for item in items])
    before_B = np.cumsum(counts_B) - counts_B
    first_B = starts + np.array([item.first for item in items]) - 1
    return np.repeat(first_B - before_B, counts_B) + np.arange(int(counts_B.sum()))
