"""What an evaluation needs a version's exact forward pass for: how far it is from the teachers.

    sequences ─▶ teacher's hidden states or log-probabilities ─┐
              ─▶ student's hidden states, fp32, here ──────────┴─▶ sums of the divergence (report.py)

No teacher is loaded; the student is, for the length of a comparison.

Letters in shapes: N tokens of several sequences, L tokens of one, H hidden size, V vocabulary.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from distill.config import RunConfig
from distill.config.evaluation import EvaluationConfig
from distill.evaluation.models import load_model
from distill.scoring import ask, until_answered
from distill.translation import TextTeacher
from sync import wire
from sync.base.errors import RemoteError, WireError
from sync.base.tokenizers import load_tokenizer, vocab_size
from sync.weights.subscribe import Subscriber
from sync.wire import checks
from sync.wire.head import OutputHead, probabilities, tensor_of
from teacher_service.client import TeacherClient
from teacher_service.config import TeacherConfig
from teacher_service.engines.base import EngineScores, Item, ScoreOptions
from teacher_service.engines.transformers import TransformersEngine, find_device

log = logging.getLogger(__name__)
CHUNK: Final = 1024
"""Positions whose full-vocabulary distributions are in memory at once."""
HIDDEN_BYTES: Final = 1 << 28
"""Bytes of the hidden states of one request to a teacher, and of the student's beside it."""
SCORE_SECONDS: Final = 3600.0
"""Within which a teacher that is busy with the run's rollouts, or restarting, must answer one request."""


class Evaluator:
    """Made once for a run; `evaluate` once at a time."""

    def __init__(self, config: RunConfig, weights: Subscriber, teachers: Mapping[str, TeacherClient]) -> None:
        """Step 0 is the student that `config` names. Raises ConfigError for its tokenizer."""
        self._config, self._weights, self._teachers = config, weights, teachers
        self._settings = config.evaluation or EvaluationConfig()
        self._vocab = vocab_size(load_tokenizer(config.student), config.student.known_ids)

    async def evaluate(self, request: wire.EvalRequest) -> wire.EvalReply:
        """Raises DistillError."""
        if not request.teachers:  # its completions and their rewards are all
            return wire.EvalReply(version=request.version, teachers={})
        began = time.monotonic()
        student = await asyncio.to_thread(self._loaded, request.version)
        teachers = {
            name: await self._compared(student, name, sequences)
            for name, sequences in request.teachers.items()
        }
        log.info("%s is compared with its teachers in %.1f s", request.version, time.monotonic() - began)
        return wire.EvalReply(version=request.version, teachers=teachers)

    def _loaded(self, version: wire.Version) -> TransformersEngine:
        source, settings = self._config.student, self._settings
        folder = self._weights.folder(version) if version.step > 0 else None
        model = load_model(source, folder, settings.device)
        limits = TeacherConfig(path=source.path, batch_tokens=settings.batch_tokens)
        return TransformersEngine(model, self._vocab, limits)

    async def _compared(
        self, student: TransformersEngine, name: str, sequences: Sequence[wire.OwnTokens]
    ) -> wire.Divergence:
        """The student and one teacher."""
        if (teacher := self._teachers.get(name)) is None:
            raise RemoteError(
                f"the evaluator was started without teacher {name}: start it from the same file"
            )
        info = await until_answered(teacher, teacher.first_info)
        follows = self._config.teachers[name].follow_student_every is not None  # its head is soon another
        is_exact = "hidden" in info.can and not follows and not isinstance(teacher, TextTeacher)
        want, options = wire.Want(hidden=is_exact), ScoreOptions(hidden=is_exact)
        device = find_device(self._settings.device)

        def exact_head(message: wire.Head) -> OutputHead:
            return OutputHead.of(message, device).exact()

        student_head = await asyncio.to_thread(exact_head, student.head())
        other = student_head
        if is_exact:
            other = await asyncio.to_thread(exact_head, await until_answered(teacher, teacher.head))

        def values_of(
            part: list[Item], answers: Sequence[wire.Scored | wire.ScoreRefused], mine: EngineScores
        ) -> Any:
            """f4 [N]: the divergence, or log p − log q, at every scored position."""
            size = info.hidden_size if is_exact else None
            both = zip(answers, part, strict=True)
            scored = [_usable(name, answer, item, want, self._vocab, size) for answer, item in both]
            if not is_exact:
                theirs = np.concatenate([wire.unpack(score.logprob) for score in scored])
                return np.where(_unscored(scored), 0.0, mine.logprob_C - theirs).astype("f4")
            assert mine.hidden_CH is not None, "it was asked for"
            hidden = [tensor_of(score.hidden).to(device) for score in scored if score.hidden is not None]
            return exact(student_head, torch.from_numpy(mine.hidden_CH).to(device), other, torch.cat(hidden))

        width = max(info.hidden_size, student.engine_info.hidden_size) if is_exact else 1
        items = [Item(wire.unpack(sequence.token_ids), sequence.own[0][0]) for sequence in sequences]
        sums = np.zeros(len(sequences))
        for numbers, part in parts(items, HIDDEN_BYTES // (4 * width)):
            messages = [
                _sequence(str(i), item, sequences[number].shown)
                for i, (number, item) in enumerate(zip(numbers, part, strict=True))
            ]
            asked, mine = await asyncio.gather(
                ask(teacher, messages, partial(teacher.score, want=want), SCORE_SECONDS),
                asyncio.to_thread(student.score, part, options),
            )
            values_N = await asyncio.to_thread(values_of, part, [answer for answer, _ in asked], mine)
            ends = np.cumsum([item.positions for item in part])[:-1]
            for number, item, values in zip(numbers, part, np.split(values_N, ends), strict=True):
                own_L = np.zeros(len(items[number].token_ids_L), bool)
                for start, end in sequences[number].own:
                    own_L[start:end] = True
                counted = values[own_L[item.first : len(item.token_ids_L)]]
                sums[number] += float(counted.astype(np.float64).sum())
        return wire.Divergence(is_exact, sums.tolist())


@torch.inference_mode()
def exact(student: OutputHead, student_NH: Tensor, teacher: OutputHead, teacher_NH: Tensor) -> np.ndarray:
    """f4 [N]: the divergence at each position, from both models' hidden states."""
    parts = []
    for own_NH, other_NH in zip(student_NH.split(CHUNK), teacher_NH.split(CHUNK), strict=True):
        logp_NV = student.logits(own_NH.to(student.weight_VH.dtype)).log_softmax(-1)
        logq_NV = teacher.logits(other_NH.to(teacher.weight_VH.dtype)).log_softmax(-1)
        parts.append((probabilities(logp_NV) * (logp_NV - logq_NV)).sum(-1).cpu().numpy())
    return np.concatenate(parts)


def parts(items: Sequence[Item], positions: int) -> Iterator[tuple[list[int], list[Item]]]:
    """Work of at most `positions` scored positions at a time, shortest sequences first, and whose it is.

    A completion with more is split: a sequence that ends where a part ends has the same scores up to there.
    """
    numbers: list[int] = []
    part: list[Item] = []
    left = positions
    for number in sorted(range(len(items)), key=lambda i: len(items[i].token_ids_L)):
        item = items[number]
        first, length = item.first, len(item.token_ids_L)
        while first < length:
            if left == 0 or (part and length - first > left and length - first <= positions):
                yield numbers, part
                numbers, part, left = [], [], positions
            end = min(length, first + left)
            numbers.append(number)
            part.append(replace(item, token_ids_L=item.token_ids_L[:end], first=first))
            first, left = end, left - (end - first)
    if part:
        yield numbers, part


def _sequence(id: str, item: Item, shown: wire.Array | None) -> wire.ScoreSequence:
    """What the teacher is sent: behind the prompt as it is shown to it, the student's completion."""
    token_ids_L, first = item.token_ids_L, item.first
    if shown is not None:
        token_ids_L, first = np.concatenate([wire.unpack(shown), token_ids_L[first:]]), shown.shape[0]
    return wire.ScoreSequence(id, wire.pack(token_ids_L), first)


def _unscored(scores: Sequence[wire.Scored]) -> np.ndarray:
    """bool [N]: the teacher says nothing of the token."""
    segments = [
        np.full(score.logprob.shape, wire.Segment.BEGINS)
        if score.segment is None
        else wire.unpack(score.segment)
        for score in scores
    ]
    return np.concatenate(segments) == wire.Segment.UNSCORED


def _usable(
    name: str, answer: Any, item: Item, want: wire.Want, vocab: int, hidden_size: int | None
) -> wire.Scored:
    """Raises RemoteError for a refusal, WireError for scores that cannot be used."""
    if not isinstance(answer, wire.Scored):
        raise RemoteError(f"teacher {name} refuses a completion of the evaluation: {answer.error}")
    if problem := checks.scored(answer, item.positions, 0, want, vocab, hidden_size):
        raise WireError(f"a score of teacher {name} cannot be used: {problem}")
    return answer
