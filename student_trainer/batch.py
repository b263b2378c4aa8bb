"""From rows of the wire to the tensors of one forward pass, and the task's rewards of a step.

Letters: R rows, L longest prompt + completion, C completion tokens of all rows, K ids per token, G hidden
size of the teacher. Rows are padded on the right: with causal attention no supervised position sees padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from student_trainer.objectives.targets import Targets
from student_trainer.ranks import Ranks
from sync.errors import DataError
from sync.wire import Array, Rows, TrainBatch, unpack


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of one rank; made by `collate`, consumed by the student (`model.Student`)."""

    tokens_RL: Tensor
    """int64; at least one row, so that a rank without rows runs the same collectives"""
    positions_C: Tensor
    """int64: place in R · L of the hidden state that predicts each completion token"""
    targets: Targets
    """of all C completion tokens"""
    counts: dict[str, float]
    """the sums named in `diagnostics.COUNTS`, and `age_max`"""


def collate(rows: Rows, step: int, vocab: int) -> MicroBatch:
    """Tensors of `rows`, trained on top of the weights of `step`; ids must be below `vocab`.

    Raises DataError when lengths contradict each other, an id is unknown or a number is not finite.
    """
    prompt_R, completion_R = (
        unpack(lens).astype(np.int64) for lens in (rows.prompt_lens, rows.completion_lens)
    )
    flat = unpack(rows.tokens)
    _check_lengths(rows, prompt_R, completion_R, flat.size)
    length_R = prompt_R + completion_R
    tokens_RL = np.zeros((max(1, length_R.size), max(2, int(length_R.max(initial=0)))), np.int64)
    column_L = np.arange(tokens_RL.shape[1])
    tokens_RL[: length_R.size][column_L < length_R[:, None]] = flat
    row_C = np.repeat(np.arange(completion_R.size), completion_R)
    offset_C = np.arange(row_C.size) - (completion_R.cumsum() - completion_R)[row_C]
    place_C = row_C * tokens_RL.shape[1] + prompt_R[row_C] + offset_C
    age_C = step - unpack(rows.token_step)
    targets = _targets(rows, tokens_RL.ravel()[place_C], row_C, age_C)
    _check_ids(rows, flat, targets, vocab)
    counts = {
        "rows": length_R.size,
        "tokens": row_C.size,
        "truncated": 0 if rows.truncated is None else int(unpack(rows.truncated).sum()),
        "age": float(age_C.sum()),
        "padded": tokens_RL.size,
        "age_max": int(age_C.max(initial=0)),
    }
    return MicroBatch(torch.from_numpy(tokens_RL), torch.from_numpy(place_C - 1), targets, counts)


def _targets(rows: Rows, token_C: np.ndarray, row_C: np.ndarray, age_C: np.ndarray) -> Targets:
    """Targets of all completion tokens; S is the student's set where it was sent, else the teacher's."""
    ids, name = rows.teacher_topk_ids, "teacher_topk_logprob"
    if rows.student_topk_ids is not None:
        ids, name = rows.student_topk_ids, "student_topk_teacher_logprob"
    if (ids is None) != (getattr(rows, name) is None):
        raise DataError(f"batch has ids of a top-k without {name}, or the reverse: send both or neither")
    by_teacher_C = None if rows.by_teacher is None else unpack(rows.by_teacher).astype(bool)[row_C]
    fresh_C = (age_C == 0) if by_teacher_C is None else (age_C == 0) & ~by_teacher_C
    return Targets(
        token_N=torch.from_numpy(token_C),
        behavior_logp_N=_floats(rows, "behavior_logprob"),
        teacher_logp_N=_floats(rows, "teacher_logprob"),
        fresh_N=torch.from_numpy(fresh_C),
        support_NK=None if ids is None else torch.tensor(unpack(ids), dtype=torch.int64),
        support_logp_NK=_optional_floats(rows, name),
        teacher_entropy_N=_optional_floats(rows, "teacher_entropy"),
        by_teacher_N=None if by_teacher_C is None else torch.from_numpy(by_teacher_C),
        teacher_N=torch.from_numpy(unpack(rows.teacher).astype(np.int64)[row_C]),
        teacher_hidden_NG=_optional_floats(rows, "teacher_hidden"),
        row_N=torch.from_numpy(row_C),
    )


def _check_lengths(rows: Rows, prompt_R: np.ndarray, completion_R: np.ndarray, tokens: int) -> None:
    count = len(rows.ids)
    completion = int(completion_R.sum())
    per_row = ("prompt_lens", "completion_lens", "teacher", "reward", "by_teacher", "weight", "baseline")
    other = {"ids", "tokens", "truncated", *per_row}
    arrays = {name: array for name, array in msgspec.structs.asdict(rows).items() if array is not None}
    sizes = [arrays[name].shape[0] for name in per_row if name in arrays]
    lengths = [array.shape[0] for name, array in arrays.items() if name not in other]
    if any(size != count for size in sizes) or any(length != completion for length in lengths):
        raise DataError(
            f"batch of {count} rows and {completion} completion tokens carries per-row lengths {sizes} and "
            f"per-token lengths {lengths}: every array must have one entry per row or per completion token"
        )
    if tokens != int(prompt_R.sum()) + completion or (prompt_R < 1).any() or (completion_R < 0).any():
        raise DataError(
            f"batch carries {tokens} tokens for prompts of {int(prompt_R.sum())} and completions of "
            f"{completion}: they must add up, and every prompt needs at least one token"
        )


def _check_ids(rows: Rows, flat: np.ndarray, targets: Targets, vocab: int) -> None:
    highest = int(flat.max(initial=0))
    if targets.support_NK is not None and targets.support_NK.numel():
        highest = max(highest, int(targets.support_NK.max()))
    if highest >= vocab or int(flat.min(initial=0)) < 0:
        raise DataError(
            f"batch with rows {rows.ids[:2]} … carries token id {highest}, the student's tokenizer has "
            f"{vocab} ids: student, teacher and prompts must share one tokenizer"
        )


def _floats(rows: Rows, name: str) -> Tensor:
    """fp32 (bf16 stays bf16) tensor of an array of `rows`. Raises DataError on NaN or infinity."""
    array: Array = getattr(rows, name)
    tensor = torch.tensor(unpack(array))
    tensor = tensor.view(torch.bfloat16) if array.dtype == "bf16" else tensor.float()
    if not bool(torch.isfinite(tensor).all()):
        raise DataError(f"{name} of a batch is not finite: the teacher or the rollout engine is broken")
    return tensor


def _optional_floats(rows: Rows, name: str) -> Tensor | None:
    return None if getattr(rows, name) is None else _floats(rows, name)


@dataclass(frozen=True)
class Rewards:
    """Of one step, all ranks together."""

    mean: float | None
    """b: over the student's rollouts with a reward; None: the teacher generated all of them"""
    tokens: float
    """M: supervised tokens of rollouts with a reward"""


def rewards_of(batch: TrainBatch, ranks: Ranks) -> Rewards:
    """Rewards of the whole step, from this rank's share of it. Collective.

    Raises DataError when no rollout has a reward, or one is not finite.
    """
    own = np.zeros(3)
    for rows in batch.micro_batches:
        if rows.reward is not None:
            reward_R, student_R = unpack(rows.reward), np.ones(rows.reward.shape[0], bool)
            if rows.by_teacher is not None:
                student_R = unpack(rows.by_teacher) == 0
            own += reward_R[student_R].sum(), student_R.sum(), unpack(rows.completion_lens).sum()
    total, rollouts, tokens = ranks.gather(torch.from_numpy(own)).sum(0).tolist()
    if tokens == 0 or not np.isfinite(total):
        raise DataError(
            f"the batch of {batch.version} has {rollouts:.0f} rollouts with a reward, their sum is {total}: "
            "objective.task needs a finite reward; set prompts.reward_fn, take prompts of a task, or leave "
            "it out"
        )
    return Rewards(total / rollouts if rollouts else None, tokens)


def advantages(rows: Rows, rewards: Rewards, denominator: int) -> Tensor | None:
    """(R − b)·N/M of every completion token [C]; None: these rows have no reward.

    b is the rows' own baseline where they carry one, else the mean of the step.
    """
    if rows.reward is None:
        return None
    baseline_R = rewards.mean or 0.0 if rows.baseline is None else unpack(rows.baseline).astype(np.float64)
    advantage_R = (unpack(rows.reward).astype(np.float64) - baseline_R) * denominator / rewards.tokens
    return torch.from_numpy(np.repeat(advantage_R, unpack(rows.completion_lens)).astype(np.float32))
