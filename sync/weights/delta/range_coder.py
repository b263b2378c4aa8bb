"""Compiled loops of a range coder with 64-bit bounds that writes 32 bits at a time.

Its state travels as (low, span, position) when writing and (code, span, position) when reading; a reader past
the end of the stream reads zeros. Bits go through 16-bit probabilities that learn; numbers are Elias gamma
codes of such bits.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from sync.weights.delta.kernels import typed

FULL: Final = np.uint64(0xFFFFFFFFFFFFFFFF)
"""Span at the start of a stream."""
GAMMA: Final = 64
"""Models of one kind of number: 0-31 for its length in unary, 32-63 for the bit after the leading one."""
WRITER: Final = "Tuple((uint64, uint64, int64))"
READER: Final = "Tuple((uint64, uint64, int64, int64))"
CODER: Final = "uint64, uint64, int64, uint32[::1]"
MODELS: Final = "int64[:, ::1]"
_SLOWEST: Final = 120
_RATES: Final = np.array([65536 * 2 // (2 * n + 3) for n in range(_SLOWEST)], np.int64)
_WORD, _PROBABILITY = np.uint64(32), np.uint64(16)
_LEAST: Final = np.uint64(1 << 32)
_ZERO: Final = np.uint64(0)


@typed("void(int64[:, ::1], int64, int64)")
def _learn(models: Any, i: int, bit: int) -> None:
    """Move model i towards `bit`; models[i, 0] is P(1) · 2**16, models[i, 1] how often it was used."""
    rate = _RATES[models[i, 1]]
    if bit:
        models[i, 0] += ((65536 - models[i, 0]) * rate) >> 16
    else:
        models[i, 0] -= (models[i, 0] * rate) >> 16
    if models[i, 1] < _SLOWEST - 1:
        models[i, 1] += 1


@typed(f"{WRITER}(uint64, int64, uint32[::1], uint64, uint64)")
def put(low: Any, pos: int, out: Any, start: Any, size: Any) -> tuple[Any, Any, Any]:
    """Narrow to [start, start + size) of the span; `out` has room for one more word at `pos`."""
    before = low
    low += start
    if low < before:
        at = pos - 1
        while out[at] == 0xFFFFFFFF:
            out[at] = 0
            at -= 1
        out[at] += 1
    out[pos] = np.uint32(low >> _WORD)  # written over unless it is complete
    full = np.uint64(size < _LEAST)
    return low << _WORD * full, size << _WORD * full, pos + np.int64(full)


@typed(f"{WRITER}(uint64, int64, uint32[::1], uint64, uint64)")
def take(code: Any, pos: int, data: Any, start: Any, size: Any) -> tuple[Any, Any, Any]:
    """Inverse of `put`; the last word of `data` is a zero, and zeros follow it."""
    full = np.uint64(size < _LEAST)
    word = np.uint64(data[min(pos, data.size - 1)])
    code = (code - start) << _WORD * full | word * full
    return code, size << _WORD * full, pos + np.int64(full)


@typed(f"{WRITER}({CODER}, {MODELS}, int64, int64)")
def put_bit(low: Any, span: Any, pos: int, out: Any, models: Any, i: int, bit: int) -> tuple[Any, Any, int]:
    """Code `bit` with model i."""
    bound = (span >> _PROBABILITY) * np.uint64(models[i, 0])
    _learn(models, i, bit)
    if bit:
        return put(low, pos, out, _ZERO, bound)
    return put(low, pos, out, bound, span - bound)


@typed(f"{READER}({CODER}, {MODELS}, int64)")
def take_bit(code: Any, span: Any, pos: int, data: Any, models: Any, i: int) -> tuple[Any, Any, int, int]:
    """Inverse of `put_bit`; the bit comes last."""
    bound = (span >> _PROBABILITY) * np.uint64(models[i, 0])
    bit = int(code < bound)
    _learn(models, i, bit)
    if bit:
        code, span, pos = take(code, pos, data, _ZERO, bound)
    else:
        code, span, pos = take(code, pos, data, bound, span - bound)
    return code, span, pos, bit


@typed(f"{WRITER}({CODER}, {MODELS}, int64, int64)")
def put_number(
    low: Any, span: Any, pos: int, out: Any, models: Any, base: int, value: int
) -> tuple[Any, Any, int]:
    """Code a number from 0 to 2**32 - 2 with the models from `base` on: length in unary, then its bits."""
    bits = 0
    while (value + 1) >> (bits + 1):
        low, span, pos = put_bit(low, span, pos, out, models, base + bits, 1)
        bits += 1
    if bits < 31:
        low, span, pos = put_bit(low, span, pos, out, models, base + bits, 0)
    if bits > 0:
        low, span, pos = put_bit(
            low, span, pos, out, models, base + 32 + bits, ((value + 1) >> (bits - 1)) & 1
        )
    left = bits - 1
    while left > 0:
        many = min(left, 16)
        left -= many
        share = span >> np.uint64(many)
        part = np.uint64(((value + 1) >> left) & ((1 << many) - 1))
        low, span, pos = put(low, pos, out, part * share, share)
    return low, span, pos


@typed(f"{READER}({CODER}, {MODELS}, int64)")
def take_number(
    code: Any, span: Any, pos: int, data: Any, models: Any, base: int
) -> tuple[Any, Any, int, int]:
    """Inverse of `put_number`; the number comes last."""
    bits, more = 0, 1
    value: Any = 1
    while bits < 31 and more:
        code, span, pos, more = take_bit(code, span, pos, data, models, base + bits)
        bits += more
    if bits > 0:
        code, span, pos, value = take_bit(code, span, pos, data, models, base + 32 + bits)
        value += 2
    left = bits - 1
    while left > 0:
        many = min(left, 16)
        left -= many
        share = span >> np.uint64(many)
        part = min(code // share, np.uint64((1 << many) - 1))
        code, span, pos = take(code, pos, data, part * share, share)
        value = (value << many) | np.int64(part)
    return code, span, pos, value - 1


def fresh(kinds: int) -> np.ndarray:
    """Models of so many kinds of numbers at the start of a stream; both sides start from these."""
    models = np.zeros((kinds * GAMMA, 2), np.int64)
    models[:, 0] = 1 << 15
    return models
