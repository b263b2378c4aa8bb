"""Checkpoint tensors as one run of bytes, cut into buckets whose size does not depend on the tensors'."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import torch

from sync.base.errors import SnapshotError
from sync.weights.snapshots.checkpoint import TensorMeta

BUCKET_BYTES: Final = 64 << 20
"""What is gathered and sent at once."""
_ALIGN: Final = 16


class Part(NamedTuple):
    """Bytes [start, stop) of one bucket, which a holder has from byte `at` of its range of a tensor on."""

    name: str
    start: int
    stop: int
    at: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Plan:
    """Tensors one behind the other, each from its offset on, a multiple of 16; `nbytes` in all.
    `adapter_config`: the text of an adapter's adapter_config.json; None: the tensors are a whole checkpoint.
    Raises SnapshotError for a dtype that torch lacks."""

    def __init__(
        self, metas: Sequence[TensorMeta], bucket_bytes: int = BUCKET_BYTES, adapter_config: str | None = None
    ) -> None:
        self.metas, self.bucket_bytes, self.adapter_config = list(metas), bucket_bytes, adapter_config
        sizes = [-(-nbytes(meta) // _ALIGN) * _ALIGN for meta in self.metas]
        *self.offsets, self.nbytes = itertools.accumulate(sizes, initial=0)
        starts = range(0, self.nbytes, bucket_bytes)
        self.buckets = [range(start, min(start + bucket_bytes, self.nbytes)) for start in starts]
        """Bytes of each; tensors may begin in one and end in another."""

    def parts(self, ranges: Iterable[tuple[str, int, int]]) -> list[list[Part]]:
        """What every bucket has of `ranges`: a tensor's name, the first byte in it, and how many."""
        offsets = dict(zip((meta.name for meta in self.metas), self.offsets, strict=True))
        parts_by_bucket: list[list[Part]] = [[] for _ in self.buckets]
        for name, begin, count in ranges:
            first = offsets[name] + begin
            last = first + count
            for number in range(first // self.bucket_bytes, -(-last // self.bucket_bytes)):
                bucket = self.buckets[number]
                start, stop = max(first, bucket.start), min(last, bucket.stop)
                if start < stop:
                    part = Part(name, start - bucket.start, stop - bucket.start, start - first)
                    parts_by_bucket[number].append(part)
        return parts_by_bucket

    def tensors(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """All of them by name, from all bytes, whose memory they share."""
        return {
            meta.name: whole[at : at + nbytes(meta)].view(_dtype(meta)).view(meta.shape)
            for meta, at in zip(self.metas, self.offsets, strict=True)
        }


def nbytes(meta: TensorMeta) -> int:
    """Bytes of a tensor."""
    return math.prod(meta.shape) * _dtype(meta).itemsize


def _dtype(meta: TensorMeta) -> torch.dtype:
    dtype = getattr(torch, meta.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise SnapshotError(f"tensor {meta.name!r} has dtype {meta.dtype!r}: torch has no such dtype")
    return dtype
