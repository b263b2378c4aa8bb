"""The small mode's compiled coder of bits and numbers.

A binary range coder with 64-bit bounds and 16-bit probabilities that learn. Its state travels as
(low, span, position) when writing and (code, span, position) when reading. A reader past the end of the
stream reads zeros.

Numbers are adaptive Golomb codes: the quotient in unary and two leading bits of the remainder through models,
the other bits as they are. Divisor and models follow a running mean, so that few models serve every scale and
learn within tens of numbers.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from sync.delta.kernels import typed

SCALES: Final = 112
"""Half octaves of a running mean, from 1/16."""
PER_SCALE: Final = 8
"""Models of one scale; quotient: 0-4, leading bits of the remainder: 5-7."""
FULL: Final = np.uint64(0xFFFFFFFFFFFFFFFF)
"""Span at the start of a stream."""
MARGIN: Final = 256
"""Bytes; two numbers and a bit take fewer, escapes included."""
WRITER: Final = "Tuple((uint64, uint64, int64))"
READER: Final = "Tuple((uint64, uint64, int64, int64))"
_SLOWEST: Final = 120
_RATES: Final = np.array([65536 * 2 // (2 * n + 3) for n in range(_SLOWEST)], np.int64)
_MEMORY: Final = 96  # numbers that a running mean remembers
_QUOTIENTS: Final = 20  # a longer one is an escape
_TOP: Final = np.uint64(56)
_BYTE: Final = np.uint64(8)
_LEAST: Final = np.uint64(1 << 48)
_ZERO: Final = np.uint64(0)


# --- bits -------------------------------------------------------------------------------------------------


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


@typed("void(uint8[::1], int64)")
def _carry(out: Any, pos: int) -> None:
    """Add one to the number that out[:pos] spells."""
    pos -= 1
    while out[pos] == 255:
        out[pos] = 0
        pos -= 1
    out[pos] += 1


@typed(f"{WRITER}(uint64, uint64, int64, uint8[::1])")
def _flush(low: Any, span: Any, pos: int, out: Any) -> tuple[Any, Any, int]:
    """Write the leading bytes that are settled; `out` has room for eight more."""
    while span < _LEAST:
        out[pos] = np.uint8(low >> _TOP)
        pos += 1
        low <<= _BYTE
        span <<= _BYTE
    return low, span, pos


@typed(f"{WRITER}(uint64, uint64, int64, uint8[::1], int64[:, ::1], int64, int64)")
def put_bit(low: Any, span: Any, pos: int, out: Any, models: Any, i: int, bit: int) -> tuple[Any, Any, int]:
    """Code `bit` with model i; `out` has room for eight more bytes."""
    bound = (span >> np.uint64(16)) * np.uint64(models[i, 0])
    if bit:
        span = bound
    else:
        if low + bound < low:
            _carry(out, pos)
        low += bound
        span -= bound
    _learn(models, i, bit)
    return _flush(low, span, pos, out)


@typed(f"{WRITER}(uint64, uint64, int64, uint8[::1], int64, int64)")
def _put_plain(low: Any, span: Any, pos: int, out: Any, value: int, bits: int) -> tuple[Any, Any, int]:
    """`bits` bits of `value` as they are, 16 at a time."""
    while bits > 0:
        take = min(bits, 16)
        bits -= take
        span >>= np.uint64(take)
        step = span * np.uint64((value >> bits) & ((1 << take) - 1))
        if low + step < low:
            _carry(out, pos)
        low += step
        low, span, pos = _flush(low, span, pos, out)
    return low, span, pos


@typed("int64(uint64, uint64, int64, uint8[::1])")
def finish(low: Any, span: Any, pos: int, out: Any) -> int:
    """Write the fewest bytes that name a number in [low, low + span); returns the stream's length."""
    last = low + span - np.uint64(1)
    if last < low:
        last = FULL
    for count in range(8):
        keep = np.uint64(64 - 8 * count)
        value = _ZERO if count == 0 else (last >> keep) << keep
        if value >= low:
            for j in range(count):
                out[pos + j] = np.uint8(value >> np.uint64(56 - 8 * j))
            return pos + count
    return -1


@typed(f"{WRITER}(uint64, uint64, int64, uint8[::1])")
def _refill(code: Any, span: Any, pos: int, data: Any) -> tuple[Any, Any, int]:
    while span < _LEAST:
        code <<= _BYTE
        span <<= _BYTE
        if pos < data.size:
            code |= np.uint64(data[pos])
        pos += 1
    return code, span, pos


@typed(f"{WRITER}(uint8[::1])")
def opening(data: Any) -> tuple[Any, Any, int]:
    """State of a reader at the start of `data`."""
    code, pos = _ZERO, 0
    for _ in range(8):
        code <<= _BYTE
        if pos < data.size:
            code |= np.uint64(data[pos])
        pos += 1
    return code, FULL, pos


@typed(f"{READER}(uint64, uint64, int64, uint8[::1], int64[:, ::1], int64)")
def take_bit(code: Any, span: Any, pos: int, data: Any, models: Any, i: int) -> tuple[Any, Any, int, int]:
    """Inverse of `put_bit`; the bit comes last."""
    bound = (span >> np.uint64(16)) * np.uint64(models[i, 0])
    if code < bound:
        span = bound
        bit = 1
    else:
        code -= bound
        span -= bound
        bit = 0
    _learn(models, i, bit)
    code, span, pos = _refill(code, span, pos, data)
    return code, span, pos, bit


@typed(f"{READER}(uint64, uint64, int64, uint8[::1], int64)")
def _take_plain(code: Any, span: Any, pos: int, data: Any, bits: int) -> tuple[Any, Any, int, int]:
    value: Any = 0
    while bits > 0:
        take = min(bits, 16)
        bits -= take
        span >>= np.uint64(take)
        part: Any = min(np.int64(code // span), (1 << take) - 1)
        code -= np.uint64(part) * span
        value = (value << take) | part
        code, span, pos = _refill(code, span, pos, data)
    return code, span, pos, value


# --- numbers ----------------------------------------------------------------------------------------------


@typed("int64(int64[:, ::1], int64)")
def _scale(mean: Any, c: int) -> int:
    """Half octaves of class c's running mean (mean[c, 0] / mean[c, 1]) above 1/16."""
    total = mean[c, 0] * 16
    count = mean[c, 1]
    octave = 0
    while octave < 54 and total >= count << (octave + 1):
        octave += 1
    return 2 * octave + int(total * 5 >= (count * 7) << octave)


@typed("void(int64[:, ::1], int64, int64)")
def _follow(mean: Any, c: int, value: int) -> None:
    """Take `value` into class c's running mean."""
    mean[c, 0] += min(value, 1 << 40)
    mean[c, 1] += 1
    if mean[c, 1] >= _MEMORY:
        mean[c, 0] = (mean[c, 0] + 1) >> 1
        mean[c, 1] >>= 1


@typed(f"{WRITER}(uint64, uint64, int64, uint8[::1], int64[:, ::1], int64, int64[:, ::1], int64, int64)")
def put_number(
    low: Any, span: Any, pos: int, out: Any, models: Any, base: int, mean: Any, c: int, value: int
) -> tuple[Any, Any, int]:
    """Code a number from 0 to 2**40 - 1 with the models from `base` on and the running mean `mean[c]`."""
    scale = _scale(mean, c)
    k = max(0, (scale >> 1) - 4)
    at = base + scale * PER_SCALE
    quotient = min(value >> k, _QUOTIENTS)
    for j in range(quotient):
        low, span, pos = put_bit(low, span, pos, out, models, at + min(j, 4), 1)
    if quotient == _QUOTIENTS:
        low, span, pos = _put_plain(low, span, pos, out, value, 40)
    else:
        low, span, pos = put_bit(low, span, pos, out, models, at + min(quotient, 4), 0)
        if k > 0:
            first = (value >> (k - 1)) & 1
            low, span, pos = put_bit(low, span, pos, out, models, at + 5, first)
            if k > 1:
                second = (value >> (k - 2)) & 1
                low, span, pos = put_bit(low, span, pos, out, models, at + 6 + first, second)
                low, span, pos = _put_plain(low, span, pos, out, value & ((1 << (k - 2)) - 1), k - 2)
    _follow(mean, c, value)
    return low, span, pos


@typed(f"{READER}(uint64, uint64, int64, uint8[::1], int64[:, ::1], int64, int64[:, ::1], int64)")
def take_number(
    code: Any, span: Any, pos: int, data: Any, models: Any, base: int, mean: Any, c: int
) -> tuple[Any, Any, int, int]:
    """Inverse of `put_number`; the number comes last."""
    scale = _scale(mean, c)
    k = max(0, (scale >> 1) - 4)
    at = base + scale * PER_SCALE
    quotient = 0
    more = 1
    while quotient < _QUOTIENTS and more:
        code, span, pos, more = take_bit(code, span, pos, data, models, at + min(quotient, 4))
        quotient += more
    if quotient == _QUOTIENTS:
        code, span, pos, value = _take_plain(code, span, pos, data, 40)
    else:
        value = quotient
        if k > 0:
            code, span, pos, first = take_bit(code, span, pos, data, models, at + 5)
            value = (value << 1) | first
            if k > 1:
                code, span, pos, second = take_bit(code, span, pos, data, models, at + 6 + first)
                code, span, pos, rest = _take_plain(code, span, pos, data, k - 2)
                value = (((value << 1) | second) << (k - 2)) | rest
    _follow(mean, c, value)
    return code, span, pos, value
