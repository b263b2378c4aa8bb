"""Ways to send changed bf16 weights, written from their published descriptions, to measure ours against.

Each takes the bits of one tensor, old and new, uint16 [rows, columns], and returns what it would send.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import zstandard

Encoder = Callable[[np.ndarray, np.ndarray], bytes]


def int32_and_value(old: np.ndarray, new: np.ndarray) -> bytes:
    """A 32-bit index and the new value of each changed element: six bytes."""
    index = np.flatnonzero(old.ravel() != new.ravel())
    return index.astype("<i4").tobytes() + new.ravel()[index].tobytes()


def gap16_and_value(old: np.ndarray, new: np.ndarray) -> bytes:
    """The distance from the last changed element in 16 bits (0xFFFF: 32 more bits follow), and the value."""
    index = np.flatnonzero(old.ravel() != new.ravel())
    gap = np.diff(index, prepend=-1) - 1
    wide = gap[gap >= 0xFFFF].astype("<u4").tobytes()
    return np.minimum(gap, 0xFFFF).astype("<u2").tobytes() + wide + new.ravel()[index].tobytes()


def row_gaps_and_values(old: np.ndarray, new: np.ndarray) -> bytes:
    """PULSE (arXiv 2602.03839): row and column differences in the narrowest type, absolute values, zstd-1."""
    row, column = np.nonzero(old != new)
    down = np.diff(row, prepend=0)
    right = np.diff(column, prepend=0)
    right[down != 0] = column[down != 0]
    streams = [
        down.astype("<u1" if down.size == 0 or down.max() < 256 else "<i4"),
        right.astype("<u2" if right.size == 0 or right.max() < 65536 else "<i4"),
        new[row, column],
    ]
    return zstandard.ZstdCompressor(level=1).compress(b"".join(stream.tobytes() for stream in streams))


def xor_planes(old: np.ndarray, new: np.ndarray) -> bytes:
    """High and low bytes of old XOR new, each compressed with zstd-3."""
    planes = np.ascontiguousarray((old ^ new).ravel()).view("u1").reshape(-1, 2)
    compressor = zstandard.ZstdCompressor(level=3)
    return b"".join(compressor.compress(planes[:, byte].tobytes()) for byte in (0, 1))


FORMATS: Final[dict[str, Encoder]] = {
    "int32+value": int32_and_value,
    "gap16+value": gap16_and_value,
    "PULSE-style": row_gaps_and_values,
    "XOR planes": xor_planes,
}


def entropy_given_exponent(old: np.ndarray, new: np.ndarray) -> float:
    """Bits that the changes of flat bf16 arrays carry when the old exponent is known.

    Σ over exponents of N · H(step), the step being 0 or the difference of the sign-ordered integers.
    """
    exponent = (old >> 7) & 255
    step = _ordered(new) - _ordered(old)
    pairs, counts = np.unique(exponent.astype(np.int64) << 32 | (step + (1 << 20)), return_counts=True)
    total = np.bincount(pairs >> 32, counts, 256)[pairs >> 32]
    return float(-(counts * np.log2(counts / total)).sum())


def _ordered(bits: np.ndarray) -> np.ndarray:
    """int64 that grows with the value of the float."""
    wide = bits.astype(np.int64)
    return np.where(wide & 0x8000, 0x7FFF - wide, wide)
