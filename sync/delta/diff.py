"""What the codec asks of two equally long arrays of bits in host memory: the compiled loops, with their room.

`sync.delta.diff_torch` answers the same questions, with the same bytes, where a tensor lies.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class Scanner(Protocol):
    """Compares old with new; what it returns is in host memory. Both modules of this kind are stateless."""

    def same(self, old: Any, new: Any) -> bool:
        """Whether not one bit differs."""

    def gaps(self, old: Any, new: Any, room: int) -> list[np.ndarray] | None:
        """[distances, wide distances, steps, wide steps] as `kernels.scan_gaps` writes them.

        None: more elements changed than `room` holds, to within the elements of one word of 64 bits.
        """

    def bitmap(self, old: Any, new: Any) -> list[np.ndarray]:
        """[one bit per element, steps, wide steps] as `kernels.scan_bitmap` writes them."""

    def planes(self, old: Any, new: Any) -> list[np.ndarray]:
        """Differences of all elements, byte by byte, as `kernels.to_planes` writes them."""

    def classes(self, old: Any, new: Any, mantissa: int) -> np.ndarray | None:
        """Stream of `entropy.encode_classes`; None: it is longer than `new` and 512 bytes."""

    def host(self, bits: Any) -> np.ndarray:
        """The bits themselves."""


def same(old: np.ndarray, new: np.ndarray) -> bool:
    """See `Scanner`."""
    return np.array_equal(old, new)


def gaps(old: np.ndarray, new: np.ndarray, room: int) -> list[np.ndarray] | None:
    """See `Scanner`."""
    from sync.delta import kernels

    narrow, steps = np.empty(room, np.uint8), np.empty(room, np.uint8)
    wide, wide_steps = np.empty(old.size // kernels.ESCAPE + 1, np.uint64), np.empty(room, new.dtype)
    changed, g, s = kernels.scan_gaps(old, new, narrow, wide, steps, wide_steps)
    return None if changed < 0 else [narrow[:changed], wide[:g], steps[:changed], wide_steps[:s]]


def bitmap(old: np.ndarray, new: np.ndarray) -> list[np.ndarray]:
    """See `Scanner`."""
    from sync.delta import kernels

    bits, steps = np.zeros(-(-old.size // 8), np.uint8), np.empty(old.size, np.uint8)
    wide = np.empty(old.size, new.dtype)
    changed, s = kernels.scan_bitmap(old, new, new.itemsize * 8, bits, steps, wide)
    return [bits, steps[:changed], wide[:s]]


def planes(old: np.ndarray, new: np.ndarray) -> list[np.ndarray]:
    """See `Scanner`."""
    from sync.delta import kernels

    out: Any = np.empty((new.itemsize, old.size), np.uint8)
    kernels.to_planes(old, new, new.itemsize * 8, out)
    return list(np.asarray(out))


def classes(old: np.ndarray, new: np.ndarray, mantissa: int) -> np.ndarray | None:
    """See `Scanner`."""
    from sync.delta import entropy

    out = np.empty(new.nbytes + 512, np.uint8)
    length = entropy.encode_classes(old, new, new.itemsize * 8, mantissa, *entropy.fresh(), out)
    return None if length < 0 else out[:length]


def host(bits: np.ndarray) -> np.ndarray:
    """See `Scanner`."""
    return bits
