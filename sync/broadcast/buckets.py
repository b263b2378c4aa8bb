"""How the tensors of a broadcast are laid into flat buffers. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from sync.errors import SnapshotError
from sync.snapshots.tensors import TensorMeta

BUCKET_BYTES: Final = 64 << 20
"""Small tensors travel together up to this many bytes; a larger tensor travels alone."""
_ALIGN: Final = 16


class Bucket(NamedTuple):
    """Tensors that travel in one flat buffer of `nbytes`, each at its offset."""

    metas: list[TensorMeta]
    offsets: list[int]
    nbytes: int


def plan(metas: Sequence[TensorMeta], limit: int = BUCKET_BYTES) -> list[Bucket]:
    """Cut tensors, in order, into buckets of at most `limit` bytes, or of one tensor."""
    buckets: list[Bucket] = []
    for meta in metas:
        size = _aligned(nbytes(meta))
        if not buckets or buckets[-1].nbytes + size > limit:
            buckets.append(Bucket([], [], 0))
        last = buckets[-1]
        buckets[-1] = Bucket([*last.metas, meta], [*last.offsets, last.nbytes], last.nbytes + size)
    return buckets


def nbytes(meta: TensorMeta) -> int:
    """Bytes of a tensor."""
    return math.prod(meta.shape) * _dtype(meta).itemsize


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _dtype(meta: TensorMeta) -> torch.dtype:
    dtype = getattr(torch, meta.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise SnapshotError(f"tensor {meta.name!r} has dtype {meta.dtype!r}: torch has no such dtype")
    return dtype


def view(flat: torch.Tensor, meta: TensorMeta, offset: int) -> torch.Tensor:
    """The tensor at `offset` of a flat u1 buffer, sharing its memory."""
    return flat[offset : offset + nbytes(meta)].view(_dtype(meta)).view(meta.shape)
