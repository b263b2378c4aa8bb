"""A checksum of weights that is computed where they lie; of a GPU's, eight bytes a block come to the host.

    block b of 2¹⁵ elements        s_b = Σ_j k_j · x_bj        x: the element's bits as a signed integer
    all blocks, in order           c   = Σ_b r_b · s_b         everything modulo 2⁶⁴

k and r are fixed odd pseudo-random numbers of 64 bits. Sums modulo 2⁶⁴ do not depend on their order, so
that every device and every way to cut the work gives the same c. A single changed element is always seen,
since odd numbers have inverses. That several changes cancel has a chance of about 2⁻⁶³; at worst, where they
are of sign bits alone, of 2⁻⁴⁸ for bf16 and 2⁻³² for fp32. This tells accidents, not forgeries: what is
published has BLAKE3 digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

BLOCK: Final = 1 << 15
"""Elements that share a factor r; a CPU's cache holds so many as int64, and as many k."""
_BLOCKS_AT_ONCE: Final = 128
"""Of a GPU: 32 MiB for a moment."""
_SIGNED: Final = {2: torch.int16, 4: torch.int32}
_STREAM_R: Final = 1 << 32
"""Where the numbers r begin in the sequence that k begins."""


def checksum(shards: Iterable[Tensor]) -> str:
    """16 hex digits of the bits of flat bf16 or fp32 tensors, in their order. Each begins a block."""
    numbers = (shard.detach().view(_SIGNED[shard.itemsize]) for shard in shards)
    sums = [part for one in numbers for part in (_host_sums if one.is_cpu else device_sums)(one)]
    s = np.concatenate([np.zeros(0, np.int64), *(one.cpu().numpy() for one in sums)]).view(np.uint64)
    return f"{int((s * odd_numbers(len(s), _STREAM_R)).sum(dtype=np.uint64)):016x}"


def _host_sums(numbers_N: Tensor) -> Iterator[Tensor]:
    """int64: s of every block of a tensor in host memory; numpy is the faster one there."""
    k, array = _keys(numbers_N.device).numpy(), numbers_N.numpy()
    parts = (array[start : start + BLOCK].astype(np.int64) for start in range(0, len(array), BLOCK))
    yield torch.tensor([int(part.dot(k[: len(part)])) for part in parts], dtype=torch.int64)


def device_sums(numbers_N: Tensor) -> Iterator[Tensor]:
    """int64: the same for a tensor anywhere, where it lies; of several blocks at a time."""
    k = _keys(numbers_N.device)
    for part in numbers_N.split(BLOCK * _BLOCKS_AT_ONCE):
        wide, whole = part.long(), len(part) // BLOCK * BLOCK
        yield wide[:whole].view(-1, BLOCK).mul_(k).sum(1)
        if whole < len(part):
            yield wide[whole:].mul_(k[: len(part) - whole]).sum(0, keepdim=True)


@cache
def _keys(device: torch.device) -> Tensor:
    """int64 [BLOCK]: k"""
    return torch.from_numpy(odd_numbers(BLOCK, 0).view(np.int64)).to(device)


def odd_numbers(count: int, first: int) -> np.ndarray:
    """uint64: a part of one fixed sequence, SplitMix64 with its lowest bit set."""
    mixed = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    odd: np.ndarray = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    return odd
