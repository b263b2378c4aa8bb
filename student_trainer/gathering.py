"""The ranks' copies of their shards, gathered on rank 0 bucket by bucket beside training.

    rank r > 0                                    rank 0
    waits for a number   ◀────── gloo ────────    bucket k
    its bytes of bucket k  ── gloo or NCCL ──▶    put where they belong: the bucket is whole

Rank 0 asks and the others answer, in a thread of their own and a process group of their own: no collective of
training waits for this one, and rank 0 may begin again when a broadcast failed. It holds the bucket that it
gathers, the one that it sends, and one rank's bytes of the first: at most 3 × BUCKET_BYTES, however large the
model is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from threading import Lock
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from student_trainer.ranks import Ranks
from student_trainer.weights import DTYPES
from sync.base.decoding import json_decoder
from sync.base.errors import ConfigError
from sync.weights.buckets import BUCKET_BYTES, Plan
from sync.weights.delta.codec import Bits
from sync.weights.publish import Slice
from sync.weights.snapshots.checkpoint import BITS, TensorMeta

_TORCH_NAMES: Final = {kind: str(dtype).removeprefix("torch.") for dtype, kind in DTYPES.items()}
_DONE: Final = -1
_PATIENCE: Final = timedelta(days=7)
"""Between two numbers; the end of rank 0 is noticed at once."""


class Part(NamedTuple):
    """Bytes [start, stop) of one bucket, which a rank holds from byte `at` of its slice of a tensor on."""

    name: str
    start: int
    stop: int
    at: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Gathering:
    """Gathers what `Weights.snapshot` copied. Made by all ranks together, for the length of a run."""

    def __init__(
        self,
        ranks: Ranks,
        slices: list[Slice],
        bucket_bytes: int = BUCKET_BYTES,
        adapter_config: str | None = None,
    ) -> None:
        """`slices` and `adapter_config`: of `Weights`. Collective.

        Raises ConfigError when the slices do not tile the tensors.
        """
        bodies = ranks.collect(msgspec.json.encode(slices))
        every = [json_decoder(list[Slice]).decode(body) for body in bodies]
        self.plan = Plan(metas_of(every), bucket_bytes, adapter_config)
        self._parts = [parts_of(rank_slices, self.plan) for rank_slices in every]
        self._ranks, self._group = ranks, None
        self._turn, self._exchange = 0, Lock()
        if ranks.world_size > 1:
            backend = "gloo" if ranks.device.type == "cpu" else f"cpu:gloo,{ranks.device.type}:nccl"
            self._group = dist.new_group(backend=backend, timeout=_PATIENCE)

    def buckets(self, shards: Mapping[str, Bits]) -> Iterator[torch.Tensor]:
        """Rank 0: every bucket of the plan, uint8, each in memory of its own.

        Called again it begins anew; who still asks the one before, or asks after `done`, gets a RuntimeError.
        """
        with self._exchange:
            self._turn += 1
            turn = self._turn
        for number in range(len(self.plan.buckets)):
            with self._exchange:
                if turn != self._turn:
                    raise RuntimeError("these buckets were given up")
                flat_N = self._bucket(number, shards)
            yield flat_N

    def _bucket(self, number: int, shards: Mapping[str, Bits]) -> torch.Tensor:
        flat_N = torch.zeros(len(self.plan.buckets[number]), dtype=torch.uint8, device=self._ranks.device)
        parts_by_rank = [parts[number] for parts in self._parts]
        others = [rank for rank, parts in enumerate(parts_by_rank) if rank > 0 and parts]
        for rank in others:
            self._tell(number, rank)
        _place(flat_N, parts_by_rank[0], _joined(parts_by_rank[0], shards, self._ranks.device))
        for rank in others:
            size = sum(part.nbytes for part in parts_by_rank[rank])
            given_N = torch.empty(size, dtype=torch.uint8, device=self._ranks.device)
            dist.recv(given_N, rank, group=self._group)
            _place(flat_N, parts_by_rank[rank], given_N)
        return flat_N

    def _tell(self, number: int, rank: int) -> None:
        dist.send(torch.tensor([number]), rank, group=self._group)

    def answer(self, shards: Mapping[str, Bits]) -> None:
        """Ranks above 0: send what rank 0 asks for, until it is `done`."""
        number, parts = torch.zeros(1, dtype=torch.int64), self._parts[self._ranks.rank]
        while True:
            dist.recv(number, 0, group=self._group)
            if int(number) == _DONE:
                return
            dist.send(_joined(parts[int(number)], shards, self._ranks.device), 0, group=self._group)

    def done(self) -> None:
        """Rank 0: nothing more is asked for of this version."""
        with self._exchange:
            self._turn += 1
            for rank in range(1, self._ranks.world_size):
                self._tell(_DONE, rank)


def metas_of(every: list[list[Slice]]) -> list[TensorMeta]:
    """The tensors of which the ranks hold slices. Raises ConfigError when those do not tile them."""
    whole = {part.name: part for rank_slices in every for part in rank_slices}
    counts = dict.fromkeys(whole, 0)
    for slices_of_rank in every:
        for part in slices_of_rank:
            counts[part.name] += part.count
    wrong = {name: counts[name] for name, part in whole.items() if counts[name] != np.prod(part.shape)}
    if wrong:
        raise ConfigError(
            f"the {len(every)} ranks hold {wrong} elements of these tensors: every element must belong to "
            'exactly one rank; use weights.transport = "snapshot" and report this model'
        )
    return [TensorMeta(part.name, _TORCH_NAMES[part.dtype], tuple(part.shape)) for part in whole.values()]


def parts_of(slices: list[Slice], plan: Plan) -> list[list[Part]]:
    """What a rank holds of every bucket."""
    offsets = dict(zip((meta.name for meta in plan.metas), plan.offsets, strict=True))
    parts_by_bucket: list[list[Part]] = [[] for _ in plan.buckets]
    for piece in slices:
        width = BITS[piece.dtype].itemsize
        first = offsets[piece.name] + piece.start * width
        last = first + piece.count * width
        for number in range(first // plan.bucket_bytes, -(-last // plan.bucket_bytes)):
            bucket = plan.buckets[number]
            start, stop = max(first, bucket.start), min(last, bucket.stop)
            if start < stop:
                part = Part(piece.name, start - bucket.start, stop - bucket.start, start - first)
                parts_by_bucket[number].append(part)
    return parts_by_bucket


def _place(flat_N: torch.Tensor, parts: list[Part], given_N: torch.Tensor) -> None:
    for part, piece in zip(parts, given_N.split([part.nbytes for part in parts]), strict=True):
        flat_N[part.start : part.stop] = piece


def _joined(parts: list[Part], shards: Mapping[str, Bits], device: torch.device) -> torch.Tensor:
    """These parts of a rank's shards, one behind the other."""
    pieces = [_flat(shards[part.name])[part.at : part.at + part.nbytes] for part in parts]
    return torch.cat([piece.to(device) for piece in pieces] or [torch.empty(0, dtype=torch.uint8)])


def _flat(bits: Any) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.uint8)) if isinstance(bits, np.ndarray) else bits.view(torch.uint8)
