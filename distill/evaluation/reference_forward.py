"""Reference values of teachers, rollouts and the objective from plain fp32 forward passes, for the preflight.

One sequence at a time, without padding or packing: every faster path is compared with it.

Letters: T completion tokens of a sequence, N of several, V vocabulary, K ids of an objective's S.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distill.evaluation.evaluation import LanguageModel
from student_trainer.objectives.config import (
    SFT,
    ForwardTopK,
    ObjectiveConfig,
    StudentTopK,
    TopK,
    teacher_temperature,
)
from student_trainer.objectives.divergences import Objective, Targets, at, build
from sync.wire import ProbeReply, ProbeRequest, ReferenceScores, ScoreSequence, pack, unpack


class SelfAndTeacher(NamedTuple):
    """An objective on real distributions; per token."""

    self_loss: float
    self_gradient: float
    teacher_gradient: float


def probe(
    request: ProbeRequest,
    student: LanguageModel,
    teachers: Mapping[str, LanguageModel],
    objective: ObjectiveConfig,
    temperature: float,
) -> ProbeReply:
    """Reply of an evaluator; `temperature`: of the rollouts. Raises KeyError for an unknown teacher."""
    own = [_sampled(one, log_probs(student, one, temperature)) for one in request.student]
    scored = {}
    for name, sequences in request.teachers.items():
        teacher = [log_probs(teachers[name], one) for one in sequences]
        figures: SelfAndTeacher | tuple[None, None, None] = (None, None, None)
        if not isinstance(objective, SFT):
            tokens = torch.cat([_completion(one) for one in sequences]).to(teacher[0].device)
            live_NV = torch.cat([log_probs(student, one, temperature) for one in sequences])
            teacher_NV = (torch.cat(teacher) / teacher_temperature(objective, temperature)).log_softmax(-1)
            figures = objective_figures(build(objective), live_NV, teacher_NV, tokens, ids(objective))
        scores = [pack(_sampled(one, logq)) for one, logq in zip(sequences, teacher, strict=True)]
        scored[name] = ReferenceScores(scores, *figures)
    return ProbeReply(student=[pack(logp) for logp in own], teachers=scored)


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
    tokens = len(token_N)
    return SelfAndTeacher(
        abs(own_loss) / tokens, float(own_NV.norm()) / tokens, float((other_NV - own_NV).norm()) / tokens
    )


def ids(objective: ObjectiveConfig) -> int:
    """K of objectives over a set S; 0: over none."""
    return objective.k if isinstance(objective, TopK | StudentTopK | ForwardTopK) else 0


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


def _completion(sequence: ScoreSequence) -> Tensor:
    return torch.from_numpy(unpack(sequence.token_ids)[sequence.start :].astype(np.int64))


def _sampled(sequence: ScoreSequence, logp_TV: Tensor) -> np.ndarray:
    """log-probabilities [T] of the completion's tokens."""
    return at(logp_TV, _completion(sequence).to(logp_TV.device)).cpu().numpy()
