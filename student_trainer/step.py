"""One optimizer step: the micro-batches of this rank, one global denominator, ZeRO-3's update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from student_trainer.batch import Counts, MicroBatch, collate
from student_trainer.head import RHO_MAX, HeadWeights
from student_trainer.model import Job
from student_trainer.objectives.terms import STATS, Objective
from student_trainer.ranks import Ranks
from sync.errors import DataError
from sync.wire import TrainBatch

_COUNTED: Final = ("rows", "tokens", "truncated", "age", "padded")


@dataclass(frozen=True)
class Aim:
    """What is optimised, for the whole run."""

    objective: Objective
    gamma: float
    heads: tuple[HeadWeights, ...]
    """Of the teachers, for objectives over the whole vocabulary; else empty."""
    vocab: int


def train_step(engine: Any, batch: TrainBatch, aim: Aim, ranks: Ranks) -> dict[str, float]:
    """Train on this rank's share of `batch`; metrics of the whole step, the same on every rank. Collective.

    Loss sums are divided by the step's denominator, whatever the micro-batches, ranks and padding; DeepSpeed
    averages gradients over the ranks, hence the factor. A rank without rows runs a forward pass of no weight.
    """
    if batch.denominator < 1 or not batch.micro_batches:
        raise DataError(
            f"batch of {batch.version} has denominator {batch.denominator} and {len(batch.micro_batches)} "
            "micro-batches: a step needs at least one supervised token and one (maybe empty) micro-batch"
        )
    scale = ranks.world_size / batch.denominator
    stats, counts = torch.zeros(len(STATS) + 1), []
    for index, rows in enumerate(batch.micro_batches):
        micro = collate(rows, batch.version.step, aim.vocab).to(ranks.device)
        engine.set_gradient_accumulation_boundary(index + 1 == len(batch.micro_batches))
        loss, part = engine(micro.tokens_RL, micro.positions_C, job(micro, aim))
        engine.backward(loss * scale)
        stats = merge(stats, part.cpu())
        counts.append(micro.counts)
    engine.step()
    metrics = summarise(stats, counts, batch.denominator, ranks)
    if not math.isfinite(metrics["loss"]):
        raise DataError(
            f"the loss of step {batch.version.step + 1} is {metrics['loss']}: the weights are lost, "
            "go on from a checkpoint with a lower learning rate"
        )
    return metrics | {"grad_norm": _norm(engine), "lr": float(engine.get_lr()[0])}


def job(micro: MicroBatch, aim: Aim) -> Job:
    """What the head is asked to do with one micro-batch. Raises DataError for a teacher without a head."""
    highest = int(micro.teacher_C.max()) if micro.teacher_C.numel() else 0
    if aim.heads and highest >= len(aim.heads):
        raise DataError(
            f"a row was scored by teacher {highest}, the trainer knows {len(aim.heads)}: "
            "Rows.teacher must index TrainerWelcome.teachers"
        )
    return Job(micro, aim.objective, aim.gamma, aim.heads)


def merge(left: Tensor, right: Tensor) -> Tensor:
    """Statistics vectors of two micro-batches as one."""
    return torch.cat([left[:RHO_MAX] + right[:RHO_MAX], torch.maximum(left[RHO_MAX:], right[RHO_MAX:])])


def summarise(stats: Tensor, counts: list[Counts], denominator: int, ranks: Ranks) -> dict[str, float]:
    """Metrics of the step from the sums of all ranks; a mean over no tokens is left out. Collective."""
    own = [sum(getattr(count, name) for count in counts) for name in _COUNTED]
    age_max = float(max(count.age_max for count in counts))
    every = ranks.gather(
        torch.cat([stats.double().cpu(), torch.tensor([*own, age_max], dtype=torch.float64)])
    )
    rho_max, age_max = float(every[:, RHO_MAX].max()), float(every[:, -1].max())
    summed = every.sum(0).tolist()
    rows, tokens, truncated, age, padded = summed[RHO_MAX + 1 : -1]
    total = dict(zip(STATS, summed[:RHO_MAX], strict=True))
    shares = {
        "loss": (total["loss"], denominator),
        "reverse_kl": (total["reverse_kl"], tokens),
        "student_entropy": (total["student_entropy"], tokens),
        "teacher_entropy": (total["teacher_entropy"], total["teacher_entropy_tokens"]),
        "rho_mean": (total["rho"], tokens),
        "effective_sample_size": (total["rho"] ** 2, total["rho_squared"] * tokens),
        "mismatch_kl": (total["fresh_kl"], total["fresh_tokens"]),
        "student_mass": (total["student_mass"], total["support_tokens"]),
        "teacher_mass": (total["teacher_mass"], total["support_tokens"]),
        "topk_overlap": (total["overlap"], total["overlap_tokens"]),
        "truncation_rate": (truncated, rows),
        "eos_rate": (rows - truncated, rows),
        "age_mean": (age, tokens),
        "tokens_per_slot": (tokens, padded),
    }
    metrics = {name: above / below for name, (above, below) in shares.items() if below > 0}
    return metrics | {"tokens": tokens, "rows": rows, "rho_max": rho_max, "age_max": age_max}


def _norm(engine: Any) -> float:
    """Norm of the step's gradient before clipping; NaN when DeepSpeed did not compute it."""
    norm = engine.get_global_grad_norm()
    return float("nan") if norm is None else float(norm)
