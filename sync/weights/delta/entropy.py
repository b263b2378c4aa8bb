"""The small mode's compiled loops: changes by the hazard that lies between them, range coded.

Whether a weight moves by a unit in the last place depends on its exponent, which the receiver knows. So each
class (one of the largest sixteen old exponents; those below are the last) has a hazard, the -log2 of the
probability that an element of it stays, measured by the encoder and sent in half octaves. The hazards of all
elements, in order of position, lay them out on a line; within one bit of hazard the next change comes with
probability 1/2, whatever the classes are. A change is coded as a third of its element's interval on that
line, counted from the end of the last changed one: one up, one down, or further, which is as wide as such
steps of the class are frequent and is followed by size and sign. CELL without a change is one symbol.

    stream = classes and their levels, then per change: cells, third of an interval, size and sign if further

The range coder has 64-bit bounds and writes 32 bits at a time. Its state travels as (low, span, position)
when writing and (code, span, position) when reading; a reader past the end of the stream reads zeros. Bits go
through 16-bit probabilities that learn; numbers are Elias gamma codes of such bits.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from sync.weights.delta.kernels import BLOCK, compiled, find, moved, prefetch, room, typed, zigzag

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
UNIT: Final = 18
"""log2 of the steps that a hazard of one bit is divided into."""
CELL: Final = 7 << UNIT
"""Hazard that is skipped at once."""
CLASSES: Final = 16
MARGIN: Final = 64
"""Words of 32 bits; one change takes fewer, its skipped cells aside."""
_SHARE: Final = np.uint64(28)  # log2 of the total that intervals are parts of
_HALF: Final = 9  # bits of each of the two steps in which a power of two is looked up
_TOP: Final = 2 * UNIT + 5  # level of a hazard of almost six bits
_EVEN: Final = 28  # level at which larger steps are as frequent as those of one unit
_SAMPLED: Final = 64  # blocks, evenly spread, that hazards are measured on
_AHEAD: Final = 96  # elements of the next block that are asked for with every change of this one
_TABLES: Final = "uint32[::1], uint32[::1], uint16[::1], uint64[::1]"
_LEVELS: Final = CLASSES * GAMMA  # models, after those of each class's sizes
_ONE, _ZERO = np.uint64(1), np.uint64(0)
_WEIGHT_OF: Final = np.round(2.0 ** (np.arange(_TOP + 1) / 2)).astype(np.uint32)
_FURTHER_OF: Final = np.round(2.0**16 / (1 + 2.0 ** ((_EVEN - np.arange(_TOP + 1)) / 2))).astype(np.uint32)


# --- range coder -------------------------------------------------------------------------------------------


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


# --- hazards ----------------------------------------------------------------------------------------------


def _powers(roots: int) -> np.ndarray:
    """2**(31 - i / 2**roots), i below 2**_HALF, from whole numbers alone: equal on every machine."""
    unit, root, out = 1 << 128, 2 << 128, []
    for _ in range(roots):
        root = math.isqrt(root * unit)
    power = unit << 31
    for _ in range(1 << _HALF):
        out.append(power >> 128)
        power = power * unit // root
    return np.array(out, np.uint64)


_COARSE: Final = _powers(_HALF)
_FINE: Final = _powers(UNIT)
_WITHIN: Final = (1 << UNIT) - 1


@typed("uint64(int64)")
def chance(hazard: int) -> Any:
    """P(a change within `hazard` steps) in parts of 2**28, up to CELL; rises by at least 4 at every step."""
    within = hazard & _WITHIN
    power = _COARSE[within >> _HALF] * _FINE[within & ((1 << _HALF) - 1)]
    return (_ONE << _SHARE) - (power >> np.uint64(34 + (hazard >> UNIT)))


_OCTAVE: Final = np.array([8 - min(max(top.bit_length(), 1), 8) for top in range(257)])
_LOGS: Final = np.round((1 - np.log2(1 + np.arange(514) / 512)) * (1 << (UNIT + 8))).astype(np.int64)


@typed("int64(uint64)")
def hazard_below(share: Any) -> int:
    """At most two steps below the largest hazard whose `chance` is at most `share`, which is below CELL's."""
    left = (_ONE << _SHARE) - share  # 2**21 to 2**28, of which a table gives the logarithm
    octave = _OCTAVE[left >> np.uint64(20)]
    left = (left << np.uint64(octave)) - (_ONE << np.uint64(27))
    at, rest = left >> np.uint64(18), np.int64(left & np.uint64((1 << 18) - 1))
    near = _LOGS[at] + (((_LOGS[at + _ONE] - _LOGS[at]) * rest) >> 18)
    return max(0, (octave << UNIT) + (near >> 8) - 1)


@compiled
def _measure(old: Any, new: Any, upper: Any, mantissa: int, mask: int) -> Any:
    """Elements, changes and changes beyond one unit of each exponent [3, 256], in blocks evenly spread."""
    counts, work, width = np.zeros((3, 256), np.int64), room(), 8 * old.itemsize
    for begin in range(0, old.size, BLOCK * max(1, old.size // (BLOCK * _SAMPLED))):
        for bits in upper[begin : begin + BLOCK]:
            counts[0, (np.int64(bits) & mask) >> mantissa] += 1
        for i in find(old, new, begin, work):
            exponent = (np.int64(upper[i]) & mask) >> mantissa
            counts[1, exponent] += 1
            counts[2, exponent] += int(zigzag(np.int64(old[i]), np.int64(new[i]), width) > 2)
    return counts


def _levels(counts: np.ndarray) -> tuple[int, np.ndarray]:
    """(lowest class's exponent, half octaves of each class's hazard and of its odds of further steps)."""
    exponents = np.flatnonzero(counts[0])
    first = int(max(exponents[0], exponents[-1] - CLASSES + 1))
    counts = np.add.reduceat(counts, [0, *range(first + 1, exponents[-1] + 1)], axis=1)
    seen, changed, further = counts
    hazards = UNIT + np.log2(-np.log2(1 - (changed + 0.02) / (seen + 0.04)))
    odds = _EVEN / 2 + np.log2((further + 0.1) / (changed - further + 0.2))
    levels = np.round([2 * hazards, 2 * odds]).astype(np.int64).clip(0, _TOP)
    for c in range(1, len(seen)):  # where nothing was seen, at most half of the one's below
        half = (levels[:, c - 1] - 2).clip(0)
        levels[:, c] = np.where(counts[::2, c], levels[:, c], np.minimum(levels[:, c], half))
    return first, levels


def _told(levels: np.ndarray) -> np.ndarray:
    """Levels as numbers from 0: each by its distance from two below the one before."""
    steps = np.diff(levels, prepend=0) + 2
    return np.where(steps > 0, 2 * steps - 1, -2 * steps)


def _levels_of(told: np.ndarray) -> np.ndarray:
    """Inverse of `_told`."""
    return np.cumsum(np.where(told & 1, told + 1, -told) // 2 - 2, axis=-1)


@compiled
def _lay_out(upper: Any, tables: Any, block: Any) -> Any:
    """Classes of a block, in fours, and the hazard before each eight, in `block`; returns all its hazard."""
    mantissa, mask, first, limit, _, fours, _ = tables
    lanes, classes, sums = block
    for i in range(upper.size):
        exponent = np.uint16(upper[i] & mask)
        above = np.uint16((exponent if exponent > first else first) - first)
        lanes[i] = above if above < limit else limit
    lanes[upper.size :] = 0
    in_fours, total = lanes.view(np.uint64), _ZERO
    for j in range(in_fours.size):
        two = in_fours[j] | (in_fours[j] >> np.uint64(12))
        classes[j] = ((two | (two >> np.uint64(24))) >> mantissa) & np.uint64(0xFFFF)
    eights = (upper.size + 7) >> 3
    for j in range(eights):
        sums[j] = total
        total += np.uint64(fours[classes[2 * j]]) + np.uint64(fours[classes[2 * j + 1]])
    sums[eights:] = FULL
    sums[eights] = total
    return np.int64(total)


@typed(f"Tuple((int64, int64, int64))({_TABLES}, int64)")
def _element(weights: Any, fours: Any, classes: Any, sums: Any, i: int) -> tuple[Any, Any, Any]:
    """(class of element i of a block, hazard before it, its own)."""
    eight, lane = i >> 3, i & 7
    all_of = np.int64(classes[2 * eight]) | np.int64(classes[2 * eight + 1]) << 16
    before = all_of & ((1 << (4 * lane)) - 1)  # the others count as class 0
    at = np.int64(sums[eight]) + np.int64(fours[before & 0xFFFF]) + np.int64(fours[before >> 16])
    at -= (8 - lane) * np.int64(weights[0])
    c = (all_of >> (4 * lane)) & 15
    return c, at, np.int64(weights[c])


@typed(f"Tuple((int64, int64, int64, int64))({_TABLES}, uint64, int64)")
def _find(weights: Any, fours: Any, classes: Any, sums: Any, hazard: Any, j: int) -> tuple[Any, ...]:
    """(element of a block that a hazard falls on, in eight j or after, its class, hazard before, own)."""
    while sums[j + 4] <= hazard:
        j += 4
    for step in (2, 1):
        j += step * int(sums[j + step] <= hazard)
    at = sums[j]
    middle = at + np.uint64(fours[classes[2 * j]])
    half = int(middle <= hazard)
    at = (at, middle)[half]
    four, lane, end = np.int64(classes[2 * j + half]), 0, at
    for k in range(3):
        end += np.uint64(weights[(four >> (4 * k)) & 15])
        past = int(end <= hazard)
        at = (at, end)[past]
        lane += past
    c = (four >> (4 * lane)) & 15
    return 8 * j + 4 * half + lane, c, np.int64(at), np.int64(weights[c])


@compiled
def _fresh_block() -> tuple[Any, Any, Any]:
    """Room for what `_lay_out` writes: exponents, classes in fours, hazard before each eight."""
    return np.empty(BLOCK, np.uint16), np.empty(BLOCK // 4, np.uint16), np.empty(BLOCK // 8 + 5, np.uint64)


# --- changes ----------------------------------------------------------------------------------------------


@typed("Tuple((uint64, uint64, uint64))(uint32, int64, int64)")
def _parts(further: Any, gap: int, width: int) -> tuple[Any, Any, Any]:
    """(start, one up or down, further): parts of 2**28 for an element of hazard `width` after `gap`."""
    start = chance(gap)
    size = chance(min(gap + width, CELL)) - start
    unit = (size - (((size - np.uint64(3)) * np.uint64(further)) >> np.uint64(16)) - _ONE) >> _ONE
    return start, unit, size - unit - unit


@typed(f"{WRITER}({CODER}, {MODELS}, uint32, int64, int64, int64, int64)")
def _put_change(
    low: Any,
    span: Any,
    pos: int,
    out: Any,
    models: Any,
    further: Any,
    c: int,
    gap: int,
    width: int,
    code: int,
) -> tuple[Any, Any, int]:
    """Code that an element of class c and hazard `width`, after `gap`, changed by `code` (of `zigzag`)."""
    while gap >= CELL:
        start = (span >> _SHARE) * chance(CELL)
        low, span, pos = put(low, pos, out, start, span - start)
        gap -= CELL
    start, unit, rest = _parts(further, gap, width)
    share, down = span >> _SHARE, np.uint64(code & 1)
    if code <= 2:
        return put(low, pos, out, (start + down * unit) * share, unit * share)
    low, span, pos = put(low, pos, out, (start + unit + unit) * share, rest * share)
    low, span, pos = put_number(low, span, pos, out, models, c * GAMMA, (code - 3) >> 1)
    return put(low, pos, out, down * (span >> _ONE), span >> _ONE)


def encode_changes(old: np.ndarray, new: np.ndarray, mantissa: int) -> tuple[int, bytes | None]:
    """(elements that changed, stream); None instead of one that would be longer than `new`."""
    upper, mantissa, mask = _upper(old, mantissa)
    first, levels = _levels(_measure(old, new, upper, mantissa, mask))
    head = np.array([first, levels.shape[1], *_told(levels).ravel()])
    out, models = np.empty(old.nbytes // 4 + 2 * MARGIN, np.uint32), fresh(CLASSES + 1)
    tables = _tables(mantissa, mask, first, levels)
    count, length = _encode(head, out, models, old, new, upper, tables)
    if length < 0:
        return count, None
    data = out[:length].astype(">u4").tobytes()
    return count, data[:-4] + data[-4:].rstrip(b"\0")


def _upper(bits: np.ndarray, mantissa: int) -> tuple[np.ndarray, int, int]:
    """(upper 16 bits of each element, mantissa bits among them, mask of the exponent)."""
    halves = bits.itemsize // 2
    mantissa -= 16 * (halves - 1)
    return bits.view(np.uint16)[halves - 1 :: halves], mantissa, 0x7FFF >> mantissa << mantissa


def _tables(mantissa: int, mask: int, first: int, levels: np.ndarray) -> tuple[Any, ...]:
    """What both sides look classes up in."""
    bounds = np.uint16(mask), np.uint16(first << mantissa), np.uint16((levels.shape[1] - 1) << mantissa)
    weights, further = np.zeros((2, CLASSES), np.uint32)
    weights[: levels.shape[1]], further[: levels.shape[1]] = _WEIGHT_OF[levels[0]], _FURTHER_OF[levels[1]]
    pairs = (weights[None, :] + weights[:, None]).ravel()
    fours = (pairs[None, :] + pairs[:, None]).ravel()  # of class a, b, c and d at a + 16 b + 256 c + 4096 d
    return np.uint64(mantissa), *bounds, weights, fours, further


@compiled
def _encode(head: Any, out: Any, models: Any, old: Any, new: Any, upper: Any, tables: Any) -> tuple[int, int]:
    """Code the changes; how many, and the stream's length in words, or -1 when `out` is too short."""
    work, block = room(), _fresh_block()
    (weights, fours, further), (_, classes, sums) = tables[4:], block
    low, span, pos, count, end, base = _ZERO, FULL, 0, 0, 0, 0
    for number in head:
        low, span, pos = put_number(low, span, pos, out, models, _LEVELS, number)
    for begin in range(0, old.size, BLOCK):
        places = find(old, new, begin, work)
        total = _lay_out(upper[begin : begin + BLOCK], tables, block)
        ahead, stop = begin + BLOCK, begin + 2 * BLOCK
        for i in places:
            if ahead < stop:
                ahead = prefetch(old, new, ahead, ahead + _AHEAD)
            c, at, width = _element(weights, fours, classes, sums, i - begin)
            gap = base + at - end
            if pos + (gap >> (UNIT + 5)) > out.size - MARGIN:
                return count, -1
            code = zigzag(np.int64(old[i]), np.int64(new[i]), 8 * old.itemsize)
            low, span, pos = _put_change(low, span, pos, out, models, further[c], c, gap, width, code)
            end = base + at + width
        prefetch(old, new, ahead, stop)
        count += places.size
        base += total
    whole = 63
    while (_ONE << np.uint64(whole)) > span:
        whole -= 1
    rest = (_ONE << np.uint64(whole)) - _ONE
    low, span, pos = put(low, pos, out, (_ZERO - low) & rest, _ONE)
    return count, pos


def apply_changes(bits: np.ndarray, mantissa: int, count: int, stream: memoryview) -> int:
    """Inverse of `encode_changes`, in place. Returns 0, or -1 when the stream does not fit `bits`."""
    padded = bytes(stream) + bytes(8 + -len(stream) % 4)
    data, models = np.frombuffer(padded, ">u4").astype(np.uint32), fresh(CLASSES + 1)
    state: Any = (np.uint64(data[0]) << np.uint64(32) | np.uint64(data[1]), FULL, 2)
    *state, first = take_number(*state, data, models, _LEVELS)
    *state, length = take_number(*state, data, models, _LEVELS)
    if not 0 < length <= CLASSES or first + length > 256:
        return -1
    told = np.zeros((2, length), np.int64)
    for at in np.ndindex(told.shape):
        *state, told[at] = take_number(*state, data, models, _LEVELS)
    levels = _levels_of(told)
    if levels.min() < 0 or levels.max() > _TOP:
        return -1
    upper, mantissa, mask = _upper(bits, mantissa)
    tables = _tables(mantissa, mask, first, levels)
    code, span = np.uint64(state[0]), np.uint64(state[1])
    return int(_decode(code, span, state[2], data, models, tables, count, bits, upper))


@compiled
def _decode(
    code: Any, span: Any, pos: int, data: Any, models: Any, tables: Any, count: int, bits: Any, upper: Any
) -> int:
    """Apply `count` changes; 0, or -1 as soon as one does not fit."""
    block, width, begin, base, total, end, j = _fresh_block(), 8 * bits.itemsize, -BLOCK, 0, 0, 0, 0
    (weights, fours, further), (_, classes, sums) = tables[4:], block
    i, c, gap, start, unit, rest = 0, 0, 0, _ZERO, _ZERO, _ZERO
    for _ in range(count):
        edge = (span >> _SHARE) * chance(CELL)
        while code >= edge:
            code, span, pos = take(code, pos, data, edge, span - edge)
            end += CELL
            edge = (span >> _SHARE) * chance(CELL)
            if pos > data.size + 3:
                return -1
        share = span >> _SHARE
        part = code // share
        target, stop = end + hazard_below(part), _ZERO
        while part >= stop:
            while target >= base + total:
                begin, base, j = begin + BLOCK, base + total, 0
                if begin >= bits.size:
                    return -1
                total = _lay_out(upper[begin : begin + BLOCK], tables, block)
            i, c, at, change_width = _find(weights, fours, classes, sums, np.uint64(target - base), j)
            gap = base + at - end
            start, unit, rest = _parts(further[c], gap, change_width)
            stop, target, j = start + unit + unit + rest, base + at + change_width, i >> 3
        if begin + i >= bits.size or gap < 0:
            return -1
        down = np.uint64(part >= start + unit)
        change = 2 - np.int64(down)
        if part < start + unit + unit:
            code, span, pos = take(code, pos, data, (start + down * unit) * share, unit * share)
        else:
            code, span, pos = take(code, pos, data, (start + unit + unit) * share, rest * share)
            code, span, pos, size = take_number(code, span, pos, data, models, c * GAMMA)
            down = np.uint64(code >= span >> _ONE)
            code, span, pos = take(code, pos, data, down * (span >> _ONE), span >> _ONE)
            change = 2 * size + 4 - np.int64(down)
        bits[begin + i] = moved(np.int64(bits[begin + i]), change, width)
        end = target
    return 0 if pos <= data.size + 3 else -1
