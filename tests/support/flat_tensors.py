"""Tensors of one process as a broadcast sends them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from sync.buckets import BUCKET_BYTES, Plan
from sync.snapshots.checkpoint import meta_of


def plan_of(
    weights: Mapping[str, torch.Tensor],
    bucket_bytes: int = BUCKET_BYTES,
    adapter_config: str | None = None,
) -> Plan:
    """For these tensors, in their order."""
    metas = [meta_of(name, tensor) for name, tensor in weights.items()]
    return Plan(metas, bucket_bytes, adapter_config)


def buckets_of(plan: Plan, weights: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of each bucket, uint8."""
    whole_N = torch.zeros(plan.nbytes, dtype=torch.uint8)
    for name, view in plan.tensors(whole_N).items():
        view.copy_(weights[name])
    for bucket in plan.buckets:
        yield whole_N[bucket.start : bucket.stop]
