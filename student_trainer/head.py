"""Output head and loss in chunks: [tokens, vocabulary] is never whole in memory, forward or backward.

The gradients of a chunk are taken while its logits exist, so the backward pass only scales what was kept:
[C, H] for the hidden states and [V, H] for the weight. Products are of whole chunks. What lies between them
needs many tensors of the logits' size: a CPU makes them for a block of tokens at a time, and a block's
gradients take the place of its logits.

Letters: C completion tokens of a micro-batch, N tokens of one chunk, B of one block, V rows of the
vocabulary, H hidden size, G hidden size of a teacher. Log-probabilities are fp32 whatever the model's
precision; what is multiplied is rounded to it, and so are products of bf16 on a CPU (`sync.wire.head`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Final

import torch
from torch import Tensor

from student_trainer.objectives.config import TaskReward
from student_trainer.objectives.divergences import Discount, Objective, Targets, at, own
from student_trainer.objectives.token_statistics import OVERLAP_TOKENS, STATS, token_sums
from sync.wire.head import HeadShape, OutputHead

RHO_MAX = len(STATS)
"""Place of the largest ρ in a statistics vector; the sums named in STATS stand before it. After it stand, for
M tracked teachers, M sums of their tokens' reverse KL and M counts of these tokens."""
BLOCK: Final = 1 << 20
"""Logits of a block of tokens on a CPU, 4 MB each: other sizes were no faster."""


@dataclass(frozen=True)
class Loss:
    """What is minimised, the same for every step of a run; made by `step.loss_of`."""

    objective: Objective
    discount: Discount | None = None
    """How later tokens are credited; None: credit is immediate."""
    heads: tuple[OutputHead, ...] = ()
    """The teachers' heads, for objectives over the whole vocabulary; else empty."""
    ends: tuple[int, ...] = ()
    """Ids that end a completion, whose probability is recorded; empty: it is not."""
    teachers: tuple[str, ...] = ()
    """Names, as Rows.teacher indexes them."""
    coefficients: tuple[float, ...] = ()
    """λ·c of each teacher; empty: 1 for all."""
    first_bytes: Callable[[], Tensor] | None = None
    """`Targets.first_V`, read where a teacher has another tokenizer."""
    task: TaskReward | None = None
    """How rollouts' rewards are part of the loss; None: they are not."""

    @property
    def tracked(self) -> int:
        """M: teachers whose reverse KL is summed one by one; 0 when there is only one."""
        return len(self.teachers) if len(self.teachers) > 1 else 0


@torch.no_grad()
def token_logp(hidden_CH: Tensor, head: OutputHead, token_C: Tensor, chunk: int) -> Tensor:
    """log p(y) [C] without gradient, in chunks of `chunk` tokens."""
    head = head.placed(hidden_CH.device)
    pairs = zip(hidden_CH.split(chunk), token_C.split(chunk), strict=True)
    return torch.cat([at(head.logits(h_NH).log_softmax(1), token_N) for h_NH, token_N in pairs])


def chunked_loss(
    hidden_CH: Tensor, head: OutputHead, targets: Targets, loss: Loss, chunk: int
) -> tuple[Tensor, Tensor]:
    """Sum of the objective over C tokens, and the statistics vector (see RHO_MAX).

    The sum can be differentiated once, with respect to `hidden_CH`, the head's weight and its bias. C may be
    0: then both are zero, and so are the gradients.
    """
    total, stats = _ChunkedLoss.apply(
        hidden_CH, head.weight_VH, head.bias_V, head.shape, targets, loss, chunk
    )
    return total, stats


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_CH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        shape: HeadShape,
        targets: Targets,
        spec: Loss,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        head = OutputHead(weight_VH, bias_V, shape).placed(hidden_CH.device)
        stats = hidden_CH.new_zeros(RHO_MAX + 1 + 2 * spec.tracked, dtype=torch.float32)
        grad_hidden_CH = torch.zeros_like(hidden_CH, dtype=torch.float32)
        grad_weight_VH = torch.empty_like(weight_VH, dtype=torch.float32) if weight_VH.requires_grad else None
        if grad_weight_VH is not None:
            grad_weight_VH[shape.vocab if len(hidden_CH) else 0 :] = 0.0  # the others are the first chunk's
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        tokens = chunk if hidden_CH.is_cuda else max(1, min(chunk, BLOCK // shape.vocab))
        for part in _parts(hidden_CH.shape[0], chunk):
            hidden_NH, chunk_targets = hidden_CH[part].detach(), targets.each(itemgetter(part))
            grad_NV, teacher_NV = head.raw(hidden_NH), _teacher_logits(chunk_targets, spec.heads)
            for rows in _parts(hidden_NH.shape[0], tokens):
                block = chunk_targets.each(itemgetter(rows))
                logits_BV = None if teacher_NV is None else teacher_NV[rows]
                compared = max(0, OVERLAP_TOKENS - rows.start)
                raw_BV = grad_NV[rows].float()
                sums, grad_NV[rows] = _block_loss(raw_BV, logits_BV, shape, block, spec, compared)
                _record(stats, sums)
            low_NV, low_NH = grad_NV.to(head.weight_VH.dtype), hidden_NH.to(head.weight_VH.dtype)
            grad_hidden_CH[part] = low_NV @ head.weight_VH
            if grad_weight_VH is not None:
                _add_product(grad_weight_VH[: shape.vocab], low_NV, low_NH, onto=int(part.start > 0))
            if grad_bias_V is not None:
                grad_bias_V[: shape.vocab] += grad_NV.sum(0, dtype=torch.float32)
        ctx.grads = (grad_hidden_CH, grad_weight_VH, grad_bias_V)
        ctx.dtype = weight_VH.dtype
        ctx.mark_non_differentiable(stats)
        return stats[STATS.index("loss")].clone(), stats

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if grad is None else _times(grad, grad_loss, ctx.dtype) for grad in ctx.grads]
        ctx.grads = None
        return (*scaled, None, None, None, None)


def _times(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """grad · factor as `dtype`, in one pass; in its place where it has that precision."""
    return torch.mul(grad, factor, out=grad if grad.dtype == dtype else torch.empty_like(grad, dtype=dtype))


def _parts(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def _block_loss(
    raw_BV: Tensor,
    logits_BV: Tensor | None,
    shape: HeadShape,
    targets: Targets,
    spec: Loss,
    overlap_tokens: int,
) -> tuple[dict[str, Tensor], Tensor]:
    """Sums over one block, the loss among them, and the gradient of the loss in `raw_BV`. `logits_BV`: the
    teacher's."""
    first_V = None if targets.parted_NB is None or spec.first_bytes is None else spec.first_bytes()
    logq_BV = None if logits_BV is None else logits_BV.log_softmax(1)
    targets = replace(targets, teacher_logp_NV=logq_BV, first_V=first_V)
    with torch.enable_grad():
        logp_BV = shape.logits(raw_BV.requires_grad_()).log_softmax(1)
        loss_B, terms = spec.objective(logp_BV, targets)
        total = loss_B.sum()
    (grad_BV,) = torch.autograd.grad(total, raw_BV)
    sums = token_sums(logp_BV.detach(), targets, spec.ends, overlap_tokens)
    sums |= {name: value.sum() for name, value in terms.items()}
    if spec.tracked and "reverse_kl" in terms:
        assert targets.teacher_N is not None
        both_2N = torch.stack([terms["reverse_kl"], own(targets).to(logp_BV.dtype)])
        sums["by_teacher"] = both_2N.new_zeros(2, spec.tracked).index_add_(1, targets.teacher_N, both_2N)
    return sums | {"loss": total.detach()}, grad_BV


def _teacher_logits(targets: Targets, heads: tuple[OutputHead, ...]) -> Tensor | None:
    """Teachers' logits [N, V] of one chunk; None when the objective does not go over the whole vocabulary."""
    hidden_NG = targets.teacher_hidden_NG
    if hidden_NG is None or not heads:
        return None
    if len(heads) == 1:
        return _one_teacher(hidden_NG, heads[0])
    logits_NV = hidden_NG.new_empty((hidden_NG.shape[0], heads[0].shape.vocab), dtype=torch.float32)
    for index, head in enumerate(heads):
        scored_N = targets.teacher_N == index
        logits_NV[scored_N] = _one_teacher(hidden_NG[scored_N], head)
    return logits_NV


def _one_teacher(hidden_NG: Tensor, head: OutputHead) -> Tensor:
    head = head.placed(hidden_NG.device)
    return head.logits(hidden_NG[:, : head.weight_VH.shape[1]])


def _record(stats: Tensor, sums: dict[str, Tensor]) -> None:
    for name, value in sums.items():
        if name == "rho_max":
            stats[RHO_MAX] = torch.maximum(stats[RHO_MAX], value)
        elif name == "by_teacher":
            stats[RHO_MAX + 1 :] += value.flatten()
        else:
            stats[STATS.index(name)] += value


def _add_product(sum_VH: Tensor, grad_NV: Tensor, hidden_NH: Tensor, onto: int = 1) -> None:
    """sum = onto · sum + gradᵀ · hidden in place; the sum is fp32 whatever the precision of both factors."""
    if grad_NV.dtype == sum_VH.dtype:
        sum_VH.addmm_(grad_NV.t(), hidden_NH, beta=onto)
    elif grad_NV.is_cuda:
        product: Any = {"out_dtype": torch.float32, "beta": onto, "out": sum_VH}
        torch.addmm(sum_VH, grad_NV.t(), hidden_NH, **product)
    elif onto:
        sum_VH += grad_NV.t() @ hidden_NH
    else:
        sum_VH.copy_(grad_NV.t() @ hidden_NH)
