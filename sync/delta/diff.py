"""`codec.Scanner` for arrays in host memory, by the compiled loops; `diff_torch` is its twin on a device."""

from __future__ import annotations

from typing import Any

import numpy as np

from sync.delta import entropy
from sync.delta.kernels import ESCAPE, scan_bitmap, scan_gaps, to_planes


def same(old: np.ndarray, new: np.ndarray) -> bool:
    """See `Scanner`."""
    return np.array_equal(old, new)


def gaps(old: np.ndarray, new: np.ndarray, room: int) -> list[np.ndarray] | None:
    """See `Scanner`."""
    narrow, steps = np.empty(room, np.uint8), np.empty(room, np.uint8)
    wide, wide_steps = np.empty(old.size // ESCAPE + 1, np.uint64), np.empty(room, new.dtype)
    changed, g, s = scan_gaps(old, new, narrow, wide, steps, wide_steps)
    return None if changed < 0 else [narrow[:changed], wide[:g], steps[:changed], wide_steps[:s]]


def bitmap(old: np.ndarray, new: np.ndarray) -> list[np.ndarray]:
    """See `Scanner`."""
    bits, steps = np.zeros(-(-old.size // 8), np.uint8), np.empty(old.size, np.uint8)
    wide = np.empty(old.size, new.dtype)
    changed, s = scan_bitmap(old, new, new.itemsize * 8, bits, steps, wide)
    return [bits, steps[:changed], wide[:s]]


def planes(old: np.ndarray, new: np.ndarray) -> list[np.ndarray]:
    """See `Scanner`."""
    out: Any = np.empty((new.itemsize, old.size), np.uint8)
    to_planes(old, new, new.itemsize * 8, out)
    return list(np.asarray(out))


def classes(old: np.ndarray, new: np.ndarray, mantissa: int) -> np.ndarray | None:
    """See `Scanner`."""
    out = np.empty(new.nbytes + 512, np.uint8)
    length = entropy.encode_classes(old, new, new.itemsize * 8, mantissa, *entropy.fresh(), out)
    return None if length < 0 else out[:length]


def host(bits: np.ndarray) -> np.ndarray:
    """See `Scanner`."""
    return bits
