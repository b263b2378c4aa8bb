"""A model's output head: logits = cap(scale · (hidden · weightᵀ + bias)) / temperature.

Products are of the weight's numbers, summed in fp32. GPUs keep the sums of bf16 numbers as they are. CPUs
round them to bf16, as they do in every layer of a bf16 model: torch has others, two to four times as slow.
`exact` is for those who compare models.

Letters in shapes: N tokens, V rows of the vocabulary, H hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
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


@torch.no_grad()
def probabilities(logp_NV: Tensor) -> Tensor:
    """exp of fp32 log-probabilities over a vocabulary; on CPUs by powers of two, as torch's exp takes three
    times as long. Their relative error is at most 2e-7 · max(1, |log p|)."""
    return logp_NV.exp() if logp_NV.is_cuda else torch.mul(logp_NV, 1 / math.log(2)).exp2_()


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

    @classmethod
    def of(
        cls, message: Head, device: torch.device, vocab: int | None = None, temperature: float = 1.0
    ) -> OutputHead:
        """Inverse of `message`, on `device`, with logits of `vocab` ids (None: all) at `temperature`."""
        weight_VH = tensor_of(message.weight)
        bias_V = None if message.bias is None else tensor_of(message.bias)
        shape = HeadShape(vocab or len(weight_VH), message.scale, message.soft_cap, temperature)
        return cls(weight_VH, bias_V, shape).placed(device)

    def placed(self, device: torch.device) -> OutputHead:
        """The rows that tokens have, without gradients, where they are applied."""
        weight_VH = self.weight_VH.detach()[: self.shape.vocab].to(device)
        if weight_VH.dtype == torch.float16 and not weight_VH.is_cuda:
            weight_VH = weight_VH.float()  # CPUs have no products of float16
        bias_V = None if self.bias_V is None else self.bias_V.detach()[: self.shape.vocab].to(device).float()
        return OutputHead(weight_VH, bias_V, self.shape)

    def exact(self) -> OutputHead:
        """The head whose logits are nowhere rounded to bf16."""
        return self if self.weight_VH.is_cuda else replace(self, weight_VH=self.weight_VH.float())

    def raw(self, hidden_NH: Tensor) -> Tensor:
        """hidden · weightᵀ + bias [N, V]: fp32, or bf16 where both are and a CPU multiplies."""
        weight_VH = self.weight_VH
        if hidden_NH.dtype != weight_VH.dtype or (hidden_NH.dtype == torch.float16 and not hidden_NH.is_cuda):
            hidden_NH, weight_VH = hidden_NH.float(), weight_VH.float()
        sums: Any = (
            {"out_dtype": torch.float32} if hidden_NH.is_cuda and hidden_NH.dtype.itemsize == 2 else {}
        )
        raw_NV = torch.mm(hidden_NH, weight_VH.t(), **sums)
        if self.bias_V is not None:
            raw_NV += self.bias_V
        return raw_NV

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """fp32 [N, V], whatever the model's precision."""
        return self.shape.logits(self.raw(hidden_NH).float())

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
