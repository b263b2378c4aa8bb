"""The small mode's compiled loops: changes by the hazard that lies between them, range coded.

Whether a weight moves by a unit in the last place depends on its exponent, which the receiver knows. So each
class (old exponent) has a hazard, the -log2 of the probability that an element of it stays, measured by the
encoder and sent in half octaves. The hazards of all elements, in order of position, lay them out on a line;
within one bit of hazard the next change comes with probability 1/2, whatever the classes are. A change is
coded as its element's interval on that line, counted from the end of the last changed one, and its sign by a
half of that; CELL without a change is one symbol. Both sides sum hazards over words of four elements.

    stream = number of changes, hazards of the classes, then per change: cells, interval and sign, size
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Final

import numpy as np

from sync.delta.kernels import CLASSES, compiled, moved, typed
from sync.delta.range_coder import (
    CODER,
    FULL,
    GAMMA,
    WRITER,
    fresh,
    put,
    put_number,
    take,
    take_number,
)

UNIT: Final = 18
"""log2 of the steps that a hazard of one bit is divided into."""
CELL: Final = 8 << UNIT
"""Hazard that is skipped at once."""
BLOCK: Final = 4096
"""Elements whose hazards are summed at once."""
MARGIN: Final = 64
"""Words of 32 bits; one change takes fewer, its skipped cells aside."""
_SHARE: Final = np.uint64(28)  # log2 of the total that intervals are parts of
_HALF: Final = 9  # bits of each of the two steps in which a power of two is looked up
_STRONGEST: Final = 2 * UNIT + 5  # half octaves: a hazard of almost six bits
_SAMPLED: Final = 128  # blocks, evenly spread, that hazards are measured on
_COUNTS, _LEVELS = CLASSES * GAMMA, (CLASSES + 1) * GAMMA  # models, after those of each class's sizes
_WORD: Final = np.uint64(32)
_ONE, _ZERO, _LANE = np.uint64(1), np.uint64(0), np.uint64(0xFFFF)
_WEIGHT_OF: Final = np.round(2.0 ** (np.arange(_STRONGEST + 1) / 2)).astype(np.uint32)


# --- hazards ----------------------------------------------------------------------------------------------


def _powers(roots: int) -> np.ndarray:
    """2**(31 - i / 2**roots), i below 2**_HALF, from whole numbers alone: equal on every machine."""
    one, root, out = 1 << 128, 2 << 128, []
    for _ in range(roots):
        root = math.isqrt(root * one)
    power = one << 31
    for _ in range(1 << _HALF):
        out.append(power >> 128)
        power = power * one // root
    return np.array(out, np.uint64)


_COARSE: Final = _powers(_HALF)
_FINE: Final = _powers(UNIT)
_WITHIN: Final = (1 << UNIT) - 1


@typed("uint64(int64)")
def chance(hazard: int) -> Any:
    """P(a change within `hazard` steps) in parts of 2**28, up to CELL; rises by at least 2 at every step."""
    within = hazard & _WITHIN
    power = _COARSE[within >> _HALF] * _FINE[within & ((1 << _HALF) - 1)]
    return (_ONE << _SHARE) - (power >> np.uint64(34 + (hazard >> UNIT)))


_OCTAVE: Final = np.array([8 - min(max(top.bit_length(), 1), 8) for top in range(257)])
_LOGS: Final = np.round((1 - np.log2(1 + np.arange(514) / 512)) * (1 << (UNIT + 8))).astype(np.int64)


@typed("int64(uint64)")
def hazard_of(share: Any) -> int:
    """The largest hazard whose `chance` is at most `share`, which is below that of CELL."""
    left = (_ONE << _SHARE) - share  # 2**20 to 2**28, of which a table gives the logarithm
    octave = _OCTAVE[left >> np.uint64(20)]
    left = (left << np.uint64(octave)) - (_ONE << np.uint64(27))
    at, rest = left >> np.uint64(18), np.int64(left & np.uint64((1 << 18) - 1))
    near = _LOGS[at] + (((_LOGS[at + _ONE] - _LOGS[at]) * rest) >> 18)
    hazard = (octave << UNIT) + (near >> 8)
    while hazard >= CELL or chance(hazard) > share:
        hazard -= 1
    while chance(hazard + 1) <= share:
        hazard += 1
    return hazard


@typed("Tuple((int64[::1], int64[::1]))(uint64[::1], uint64, uint64, int64[::1], int64)")
def _measure(words: Any, mantissa: Any, mask: Any, places: Any, stride: int) -> tuple[Any, Any]:
    """(elements, changes) of each class, in every `stride`-th block."""
    seen, changed = np.zeros(CLASSES, np.int64), np.zeros(CLASSES, np.int64)
    for begin in range(0, words.size, BLOCK // 4 * stride):
        for word in words[begin : begin + BLOCK // 4]:
            for lane in range(4):
                seen[(word >> (mantissa + np.uint64(16 * lane))) & mask & _LANE] += 1
        first, last = np.searchsorted(places, 4 * begin), np.searchsorted(places, 4 * begin + BLOCK)
        for i in places[first:last]:
            changed[(words[i >> 2] >> (mantissa + np.uint64(16 * (i & 3)))) & mask & _LANE] += 1
    return seen, changed


def _levels(seen: np.ndarray, changed: np.ndarray) -> tuple[int, list[int]]:
    """(first class seen, hazards from it to the last one in half octaves of a step)."""
    stays = 1 - (changed + 0.02) / (seen + 0.04)
    measured = np.round(2 * (UNIT + np.log2(-np.log2(stays)))).clip(0, _STRONGEST)
    classes = np.flatnonzero(seen)
    levels: list[int] = []
    for c in range(classes[0], classes[-1] + 1):
        levels.append(int(measured[c]) if seen[c] else max(0, levels[-1] - 2))
    return int(classes[0]), levels


def _weights(first: int, levels: list[int]) -> np.ndarray:
    """Hazard of every class, uint32; it halves with every exponent where none is known."""
    at, last = np.arange(CLASSES), first + len(levels) - 1
    beyond = (first - at).clip(0) - (at - last).clip(0)
    return _WEIGHT_OF[(np.array(levels)[at.clip(first, last) - first] + 2 * beyond).clip(0, _STRONGEST)]


def _pairs(weights: np.ndarray) -> np.ndarray:
    """Sum of the hazards of two classes, [65536]: class a and b at a + 256 b."""
    return (weights[None, :] + weights[:, None]).ravel()


@typed("void(uint64[::1], uint64, uint64, uint32[::1], uint64[::1])")
def _sum(words: Any, mantissa: Any, mask: Any, pairs: Any, sums: Any) -> None:
    """Hazard before each word of a block; the block's own after the last one."""
    total = _ZERO
    for j in range(words.size):
        classes = (words[j] >> mantissa) & mask
        classes |= classes >> np.uint64(8)
        sums[j] = total
        total += np.uint64(pairs[classes & _LANE] + pairs[(classes >> _WORD) & _LANE])
    sums[words.size :] = FULL
    sums[words.size] = total


@typed("Tuple((int64, int64, int64))(uint64[::1], uint64[::1], uint32[::1], uint64, uint64, int64)")
def _element(sums: Any, words: Any, weights: Any, mantissa: Any, mask: Any, i: int) -> tuple[Any, Any, Any]:
    """(class of element i of a block, hazard before it, its own)."""
    low = (words[i >> 2] >> mantissa) & mask
    at = np.int64(sums[i >> 2])
    own = np.int64(weights[low & np.uint64(255)])
    for lane in range(1, 4):
        here = np.int64(weights[(low >> np.uint64(16 * lane)) & np.uint64(255)])
        at += own if lane <= i & 3 else 0
        own = here if lane <= i & 3 else own
    return np.int64((low >> np.uint64(16 * (i & 3))) & np.uint64(255)), at, own


# --- changes ----------------------------------------------------------------------------------------------


@typed(f"{WRITER}({CODER}, int64, int64, int64)")
def _put_change(low: Any, span: Any, pos: int, out: Any, gap: int, own: int, up: int) -> tuple[Any, Any, int]:
    """Code the half, for its sign, of the interval of an element of hazard `own` after `gap`."""
    while gap >= CELL:
        start = (span >> _SHARE) * chance(CELL)
        low, span, pos = put(low, pos, out, start, span - start)
        gap -= CELL
    start = chance(gap)
    size = (chance(min(gap + own, CELL)) - start) >> _ONE
    share = span >> _SHARE
    return put(low, pos, out, (start + size * np.uint64(up)) * share, size * share)


def encode_changes(old: np.ndarray, mantissa: int, places: np.ndarray, codes: np.ndarray) -> bytes | None:
    """Stream of the changes of `old` at `places` by `codes` (`kernels.zigzag`); None: longer than `old`."""
    layout = _layout(old, mantissa)
    stride = max(1, old.size // (BLOCK * _SAMPLED))
    first, levels = _levels(*_measure(*layout, places, stride))
    weights = _weights(first, levels)
    out, models = np.empty(old.nbytes // 4 + 2 * MARGIN + CLASSES, np.uint32), fresh(CLASSES + 2)
    head = np.array(_head(len(places), first, levels), np.int64)
    length = _encode(head, out, models, (*layout, weights, _pairs(weights)), places, codes)
    if length < 0:
        return None
    data = out[:length].astype(">u4").tobytes()
    return data[:-4] + data[-4:].rstrip(b"\0")


def _layout(bits: np.ndarray, mantissa: int) -> tuple[np.ndarray, Any, Any]:
    """(words, mantissa, mask): upper 16 bits of four elements each; classes: `(word >> mantissa) & mask`."""
    shift = 8 * bits.itemsize - 16
    if shift or bits.size % 4:
        bits = np.pad((bits >> shift).astype(np.uint16), (0, -bits.size % 4), "edge")
    classes = min(CLASSES, 1 << (16 + shift - mantissa)) - 1
    words = np.require(bits.view(np.uint64), requirements="A")
    return words, np.uint64(mantissa - shift), np.uint64(classes * 0x0001000100010001)


def _head(count: int, first: int, levels: list[int]) -> list[tuple[int, int]]:
    """(models, number) of all that precedes the changes; a level is told by its distance from two below."""
    steps = [level - before + 2 for before, level in pairwise(levels)]
    told = [first, len(levels), *levels[:1], *(2 * abs(step) - (step > 0) for step in steps)]
    return [(_COUNTS, count), *((_LEVELS, number) for number in told)]


@compiled
def _encode(head: Any, out: Any, models: Any, tables: Any, places: Any, codes: Any) -> int:
    """Code the changes; the stream's length in words, or -1 when `out` is too short."""
    (words, mantissa, mask, weights, pairs), sums = tables, np.empty(BLOCK // 4 + 17, np.uint64)
    low, span, pos, k, end = _ZERO, FULL, 0, 0, 0
    base: Any = 0
    for i in range(head.shape[0]):
        low, span, pos = put_number(low, span, pos, out, models, head[i, 0], head[i, 1])
    for begin in range(0, words.size, BLOCK // 4):
        block = words[begin : begin + BLOCK // 4]
        _sum(block, mantissa, mask, pairs, sums)
        while k < places.size and places[k] < 4 * begin + BLOCK:
            c, at, own = _element(sums, block, weights, mantissa, mask, places[k] - 4 * begin)
            code, gap = np.int64(codes[k]), base + at - end
            if pos + (gap >> (UNIT + 5)) > out.size - MARGIN:
                return -1
            low, span, pos = _put_change(low, span, pos, out, gap, own, 1 - (code & 1))
            low, span, pos = put_number(low, span, pos, out, models, c * GAMMA, (code - 1) >> 1)
            end = base + at + own
            k += 1
        base += np.int64(sums[block.size])
    whole = 63
    while (_ONE << np.uint64(whole)) > span:
        whole -= 1
    rest = (_ONE << np.uint64(whole)) - _ONE
    low, span, pos = put(low, pos, out, (_ZERO - low) & rest, _ONE)
    return pos


def apply_changes(bits: np.ndarray, mantissa: int, stream: memoryview) -> int:
    """Inverse of `encode_changes`, in place. Returns 0, or -1 when the stream does not fit `bits`."""
    padded = bytes(stream) + bytes(8 + -len(stream) % 4)
    data = np.frombuffer(padded, ">u4").astype(np.uint32)
    models, levels = fresh(CLASSES + 2), [0]
    state: Any = (np.uint64(data[0]) << _WORD | np.uint64(data[1]), FULL, 2)
    *state, count = take_number(*state, data, models, _COUNTS)
    *state, first = take_number(*state, data, models, _LEVELS)
    *state, length = take_number(*state, data, models, _LEVELS)
    if count > bits.size or length == 0 or first + length > CLASSES:
        return -1
    for k in range(length):
        *state, told = take_number(*state, data, models, _LEVELS)
        levels.append(told if k == 0 else levels[-1] - 2 + ((told + 1) // 2 if told & 1 else -told // 2))
    if not all(0 <= level <= _STRONGEST for level in levels):
        return -1
    weights = _weights(first, levels[1:])
    code, span = np.uint64(state[0]), np.uint64(state[1])
    tables = *_layout(bits, mantissa), weights, _pairs(weights)
    return int(_decode(code, span, state[2], data, models, tables, count, bits, 8 * bits.itemsize))


@compiled
def _decode(
    code: Any, span: Any, pos: int, data: Any, models: Any, tables: Any, count: int, bits: Any, width: int
) -> int:
    """Apply `count` changes, those of a block when it is left; 0, or -1 as soon as one does not fit."""
    words, mantissa, mask, weights, pairs = tables
    sums, block = np.empty(BLOCK // 4 + 17, np.uint64), words[:0]
    places, codes = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    begin, base, end, k, j = -BLOCK, 0, 0, 0, 0
    total: Any = 0
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
        target = end + hazard_of(part)
        while target >= base + total:
            for n in range(k):
                bits[places[n]] = moved(np.int64(bits[places[n]]), codes[n], width)
            begin, base, k, j = begin + BLOCK, base + total, 0, 0
            if begin >= bits.size:
                return -1
            block = words[begin // 4 : begin // 4 + BLOCK // 4]
            _sum(block, mantissa, mask, pairs, sums)
            total = np.int64(sums[block.size])
        i, j = _find(sums, block, weights, mantissa, mask, np.uint64(target - base), j)
        c, at, own = _element(sums, block, weights, mantissa, mask, i)
        gap = base + at - end
        if gap < 0 or begin + i >= bits.size:
            return -1
        start = chance(gap)
        size = (chance(min(gap + own, CELL)) - start) >> _ONE
        up = int(part >= start + size)
        if part >= start + size + size:
            return -1
        code, span, pos = take(code, pos, data, (start + size * np.uint64(up)) * share, size * share)
        code, span, pos, longer = take_number(code, span, pos, data, models, c * GAMMA)
        places[k], codes[k] = begin + i, 2 * longer + 1 + up
        k += 1
        end = base + at + own
    for n in range(k):
        bits[places[n]] = moved(np.int64(bits[places[n]]), codes[n], width)
    return 0 if pos <= data.size + 3 else -1


@typed("Tuple((int64, int64))(uint64[::1], uint64[::1], uint32[::1], uint64, uint64, uint64, int64)")
def _find(
    sums: Any, words: Any, weights: Any, mantissa: Any, mask: Any, hazard: Any, j: int
) -> tuple[int, int]:
    """(element of a block, word) that a hazard falls on, at word j or after; sums end in sixteen maxima."""
    while sums[j + 16] <= hazard:
        j += 16
    for step in (8, 4, 2, 1):
        j += step if sums[j + step] <= hazard else 0
    low = (words[j] >> mantissa) & mask
    end, i = sums[j], 4 * j
    for lane in range(3):
        end += weights[(low >> np.uint64(16 * lane)) & np.uint64(255)]
        i += int(end <= hazard)
    return i, j
