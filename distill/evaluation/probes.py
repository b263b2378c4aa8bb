"""The evaluator's part of the preflight: reference values of plain fp32 forward passes.

A teacher is loaded for it, one at a time, where 4 bytes for each of its parameters fit into SHARE of the free
memory beside the student. A larger one is not, nor one with an engine of the user's: its log-probabilities
are compared with nothing, and the objective is tried on the distributions that its service gives, where it
gives hidden states.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import psutil
import torch

from distill.config import RunConfig
from distill.config.evaluation import EvaluationConfig
from distill.evaluation.models import load_model
from distill.evaluation.reference import LanguageModel, log_probs, probe_teacher, scores_of
from distill.evaluation.reverse_kl import head_of, tensor_of
from sync.base.errors import ConfigError, RemoteError
from sync.base.own_code import is_own
from sync.base.settings import ModelSource
from sync.base.tokenizers import load_tokenizer, vocab_size
from sync.wire import ProbeReply, ProbeRequest, SamplingMask, Scored, ScoreSequence, Want
from teacher_service.client import TeacherClient
from teacher_service.config import TeacherConfig
from teacher_service.engines.head import find_head
from teacher_service.engines.transformers import find_device

SHARE: Final = 0.5
"""Of the free memory of the evaluator's device that a probed teacher may take."""
GIB: Final = 1 << 30


async def probe(
    config: RunConfig, teachers: Mapping[str, TeacherClient], request: ProbeRequest
) -> ProbeReply:
    """Reply of an evaluator. Raises ConfigError for a teacher that it was started without."""
    if unknown := request.teachers.keys() - config.teachers.keys():
        raise ConfigError(
            f"the evaluator was started without teacher {', '.join(unknown)}: start it from the same file"
        )
    vocab = vocab_size(load_tokenizer(config.student), config.student.known_ids)
    temperature = config.rollout.temperature
    setting = (config.evaluation or EvaluationConfig()).device
    student = await asyncio.to_thread(_loaded, config.student, vocab, setting)

    def plain(source: ModelSource, sequences: Sequence[ScoreSequence]) -> list[torch.Tensor]:
        teacher = _loaded(source, vocab, setting)
        return [log_probs(teacher, sequence) for sequence in sequences]

    scores = {}
    logq: list[torch.Tensor] | None
    for name, sequences in request.teachers.items():
        source, device = config.teachers[name], find_device(setting)
        if (reason := await asyncio.to_thread(not_loaded, source, free_bytes(device))) is None:
            logq = await asyncio.to_thread(plain, source, sequences)
        else:
            logq = await _served(teachers[name], sequences, device)
        scores[name] = await asyncio.to_thread(
            probe_teacher, sequences, logq, reason, student, config.objective, temperature
        )
    masks: Sequence[SamplingMask | None] = request.masks or [None] * len(request.student)
    student_scores = [
        scores_of(sequence, log_probs(student, sequence, temperature), mask)
        for sequence, mask in zip(request.student, masks, strict=True)
    ]
    return ProbeReply(student=student_scores, teachers=scores)


def _loaded(source: ModelSource, vocab: int, device: Any) -> LanguageModel:
    model = load_model(source, device)
    return LanguageModel(model, find_head(model, vocab))


def free_bytes(device: torch.device) -> int:
    """Free memory of a device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def not_loaded(teacher: TeacherConfig, free: int) -> str | None:
    """Why no forward pass of ours gives a teacher's scores, beside `free` bytes; None: one does."""
    if is_own(teacher.engine):
        return f"engine {teacher.engine!r} is your own, and need not score as the model of `path` does"
    if (reason := too_large(teacher, free)) is not None:
        reason += "; compare a small model on the same engine, or start the evaluator where there is room"
    return reason


def too_large(source: ModelSource, free: int) -> str | None:
    """Why a model is not loaded beside `free` bytes; None: it is small enough."""
    from transformers import AutoConfig, AutoModelForCausalLM

    trusted = {"trust_remote_code": source.trust_remote_code}
    shape = AutoConfig.from_pretrained(source.path, revision=source.revision, **trusted)
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(shape, **trusted).num_parameters()
    if 4 * parameters <= SHARE * free:
        return None
    return (
        f"{parameters / 1e9:.2f} B parameters take {4 * parameters / GIB:.1f} GiB in fp32, and "
        f"{SHARE:.0%} of the evaluator's {free / GIB:.1f} GiB of free memory is {SHARE * free / GIB:.1f}"
    )


async def _served(
    teacher: TeacherClient, sequences: Sequence[ScoreSequence], device: torch.device
) -> list[torch.Tensor] | None:
    """fp32 [T, V] of each sequence, from hidden states and head; None: the teacher gives none."""
    if "hidden" not in (await teacher.first_info()).can:
        return None
    head, logps = head_of(await teacher.head(), device), []
    for answer in await teacher.score(sequences, Want(hidden=True)):
        if not isinstance(answer, Scored) or answer.hidden is None:
            raise RemoteError(f"teacher {teacher.name} refuses a probe: {answer}"[:500])
        hidden_TH = tensor_of(answer.hidden, device).to(head.weight_VH.dtype)
        logps.append(head.logits(hidden_TH).log_softmax(-1))
    return logps
