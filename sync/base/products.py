"""Matrix products of bf16 numbers, summed and kept in fp32.

GPUs have them. On CPUs torch has none: it multiplies fp32 copies, and oneDNN may take these as bf16 again,
which loses nothing of what bf16 holds and is twice as fast where the CPU has instructions for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def bf16_products(exact: bool) -> Iterator[None]:
    """Let oneDNN multiply fp32 matrices in bf16 where that is `exact`: their numbers are bf16's.

    For the whole process: one thread at a time multiplies what is `exact`.
    """
    if not exact:
        yield
        return
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def project(hidden_NH: Tensor, weight_VH: Tensor, exact: bool = False) -> Tensor:
    """hidden · weightᵀ as fp32 [N, V]. `exact`: an fp32 weight holds what bf16 can."""
    half = weight_VH.dtype in (torch.bfloat16, torch.float16)
    if hidden_NH.is_cuda and half and hidden_NH.dtype == weight_VH.dtype:
        return torch.mm(hidden_NH, weight_VH.t(), out_dtype=torch.float32)
    with bf16_products(exact and hidden_NH.dtype == torch.bfloat16 and not hidden_NH.is_cuda):
        return hidden_NH.float() @ weight_VH.float().t()
