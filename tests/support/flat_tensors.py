"""Tensors of one process as a broadcast sends them, and digests of those in a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

from sync.weights.buckets import BUCKET_BYTES, Plan
from sync.weights.snapshots import checkpoint
from sync.weights.snapshots.checkpoint import TensorMeta


def plan_of(
    weights: Mapping[str, torch.Tensor], bucket_bytes: int = BUCKET_BYTES, adapter_config: str | None = None
) -> Plan:
    """For these tensors, in their order."""
    metas = [
        TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in weights.items()
    ]
    return Plan(metas, bucket_bytes, adapter_config)


def buckets_of(plan: Plan, weights: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of each bucket, uint8."""
    whole_N = torch.zeros(plan.nbytes, dtype=torch.uint8)
    for name, view in plan.tensors(whole_N).items():
        view.copy_(weights[name])
    for bucket in plan.buckets:
        yield whole_N[bucket.start : bucket.stop]


def digest(array: np.ndarray) -> str:
    """BLAKE3 hex of an array's bytes (1-D, contiguous)."""
    return blake3(array.view(np.uint8).data).hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """BLAKE3 hex of each tensor's bytes in a checkpoint folder, by name."""
    arrays = checkpoint.bits(checkpoint.tensors(folder))
    return {name: digest(array) for name, array in arrays.items()}
