"""The evaluator's part of the preflight: reference values of plain fp32 forward passes.

A teacher is loaded for it, one at a time, where 4 bytes for each of its parameters fit into SHARE of the free
memory beside the student. A larger one is not, nor one with an engine of the user's: its log-probabilities
are compared with nothing, and the objective is tried on the distributions that its service gives, where it
gives hidden states. Passes are of one sequence at a time, without padding or packing.

Letters in shapes: L tokens of a sequence, T its completion tokens, N tokens of several sequences, H hidden
size, V vocabulary, K ids of an objective's S.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import psutil
import torch
from torch import Tensor

from distill.config import RunConfig
from distill.config.evaluation import EvaluationConfig
from distill.evaluation.models import load_model
from distill.model_facts import on_meta
from distill.scoring import ask, until_answered
from student_trainer.objectives.config import SFT, ObjectiveConfig, needs, student_topk, teacher_temperature
from student_trainer.objectives.divergences import Objective, Targets, at, build, mask_log_mass
from sync import wire
from sync.base.errors import ConfigError, RemoteError
from sync.base.own_code import is_own
from sync.base.settings import ModelSource
from sync.base.tokenizers import end_ids, load_tokenizer, vocab_size
from sync.wire import ProbeReply, ProbeRequest, SamplingMask, Scored, ScoreSequence, Want, pack, unpack
from sync.wire.head import OutputHead, tensor_of
from teacher_service.client import TeacherClient
from teacher_service.config import TeacherConfig
from teacher_service.engines.head import find_head
from teacher_service.engines.transformers import find_device

SHARE: Final = 0.5
"""Share of the free memory of the evaluator's device that a probed teacher may take."""
GIB: Final = 1 << 30


async def probe(
    config: RunConfig, teachers: Mapping[str, TeacherClient], request: ProbeRequest
) -> ProbeReply:
    """Reply of an evaluator. Raises ConfigError for a teacher that it was started without."""
    if unknown := request.teachers.keys() - config.teachers.keys():
        raise ConfigError(
            f"the evaluator was started without teacher {', '.join(unknown)}: start it from the same file"
        )
    tokenizer = load_tokenizer(config.student)
    vocab = vocab_size(tokenizer, config.student.known_ids)
    ends = end_ids(config.student, tokenizer, config.rollout.stop_token_ids)
    temperature = config.rollout.temperature
    setting = (config.evaluation or EvaluationConfig()).device
    student = await asyncio.to_thread(_loaded, config.student, vocab, setting)

    def plain(source: ModelSource, sequences: Sequence[ScoreSequence]) -> list[Tensor]:
        return [*map(_loaded(source, vocab, setting), sequences)]

    scores = {}
    for name, sequences in request.teachers.items():
        source, device = config.teachers[name], find_device(setting)
        logq: list[Tensor] | None
        if (reason := await asyncio.to_thread(not_loaded, source, free_bytes(device))) is None:
            logq = await asyncio.to_thread(plain, source, sequences)
        else:
            logq = await _served(teachers[name], sequences, device)
        scores[name] = await asyncio.to_thread(
            probe_teacher, sequences, logq, reason, student, config.objective, temperature, ends
        )
    masks: Sequence[SamplingMask | None] = request.masks or [None] * len(request.student)
    student_scores = [
        scores_of(sequence, student(sequence, temperature), mask)
        for sequence, mask in zip(request.student, masks, strict=True)
    ]
    return ProbeReply(student=student_scores, teachers=scores)


def _loaded(source: ModelSource, vocab: int, device: Any) -> Callable[..., Tensor]:
    """`log_probs` of a model, its head cut to the tokenizer's vocabulary."""
    model = load_model(source, device=device)
    return partial(log_probs, model, find_head(model, vocab))


def free_bytes(device: torch.device) -> int:
    """Free memory of a device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def not_loaded(teacher: TeacherConfig, free: int) -> str | None:
    """Why no forward pass of ours gives a teacher's scores, beside `free` bytes; None: one does."""
    if is_own(teacher.engine):
        return f"engine {teacher.engine!r} is your own, and need not score as the model of `path` does"
    parameters = sum(parameter.numel() for parameter in on_meta(teacher).parameters())
    if 4 * parameters <= SHARE * free:
        return None
    return (
        f"{parameters / 1e9:.2f} B parameters take {4 * parameters / GIB:.1f} GiB in fp32, and "
        f"{SHARE:.0%} of the evaluator's {free / GIB:.1f} GiB of free memory is {SHARE * free / GIB:.1f}; "
        "compare a small model on the same engine, or start the evaluator where there is room"
    )


async def _served(
    teacher: TeacherClient, sequences: Sequence[ScoreSequence], device: torch.device
) -> list[torch.Tensor] | None:
    """fp32 [T, V] of each sequence, from hidden states and head; None: the teacher gives none."""
    if "hidden" not in (await until_answered(teacher, teacher.first_info)).can:
        return None
    head, logps = OutputHead.of(await until_answered(teacher, teacher.head), device).exact(), []
    for answer, _ in await ask(teacher, sequences, partial(teacher.score, want=Want(hidden=True))):
        if not isinstance(answer, Scored) or answer.hidden is None:
            raise RemoteError(f"teacher {teacher.name} refuses a probe: {answer}"[:500])
        hidden_TH = tensor_of(answer.hidden).to(device, head.weight_VH.dtype)
        logps.append(head.logits(hidden_TH).log_softmax(-1))
    return logps


def probe_teacher(
    sequences: Sequence[ScoreSequence],
    logq_TV: Sequence[Tensor] | None,
    not_shown: str | None,
    student: Callable[[ScoreSequence, float], Tensor],
    objective: ObjectiveConfig,
    temperature: float,
    ends: Sequence[int],
) -> wire.ReferenceScores:
    """One teacher's part of a ProbeReply; `student`: `log_probs` of it; `temperature`: of the rollouts;
    `ends`: ids that end a completion.

    `logq_TV`: its distributions of the completion tokens of each sequence, fp32, temperature 1; None: they
    are not known. `not_shown`: why no forward pass of ours gave them; None: one did.
    """
    figures: tuple[float, float, float] | tuple[None, None, None] = (None, None, None)
    if not isinstance(objective, SFT):
        live_NV = torch.cat([student(sequence, temperature) for sequence in sequences])
        token_N = torch.cat([_completion(sequence, live_NV.device) for sequence in sequences])
        teacher_NV = live_NV
        if logq_TV is not None:
            logq_NV = torch.cat([*logq_TV])
            teacher_NV = (logq_NV / teacher_temperature(objective, temperature)).log_softmax(-1)
        k = needs(objective).topk or student_topk(objective)
        figures = objective_figures(build(objective, ends), live_NV, teacher_NV, token_N, k)
    loss, gradient, change = figures
    scores = None
    if not_shown is None and logq_TV is not None:
        scores = [scores_of(*pair) for pair in zip(sequences, logq_TV, strict=True)]
    return wire.ReferenceScores(scores, not_shown, loss, gradient, None if logq_TV is None else change)


def scores_of(sequence: ScoreSequence, logp_TV: Tensor, mask: SamplingMask | None = None) -> wire.Array:
    """f4 [T]: log-probabilities of the completion's tokens, within its sampling mask."""
    logp_T = at(logp_TV, _completion(sequence, logp_TV.device))
    if mask is not None:
        logp_T = logp_T - mask_log_mass(logp_TV, torch.from_numpy(mask.padded()).to(logp_TV.device))
    return pack(logp_T.cpu().numpy())


@torch.inference_mode()
def log_probs(model: Any, head: OutputHead, sequence: ScoreSequence, temperature: float = 1.0) -> Tensor:
    """fp32 [T, V]: distributions of the completion's tokens, by a causal language model of transformers."""
    tokens_L = torch.from_numpy(unpack(sequence.token_ids).astype(np.int64)).to(model.device)
    output = model.get_decoder()(input_ids=tokens_L[None], use_cache=False)
    hidden_TH = output.last_hidden_state[0, sequence.start - 1 : -1]
    return (head.logits(hidden_TH) / temperature).log_softmax(-1)


def objective_figures(
    objective: Objective, live_NV: Tensor, teacher_NV: Tensor, token_N: Tensor, k: int = 0
) -> tuple[float, float, float]:
    """Loss and gradient of the objective with the student as its own teacher, and the gradient's change with
    the real one; per token.

    `k`: size of S for objectives that have one: the teacher's top-k.
    """
    own_loss, own_NV = _gradient(objective, live_NV, live_NV, token_N, k)
    _, other_NV = _gradient(objective, live_NV, teacher_NV, token_N, k)
    sums = abs(own_loss), float(own_NV.norm()), float((other_NV - own_NV).norm())
    loss, gradient, change = (total / len(token_N) for total in sums)
    return loss, gradient, change


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
