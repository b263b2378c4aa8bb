"""One optimizer step: the micro-batches of this rank, one global denominator, ZeRO-3's update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from student_trainer.batch import Counts, MicroBatch, collate
from student_trainer.head import RHO_MAX, HeadWeights
from student_trainer.model import Job
from student_trainer.objectives.importance import Discount
from student_trainer.objectives.terms import STATS, Objective
from student_trainer.ranks import Ranks
from student_trainer.rewards import Rewards, advantages, rewards_of
from sync.errors import DataError
from sync.wire import Rows, TrainBatch, unpack

_COUNTED: Final = ("rows", "tokens", "truncated", "age", "padded")


@dataclass(frozen=True)
class LossSpec:
    """What is optimised, for the whole run."""

    objective: Objective
    discount: Discount | None
    """How later tokens are credited; None: credit is immediate."""
    heads: tuple[HeadWeights, ...]
    """Of the teachers, for objectives over the whole vocabulary; else empty."""
    vocab: int
    teachers: tuple[str, ...] = ()
    """Names, as Rows.teacher indexes them; the reverse KL of each is told apart when there are several."""
    coefficients: tuple[float, ...] = ()
    """λ·c of each teacher; empty: 1 for all."""
    task: bool = False
    """Whether rollouts' rewards are part of the loss."""


def train_step(engine: Any, batch: TrainBatch, spec: LossSpec, ranks: Ranks) -> dict[str, float]:
    """Train on this rank's share of `batch`; metrics of the whole step, the same on every rank. Collective.

    Loss sums are divided by the step's denominator, whatever the micro-batches, ranks and padding; DeepSpeed
    averages gradients over the ranks, hence the factor. A rank without rows runs a forward pass of no weight.
    DeepSpeed leaves out the update of a step whose gradient is not finite; `skipped` is 1 then.
    """
    if batch.denominator < 1 or not batch.micro_batches:
        raise DataError(
            f"batch of {batch.version} has denominator {batch.denominator} and {len(batch.micro_batches)} "
            "micro-batches: a step needs at least one supervised token and one (maybe empty) micro-batch"
        )
    scale = ranks.world_size / batch.denominator
    rewards = rewards_of(batch, ranks) if spec.task else None
    stats, counts = torch.zeros(RHO_MAX + 1 + 2 * num_tracked_teachers(spec)), []
    for index, rows in enumerate(batch.micro_batches):
        micro = collate(rows, batch.version.step, spec.vocab)
        micro = weighed(micro, rows, spec, rewards, batch.denominator).to(ranks.device)
        engine.set_gradient_accumulation_boundary(index + 1 == len(batch.micro_batches))
        loss, part = engine(micro.tokens_RL, micro.positions_C, job(micro, spec))
        engine.backward(loss * scale)
        stats = merge(stats, part.cpu())
        counts.append(micro.counts)
    engine.step()
    metrics = summarise(stats, counts, batch.denominator, ranks, spec.teachers)
    if rewards is not None and rewards.mean is not None:
        metrics["reward_mean"] = rewards.mean
    applied = bool(engine.was_step_applied())
    if applied and not math.isfinite(metrics["loss"]):
        raise DataError(
            f"the loss of step {batch.version.step + 1} is {metrics['loss']} and its update was applied: the "
            "weights are lost, go on from a checkpoint with a lower learning rate"
        )
    norm = {"grad_norm": _norm(engine), "lr": float(engine.get_lr()[0])}
    return metrics | norm | {"skipped": float(not applied)}


def weighed(
    micro: MicroBatch, rows: Rows, spec: LossSpec, rewards: Rewards | None, denominator: int
) -> MicroBatch:
    """`micro` with what each token counts for: λ·c and the task's credit, both times the row's weight.

    Raises DataError for an unknown teacher.
    """
    highest = int(micro.teacher_C.max()) if micro.teacher_C.numel() else 0
    known = len(spec.heads) or len(spec.teachers)
    if known and highest >= known:
        raise DataError(
            f"a row was scored by teacher {highest}, the trainer knows {known}: "
            "Rows.teacher must index TrainerWelcome.teachers"
        )
    coefficient_C = torch.tensor(spec.coefficients)[micro.teacher_C] if spec.coefficients else None
    advantage_C = None if rewards is None else advantages(rows, rewards, denominator)
    if rows.weight is not None:
        weight_C = torch.tensor(unpack(rows.weight))[micro.row_C]
        coefficient_C = weight_C if coefficient_C is None else weight_C * coefficient_C
        advantage_C = None if advantage_C is None else weight_C * advantage_C
    targets = replace(micro.targets, coefficient_N=coefficient_C, advantage_N=advantage_C)
    return replace(micro, targets=targets)


def num_tracked_teachers(spec: LossSpec) -> int:
    """Teachers whose reverse KL is summed one by one: none when there is only one."""
    return len(spec.teachers) if len(spec.teachers) > 1 else 0


def job(micro: MicroBatch, spec: LossSpec) -> Job:
    """What the head is asked to do with one micro-batch."""
    return Job(micro, spec.objective, spec.discount, spec.heads, num_tracked_teachers(spec))


def merge(left: Tensor, right: Tensor) -> Tensor:
    """Statistics vectors of two micro-batches as one."""
    merged = left + right
    merged[RHO_MAX] = torch.maximum(left[RHO_MAX], right[RHO_MAX])
    return merged


def summarise(
    stats: Tensor, counts: list[Counts], denominator: int, ranks: Ranks, teachers: Sequence[str] = ()
) -> dict[str, float]:
    """Metrics of the step from the sums of all ranks; a mean over no tokens is left out. Collective."""
    own = [sum(getattr(count, name) for count in counts) for name in _COUNTED]
    age_max = float(max(count.age_max for count in counts))
    every = ranks.gather(
        torch.cat([stats.double().cpu(), torch.tensor([*own, age_max], dtype=torch.float64)])
    )
    rho_max, age_max = float(every[:, RHO_MAX].max()), float(every[:, -1].max())
    summed = every.sum(0).tolist()
    rows, tokens, truncated, age, padded = summed[-1 - len(_COUNTED) : -1]
    total = dict(zip(STATS, summed[:RHO_MAX], strict=True))
    shares = {
        "loss": (total["loss"], denominator),
        "reverse_kl": (total["reverse_kl"], total["own_tokens"]),
        "student_entropy": (total["student_entropy"], tokens),
        "teacher_entropy": (total["teacher_entropy"], total["teacher_entropy_tokens"]),
        "rho_mean": (total["rho"], total["own_tokens"]),
        "effective_sample_size": (total["rho"] ** 2, total["rho_squared"] * total["own_tokens"]),
        "mismatch_kl": (total["fresh_kl"], total["fresh_tokens"]),
        "score_gap": (total["score_gap"], total["score_gap_tokens"]),
        "student_mass": (total["student_mass"], total["support_tokens"]),
        "teacher_mass": (total["teacher_mass"], total["support_tokens"]),
        "topk_overlap": (total["overlap"], total["overlap_tokens"]),
        "truncation_rate": (truncated, rows),
        "eos_rate": (rows - truncated, rows),
        "age_mean": (age, tokens),
        "tokens_per_slot": (tokens, padded),
        **_of_teachers(summed[RHO_MAX + 1 : -1 - len(_COUNTED)], teachers),
    }
    metrics = {name: above / below for name, (above, below) in shares.items() if below > 0}
    counted = {"tokens": tokens, "tokens_by_teacher": tokens - total["own_tokens"], "rows": rows}
    return metrics | counted | {"rho_max": rho_max, "age_max": age_max}


def _of_teachers(sums: list[float], teachers: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Reverse KL of each teacher's tokens, as sum and count; nothing unless they were told apart."""
    if not sums:
        return {}
    half = len(teachers)
    return {f"reverse_kl/{name}": (sums[i], sums[half + i]) for i, name in enumerate(teachers)}


def _norm(engine: Any) -> float:
    """Norm of the step's gradient before clipping; NaN when DeepSpeed did not compute it."""
    norm = engine.get_global_grad_norm()
    return float("nan") if norm is None else float(norm)
