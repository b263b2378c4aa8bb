"""Compiled loops of the codec: gaps, bitmaps, exponent classes. Imported when a delta is coded.

Arrays hold the integer bits of floating-point numbers: uint16 (bf16, f2) or uint32 (f4), `width` bits each.
A difference is taken between sign-ordered integers and zigzagged, so that +1 and -1 unit in the last place
(ULP) become 2 and 1; it wraps, and so is exact for every pattern. Streams of bytes hold `value` below 255;
255 refers to the next value of the wide stream beside it. Loops that read a peer's streams
check every bound and return -1 on nonsense, without having written outside of the array.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

ESCAPE: Final = 255
BLOCK: Final = 4096
"""Elements that are compared, and whose classes are looked up, at once."""


def compiled(function: Callable[..., Any], signature: str | None = None, inline: bool = False) -> Any:
    """`function`, compiled for the types of its first call, or at once for those of `signature`.

    The result is kept on disk, beside the package or in the user's cache; where neither can be written, each
    process compiles anew (seconds). numba watches only the function's own file for changes: after an edit of
    one that it calls in another file, remove __pycache__. `inline`: compiled callers hold its body.
    """
    try:
        return njit(signature, cache=True, nogil=True, forceinline=inline)(function)
    except RuntimeError:  # numba: no locator available
        return njit(signature, nogil=True, forceinline=inline)(function)


def typed(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: `compiled`, inline, with one signature, so that constant arguments make no copies."""
    return partial(compiled, signature=signature, inline=True)


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


@compiled
def room() -> tuple[Any, Any, Any]:
    """What `find` works in: flags of a block's elements, its eights that have one, places."""
    return np.empty(BLOCK, np.uint8), np.empty(BLOCK // 8, np.int64), np.empty(BLOCK, np.int64)


@compiled
def find(old: Any, new: Any, begin: int, work: Any) -> Any:
    """Places of the elements that differ in the block from `begin` on; they lie in `work`, of `room`."""
    flags, eights, places = work
    old, new = old[begin : begin + BLOCK], new[begin : begin + BLOCK]
    for i in range(old.size):
        flags[i] = old[i] != new[i]
    flags[old.size :] = 0
    many, k, flags_of_eight = 0, 0, flags.view(np.uint64)
    for j in range(flags_of_eight.size):
        eights[many] = j
        many += int(flags_of_eight[j] != 0)
    for j in eights[:many]:
        for i in range(8 * j, 8 * j + 8):
            places[k] = begin + i
            k += int(flags[i])
    return places[:k]


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(_: Any, array: Any, index: Any) -> tuple[Any, Any]:
    """Ask for the cache line of array[index], which may lie outside: a hint that reads nothing."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        place = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        builder.call(hint, [place, number(0), number(3), number(1)])  # for reading, into every cache, data
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@partial(compiled, inline=True)
def prefetch(old: Any, new: Any, begin: int, end: int) -> int:
    """Ask for elements [begin, end) of both arrays, which arrive while others are coded; returns `end`."""
    for i in range(begin, end, 64 // old.itemsize):
        _prefetch(old, i)
        _prefetch(new, i)
    return end


@compiled
def scan(old: Any, new: Any) -> tuple[Any, Any, Any, Any]:
    """(gaps, wide gaps, steps, wide steps) of the elements that changed. A gap is the distance from the
    changed element before, a step the ULP difference, both less 1."""
    gaps, steps = np.empty(old.size, np.uint8), np.empty(old.size, np.uint8)
    wide_gaps, wide_steps = np.empty(old.size // ESCAPE + 1, np.uint64), np.empty(old.size, new.dtype)
    k, g, s, last, work = 0, 0, 0, -1, room()
    for begin in range(0, old.size, BLOCK):
        for i in find(old, new, begin, work):
            g = _put(i - last - 1, gaps, k, wide_gaps, g)
            step = zigzag(np.int64(old[i]), np.int64(new[i]), 8 * old.itemsize) - 1
            s = _put(step, steps, k, wide_steps, s)
            last = i
            k += 1
    return gaps[:k], wide_gaps[:g], steps[:k], wide_steps[:s]


@compiled
def _take(narrow: Any, k: int, wide: Any, w: int) -> tuple[int, int]:
    """Entry k of a stream of bytes, or -1, and the wide values used so far."""
    value: Any = np.int64(narrow[k])
    if value != ESCAPE:
        return value, w
    if w >= wide.size:
        return -1, w
    value = np.int64(wide[w])
    return value, w + 1


@compiled
def apply_gaps(bits: Any, width: int, gaps: Any, wide_gaps: Any, steps: Any, wide_steps: Any) -> int:
    """Inverse of `scan`, in place; 0, or -1 when the streams do not fit `bits` or one another."""
    g, s, i = 0, 0, -1
    for k in range(gaps.size):
        gap, g = _take(gaps, k, wide_gaps, g)
        step, s = _take(steps, k, wide_steps, s)
        if gap < 0 or step < 0 or gap >= bits.size - 1 - i:
            return -1
        i += gap + 1
        bits[i] = moved(np.int64(bits[i]), step + 1, width)
    return 0 if g == wide_gaps.size and s == wide_steps.size else -1


@compiled
def apply_bitmap(bits: Any, width: int, bitmap: Any, steps: Any, wide_steps: Any) -> int:
    """`apply_gaps` with one bit per element, least significant first, instead of gaps."""
    k, s, (_, _, places) = 0, 0, room()
    for begin in range(0, bits.size, BLOCK):
        many = 0
        for i in range(begin, min(begin + BLOCK, bits.size)):
            places[many] = i
            many += int((bitmap[i >> 3] >> (i & 7)) & 1)
        if many > steps.size - k:
            return -1
        for i in places[:many]:
            step, s = _take(steps, k, wide_steps, s)
            if step < 0:
                return -1
            bits[i] = moved(np.int64(bits[i]), step + 1, width)
            k += 1
    return 0 if k == steps.size and s == wide_steps.size else -1
