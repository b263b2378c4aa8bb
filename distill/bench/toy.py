"""The parts of a distillation step in one process, each the pipeline's own: write, mark, rows of a batch.

Completions come from `distill.evaluation.evaluation.sample`, marks from the teacher service's transformers
engine, and both become the wire arrays that a trainer rank is sent.

Letters in shapes: B completions, T longest of them, C completion tokens, K ids per token, V vocabulary.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from distill.evaluation.evaluation import LanguageModel, Limits, sample
from distill.evaluation.models import load_model
from distill.prompts.stream import Prompt
from distill.tasks import Task, TaskPrompt, spellings
from student_trainer.objectives.config import ObjectiveConfig, needs
from sync.settings import ModelSource
from sync.wire import Array, Rows, Scored, pack
from teacher_service.engines.base import Item, ScoreOptions
from teacher_service.engines.head import find_head
from teacher_service.engines.sampling import Sampled
from teacher_service.engines.transformers import TransformersEngine
from teacher_service.replies import scored

SPARE_TOKENS: Final = 2
"""Of a completion, beyond the longest right one."""


@dataclass(frozen=True)
class World:
    """What all trials share: two models of one vocabulary, a task, held-out prompts."""

    teacher: LanguageModel
    engine: TransformersEngine
    """Marks with the same teacher."""
    student: LanguageModel
    """As it starts; trials train copies."""
    task: Task
    held_out: list[Prompt]
    limits: Limits

    @property
    def vocab(self) -> int:
        """Tokens of both models."""
        return len(self.teacher.head.weight_VH)


def open_world(folder: Path, held_out: int, seed: int = 0) -> tuple[World, str]:
    """The models of `spellings`, made or found in `folder`, and the name of the folder that holds them."""
    from transformers import AutoTokenizer

    models, task = spellings.make_models(folder, seed), spellings.make()
    tokenizer = AutoTokenizer.from_pretrained(models.teacher)
    teacher, student = (load_model(ModelSource(path=str(path)), tokenizer, "cpu") for path in models)
    prompts = [_prompt(task.held_out(seed, i), i) for i in range(held_out)]
    limits = Limits(spellings.LONGEST + 1 + SPARE_TOKENS, (spellings.EOS_ID,))
    engine = TransformersEngine(teacher.model, len(spellings.VOCABULARY))
    return World(teacher, engine, student, task, prompts, limits), models.teacher.parent.name


def _prompt(made: TaskPrompt, index: int) -> Prompt:
    return Prompt(str(index), list(made.token_ids or ()), text=made.text)


class TeacherCompletion(NamedTuple):
    """Completions, with what the sampler knew of them."""

    prompt_B: np.ndarray
    """int32: tokens of each prompt"""
    completion_B: np.ndarray
    """int32: tokens of each completion"""
    tokens: np.ndarray
    """int32: each row's prompt, then its completion"""
    logp_C: np.ndarray
    """float32: log μ(y)"""
    topk_CK: np.ndarray | None
    """int32: the author's most likely ids; None: not asked for"""


@torch.inference_mode()
def write(
    author: LanguageModel,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    generator: torch.Generator,
    topk: int = 0,
) -> TeacherCompletion:
    """One completion of every prompt, and at each place the author's `topk` most likely ids."""
    logp_TB: list[Tensor] = []
    ids_TBK: list[Tensor] = []

    def watch(p_BV: Tensor, token_B: Tensor) -> None:
        logp_TB.append(p_BV.gather(1, token_B[:, None])[:, 0].log())
        if topk:
            ids_TBK.append(p_BV.topk(topk, dim=1).indices)

    sampled = sample(author, prompts, limits, generator, watch)
    completion_BT = sampled.completion_BL[:, -len(logp_TB) :]
    return TeacherCompletion(
        prompt_B=np.array([len(prompt) for prompt in prompts], np.int32),
        completion_B=completion_BT.sum(1).int().numpy(),
        tokens=_flat(sampled),
        logp_C=torch.stack(logp_TB, 1)[completion_BT].numpy(),
        topk_CK=torch.stack(ids_TBK, 1)[completion_BT].int().numpy() if topk else None,
    )


def _flat(sampled: Sampled) -> np.ndarray:
    return sampled.tokens_BL[sampled.attended_BL.bool()].int().numpy()


def score_hidden(
    engine: TransformersEngine, written: TeacherCompletion, objective: ObjectiveConfig
) -> Scored:
    """What a teacher sends for all completions, one after the other; hidden states in bf16, top-k in fp16."""
    want = needs(objective)
    width = 0 if written.topk_CK is None else written.topk_CK.shape[1]
    scores = engine.score(items(written), ScoreOptions(want.topk, width, want.entropy, want.hidden))
    if scores.hidden_CH is not None:
        bits_CH = torch.from_numpy(scores.hidden_CH).bfloat16().view(torch.uint16).numpy()
        scores = replace(scores, hidden_CH=bits_CH)
    return scored("all", scores, "f2")


def items(written: TeacherCompletion) -> list[Item]:
    """One sequence per completion, with the ids to gather where there are any."""
    rows = np.split(written.tokens, np.cumsum(written.prompt_B + written.completion_B)[:-1])
    cuts = np.cumsum(written.completion_B)[:-1]
    gather: Sequence[Any] = [None] * len(rows)
    if written.topk_CK is not None:
        gather = np.split(written.topk_CK, cuts)
    return [
        Item(row_L, int(first), ids_TK)
        for row_L, first, ids_TK in zip(rows, written.prompt_B, gather, strict=True)
    ]


def rows_of(written: TeacherCompletion, scores: Scored, step: int) -> Rows:
    """What a trainer rank is sent: completions written by the weights of `step`, with their marks."""
    count = len(written.prompt_B)
    return Rows(
        ids=[str(i) for i in range(count)],
        tokens=pack(written.tokens),
        prompt_lens=pack(written.prompt_B),
        completion_lens=pack(written.completion_B),
        behavior_logprob=pack(written.logp_C),
        token_step=pack(np.full(len(written.logp_C), step, np.int32)),
        teacher=pack(np.zeros(count, np.int32)),
        teacher_logprob=scores.logprob,
        teacher_topk_ids=scores.topk_ids,
        teacher_topk_logprob=scores.topk_logprob,
        student_topk_ids=None if written.topk_CK is None else pack(written.topk_CK),
        student_topk_teacher_logprob=scores.gathered,
        teacher_hidden=scores.hidden,
        teacher_entropy=scores.entropy,
    )


def wire_bytes(scores: Scored) -> int:
    """Bytes of all arrays of a teacher's marks."""
    values = msgspec.structs.asdict(scores).values()
    return sum(len(value.data) for value in values if isinstance(value, Array))


class Delayed:
    """A model as it was some optimizer steps ago. `author` is called once per step, before it."""

    def __init__(self, live: LanguageModel, lag: int) -> None:
        self._live, self._lag = live, lag
        self._old = copy_of(live) if lag else live
        self._past: deque[list[Tensor]] = deque(maxlen=lag + 1)

    @torch.no_grad()
    def author(self) -> LanguageModel:
        """The model of `lag` calls ago; of the first call when there were fewer."""
        if self._lag:
            self._past.append([weight.clone() for weight in self._live.model.parameters()])
            for weight, before in zip(self._old.model.parameters(), self._past[0], strict=True):
                weight.copy_(before)
        return self._old


def copy_of(model: LanguageModel) -> LanguageModel:
    """The same weights in memory of their own; its head follows them."""
    own = copy.deepcopy(model.model)
    return LanguageModel(own, find_head(own, len(model.head.weight_VH)))
