"""The small mode's compiled loops: changes are ordered by the old exponent and then entropy coded.

Whether a weight moves by a unit in the last place depends on its exponent, which the receiver knows. So the
elements of one exponent class are taken together, in order of position: per class, the distance from one
changed element to the next (counted within the class) and its ULP difference are coded with probabilities
that adapt. A stream is a sequence of blocks of BLOCK elements; a block is, for each class, the number of
changes, then (gap, size, sign) of each. What a reader decodes is checked against the array.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from sync.delta.kernels import compiled, moved, typed, zigzag
from sync.delta.rangecoder import (
    FULL,
    MARGIN,
    PER_SCALE,
    SCALES,
    WRITER,
    finish,
    opening,
    put_bit,
    put_number,
    take_bit,
    take_number,
)

BLOCK: Final = 1 << 20
"""Elements coded together."""
CLASSES: Final = 256
"""Exponents of the widest kind; f2 uses 32 of them."""
_GAPS: Final = 0
_SIZES: Final = SCALES * PER_SCALE
_COUNTS: Final = 2 * SCALES * PER_SCALE
_EMPTY: Final = 3 * SCALES * PER_SCALE
_SIGN: Final = _EMPTY + 2
_MODELS: Final = _SIGN + 2
_ZERO: Final = np.uint64(0)


@typed("void(int64[:, ::1], int64, int64)")
def _inherit(mean: Any, c: int, before: int) -> None:
    """A class that is met for the first time starts from the mean of the one before it."""
    if mean[c, 1] == 0:
        mean[c, 0] = max(1, 2 * mean[before, 0] // mean[before, 1])
        mean[c, 1] = 2


def fresh() -> tuple[np.ndarray, np.ndarray]:
    """(models, running means) at the start of a stream; both sides start from these.

    Means are int64 [3, CLASSES + 1, 2] of gaps, sizes and counts; row CLASSES holds the start.
    """
    models = np.zeros((_MODELS, 2), np.int64)
    models[:, 0] = 1 << 15
    means = np.zeros((3, CLASSES + 1, 2), np.int64)
    means[0, CLASSES] = 32, 1
    means[1, CLASSES] = 1, 4
    means[2] = 64, 2
    return models, means


@compiled
def _collect(
    old: Any,
    new: Any,
    start: int,
    stop: int,
    width: int,
    mantissa: int,
    heads: Any,
    links: Any,
    gaps: Any,
    codes: Any,
) -> int:
    """Changes of one block in order of position, with the class each belongs to; returns how many."""
    seen = np.zeros(CLASSES, np.int64)
    last = np.full(CLASSES, -1, np.int64)
    k = 0
    for i in range(start, stop):
        c = (np.int64(old[i]) >> mantissa) & (CLASSES - 1)
        if old[i] != new[i]:
            links[k] = c
            gaps[k] = seen[c] - last[c] - 1
            codes[k] = zigzag(np.int64(old[i]), np.int64(new[i]), width)
            last[c] = seen[c]
            heads[c] += 1
            k += 1
        seen[c] += 1
    return k


@compiled
def encode_classes(old: Any, new: Any, width: int, mantissa: int, models: Any, means: Any, out: Any) -> int:
    """Code all changes from `old` to `new` into `out`; returns the length, or -1 when `out` is too short."""
    size = min(BLOCK, old.size)
    classes = np.empty(size, np.uint8)
    gaps = np.empty(size, np.uint32)
    codes = np.empty(size, np.uint32)
    order = np.empty(size, np.uint32)
    low, span, pos = _ZERO, FULL, 0
    for begin in range(0, old.size, BLOCK):
        counts = np.zeros(CLASSES, np.int64)
        end = min(begin + BLOCK, old.size)
        k = _collect(old, new, begin, end, width, mantissa, counts, classes, gaps, codes)
        slots = np.cumsum(counts) - counts
        for j in range(k):
            order[slots[classes[j]]] = j
            slots[classes[j]] += 1
        low, span, pos = _put_block(low, span, pos, out, models, means, counts, order, gaps, codes)
        if pos < 0:
            return -1
    return finish(low, span, pos, out)


@compiled
def encode_listed(counts: Any, gaps: Any, codes: Any, models: Any, means: Any, out: Any) -> int:
    """`encode_classes` of changes that are already in the stream's order.

    counts: int64 [blocks, CLASSES]; gaps and codes: uint32, by block, class and position.
    """
    low, span, pos, start = _ZERO, FULL, 0, 0
    for block in range(counts.shape[0]):
        end = start + counts[block].sum()
        order = np.arange(end - start).astype(np.uint32)
        low, span, pos = _put_block(
            low, span, pos, out, models, means, counts[block], order, gaps[start:end], codes[start:end]
        )
        if pos < 0:
            return -1
        start = end
    return finish(low, span, pos, out)


@typed(
    f"{WRITER}(uint64, uint64, int64, uint8[::1], int64[:, ::1], int64[:, :, ::1], int64[::1], uint32[::1],"
    " uint32[::1], uint32[::1])"
)
def _put_block(
    low: Any,
    span: Any,
    pos: int,
    out: Any,
    models: Any,
    means: Any,
    counts: Any,
    order: Any,
    gaps: Any,
    codes: Any,
) -> tuple[Any, Any, int]:
    """Code one block, class by class; the position is -1 when `out` is too short."""
    gap_means, size_means, count_means = means[0], means[1], means[2]
    at, before, empty = 0, CLASSES, 1
    for c in range(CLASSES):
        if pos > out.size - MARGIN:
            return low, span, -1
        count = counts[c]
        low, span, pos = put_bit(low, span, pos, out, models, _EMPTY + empty, int(count == 0))
        empty = int(count == 0)
        if empty:
            continue
        low, span, pos = put_number(low, span, pos, out, models, _COUNTS, count_means, c, count - 1)
        _inherit(gap_means, c, before)
        _inherit(size_means, c, before)
        before = c
        for j in range(at, at + count):
            if pos > out.size - MARGIN:
                return low, span, -1
            gap, code = np.int64(gaps[order[j]]), np.int64(codes[order[j]])
            low, span, pos = put_number(low, span, pos, out, models, _GAPS, gap_means, c, gap)
            low, span, pos = put_number(low, span, pos, out, models, _SIZES, size_means, c, (code - 1) >> 1)
            low, span, pos = put_bit(low, span, pos, out, models, _SIGN, code & 1)
        at += count
    return low, span, pos


@compiled
def apply_classes(bits: Any, width: int, mantissa: int, models: Any, means: Any, data: Any) -> int:
    """Inverse of `encode_classes`, in place. Returns 0, or -1 when the stream does not fit `bits`."""
    size = min(BLOCK, bits.size)
    gaps = np.empty(size + 1, np.int64)
    codes = np.empty(size + 1, np.uint64)
    first = np.zeros(CLASSES + 1, np.int64)
    code, span, pos = opening(data)
    for begin in range(0, bits.size, BLOCK):
        end = min(begin + BLOCK, bits.size)
        code, span, pos = _take_block(code, span, pos, data, models, means, end - begin, first, gaps, codes)
        if pos < 0 or _place(bits, begin, end, width, mantissa, first, gaps, codes) != 0:
            return -1
    return 0 if pos <= data.size + 8 else -1


@typed(
    f"{WRITER}(uint64, uint64, int64, uint8[::1], int64[:, ::1], int64[:, :, ::1], int64, int64[::1],"
    " int64[::1], uint64[::1])"
)
def _take_block(
    code: Any,
    span: Any,
    pos: int,
    data: Any,
    models: Any,
    means: Any,
    size: int,
    first: Any,
    gaps: Any,
    codes: Any,
) -> tuple[Any, Any, int]:
    """Inverse of `_put_block`; class c's changes are first[c] … first[c + 1]. Position -1: too many."""
    gap_means, size_means, count_means = means[0], means[1], means[2]
    at, before, empty = 0, CLASSES, 1
    for c in range(CLASSES):
        first[c] = at
        code, span, pos, empty = take_bit(code, span, pos, data, models, _EMPTY + empty)
        if empty:
            continue
        code, span, pos, count = take_number(code, span, pos, data, models, _COUNTS, count_means, c)
        if count >= size - at:
            return code, span, -1
        _inherit(gap_means, c, before)
        _inherit(size_means, c, before)
        before = c
        for _ in range(count + 1):
            code, span, pos, gap = take_number(code, span, pos, data, models, _GAPS, gap_means, c)
            code, span, pos, length = take_number(code, span, pos, data, models, _SIZES, size_means, c)
            code, span, pos, sign = take_bit(code, span, pos, data, models, _SIGN)
            gaps[at] = gap
            codes[at] = np.uint64(((length + 1) << 1) - sign)
            at += 1
    first[CLASSES] = at
    return code, span, pos


@compiled
def _place(
    bits: Any, start: int, stop: int, width: int, mantissa: int, first: Any, gaps: Any, codes: Any
) -> int:
    """Apply one block's changes, class c's being first[c] … first[c + 1]; -1 when some are left, else 0."""
    left: Any = np.full(CLASSES, -1, np.int64)
    next_ = first[:CLASSES].copy()
    c: Any
    for c in range(CLASSES):
        if first[c] < first[c + 1]:
            left[c] = gaps[first[c]]
    for i in range(start, stop):
        c = (np.int64(bits[i]) >> mantissa) & (CLASSES - 1)
        if left[c] == 0:
            bits[i] = moved(np.int64(bits[i]), np.int64(codes[next_[c]]), width)
            next_[c] += 1
            left[c] = gaps[next_[c]] if next_[c] < first[c + 1] else -1
        else:
            left[c] -= 1
    for c in range(CLASSES):
        if next_[c] != first[c + 1]:
            return -1
    return 0
