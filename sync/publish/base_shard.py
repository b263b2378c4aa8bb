"""The shard as it was published last: what the next delta is taken from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sync.delta import file as delta_file
from sync.delta.codec import Bits, Effort, apply, scanner
from sync.delta.file import Header, Slice
from sync.snapshots.checkpoint import BITS


class BaseShard:
    """A copy where the shard lies; of a shard on a device also one in host memory.

    A device compares its own two copies, and the host brings its copy forward by the blobs that come of it:
    digests are so of the very bits that a reader will hold, and no shard leaves the device after an anchor.
    """

    def __init__(self, slices: Sequence[Slice], shards: Mapping[str, Bits]) -> None:
        """Copies `shards`, for which `problem` found nothing."""
        self._last: dict[str, Bits] = {part.name: _copy(shards[part.name]) for part in slices}
        self.host: dict[str, np.ndarray] = {name: _on_host(bits) for name, bits in self._last.items()}
        """The same bits in host memory."""

    def delta(
        self,
        header: Header,
        slices: Sequence[Slice],
        shards: Mapping[str, Bits],
        effort: Effort,
        threads: int,
    ) -> bytes:
        """This rank's file from what is held to `shards`; `advance` or a new anchor must follow."""

        def after(part: Slice, blob: bytes) -> np.ndarray:
            new = shards[part.name]
            if isinstance(new, np.ndarray):
                return new
            apply(self.host[part.name], blob, part.dtype)
            return self.host[part.name]

        return delta_file.build(header, slices, self._last, shards, effort, threads, after)

    def advance(self, shards: Mapping[str, Bits]) -> None:
        """Hold `shards`, to which `delta` was taken, from now on."""
        for name, last in self._last.items():
            bits: Any = last
            bits[:] = shards[name]


def problem(part: Slice, bits: Bits | None) -> str | None:
    """What is wrong with what came for a slice; None: nothing."""
    wanted = BITS[part.dtype]
    if bits is None:
        return "nothing"
    exact = bits.dtype == wanted if isinstance(bits, np.ndarray) else not bits.dtype.is_floating_point
    if exact and bits.itemsize == wanted.itemsize and tuple(bits.shape) == (part.count,):
        return None
    return f"{bits.dtype}{tuple(bits.shape)}"


def _copy(bits: Bits) -> Bits:
    return bits.copy() if isinstance(bits, np.ndarray) else bits.clone()


def _on_host(bits: Bits) -> np.ndarray:
    """`bits` themselves when they are an array; of a tensor, a copy."""
    return bits if isinstance(bits, np.ndarray) else scanner(bits).host(bits).copy()
