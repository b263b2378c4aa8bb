"""Compiled loops of the codec: gaps, bitmaps, byte planes, exponent classes. Imported when a delta is coded.

Arrays hold the integer bits of floating-point numbers: uint16 (bf16, f2) or uint32 (f4), `width` bits each.
A difference is taken between sign-ordered integers and zigzagged, so that +1 and -1 unit in the last place
(ULP) become 2 and 1; it wraps, and so is exact for every pattern. Streams of bytes hold `value` below 255;
255 says that the real value is the next one of the wide stream beside it. Loops that read a peer's streams
check every bound and return -1 on nonsense, without having written outside of the array.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
from numba import njit

ESCAPE: Final = 255
CLASSES: Final = 256
"""Exponents of the widest kind; f2 uses 32 of them."""
_ONE: Final = np.uint64(1)
_UPPER_HALF: Final = np.uint64(0xFFFFFFFF00000000)
_ODD_QUARTERS: Final = np.uint64(0xFFFF0000FFFF0000)
_TOPS: Final = {16: np.uint64(0x8000800080008000), 32: np.uint64(0x8000000080000000)}


def compiled(function: Callable[..., Any], signature: str | None = None) -> Callable[..., Any]:
    """`function`, compiled for the types of its first call, or at once for those of `signature`.

    The result is kept on disk, beside the package or in the user's cache; where neither can be written, each
    process compiles anew (seconds). numba watches only the function's own file for changes: after an edit of
    one that it calls in another file, remove __pycache__.
    """
    try:
        return njit(signature, cache=True, nogil=True)(function)
    except RuntimeError:  # numba: no locator available
        return njit(signature, nogil=True)(function)


def typed(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: `compiled` with one signature, so that constant arguments make no copies of their own."""
    return partial(compiled, signature=signature)


@compiled
def zigzag(old: int, new: int, width: int) -> int:
    """new - old in ULPs: -1 → 1, +1 → 2, -2 → 3, … in [0, 2**width); 0 only for equal patterns."""
    top = 1 << (width - 1)
    mask = (1 << width) - 1
    a = ~old & mask if old & top else old | top
    b = ~new & mask if new & top else new | top
    step = ((b - a + top) & mask) - top
    return (step << 1) ^ (step >> 63)


@compiled
def moved(old: int, code: int, width: int) -> int:
    """Inverse of `zigzag`: the pattern that is `code` away from `old`."""
    top = 1 << (width - 1)
    mask = (1 << width) - 1
    a = ~old & mask if old & top else old | top
    b = (a + ((code >> 1) ^ -(code & 1))) & mask
    return b ^ top if b & top else ~b & mask


@compiled
def _put(value: int, narrow: Any, k: int, wide: Any, w: int) -> int:
    """Append `value` as entry k of a stream of bytes; returns how many wide values there are now."""
    if value < ESCAPE:
        narrow[k] = value
        return w
    narrow[k] = ESCAPE
    wide[w] = value
    return w + 1


def scan_gaps(
    old: np.ndarray,
    new: np.ndarray,
    gaps: np.ndarray,
    wide_gaps: np.ndarray,
    steps: np.ndarray,
    wide_steps: np.ndarray,
) -> tuple[int, int, int]:
    """Compare, and write per changed element its distance from the last one and its ULP difference less 1.

    Returns (changed elements, wide gaps, wide steps); changed is -1 when they are more than `gaps` holds.
    """
    width = old.itemsize * 8
    words = old.nbytes // 8
    whole = words * 64 // width
    return _scan_gaps(
        old,
        new,
        old[:whole].view(np.uint64),
        new[:whole].view(np.uint64),
        _TOPS[width],
        width,
        gaps,
        wide_gaps,
        steps,
        wide_steps,
    )


@compiled
def _scan_gaps(
    old: Any,
    new: Any,
    old_words: Any,
    new_words: Any,
    tops: Any,
    width: int,
    gaps: Any,
    wide_gaps: Any,
    steps: Any,
    wide_steps: Any,
) -> tuple[int, int, int]:
    lanes = 64 // width
    narrow_lanes = width // 32  # 0: four lanes of 16 bits, 1: two of 32
    limit = gaps.size - lanes
    k, g, s, last = 0, 0, 0, -1
    for word in range(old_words.size):
        different = old_words[word] ^ new_words[word]
        if different == 0:
            continue
        if k > limit:
            return -1, 0, 0
        found = (((different & ~tops) + ~tops) | different) & tops  # the top bit of every lane that differs
        while found:
            low = found & (~found + _ONE)
            found ^= low
            lane = 2 * int((low & _UPPER_HALF) != 0) + int((low & _ODD_QUARTERS) != 0)
            i = word * lanes + (lane >> narrow_lanes)
            g = _put(i - last - 1, gaps, k, wide_gaps, g)
            s = _put(zigzag(np.int64(old[i]), np.int64(new[i]), width) - 1, steps, k, wide_steps, s)
            last = i
            k += 1
    for i in range(old_words.size * lanes, old.size):
        if old[i] != new[i]:
            if k >= gaps.size:
                return -1, 0, 0
            g = _put(i - last - 1, gaps, k, wide_gaps, g)
            s = _put(zigzag(np.int64(old[i]), np.int64(new[i]), width) - 1, steps, k, wide_steps, s)
            last = i
            k += 1
    return k, g, s


@compiled
def apply_gaps(bits: Any, width: int, gaps: Any, wide_gaps: Any, steps: Any, wide_steps: Any) -> int:
    """Inverse of `scan_gaps`, in place; 0, or -1 when the streams do not fit `bits` or one another."""
    g, s, i = 0, 0, -1
    for k in range(gaps.size):
        gap: Any = np.int64(gaps[k])
        if gap == ESCAPE:
            if g >= wide_gaps.size:
                return -1
            gap = np.int64(wide_gaps[g])
            g += 1
        if gap < 0 or gap >= bits.size - 1 - i:
            return -1
        i += gap + 1
        step: Any = np.int64(steps[k])
        if step == ESCAPE:
            if s >= wide_steps.size:
                return -1
            step = np.int64(wide_steps[s])
            s += 1
        bits[i] = moved(np.int64(bits[i]), step + 1, width)
    return 0 if g == wide_gaps.size and s == wide_steps.size else -1


@compiled
def scan_bitmap(old: Any, new: Any, width: int, bitmap: Any, steps: Any, wide_steps: Any) -> tuple[int, int]:
    """Compare, and write one bit per element (least significant first) and the differences less 1.

    `bitmap` comes zeroed. Returns (changed elements, wide steps).
    """
    k, s = 0, 0
    for i in range(old.size):
        if old[i] != new[i]:
            bitmap[i >> 3] |= 1 << (i & 7)
            s = _put(zigzag(np.int64(old[i]), np.int64(new[i]), width) - 1, steps, k, wide_steps, s)
            k += 1
    return k, s


@compiled
def apply_bitmap(bits: Any, width: int, bitmap: Any, steps: Any, wide_steps: Any) -> int:
    """Inverse of `scan_bitmap`, in place; `bitmap` covers `bits`. Returns 0, or -1 on nonsense."""
    k, s = 0, 0
    for i in range(bits.size):
        if (bitmap[i >> 3] >> (i & 7)) & 1:
            if k >= steps.size:
                return -1
            step: Any = np.int64(steps[k])
            k += 1
            if step == ESCAPE:
                if s >= wide_steps.size:
                    return -1
                step = np.int64(wide_steps[s])
                s += 1
            bits[i] = moved(np.int64(bits[i]), step + 1, width)
    return 0 if k == steps.size and s == wide_steps.size else -1


@compiled
def to_planes(old: Any, new: Any, width: int, planes: Any) -> None:
    """Byte p of every element's difference into planes[p]."""
    for i in range(old.size):
        code = zigzag(np.int64(old[i]), np.int64(new[i]), width)
        for p in range(planes.shape[0]):
            planes[p, i] = (code >> (8 * p)) & 255


@compiled
def apply_planes(bits: Any, width: int, planes: Any) -> None:
    """Inverse of `to_planes`, in place."""
    for i in range(bits.size):
        code: Any = 0
        for p in range(planes.shape[0]):
            code |= np.int64(planes[p, i]) << (8 * p)
        bits[i] = moved(np.int64(bits[i]), code, width)


@compiled
def collect(
    old: Any, new: Any, width: int, mantissa: int, counts: Any, classes: Any, gaps: Any, codes: Any
) -> int:
    """Changes in order of position, with the exponent class each belongs to; returns how many.

    `gaps` are counted within a class; `counts` holds the number of changes of each class.
    """
    seen = np.zeros(CLASSES, np.int64)
    last = np.full(CLASSES, -1, np.int64)
    k = 0
    for i in range(old.size):
        c = (np.int64(old[i]) >> mantissa) & (CLASSES - 1)
        if old[i] != new[i]:
            classes[k], gaps[k] = c, seen[c] - last[c] - 1
            codes[k] = zigzag(np.int64(old[i]), np.int64(new[i]), width)
            last[c] = seen[c]
            counts[c] += 1
            k += 1
        seen[c] += 1
    return k


@compiled
def place(bits: Any, width: int, mantissa: int, first: Any, gaps: Any, codes: Any) -> int:
    """Apply changes, class c's being first[c] … first[c + 1]; -1 when some are left, else 0."""
    left: Any = np.full(CLASSES, -1, np.int64)
    next_ = first[:CLASSES].copy()
    c: Any
    for c in range(CLASSES):
        if first[c] < first[c + 1]:
            left[c] = gaps[first[c]]
    for i in range(bits.size):
        c = (np.int64(bits[i]) >> mantissa) & (CLASSES - 1)
        if left[c] == 0:
            bits[i] = moved(np.int64(bits[i]), codes[next_[c]], width)
            next_[c] += 1
            left[c] = gaps[next_[c]] if next_[c] < first[c + 1] else -1
        else:
            left[c] -= 1
    for c in range(CLASSES):
        if next_[c] != first[c + 1]:
            return -1
    return 0
