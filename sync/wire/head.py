"""A model's output head: logits = cap(scale · (hidden · weightᵀ + bias)) / temperature.

Products are of the weight's numbers, and are summed and kept in fp32. GPUs have those of bf16. On CPUs torch
has none: it multiplies fp32 copies, and oneDNN may take these as bf16 again, which loses nothing of what bf16
holds and is twice as fast where the CPU has instructions for it.

Letters in shapes: N tokens, V rows of the vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sync.wire import Array, Head, pack, unpack


@dataclass(frozen=True)
class HeadShape:
    """How logits follow from the weight's products."""

    vocab: int
    """Ids of the tokenizer; rows of the model beyond them do not exist."""
    scale: float = 1.0
    soft_cap: float | None = None
    """cap(x) = soft_cap · tanh(x / soft_cap); None: no cap"""
    temperature: float = 1.0

    def logits(self, raw_NV: Tensor) -> Tensor:
        """[N, V] from hidden · weightᵀ + bias, which is overwritten unless gradients are taken in it."""
        out = None if raw_NV.requires_grad else raw_NV
        if self.scale != 1.0:
            raw_NV = torch.mul(raw_NV, self.scale, out=out)
        if self.soft_cap is not None:
            capped_NV = torch.tanh(torch.div(raw_NV, self.soft_cap, out=out), out=out)
            raw_NV = torch.mul(capped_NV, self.soft_cap, out=out)
        return raw_NV if self.temperature == 1.0 else torch.div(raw_NV, self.temperature, out=out)


def soft_cap_of(config: Any) -> float | None:
    """The cap of a model's logits, from its transformers text configuration; None: it has none."""
    caps = (getattr(config, name, None) for name in ("final_logit_softcapping", "output_logit_soft_cap"))
    return next((float(value) for value in caps if value is not None), None)


@dataclass(frozen=True)
class OutputHead:
    """A head whose weight is at hand, of the student or of a teacher; `placed` before it is applied."""

    weight_VH: Tensor
    bias_V: Tensor | None
    shape: HeadShape
    exact: bool = False
    """Whether a float32 weight holds what bfloat16 can."""

    @classmethod
    def of(
        cls, message: Head, device: torch.device, vocab: int | None = None, temperature: float = 1.0
    ) -> OutputHead:
        """Inverse of `message`, placed on `device`, with logits at `temperature`. `vocab`: of so many ids;
        None: of all rows."""
        weight_VH = tensor_of(message.weight)
        bias_V = None if message.bias is None else tensor_of(message.bias)
        shape = HeadShape(vocab or len(weight_VH), message.scale, message.soft_cap, temperature)
        return cls(weight_VH, bias_V, shape).placed(device)

    def placed(self, device: torch.device) -> OutputHead:
        """The rows that tokens have, without gradients, where they are applied; on a CPU with a float32
        weight."""
        weight_VH = self.weight_VH.detach()[: self.shape.vocab].to(device)
        exact = self.exact or weight_VH.dtype == torch.bfloat16
        if not weight_VH.is_cuda:
            weight_VH = weight_VH.float()  # once, not for every chunk
        bias_V = None if self.bias_V is None else self.bias_V.detach()[: self.shape.vocab].to(device).float()
        return OutputHead(weight_VH, bias_V, self.shape, exact)

    def raw(self, hidden_NH: Tensor) -> Tensor:
        """hidden · weightᵀ + bias as fp32 [N, V]."""
        raw_NV = project(hidden_NH, self.weight_VH, self.exact)
        if self.bias_V is not None:
            raw_NV += self.bias_V
        return raw_NV

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """fp32 [N, V], whatever the model's precision."""
        return self.shape.logits(self.raw(hidden_NH))

    def message(self, dtype: torch.dtype) -> Head:
        """Wire form; `dtype`: of the model, whose precision the weight keeps."""
        half = dtype == torch.bfloat16
        weight_VH = self.weight_VH.to(torch.bfloat16 if half else torch.float32)
        return Head(
            weight=pack(to_numpy(weight_VH), "bf16" if half else "f4"),
            bias=None if self.bias_V is None else pack(to_numpy(self.bias_V)),
            scale=self.shape.scale,
            soft_cap=self.shape.soft_cap,
        )


def to_numpy(tensor: Tensor) -> np.ndarray:
    """bfloat16 as uint16 bits, float16 as float32, anything else as it is."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    elif tensor.dtype == torch.float16:
        tensor = tensor.float()
    return tensor.cpu().numpy()


def tensor_of(array: Array) -> Tensor:
    """A copy of an array of the wire, bf16 as such."""
    tensor = torch.tensor(unpack(array))
    return tensor.view(torch.bfloat16) if array.dtype == "bf16" else tensor


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
