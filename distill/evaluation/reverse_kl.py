"""The metric `reverse_kl`: KL(p‖q) of student p and teacher q, averaged over completion tokens.

Completions are sampled from p at temperature 1, so

    exact       Σ_v p(v) (log p(v) − log q(v)) over the whole vocabulary at each token, fp32; it needs the
                hidden states and the head of both
    estimate    log p(y) − log q(y) of the sampled token y: the same mean in expectation. With x_i the sum
                over the n_i tokens of completion i of m, and r = Σx / Σn, the standard error of r is
                sqrt(m/(m−1) · Σ e_i²) / Σn, e_i = x_i − r·n_i: completions are independent, their tokens are
                not; with several teachers e_i is less its mean over the completions of that teacher

Rows of a model beyond the tokenizer's vocabulary do not exist for it.

Letters in shapes: N tokens of several completions, M completions, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from sync import wire
from sync.wire import unpack
from teacher_service.engines.base import Item
from teacher_service.engines.head import OutputHead

CHUNK = 1024
"""Positions whose full-vocabulary distributions are in memory at once."""


def tensor_of(array: wire.Array, device: torch.device) -> Tensor:
    """A tensor of an array of hidden states or head: bf16 or fp32."""
    values = torch.from_numpy(unpack(array).copy())
    return (values.view(torch.bfloat16) if array.dtype == "bf16" else values).to(device)


def head_of(head: wire.Head | None, device: torch.device) -> OutputHead:
    """The head of an engine with hidden states, as it is sent."""
    assert head is not None, "engines with hidden states have a head"
    weight_VH = tensor_of(head.weight, device)
    bias_V = None if head.bias is None else tensor_of(head.bias, device).float()
    return OutputHead(
        weight_VH if weight_VH.is_cuda else weight_VH.float(), bias_V, head.scale, head.soft_cap
    )


@torch.inference_mode()
def exact(student: OutputHead, student_NH: Tensor, teacher: OutputHead, teacher_NH: Tensor) -> np.ndarray:
    """f4 [N]: the divergence at each position, from both models' hidden states."""
    parts = []
    for own_NH, other_NH in zip(student_NH.split(CHUNK), teacher_NH.split(CHUNK), strict=True):
        logp_NV = student.logits(own_NH.to(student.weight_VH.dtype)).log_softmax(-1)
        logq_NV = teacher.logits(other_NH.to(teacher.weight_VH.dtype)).log_softmax(-1)
        parts.append((logp_NV.exp() * (logp_NV - logq_NV)).sum(-1).cpu().numpy())
    return np.concatenate(parts)


def parts(items: Sequence[Item], positions: int) -> Iterator[tuple[list[int], list[Item]]]:
    """Work of at most `positions` scored positions at a time, shortest sequences first, and whose it is.

    A completion with more is split: a sequence that ends where a part ends has the same scores up to there.
    """
    numbers: list[int] = []
    part: list[Item] = []
    left = positions
    for number in sorted(range(len(items)), key=lambda i: len(items[i].token_ids_L)):
        item = items[number]
        first, length = item.first, len(item.token_ids_L)
        while first < length:
            if left == 0 or (part and length - first > left and length - first <= positions):
                yield numbers, part
                numbers, part, left = [], [], positions
            end = min(length, first + left)
            numbers.append(number)
            part.append(replace(item, token_ids_L=item.token_ids_L[:end], first=first))
            first, left = end, left - (end - first)
    if part:
        yield numbers, part


@dataclass
class ReverseKL:
    """Sums over the completions that one teacher scored."""

    is_exact: bool
    sums: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Completion → sum of the divergence, or of log p − log q, over its tokens, and their number."""

    def add(self, completion: int, value: float, tokens: int) -> None:
        """Add the sum over some tokens of a completion."""
        before, count = self.sums.get(completion, (0.0, 0))
        self.sums[completion] = before + value, count + tokens

    def among(self, completions: Set[int]) -> ReverseKL:
        """Sums of these completions alone."""
        return ReverseKL(self.is_exact, {id: self.sums[id] for id in self.sums.keys() & completions})

    def variance(self, ratio: float) -> float:
        """Variance of the sum of e over all completions; `ratio`: the r of all teachers. 0: it is exact."""
        if self.is_exact or not self.sums:
            return 0.0
        x_M, n_M = np.array(list(self.sums.values())).T
        if len(x_M) == 1:
            return float(x_M[0] ** 2)  # nothing to compare it with
        rest_M = x_M - ratio * n_M
        return float(len(x_M) / (len(x_M) - 1) * ((rest_M - rest_M.mean()) ** 2).sum())


def total(parts: list[ReverseKL]) -> tuple[float, float | None]:
    """Mean over the tokens of all teachers, and its standard error; None: it is exact."""
    all_sums = [sums for part in parts for sums in part.sums.values()]
    tokens = max(1, sum(count for _, count in all_sums))
    value = math.fsum(x for x, _ in all_sums) / tokens
    if all(part.is_exact for part in parts):
        return value, None
    return value, math.sqrt(sum(part.variance(value) for part in parts)) / tokens
