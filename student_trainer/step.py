"""One optimizer step: tensors of this rank's rows, one denominator over all ranks, ZeRO-3's update.

Letters: R rows, L longest prompt + completion, C completion tokens of all rows, K ids per token, G hidden
size of the teacher. Rows lie end to end in one sequence, R = 1, and do not see each other (`varlen`); or they
are padded on the right: with causal attention no supervised position sees padding. Tokens that an environment
wrote are context alone: `collate` takes them out of everything that is [C].
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from student_trainer.head import RHO_MAX, Loss
from student_trainer.objectives.config import ObjectiveConfig, TaskReward
from student_trainer.objectives.divergences import Targets, build, discount
from student_trainer.objectives.token_statistics import COUNTS, MEANS, STATS
from student_trainer.ranks import Ranks
from student_trainer.routing import LIVE, placed
from student_trainer.sequence_split import SequenceGroup, SplitRows, split
from student_trainer.varlen import PackedRows
from sync.base.errors import DataError
from sync.base.tokenizers import OTHER
from sync.wire import Rows, Segment, TrainBatch, unpack
from sync.wire.head import OutputHead, tensor_of

_EQUAL: Final = 1e-6
"""Standard deviation of rewards, as a share of their mean or of 1, up to which they are the same number."""
MULTIPLE: Final = 64
"""Packed tokens are padded to a multiple of it. oneDNN compiles a product for every shape that it meets: rows
of any length cost it 26 compilations a step, 60 ms of 400, and a megabyte each in its cache. On GPUs the sums
over tokens are of whole tiles."""


def loss_of(
    objective: ObjectiveConfig,
    teachers: Sequence[str],
    heads: tuple[OutputHead, ...] = (),
    ends: tuple[int, ...] = (),
    first_bytes: Callable[[], Tensor] | None = None,
) -> Loss:
    """The loss of a run.

    `heads`: the teachers' output heads, for full-vocabulary objectives; `ends`: ids that end a completion;
    `first_bytes`: see Loss.
    """
    factors = [objective.coefficient * objective.teacher_coefficients.get(name, 1.0) for name in teachers]
    return Loss(
        objective=build(objective, ends),
        discount=discount(objective),
        heads=heads,
        ends=ends,
        first_bytes=first_bytes,
        teachers=tuple(teachers),
        coefficients=tuple(factors) if any(factor != 1.0 for factor in factors) else (),
        task=objective.task,
    )


def train_step(
    engine: Any, batch: TrainBatch, loss: Loss, ranks: Ranks, clock: Stopwatch | None = None
) -> dict[str, float]:
    """Train on this rank's share of `batch`; metrics of the whole step, the same on every rank. Collective.

    Loss sums are divided by the step's denominator, whatever the micro-batches, ranks and padding; DeepSpeed
    averages gradients over the ranks, hence the factor. A rank without rows runs a zero-weight forward
    pass, so that collectives stay aligned. Ranks of a group share rows: each has the loss of its positions.
    DeepSpeed leaves out the update of a step whose gradient is not finite; `skipped` is 1 then.
    `clock` times the parts "forward", "backward" and "optimizer".
    """
    clock = Stopwatch(ranks.device) if clock is None else clock
    scale, student = ranks.world_size / batch.denominator, engine.module
    rewards = None if loss.task is None else rewards_of(batch, ranks, student.group)
    parts: list[tuple[Tensor, dict[str, float]]] = []
    for index, rows in enumerate(batch.micro_batches):
        micro = collate(rows, batch.version.step, student.head.shape.vocab, student.varlen)
        micro = replace(micro, targets=weighted(micro.targets, rows, loss, rewards, batch.denominator))
        if student.group is not None:
            micro = divided(micro, student.group)
        targets = micro.targets.each(lambda values: values.to(ranks.device))
        engine.set_gradient_accumulation_boundary(index + 1 == len(batch.micro_batches))
        tokens_RL, positions_C = micro.tokens_RL.to(ranks.device), micro.positions_C.to(ranks.device)
        with student.routed(micro.routes_SMK):
            clock.begin("forward")
            total, part = engine(tokens_RL, positions_C, targets, loss, micro.layout)
            clock.begin("backward")
            engine.backward(total * scale)
            clock.begin(None)
        parts.append((part.double().cpu(), micro.counts))
    clock.begin("optimizer")
    engine.step()
    clock.begin(None)
    metrics = summarise(parts, batch.denominator, ranks, loss.teachers)
    if rewards is not None and rewards.mean is not None:
        metrics |= {"reward_mean": rewards.mean, "reward_std": rewards.deviation}
    applied = bool(engine.was_step_applied())
    if applied and not math.isfinite(metrics["loss"]):
        raise DataError(
            f"the loss of step {batch.version.step + 1} is {metrics['loss']} and its update was applied: the "
            "weights are lost, go on from a checkpoint with a lower learning rate"
        )
    norm = engine.get_global_grad_norm()  # before clipping; None: DeepSpeed did not compute it
    metrics |= {"grad_norm": math.nan if norm is None else float(norm), "lr": float(engine.get_lr()[0])}
    return metrics | {"skipped": float(not applied)}


# --- from rows to tensors -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of one rank; made by `collate`, consumed by the student (`engine.Student`)."""

    tokens_RL: Tensor
    """int64; at least one row, so that a rank without rows runs the same collectives; R = 1 where packed"""
    positions_C: Tensor
    """int64: place in R · L of the hidden state that predicts each completion token"""
    targets: Targets
    """of all C completion tokens"""
    counts: dict[str, float]
    """the sums named in `token_statistics.COUNTS`, and `age_max`"""
    layout: PackedRows | SplitRows | None = None
    """rows that lie end to end, or over several ranks; None where they are padded, and whole"""
    routes_SMK: Tensor | None = None
    """experts of the S = R · L places in each of M layers, see `routing.placed`; None: the routers choose"""


def collate(rows: Rows, step: int, vocab: int, varlen: bool = False) -> MicroBatch:
    """Tensors of `rows`, trained on top of the weights of `step`; ids must be below `vocab`.

    `varlen`: rows lie end to end; else they are padded.
    The controller checked lengths before it packed the rows. Raises DataError for an unknown id or a number
    that is not finite.
    """
    prompt_R, completion_R = (
        unpack(lens).astype(np.int64) for lens in (rows.prompt_lens, rows.completion_lens)
    )
    flat, length_R = unpack(rows.tokens), prompt_R + completion_R
    tokens_RL, begin_R, packed = laid_out(flat, length_R, varlen)
    row_C = np.repeat(np.arange(completion_R.size), completion_R)
    offset_C = np.arange(row_C.size) - (completion_R.cumsum() - completion_R)[row_C]
    place_C = (begin_R + prompt_R)[row_C] + offset_C
    age_C = step - unpack(rows.token_step)
    targets = _targets(rows, tokens_RL.ravel()[place_C], row_C, age_C)
    if rows.own is not None:
        own_C = in_loss(rows)
        place_C, age_C = place_C[own_C], age_C[own_C]
        targets = targets.each(itemgetter(torch.from_numpy(own_C)))
    sets = (ids.numpy() for ids in (targets.support_NK, targets.mask_NK) if ids is not None)
    highest = max(int(np.max(ids, initial=0)) for ids in (flat, *sets))
    lowest = int(flat.min(initial=0))
    if highest >= vocab or lowest < 0:
        raise DataError(
            f"batch with rows {rows.ids[:2]} … carries token id {lowest if lowest < 0 else highest}, the "
            f"student's tokenizer has {vocab} ids: student, teacher and prompts must share one tokenizer"
        )
    counts = {
        "rows": length_R.size,
        "tokens": place_C.size,
        "truncated": 0 if rows.truncated is None else int(unpack(rows.truncated).sum()),
        "age": float(age_C.sum()),
        "filled": flat.size,
        "slots": tokens_RL.size,
        "rescored": sum(kept is None for kept in rows.kept or ()),
        "age_max": int(age_C.max(initial=0)),
    }
    routes_SMK = None
    if rows.routes is not None and rows.route_lens is not None:
        experts = unpack(rows.routes)
        recorded = np.split(experts, unpack(rows.route_lens).cumsum()[:-1])
        shape = (tokens_RL.size, *experts.shape[1:])
        routes_SMK = placed(recorded, begin_R.tolist(), length_R.tolist(), shape)
    tokens, positions_C = torch.from_numpy(tokens_RL), torch.from_numpy(place_C - 1)
    return MicroBatch(tokens, positions_C, targets, counts, packed, routes_SMK)


def divided(micro: MicroBatch, group: SequenceGroup) -> MicroBatch:
    """What one rank of the group computes of a micro-batch; its first rank alone counts the rows."""
    assert not isinstance(micro.layout, SplitRows)
    shape = micro.tokens_RL.shape
    tokens_RL, positions_C, layout = split(group, micro.tokens_RL, micro.positions_C, micro.layout)
    counts = dict.fromkeys(micro.counts, 0.0) if group.rank else {**micro.counts}
    counts["slots"] = tokens_RL.numel()
    routes_SMK = micro.routes_SMK
    if routes_SMK is not None:
        routes_SMK = layout.part(routes_SMK.unflatten(0, shape), LIVE).flatten(0, 1)
    targets = micro.targets.each(itemgetter(layout.index_C))
    return MicroBatch(tokens_RL, positions_C, targets, counts, layout, routes_SMK)


def laid_out(
    flat: np.ndarray, length_R: np.ndarray, varlen: bool
) -> tuple[np.ndarray, np.ndarray, PackedRows | None]:
    """Tokens of the rows in `flat` as [R, L], end to end or padded, where in R · L each row begins, and
    the lengths of those that lie end to end: behind them each token of padding is a row.

    At least one row of two tokens, whatever there is.
    """
    if varlen:
        padding = -flat.size % MULTIPLE if flat.size else MULTIPLE
        lengths = (*length_R.tolist(), *[1] * padding)
        tokens_S = np.concatenate([flat, np.zeros(padding, flat.dtype)]).astype(np.int64)
        return tokens_S[None], length_R.cumsum() - length_R, PackedRows(lengths)
    tokens_RL = np.zeros((max(1, length_R.size), max(2, int(length_R.max(initial=0)))), np.int64)
    column_L = np.arange(tokens_RL.shape[1])
    tokens_RL[: length_R.size][column_L < length_R[:, None]] = flat
    return tokens_RL, np.arange(length_R.size) * tokens_RL.shape[1], None


def in_loss(rows: Rows) -> np.ndarray:
    """bool [C]: the token is in the loss: no environment wrote it."""
    if rows.own is None:
        return np.ones(int(unpack(rows.completion_lens).sum()), bool)
    return unpack(rows.own).astype(bool)


def _targets(rows: Rows, token_C: np.ndarray, row_C: np.ndarray, age_C: np.ndarray) -> Targets:
    """Targets of all completion tokens; S is the student's set where it was sent, else the teacher's."""
    ids, name = rows.teacher_topk_ids, "teacher_topk_logprob"
    if rows.student_topk_ids is not None:
        ids, name = rows.student_topk_ids, "student_topk_teacher_logprob"
    by_teacher_C = None if rows.by_teacher is None else unpack(rows.by_teacher).astype(bool)[row_C]
    fresh_C = age_C == 0
    if rows.off_path is not None:
        fresh_C &= unpack(rows.off_path) == 0
    if by_teacher_C is not None:
        fresh_C &= ~by_teacher_C
    behavior_logp_C, teacher_logp_C = _floats(rows, "behavior_logprob"), _floats(rows, "teacher_logprob")
    teacher_C = None if rows.teacher is None else torch.tensor(unpack(rows.teacher)[row_C], dtype=torch.int64)
    segment_C = None if rows.segment is None else torch.tensor(unpack(rows.segment))
    parted = None if rows.parted is None else np.unpackbits(unpack(rows.parted), axis=1, count=OTHER + 1)
    if teacher_logp_C is None:  # without a teacher no token is scored
        teacher_logp_C = behavior_logp_C
    elif segment_C is not None:  # an unscored token has d = 0 but for its age
        teacher_logp_C = torch.where(segment_C == Segment.UNSCORED, behavior_logp_C, teacher_logp_C)
    return Targets(
        token_N=torch.from_numpy(token_C),
        behavior_logp_N=behavior_logp_C,
        teacher_logp_N=teacher_logp_C,
        fresh_N=torch.from_numpy(fresh_C),
        support_NK=None if ids is None else torch.tensor(unpack(ids), dtype=torch.int64),
        support_logp_NK=_floats(rows, name),
        teacher_entropy_N=_floats(rows, "teacher_entropy"),
        by_teacher_N=None if by_teacher_C is None else torch.from_numpy(by_teacher_C),
        teacher_N=teacher_C,
        teacher_hidden_NG=_floats(rows, "teacher_hidden"),
        mask_NK=None if rows.mask is None else torch.from_numpy(rows.mask.padded()),
        row_N=torch.from_numpy(row_C),
        goes_on_N=None if segment_C is None else segment_C == Segment.GOES_ON,
        by_text_N=None if segment_C is None else segment_C != Segment.TOKEN,
        parted_NB=None if parted is None else torch.from_numpy(parted.astype(bool)),
    )


def _floats(rows: Rows, name: str) -> Any:
    """fp32 (bf16 stays bf16) tensor of an array of `rows`; None: not sent."""
    array = getattr(rows, name)
    if array is None:
        return None
    tensor = tensor_of(array) if array.dtype == "bf16" else tensor_of(array).float()
    if not bool(torch.isfinite(tensor).all()):
        raise DataError(f"{name} of a batch is not finite: the teacher or the rollout engine is broken")
    return tensor


# --- weights of tokens --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rewards:
    """What the rewards of one step sum up to, all ranks together."""

    mean: float | None
    """Over the student's rollouts with a reward; None: there are none"""
    tokens: float
    """M: supervised tokens of rollouts with a reward"""
    rollouts: float = 0.0
    """Rollouts with a reward"""
    deviation: float = 0.0
    """Standard deviation, over the same as `mean`"""


def rewards_of(batch: TrainBatch, ranks: Ranks, group: SequenceGroup | None = None) -> Rewards:
    """Rewards of the whole step, from this rank's share of it; of a group's, its first rank's. Collective.

    Raises DataError when no rollout has a reward, or one is not finite.
    """
    sums = np.zeros(5)
    for rows in batch.micro_batches if group is None or group.rank == 0 else []:
        if rows.reward is not None:
            reward_R, student_R = unpack(rows.reward), np.ones(rows.reward.shape[0], bool)
            if rows.by_teacher is not None:
                student_R = unpack(rows.by_teacher) == 0
            own_R = reward_R[student_R].astype(np.float64)
            sums += own_R.sum(), own_R @ own_R, own_R.size, in_loss(rows).sum(), reward_R.size
    total, squares, count, tokens, rollouts = ranks.gather(torch.from_numpy(sums)).sum(0).tolist()
    if tokens == 0 or not np.isfinite(total):
        raise DataError(
            f"the batch of {batch.version} has {count:.0f} rollouts with a reward, their sum is {total}: "
            "objective.task needs a finite reward; set prompts.reward_fn, take prompts of a task, or leave "
            "it out"
        )
    deviation = math.sqrt(max(0.0, squares - total**2 / count) / (count - 1)) if count > 1 else 0.0
    return Rewards(total / count if count else None, tokens, rollouts, deviation)


def advantages(
    rows: Rows, rewards: Rewards, denominator: int, task: TaskReward = TaskReward()
) -> Tensor | None:
    """(R − E − b)/s·w·N of every completion token [C]; None: these rows have no reward.

    b is the rows' own baseline where they carry one, else the mean of the step, and s the deviation beside
    it, or 1. E is the part of R that turns before the token's earned, which none of its tokens can change. w
    is 1/M, or 1/(rollouts with a reward · tokens of the rollout in the loss).
    """
    if rows.reward is None:
        return None
    length_R, kept_C = unpack(rows.completion_lens), in_loss(rows)
    baseline_R, deviation_R = np.full((2, length_R.size), [[rewards.mean or 0.0], [rewards.deviation]])
    if rows.baseline is not None:
        baseline_R = unpack(rows.baseline).astype(np.float64)
    if rows.deviation is not None:
        deviation_R = unpack(rows.deviation).astype(np.float64)
    row_C = np.repeat(np.arange(length_R.size), length_R)
    advantage_C = (unpack(rows.reward) - baseline_R)[row_C]
    if rows.earned is not None:
        advantage_C = advantage_C - unpack(rows.earned)
    share_R = np.full(length_R.size, 1.0 / rewards.tokens)
    if task.average == "rollouts":
        share_R = 1.0 / (rewards.rollouts * np.bincount(row_C, kept_C, length_R.size).clip(min=1))
    if task.scale == "std":
        differ_R = deviation_R > _EQUAL * np.abs(baseline_R).clip(min=1.0)
        share_R = np.where(differ_R, share_R / np.where(differ_R, deviation_R, 1.0), 0.0)
    advantage_C = (advantage_C * share_R[row_C] * denominator)[kept_C]
    return torch.from_numpy(advantage_C.astype(np.float32))


def weighted(targets: Targets, rows: Rows, loss: Loss, rewards: Rewards | None, denominator: int) -> Targets:
    """`targets` with each token's weights: λ·c and the task's credit, times the row's weight."""
    coefficient_C = torch.tensor(loss.coefficients)[targets.teacher_N] if loss.coefficients else None
    advantage_C = None
    if rewards is not None and loss.task is not None:
        advantage_C = advantages(rows, rewards, denominator, loss.task)
    if rows.weight is not None:
        weight_C = torch.tensor(unpack(rows.weight))[targets.row_N]
        coefficient_C = weight_C if coefficient_C is None else weight_C * coefficient_C
        advantage_C = None if advantage_C is None else weight_C * advantage_C
    return replace(targets, coefficient_N=coefficient_C, advantage_N=advantage_C)


# --- metrics ------------------------------------------------------------------------------------------------


class Stopwatch:
    """Times of one step, whose parts follow each other and may come again.

    On a GPU they are those of events among its kernels: a kernel ends after the call that launched it, and
    the host's clock would give its time to a later part.
    """

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:
        self._on_gpu = device.type == "cuda"
        self._times: list[tuple[str | None, Any]] = []

    def begin(self, part: str | None) -> None:
        """End what was timed, and begin `part`; with None nothing begins."""
        self._times.append((part, self._now()))

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> dict[str, float]:
        """Seconds of each part, once the last has ended; waits for a GPU to get there."""
        if self._on_gpu:
            self._times[-1][1].synchronize()
        totals: dict[str, float] = defaultdict(float)
        for (part, begun), (_, ended) in pairwise(self._times):
            if part is not None:
                totals[part] += begun.elapsed_time(ended) / 1000 if self._on_gpu else ended - begun
        return dict(totals)


def summarise(
    parts: list[tuple[Tensor, dict[str, float]]], denominator: int, ranks: Ranks, teachers: Sequence[str]
) -> dict[str, float]:
    """Metrics of the step, `parts`: statistics vector and counts of each micro-batch. Collective.

    A mean over no tokens is left out.
    """
    stats = torch.stack([stats for stats, _ in parts])
    counted = [sum(counts[name] for _, counts in parts) for name in COUNTS]
    highest = [max(counts["age_max"] for _, counts in parts), float(stats[:, RHO_MAX].max())]
    every = ranks.gather(torch.cat([torch.tensor([*highest, *counted], dtype=torch.float64), stats.sum(0)]))
    age_max, rho_max = every[:, :2].max(0).values.tolist()
    summed = every.sum(0).tolist()[2:]
    names = (*COUNTS, *STATS)
    by_teacher = summed[len(names) + 1 :]
    total = dict(zip(names, summed, strict=False)) | {"denominator": denominator}
    shares = {metric: (total[above], total[below]) for metric, (above, below) in MEANS.items()}
    if not teachers:
        del shares["reverse_kl"]
    if by_teacher:
        pairs = zip(by_teacher, by_teacher[len(teachers) :], strict=False)
        shares |= {f"reverse_kl/{name}": pair for name, pair in zip(teachers, pairs, strict=True)}
    metrics = {name: above / below for name, (above, below) in shares.items() if below > 0}
    if (squared := metrics.pop("rho_squared_mean", 0.0)) > 0:
        metrics["effective_sample_size"] = metrics["rho_mean"] ** 2 / squared
    if "truncation_rate" in metrics:
        metrics["eos_rate"] = 1.0 - metrics["truncation_rate"]
    metrics |= {"tokens": total["tokens"], "tokens_by_teacher": total["tokens"] - total["own_tokens"]}
    metrics |= {name: total[name] for name in ("rows", "rescored")}
    return metrics | {"rho_max": rho_max, "age_max": age_max}
