"""From rows of the wire to the tensors of one forward pass; a pure function.

Letters: R rows, L longest prompt + completion, C completion tokens of all rows, K ids per token, G hidden
size of the teacher. Rows are padded on the right: with causal attention no supervised position sees padding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from student_trainer.objectives.terms import Targets
from sync.errors import DataError
from sync.wire import Array, Rows, unpack


@dataclass(frozen=True)
class Counts:
    """What the rows say about themselves; sums over rows or tokens, so that ranks can be added."""

    rows: int
    tokens: int
    """C"""
    truncated: int
    """Rows that ended at the token limit."""
    age: float
    """Sum over tokens of the trained version's step − the token's step."""
    age_max: int
    padded: int
    """R · L"""


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of one rank."""

    tokens_RL: Tensor
    """int64; at least one row, so that a rank without rows runs the same collectives"""
    positions_C: Tensor
    """int64: place in R · L of the hidden state that predicts each completion token"""
    row_C: Tensor
    """int64: row of each completion token"""
    targets: Targets
    teacher_C: Tensor
    """int64: index of the teacher"""
    teacher_hidden_CG: Tensor | None
    counts: Counts

    def to(self, device: torch.device) -> MicroBatch:
        """The same on `device`."""
        values = vars(self.targets)
        moved = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        targets = replace(self.targets, **moved)
        hidden_CG = self.teacher_hidden_CG
        return replace(
            self,
            tokens_RL=self.tokens_RL.to(device),
            positions_C=self.positions_C.to(device),
            row_C=self.row_C.to(device),
            targets=targets,
            teacher_C=self.teacher_C.to(device),
            teacher_hidden_CG=None if hidden_CG is None else hidden_CG.to(device),
        )


def collate(rows: Rows, step: int, vocab: int) -> MicroBatch:
    """Tensors of `rows`, trained on top of the weights of `step`; ids must be below `vocab`.

    Raises DataError when lengths contradict each other, an id is unknown or a number is not finite.
    """
    prompt_R, completion_R = (
        unpack(rows.prompt_lens).astype(np.int64),
        unpack(rows.completion_lens).astype(np.int64),
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
    written_C = None if rows.by_teacher is None else unpack(rows.by_teacher).astype(bool)[row_C]
    fresh_C = (age_C == 0) if written_C is None else (age_C == 0) & ~written_C
    targets = _targets(rows, tokens_RL.ravel()[place_C], fresh_C, written_C)
    _check_ids(rows, flat, targets, vocab)
    hidden_CG = None if rows.teacher_hidden is None else _floats(rows.teacher_hidden, "teacher_hidden")
    counts = Counts(
        rows=int(length_R.size),
        tokens=int(row_C.size),
        truncated=0 if rows.truncated is None else int(unpack(rows.truncated).sum()),
        age=float(age_C.sum()),
        age_max=int(age_C.max(initial=0)),
        padded=int(tokens_RL.size),
    )
    return MicroBatch(
        torch.from_numpy(tokens_RL),
        torch.from_numpy(place_C - 1),
        torch.from_numpy(row_C),
        targets,
        torch.from_numpy(unpack(rows.teacher).astype(np.int64)[row_C]),
        hidden_CG,
        counts,
    )


def _check_lengths(rows: Rows, prompt_R: np.ndarray, completion_R: np.ndarray, tokens: int) -> None:
    count = len(rows.ids)
    completion = int(completion_R.sum())
    sizes = [prompt_R.size, completion_R.size, rows.teacher.shape[0]]
    sizes += [
        array.shape[0]
        for array in (rows.reward, rows.by_teacher, rows.weight, rows.baseline)
        if array is not None
    ]
    per_token = [rows.behavior_logprob, rows.token_step, rows.teacher_logprob, rows.teacher_hidden]
    per_token += [rows.teacher_topk_ids, rows.teacher_topk_logprob, rows.teacher_entropy]
    per_token += [rows.student_topk_ids, rows.student_topk_teacher_logprob]
    lengths = [array.shape[0] for array in per_token if array is not None]
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


def _floats(array: Array, name: str) -> Tensor:
    """fp32 (bf16 stays bf16) tensor of a wire array. Raises DataError on NaN or infinity."""
    values = unpack(array)
    tensor = (
        torch.tensor(values).view(torch.bfloat16) if array.dtype == "bf16" else torch.tensor(values).float()
    )
    if not bool(torch.isfinite(tensor).all()):
        raise DataError(f"{name} of a batch is not finite: the teacher or the rollout engine is broken")
    return tensor


def _targets(rows: Rows, token_C: np.ndarray, fresh_C: np.ndarray, written_C: np.ndarray | None) -> Targets:
    """Targets of all completion tokens; S is the student's set where it was sent, else the teacher's."""
    ids, logprob, name = rows.teacher_topk_ids, rows.teacher_topk_logprob, "teacher_topk_logprob"
    if rows.student_topk_ids is not None:
        ids, logprob = rows.student_topk_ids, rows.student_topk_teacher_logprob
        name = "student_topk_teacher_logprob"
    if (ids is None) != (logprob is None):
        raise DataError(
            f"batch has ids of a top-k without {name}, or the reverse: both or neither must be sent"
        )
    entropy = rows.teacher_entropy
    return Targets(
        token_N=torch.from_numpy(token_C),
        behavior_logp_N=_floats(rows.behavior_logprob, "behavior_logprob"),
        teacher_logp_N=_floats(rows.teacher_logprob, "teacher_logprob"),
        fresh_N=torch.from_numpy(fresh_C),
        support_NK=None if ids is None else torch.tensor(unpack(ids), dtype=torch.int64),
        support_logp_NK=None if logprob is None else _floats(logprob, name),
        teacher_entropy_N=None if entropy is None else _floats(entropy, "teacher_entropy"),
        by_teacher_N=None if written_C is None else torch.from_numpy(written_C),
    )


def future_credit(d_C: Tensor, factor_C: Tensor, row_C: Tensor) -> Tensor:
    """Σ_{j≥1} (Π_{i=1…j} factor_{t+i})·d_{t+j} over the rest of each row, [C]; a row's tokens stand together.

    Doubling: after i rounds every token holds its next 2^i terms, so log2(longest row) rounds do.
    """
    total_C, next_C, reach = d_C, torch.zeros_like(d_C), 1
    next_C[:-1] = torch.where(row_C[1:] == row_C[:-1], factor_C[1:], 0.0)
    while reach < d_C.shape[0] and bool(next_C.any()):
        total_C = total_C + next_C * _later(total_C, reach)
        next_C, reach = next_C * _later(next_C, reach), reach * 2
    return total_C - d_C


def _later(values_C: Tensor, reach: int) -> Tensor:
    """What stands `reach` tokens later, 0 beyond the end."""
    return torch.cat([values_C[reach:], torch.zeros_like(values_C[:reach])])
