"""Reference values for the preflight: plain fp32 forward passes of one sequence at a time, without padding or
packing, and the objective on their distributions.

Letters in shapes: L tokens of a sequence, T its completion tokens, N tokens of several sequences, H hidden
size, V vocabulary, K ids of an objective's S.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from student_trainer.objectives.config import (
    SFT,
    ObjectiveConfig,
    needs,
    student_topk,
    teacher_temperature,
)
from student_trainer.objectives.divergences import Objective, Targets, at, build, mask_log_mass
from sync import wire
from sync.wire import SamplingMask, ScoreSequence, pack, unpack
from teacher_service.engines.head import OutputHead


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model of transformers in fp32, and its head cut to the tokenizer's vocabulary."""

    model: Any
    head: OutputHead


class SelfAndTeacher(NamedTuple):
    """An objective on real distributions; per token."""

    self_loss: float
    self_gradient: float
    teacher_gradient: float


def probe_teacher(
    sequences: Sequence[ScoreSequence],
    logq_TV: Sequence[Tensor] | None,
    not_shown: str | None,
    student: LanguageModel,
    objective: ObjectiveConfig,
    temperature: float,
) -> wire.ReferenceScores:
    """One teacher's part of a ProbeReply; `temperature`: of the rollouts.

    `logq_TV`: its distributions of the completion tokens of each sequence, fp32, temperature 1; None: they
    are not known. `not_shown`: why no forward pass of ours gave them; None: one did.
    """
    figures: SelfAndTeacher | tuple[None, None, None] = (None, None, None)
    if not isinstance(objective, SFT):
        live_NV = torch.cat([log_probs(student, sequence, temperature) for sequence in sequences])
        token_N = torch.cat([_completion(sequence, live_NV.device) for sequence in sequences])
        teacher_NV = live_NV
        if logq_TV is not None:
            logq_NV = torch.cat([*logq_TV])
            teacher_NV = (logq_NV / teacher_temperature(objective, temperature)).log_softmax(-1)
        k = needs(objective).topk or student_topk(objective)
        figures = objective_figures(build(objective), live_NV, teacher_NV, token_N, k)
    loss, gradient, change = figures
    scores = None
    if not_shown is None and logq_TV is not None:
        scores = [scores_of(*pair) for pair in zip(sequences, logq_TV, strict=True)]
    known = None if logq_TV is None else change
    return wire.ReferenceScores(scores, not_shown, loss, gradient, known)


def scores_of(sequence: ScoreSequence, logp_TV: Tensor, mask: SamplingMask | None = None) -> wire.Array:
    """f4 [T]: log-probabilities of the completion's tokens, within its sampling mask."""
    logp_T = at(logp_TV, _completion(sequence, logp_TV.device))
    if mask is not None:
        logp_T = logp_T - mask_log_mass(logp_TV, torch.from_numpy(mask.padded()).to(logp_TV.device))
    return pack(logp_T.cpu().numpy())


@torch.inference_mode()
def log_probs(model: LanguageModel, sequence: ScoreSequence, temperature: float = 1.0) -> Tensor:
    """fp32 [T, V]: distributions of the completion's tokens."""
    tokens_L = torch.from_numpy(unpack(sequence.token_ids).astype(np.int64)).to(model.model.device)
    output = model.model.get_decoder()(input_ids=tokens_L[None], use_cache=False)
    hidden_TH = output.last_hidden_state[0, sequence.start - 1 : -1]
    return (model.head.logits(hidden_TH) / temperature).log_softmax(-1)


def objective_figures(
    objective: Objective, live_NV: Tensor, teacher_NV: Tensor, token_N: Tensor, k: int = 0
) -> SelfAndTeacher:
    """The objective with the student as its own teacher, and the change of its gradient with the real one.

    `k`: size of S for objectives that have one: the teacher's top-k.
    """
    own_loss, own_NV = _gradient(objective, live_NV, live_NV, token_N, k)
    _, other_NV = _gradient(objective, live_NV, teacher_NV, token_N, k)
    sums = abs(own_loss), float(own_NV.norm()), float((other_NV - own_NV).norm())
    return SelfAndTeacher(*(total / len(token_N) for total in sums))


def _gradient(
    objective: Objective, live_NV: Tensor, teacher_NV: Tensor, token_N: Tensor, k: int
) -> tuple[float, Tensor]:
    """Summed loss of fresh tokens, and its gradient in the student's logits."""
    best = teacher_NV.topk(min(k, teacher_NV.shape[1]), dim=1) if k else None
    targets = Targets(
        token_N=token_N,
        behavior_logp_N=at(live_NV, token_N),
        teacher_logp_N=at(teacher_NV, token_N),
        fresh_N=torch.ones_like(token_N, dtype=torch.bool),
        support_NK=None if best is None else best.indices,
        support_logp_NK=None if best is None else best.values,
        teacher_logp_NV=teacher_NV,
    )
    logits_NV = live_NV.clone().requires_grad_()
    loss_N, _ = objective(logits_NV.log_softmax(1), targets)
    (gradient_NV,) = torch.autograd.grad(loss_N.sum(), logits_NV)
    return float(loss_N.detach().sum()), gradient_NV


def _completion(sequence: ScoreSequence, device: torch.device) -> Tensor:
    return torch.from_numpy(unpack(sequence.token_ids)[sequence.start :].astype(np.int64)).to(device)
