"""One optimizer step: the micro-batches of this rank, one denominator over all ranks, ZeRO-3's update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from student_trainer.batch import MicroBatch, Rewards, advantages, collate, rewards_of
from student_trainer.head import RHO_MAX, HeadWeights, Loss
from student_trainer.objectives.config import ObjectiveConfig
from student_trainer.objectives.diagnostics import COUNTS, MEANS, STATS
from student_trainer.objectives.divergences import build, coefficients, discount
from student_trainer.objectives.targets import Targets
from student_trainer.ranks import Ranks
from sync.errors import DataError
from sync.wire import Rows, TrainBatch, unpack


def loss_of(objective: ObjectiveConfig, teachers: Sequence[str], heads: tuple[HeadWeights, ...] = ()) -> Loss:
    """The loss of a run; `heads`: the teachers' output heads, for full-vocabulary objectives."""
    return Loss(
        objective=build(objective),
        discount=discount(objective),
        heads=heads,
        teachers=tuple(teachers),
        coefficients=coefficients(objective, teachers),
        task=objective.task is not None,
    )


def train_step(engine: Any, batch: TrainBatch, loss: Loss, ranks: Ranks) -> dict[str, float]:
    """Train on this rank's share of `batch`; metrics of the whole step, the same on every rank. Collective.

    Loss sums are divided by the step's denominator, whatever the micro-batches, ranks and padding; DeepSpeed
    averages gradients over the ranks, hence the factor. A rank without rows runs a zero-weight forward
    pass, so that collectives stay aligned.
    DeepSpeed leaves out the update of a step whose gradient is not finite; `skipped` is 1 then.
    """
    if batch.denominator < 1 or not batch.micro_batches:
        raise DataError(
            f"batch of {batch.version} has denominator {batch.denominator} and {len(batch.micro_batches)} "
            "micro-batches: a step needs at least one supervised token and one (maybe empty) micro-batch"
        )
    scale, vocab = ranks.world_size / batch.denominator, engine.module.head.shape.vocab
    rewards = rewards_of(batch, ranks) if loss.task else None
    parts: list[tuple[Tensor, dict[str, float]]] = []
    for index, rows in enumerate(batch.micro_batches):
        micro = collate(rows, batch.version.step, vocab)
        targets = weighted(micro, rows, loss, rewards, batch.denominator).to(ranks.device)
        engine.set_gradient_accumulation_boundary(index + 1 == len(batch.micro_batches))
        total, part = engine(
            micro.tokens_RL.to(ranks.device), micro.positions_C.to(ranks.device), targets, loss
        )
        engine.backward(total * scale)
        parts.append((part.double().cpu(), micro.counts))
    engine.step()
    metrics = summarise(parts, batch.denominator, ranks, loss.teachers)
    if rewards is not None and rewards.mean is not None:
        metrics["reward_mean"] = rewards.mean
    applied = bool(engine.was_step_applied())
    if applied and not math.isfinite(metrics["loss"]):
        raise DataError(
            f"the loss of step {batch.version.step + 1} is {metrics['loss']} and its update was applied: the "
            "weights are lost, go on from a checkpoint with a lower learning rate"
        )
    norm = engine.get_global_grad_norm()  # before clipping; None: DeepSpeed did not compute it
    metrics |= {"grad_norm": math.nan if norm is None else float(norm), "lr": float(engine.get_lr()[0])}
    return metrics | {"skipped": float(not applied)}


def weighted(micro: MicroBatch, rows: Rows, loss: Loss, rewards: Rewards | None, denominator: int) -> Targets:
    """The targets of `micro` with each token's weights: λ·c and the task's credit, times the row's weight.

    Raises DataError for an unknown teacher.
    """
    targets = micro.targets
    assert targets.teacher_N is not None
    highest = int(targets.teacher_N.max()) if targets.teacher_N.numel() else 0
    known = len(loss.heads) or len(loss.teachers)
    if known and highest >= known:
        raise DataError(
            f"a row was scored by teacher {highest}, the trainer knows {known}: "
            "Rows.teacher must index TrainerWelcome.teachers"
        )
    coefficient_C = torch.tensor(loss.coefficients)[targets.teacher_N] if loss.coefficients else None
    advantage_C = None if rewards is None else advantages(rows, rewards, denominator)
    if rows.weight is not None:
        weight_C = torch.tensor(unpack(rows.weight))[targets.row_N]
        coefficient_C = weight_C if coefficient_C is None else weight_C * coefficient_C
        advantage_C = None if advantage_C is None else weight_C * advantage_C
    return replace(targets, coefficient_N=coefficient_C, advantage_N=advantage_C)


def summarise(
    parts: list[tuple[Tensor, dict[str, float]]], denominator: int, ranks: Ranks, teachers: Sequence[str]
) -> dict[str, float]:
    """Metrics of the step, `parts`: statistics vector and counts of each micro-batch. Collective.

    A mean over no tokens is left out.
    """
    stats = torch.stack([stats for stats, _ in parts])
    counted = [sum(counts[name] for _, counts in parts) for name in COUNTS]
    highest = [max(counts["age_max"] for _, counts in parts), float(stats[:, RHO_MAX].max())]
    own = torch.cat([torch.tensor([*counted, *highest], dtype=torch.float64), stats.sum(0)])
    every, begin = ranks.gather(own), len(COUNTS) + 2
    age_max, rho_max = every[:, begin - 2 : begin].max(0).values.tolist()
    summed = every.sum(0).tolist()
    by_teacher, total = summed[begin + RHO_MAX + 1 :], dict(zip(COUNTS, summed, strict=False))
    total |= zip(STATS, summed[begin : begin + RHO_MAX], strict=True)
    total["denominator"] = denominator
    shares = {metric: (total[above], total[below]) for metric, (above, below) in MEANS.items()}
    if by_teacher:
        pairs = zip(by_teacher, by_teacher[len(teachers) :], strict=False)
        shares |= {f"reverse_kl/{name}": pair for name, pair in zip(teachers, pairs, strict=True)}
    metrics = {name: above / below for name, (above, below) in shares.items() if below > 0}
    if (squared := metrics.pop("rho_squared_mean", 0.0)) > 0:
        metrics["effective_sample_size"] = metrics["rho_mean"] ** 2 / squared
    if "truncation_rate" in metrics:
        metrics["eos_rate"] = 1.0 - metrics["truncation_rate"]
    metrics |= {"tokens": total["tokens"], "tokens_by_teacher": total["tokens"] - total["own_tokens"]}
    return metrics | {"rows": total["rows"], "rho_max": rho_max, "age_max": age_max}
