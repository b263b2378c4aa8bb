"""Output head and loss in chunks: [tokens, vocabulary] is never whole in memory, forward or backward.

The gradients of a chunk are taken while its logits exist, so the backward pass only scales what was kept:
[C, H] for the hidden states and [V, H] for the weight.

Letters: C completion tokens of a micro-batch, N tokens of one chunk, V rows of the vocabulary, H hidden size,
G hidden size of a teacher. Logits and log-probabilities are fp32 whatever the model's precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from student_trainer.objectives.diagnostics import diagnose
from student_trainer.objectives.terms import STATS, Objective, Targets, own

RHO_MAX = len(STATS)
"""Place of the largest ρ in a statistics vector; the sums named in STATS stand before it. After it stand, for
M teachers, M sums of their tokens' reverse KL and M counts of these tokens."""


@dataclass(frozen=True)
class HeadShape:
    """logits = cap(scale · (hidden · weightᵀ + bias)) / temperature, over the first `vocab` rows."""

    vocab: int
    """Rows that the tokenizer knows; rows of the model beyond it do not exist for the loss."""
    scale: float = 1.0
    soft_cap: float | None = None
    temperature: float = 1.0


@dataclass(frozen=True)
class HeadWeights:
    """A head whose weights are at hand; of the student, or of a teacher."""

    weight_VH: Tensor
    bias_V: Tensor | None
    shape: HeadShape


@dataclass(frozen=True)
class Supervision:
    """What the loss of a micro-batch needs besides hidden states, all of it with C in front."""

    targets: Targets
    teacher_C: Tensor
    """int64: index into `heads`"""
    teacher_hidden_CG: Tensor | None = None
    heads: tuple[HeadWeights, ...] = ()
    """Of the teachers, in the order of TrainerWelcome.teachers; empty unless hidden states are sent."""
    teachers: int = 0
    """M, where the reverse KL is wanted for each of them; else 0"""


def log_probs(raw_NV: Tensor, shape: HeadShape) -> Tensor:
    """log p [N, V] of raw = hidden · weightᵀ + bias."""
    logits_NV = raw_NV * shape.scale if shape.scale != 1.0 else raw_NV
    if shape.soft_cap is not None:
        logits_NV = shape.soft_cap * torch.tanh(logits_NV / shape.soft_cap)
    if shape.temperature != 1.0:
        logits_NV = logits_NV / shape.temperature
    return logits_NV.log_softmax(1)


def project(hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    """hidden · weightᵀ + bias as fp32 [N, V]; products of bf16 are summed and kept in fp32."""
    if hidden_NH.is_cuda and hidden_NH.dtype == weight_VH.dtype != torch.float32:
        raw_NV = torch.mm(hidden_NH, weight_VH.t(), out_dtype=torch.float32)
    else:
        raw_NV = hidden_NH.float() @ weight_VH.float().t()
    return raw_NV if bias_V is None else raw_NV + bias_V.float()


def _known_rows(head: HeadWeights, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Weight and bias below `vocab`; made fp32 once where products of bf16 cannot be summed in fp32."""
    weight_VH = head.weight_VH.detach()[: head.shape.vocab]
    bias_V = None if head.bias_V is None else head.bias_V.detach()[: head.shape.vocab]
    return (weight_VH if device.type == "cuda" else weight_VH.float()), bias_V


def token_logp(hidden_CH: Tensor, head: HeadWeights, token_C: Tensor, chunk: int) -> Tensor:
    """log p(y) [C] without gradient, in chunks of `chunk` tokens."""
    with torch.no_grad():
        weight_VH, bias_V = _known_rows(head, hidden_CH.device)
        parts = [
            log_probs(project(hidden_NH, weight_VH, bias_V), head.shape).gather(1, token_N.unsqueeze(1))
            for hidden_NH, token_N in zip(hidden_CH.split(chunk), token_C.split(chunk), strict=True)
        ]
        return torch.cat(parts).squeeze(1) if parts else hidden_CH.new_zeros(0, dtype=torch.float32)


def _teacher_logp(part: Supervision) -> Tensor | None:
    """log q [N, V] of one chunk; None when the objective does not go over the whole vocabulary."""
    if part.teacher_hidden_CG is None or not part.heads:
        return None
    if len(part.heads) == 1:
        return _one_teacher(part.teacher_hidden_CG, part.heads[0])
    hidden_NG = part.teacher_hidden_CG
    logq_NV = hidden_NG.new_empty((hidden_NG.shape[0], part.heads[0].shape.vocab), dtype=torch.float32)
    for index, head in enumerate(part.heads):
        mine_N = part.teacher_C == index
        logq_NV[mine_N] = _one_teacher(hidden_NG[mine_N], head)
    return logq_NV


def _one_teacher(hidden_NG: Tensor, head: HeadWeights) -> Tensor:
    weight_VG, bias_V = _known_rows(head, hidden_NG.device)
    return log_probs(project(hidden_NG[:, : weight_VG.shape[1]], weight_VG, bias_V), head.shape)


def _chunks(work: Supervision, count: int, chunk: int) -> Iterator[tuple[slice, Supervision]]:
    """Slices of C and what belongs to them."""
    for start in range(0, count, chunk):
        part = slice(start, min(start + chunk, count))
        cut = {
            field.name: value[part]
            for field in fields(Targets)
            if isinstance(value := getattr(work.targets, field.name), Tensor)
        }
        hidden = None if work.teacher_hidden_CG is None else work.teacher_hidden_CG[part]
        targets = replace(work.targets, **cut)
        yield part, Supervision(targets, work.teacher_C[part], hidden, work.heads, work.teachers)


def _record(stats: Tensor, sums: dict[str, Tensor]) -> None:
    """Add a chunk's sums to the statistics vector."""
    for name, value in sums.items():
        if name == "rho_max":
            stats[RHO_MAX] = torch.maximum(stats[RHO_MAX], value)
        elif name == "by_teacher":
            stats[RHO_MAX + 1 :] += value
        else:
            stats[STATS.index(name)] += value


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_CH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        shape: HeadShape,
        work: Supervision,
        objective: Objective,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        rows_VH, rows_V = _known_rows(HeadWeights(weight_VH, bias_V, shape), hidden_CH.device)
        loss = hidden_CH.new_zeros((), dtype=torch.float32)
        stats = hidden_CH.new_zeros(RHO_MAX + 1 + 2 * work.teachers, dtype=torch.float32)
        grad_hidden_CH = torch.zeros_like(hidden_CH, dtype=torch.float32)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if weight_VH.requires_grad else None
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        for part, piece in _chunks(work, hidden_CH.shape[0], chunk):
            hidden_NH = hidden_CH[part].detach()
            raw_NV = project(hidden_NH, rows_VH, rows_V).requires_grad_()
            total, sums, grad_NV = _chunk_loss(raw_NV, shape, piece, objective)
            loss += total
            _record(stats, sums)
            grad_hidden_CH[part] = grad_NV.to(rows_VH.dtype) @ rows_VH
            if grad_weight_VH is not None:
                _add_product(grad_weight_VH[: shape.vocab], grad_NV, hidden_NH.to(rows_VH.dtype))
            if grad_bias_V is not None:
                grad_bias_V[: shape.vocab] += grad_NV.sum(0)
        ctx.grads = (grad_hidden_CH, grad_weight_VH, grad_bias_V)
        ctx.dtype = weight_VH.dtype
        ctx.mark_non_differentiable(stats)
        return loss, stats

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if grad is None else grad.mul_(grad_loss).to(ctx.dtype) for grad in ctx.grads]
        ctx.grads = None
        return (*scaled, None, None, None, None)


def _add_product(sum_VH: Tensor, grad_NV: Tensor, hidden_NH: Tensor) -> None:
    """sum += gradᵀ · hidden, in the precision of `hidden`; without a [V, H] of its own where that is fp32."""
    if hidden_NH.dtype == sum_VH.dtype:
        sum_VH.addmm_(grad_NV.t(), hidden_NH)
    else:
        sum_VH += grad_NV.t().to(hidden_NH.dtype) @ hidden_NH


def _chunk_loss(
    raw_NV: Tensor, shape: HeadShape, piece: Supervision, objective: Objective
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Summed loss of one chunk, its statistics, and the gradient of the sum in `raw_NV`."""
    with torch.no_grad():
        targets = replace(piece.targets, teacher_logp_NV=_teacher_logp(piece))
    with torch.enable_grad():
        logp_NV = log_probs(raw_NV, shape)
        loss_N, terms = objective(logp_NV, targets)
        total = loss_N.sum()
    (grad_NV,) = torch.autograd.grad(total, raw_NV)
    sums = diagnose(logp_NV.detach(), targets)
    sums |= {name: value.sum() for name, value in terms.items()}
    if piece.teachers and "reverse_kl" in terms:
        sums["by_teacher"] = _by_teacher(terms["reverse_kl"], piece)
    return total.detach(), sums | {"loss": total.detach()}, grad_NV


def _by_teacher(kl_N: Tensor, piece: Supervision) -> Tensor:
    """[2M]: sums of each teacher's reverse KL, then counts of the student's tokens that it marked."""
    sums_2M = kl_N.new_zeros(2, piece.teachers)
    own_N = own(piece.targets).to(kl_N.dtype)
    return sums_2M.index_add_(1, piece.teacher_C, torch.stack([kl_N, own_N])).flatten()


def chunked_loss(
    hidden_CH: Tensor, head: HeadWeights, work: Supervision, objective: Objective, chunk: int
) -> tuple[Tensor, Tensor]:
    """Sum of the objective over C tokens, and the statistics vector (see RHO_MAX).

    The sum can be differentiated once, with respect to `hidden_CH`, the head's weight and its bias. C may be
    0: then both are zero, and so are the gradients.
    """
    loss, stats = _ChunkedLoss.apply(
        hidden_CH, head.weight_VH, head.bias_V, head.shape, work, objective, chunk
    )
    return loss, stats
