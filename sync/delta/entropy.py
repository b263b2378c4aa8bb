"""The small mode's compiled loops: changes ordered by the old exponent, then range coded.

Whether a weight moves by a unit in the last place depends on its exponent, which the receiver knows. So the
elements of one exponent class are taken together, in order of position: per class, the distance from one
changed element to the next (counted within the class) and its ULP difference are coded with probabilities
that adapt. A stream is a sequence of blocks of BLOCK elements; a block is, for each class, the number of
changes, then (gap, size, sign) of each. What a reader decodes is checked against the array.

Bits go through a binary range coder with 64-bit bounds and 16-bit probabilities that learn. Its state travels
as (low, span, position) when writing and (code, span, position) when reading; a reader past the end of the
stream reads zeros. Numbers are adaptive Golomb codes: the quotient in unary and two leading bits of the
remainder through models, the other bits as they are. Divisor and models follow a running mean, so that few
models serve every scale and learn within tens of numbers.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from sync.delta.kernels import CLASSES, collect, compiled, place, typed

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
CODER: Final = "uint64, uint64, int64, uint8[::1]"
MODELS: Final = "int64[:, ::1]"
MEANS: Final = "int64[:, :, ::1]"
_SLOWEST: Final = 120
_RATES: Final = np.array([65536 * 2 // (2 * n + 3) for n in range(_SLOWEST)], np.int64)
_MEMORY: Final = 96  # numbers that a running mean remembers
_QUOTIENTS: Final = 20  # a longer one is an escape
_TOP, _BYTE = np.uint64(56), np.uint64(8)
_LEAST: Final = np.uint64(1 << 48)
_ZERO: Final = np.uint64(0)
BLOCK: Final = 1 << 20
"""Elements coded together."""
_GAPS, _SIZES, _COUNTS, _EMPTY = (kind * SCALES * PER_SCALE for kind in range(4))
_SIGN: Final = _EMPTY + 2
_MODELS: Final = _SIGN + 2


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


@typed(f"{WRITER}({CODER})")
def _flush(low: Any, span: Any, pos: int, out: Any) -> tuple[Any, Any, int]:
    """Write the leading bytes that are settled; `out` has room for eight more."""
    while span < _LEAST:
        out[pos] = np.uint8(low >> _TOP)
        pos += 1
        low <<= _BYTE
        span <<= _BYTE
    return low, span, pos


@typed(f"{WRITER}({CODER}, {MODELS}, int64, int64)")
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


@typed(f"{WRITER}({CODER}, int64, int64)")
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


@typed("uint64(uint64, uint8[::1], int64)")
def _shift_in(code: Any, data: Any, pos: int) -> Any:
    """Append byte `pos` of `data` to `code`; zeros follow its end."""
    byte = np.uint64(data[pos]) if pos < data.size else _ZERO
    return (code << _BYTE) | byte


@typed(f"{WRITER}({CODER})")
def _refill(code: Any, span: Any, pos: int, data: Any) -> tuple[Any, Any, int]:
    while span < _LEAST:
        code = _shift_in(code, data, pos)
        span <<= _BYTE
        pos += 1
    return code, span, pos


@typed(f"{WRITER}(uint8[::1])")
def opening(data: Any) -> tuple[Any, Any, int]:
    """State of a reader at the start of `data`."""
    code = _ZERO
    for pos in range(8):
        code = _shift_in(code, data, pos)
    return code, FULL, 8


@typed(f"{READER}({CODER}, {MODELS}, int64)")
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


@typed(f"{READER}({CODER}, int64)")
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


@typed(f"{WRITER}({CODER}, {MODELS}, int64, int64[:, ::1], int64, int64)")
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


@typed(f"{READER}({CODER}, {MODELS}, int64, int64[:, ::1], int64)")
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


# --- blocks ---------------------------------------------------------------------------------------------


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


def encode_classes(
    old: np.ndarray, new: np.ndarray, mantissa: int, room: int | None = None
) -> np.ndarray | None:
    """Stream of all changes from `old` to `new`; None: it takes more than `room` (None: `new`) bytes."""
    counts = np.zeros((-(-old.size // BLOCK), CLASSES), np.int64)
    listed: list[np.ndarray] = [np.empty((2, 0), np.uint32)]
    for block, begin in enumerate(range(0, old.size, BLOCK)):
        a, b = old[begin : begin + BLOCK], new[begin : begin + BLOCK]
        classes, found = np.empty(a.size, np.uint8), np.empty((2, a.size), np.uint32)
        k = collect(a, b, 8 * old.itemsize, mantissa, counts[block], classes, found)
        listed.append(found[:, np.argsort(classes[:k], kind="stable")])
    out = np.empty((new.nbytes if room is None else room) + 2 * MARGIN, np.uint8)
    gaps, codes = np.ascontiguousarray(np.concatenate(listed, axis=1))
    length = _encode(counts, gaps, codes, *fresh(), out)
    return None if length < 0 else out[:length]


@compiled
def _encode(counts: Any, gaps: Any, codes: Any, models: Any, means: Any, out: Any) -> int:
    """Code changes in the stream's order: counts int64 [blocks, CLASSES], gaps and codes uint32.

    Returns the length, or -1 when `out` is too short.
    """
    low, span, pos, start = _ZERO, FULL, 0, 0
    for block in range(counts.shape[0]):
        end = start + counts[block].sum()
        low, span, pos = _put_block(
            low, span, pos, out, models, means, counts[block], gaps[start:end], codes[start:end]
        )
        if pos < 0:
            return -1
        start = end
    return finish(low, span, pos, out)


@typed(f"{WRITER}({CODER}, {MODELS}, {MEANS}, int64[::1], uint32[::1], uint32[::1])")
def _put_block(
    low: Any, span: Any, pos: int, out: Any, models: Any, means: Any, counts: Any, gaps: Any, codes: Any
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
            gap, code = np.int64(gaps[j]), np.int64(codes[j])
            low, span, pos = put_number(low, span, pos, out, models, _GAPS, gap_means, c, gap)
            low, span, pos = put_number(low, span, pos, out, models, _SIZES, size_means, c, (code - 1) >> 1)
            low, span, pos = put_bit(low, span, pos, out, models, _SIGN, code & 1)
        at += count
    return low, span, pos


def apply_classes(bits: np.ndarray, mantissa: int, data: np.ndarray) -> int:
    """Inverse of `encode_classes`, in place. Returns 0, or -1 when the stream does not fit `bits`."""
    return int(_apply(bits, 8 * bits.itemsize, mantissa, BLOCK, *fresh(), data))


@compiled
def _apply(bits: Any, width: int, mantissa: int, block: int, models: Any, means: Any, data: Any) -> int:
    found = np.empty((2, min(block, bits.size) + 1), np.int64)
    first = np.zeros(CLASSES + 1, np.int64)
    code, span, pos = opening(data)
    for begin in range(0, bits.size, block):
        part = bits[begin : begin + block]
        code, span, pos = _take_block(code, span, pos, data, models, means, part.size, first, found)
        if pos < 0 or place(part, width, mantissa, first, found[0], found[1]) != 0:
            return -1
    return 0 if pos <= data.size + 8 else -1


@typed(f"{WRITER}({CODER}, {MODELS}, {MEANS}, int64, int64[::1], int64[:, ::1])")
def _take_block(
    code: Any, span: Any, pos: int, data: Any, models: Any, means: Any, size: int, first: Any, found: Any
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
            found[0, at], found[1, at] = gap, ((length + 1) << 1) - sign
            at += 1
    first[CLASSES] = at
    return code, span, pos
