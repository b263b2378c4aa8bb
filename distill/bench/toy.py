"""One student distilled on a toy task in one process: generate, score, train, again.

Completions come from `distill.bench.local_evaluation.sample`, scores from the teacher service's transformers
engine as the wire arrays that a trainer rank is sent, loss and gradients from the trainer: figures depend on
the objective and not on engines.

Letters in shapes: B completions, T longest of them, C completion tokens, K ids per token, V vocabulary.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

from distill.bench.local_evaluation import Limits, evaluate, sample
from distill.bench.runner import Figures
from distill.evaluation.models import load_model
from distill.evaluation.reference import LanguageModel
from distill.prompts.stream import Prompt
from distill.tasks import Task, spellings
from student_trainer.engine import Student, head_shape
from student_trainer.head import HeadShape, HeadWeights
from student_trainer.objectives import config as objectives
from student_trainer.step import collate, loss_of
from sync.base.errors import ConfigError
from sync.base.settings import ModelSource
from sync.wire import Array, Rows, Scored, pack
from teacher_service.engines.base import Item, ScoreOptions
from teacher_service.engines.head import find_head
from teacher_service.engines.transformers import TransformersEngine
from teacher_service.messages import scored

OBJECTIVES: Final = ("sampled", "topk", "student_topk", "forward_topk", "full", "jsd", "skew", "sft")
SPARE_TOKENS: Final = 2
"""Of a completion, beyond the longest right one."""
HEAD_CHUNK, MAX_NORM, BETAS, WARM_UP_STEPS = 1024, 1.0, (0.9, 0.95), 10


class Setup(NamedTuple):
    """What all trials share."""

    models: str
    """Name of the folder of the made models: it changes with their recipe."""
    tokens: int = 50_000
    """Completion tokens that a student is trained on."""
    rows: int = 64
    """Completions of one step."""
    k: int = 64
    evaluations: int = 5
    """After the one at the start."""
    held_out: int = 512
    """Prompts of an evaluation."""


class World(NamedTuple):
    """Two models of one vocabulary, a task, held-out prompts."""

    teacher: LanguageModel
    engine: TransformersEngine
    """Scores with the same teacher."""
    student: LanguageModel
    """As it starts; trials train copies."""
    task: Task
    held_out: list[Prompt]
    limits: Limits

    @property
    def vocab(self) -> int:
        """Tokens of both models."""
        return len(self.teacher.head.weight_VH)


class Trial(NamedTuple):
    """One student."""

    objective: str
    rate: float
    """Learning rate."""
    seed: int
    """Of prompts and samples."""
    lag: int = 0
    """Age of the weights that generate, in optimizer steps."""


def configured(name: str, k: int) -> objectives.ObjectiveConfig:
    """The objective called `name` with its defaults, and `k` where it has one. Raises ConfigError."""
    if name not in OBJECTIVES:
        raise ConfigError(f"objective {name!r} is not known: choose from {', '.join(OBJECTIVES)}")
    config: objectives.ObjectiveConfig = TypeAdapter(objectives.ObjectiveConfig).validate_python(
        {"type": name}
    )
    has_k = isinstance(config, objectives.TopK | objectives.StudentTopK | objectives.ForwardTopK)
    return config.model_copy(update={"k": k}) if has_k else config


def open_world(folder: Path) -> tuple[World, Setup]:
    """The models of `spellings`, made or found in `folder`."""
    models, task = spellings.make_models(folder, 0), spellings.make()
    setup = Setup(models.teacher.parent.name)
    loaded = (load_model(ModelSource(path=str(path)), "cpu") for path in models)
    vocab = len(spellings.VOCABULARY)
    teacher, student = (LanguageModel(one, find_head(one, vocab)) for one in loaded)
    made = [task.held_out(0, index) for index in range(setup.held_out)]
    prompts = [Prompt(str(i), list(one.token_ids or ()), text=one.text) for i, one in enumerate(made)]
    limits = Limits(spellings.LONGEST + 1 + SPARE_TOKENS, (spellings.EOS_ID,))
    engine = TransformersEngine(teacher.model, vocab)
    return World(teacher, engine, student, task, prompts, limits), setup


# --- one trial --------------------------------------------------------------------------------------------


class Completions(NamedTuple):
    """Made by `generate`, read by `score` and `rows_of`."""

    prompt_B: np.ndarray
    """int32: tokens of each prompt"""
    completion_B: np.ndarray
    """int32: tokens of each completion"""
    tokens: np.ndarray
    """int32: each row's prompt, then its completion"""
    logp_C: np.ndarray
    """float32: log μ(y), of the model that generated"""
    topk_CK: np.ndarray | None
    """int32: that model's most likely ids; None: no objective needs them"""


@torch.inference_mode()
def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    generator: torch.Generator,
    topk: int = 0,
) -> Completions:
    """One completion of every prompt, and at each place the model's `topk` most likely ids."""
    logp_TB: list[Tensor] = []
    ids_TBK: list[Tensor] = []

    def watch(p_BV: Tensor, token_B: Tensor) -> None:
        logp_TB.append(p_BV.gather(1, token_B[:, None])[:, 0].log())
        if topk:
            ids_TBK.append(p_BV.topk(topk, dim=1).indices)

    sampled = sample(model.model, len(model.head.weight_VH), prompts, limits, generator, watch)
    completion_BT = sampled.completion_BL[:, -len(logp_TB) :]
    return Completions(
        prompt_B=np.array([len(prompt) for prompt in prompts], np.int32),
        completion_B=completion_BT.sum(1).int().numpy(),
        tokens=sampled.tokens_BL[sampled.attended_BL.bool()].int().numpy(),
        logp_C=torch.stack(logp_TB, 1)[completion_BT].numpy(),
        topk_CK=torch.stack(ids_TBK, 1)[completion_BT].int().numpy() if topk else None,
    )


class Delayed:
    """A model as it was `lag` optimizer steps ago. `model` is called once per step, before it."""

    def __init__(self, live: LanguageModel, lag: int) -> None:
        self._live, self._old = live, copy_of(live)
        self._past: deque[list[Tensor]] = deque(maxlen=lag + 1)

    @torch.no_grad()
    def model(self) -> LanguageModel:
        """The model of `lag` calls ago; of the first call when there were fewer."""
        self._past.append([weight.clone() for weight in self._live.model.parameters()])
        for weight, before in zip(self._old.model.parameters(), self._past[0], strict=True):
            weight.copy_(before)
        return self._old


def copy_of(model: LanguageModel) -> LanguageModel:
    """The same weights in memory of their own; its head follows them."""
    own = copy.deepcopy(model.model)
    return LanguageModel(own, find_head(own, len(model.head.weight_VH)))


def score(engine: TransformersEngine, made: Completions, objective: objectives.ObjectiveConfig) -> Scored:
    """What a teacher sends for all completions, one after the other; hidden states in bf16, top-k in fp16."""
    want = objectives.needs(objective)
    width = 0 if made.topk_CK is None else made.topk_CK.shape[1]
    found = engine.score(items(made), ScoreOptions(want.topk, width, want.entropy, want.hidden))
    if found.hidden_CH is not None:
        bits_CH = torch.from_numpy(found.hidden_CH).bfloat16().view(torch.uint16).numpy()
        found = replace(found, hidden_CH=bits_CH)
    return scored("all", found, "f2")


def items(made: Completions) -> list[Item]:
    """One sequence per completion, with the ids to gather where there are any."""
    rows = np.split(made.tokens, np.cumsum(made.prompt_B + made.completion_B)[:-1])
    gather: Sequence[Any] = [None] * len(rows)
    if made.topk_CK is not None:
        gather = np.split(made.topk_CK, np.cumsum(made.completion_B)[:-1])
    return [Item(*row) for row in zip(rows, map(int, made.prompt_B), gather, strict=True)]


def wire_bytes(scores: Scored) -> int:
    """Bytes of all arrays of a teacher's scores."""
    values = msgspec.structs.asdict(scores).values()
    return sum(len(value.data) for value in values if isinstance(value, Array))


def rows_of(made: Completions, scores: Scored, step: int, by_teacher: bool) -> Rows:
    """What a trainer rank is sent: completions with their scores, generated with the weights of `step`."""
    count = len(made.prompt_B)
    return Rows(
        ids=[str(i) for i in range(count)],
        tokens=pack(made.tokens),
        prompt_lens=pack(made.prompt_B),
        completion_lens=pack(made.completion_B),
        behavior_logprob=pack(made.logp_C),
        token_step=pack(np.full(len(made.logp_C), step, np.int32)),
        teacher=pack(np.zeros(count, np.int32)),
        by_teacher=pack(np.full(count, by_teacher, np.uint8)),
        teacher_logprob=scores.logprob,
        teacher_topk_ids=scores.topk_ids,
        teacher_topk_logprob=scores.topk_logprob,
        student_topk_ids=None if made.topk_CK is None else pack(made.topk_CK),
        student_topk_teacher_logprob=scores.gathered,
        teacher_hidden=scores.hidden,
        teacher_entropy=scores.entropy,
    )


class Trainee:
    """A model with the trainer's loss and AdamW, in one process."""

    def __init__(
        self,
        live: LanguageModel,
        teacher: LanguageModel,
        vocab: int,
        config: objectives.ObjectiveConfig,
        varlen: bool = False,
    ) -> None:
        """`varlen`: rows lie end to end, for which `pack_rows` has prepared `live`; else they are padded."""
        head, shape = teacher.head, head_shape(live.model.config, vocab, temperature=1.0)
        theirs = HeadWeights(head.weight_VH, head.bias_V, HeadShape(vocab, head.scale, head.soft_cap))
        self._student, self._vocab = Student(live.model, shape, HEAD_CHUNK, varlen), vocab
        self._loss = loss_of(config, (), (theirs,) if objectives.needs(config).hidden else ())
        weights = self._student.parameters()
        self._optimizer = torch.optim.AdamW(weights, betas=BETAS, weight_decay=0.0, fused=True)

    def step(self, rows: Rows, step: int, rate: float) -> dict[str, Any]:
        """One optimizer step on one micro-batch at learning rate `rate`; its counts."""
        micro = collate(rows, step, self._vocab, self._student.varlen)
        loss, _ = self._student(micro.tokens_RL, micro.positions_C, micro.targets, self._loss, micro.layout)
        (loss / micro.counts["tokens"]).backward()
        for group in self._optimizer.param_groups:
            group.update(lr=rate)
        torch.nn.utils.clip_grad_norm_(self._student.parameters(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return micro.counts


def learn(world: World, setup: Setup, trial: Trial) -> Figures:
    """Train a copy of the student on `setup.tokens` completion tokens, evaluating at even distances.

    points: the evaluations; cpu_seconds: medians of a step by part; teacher_bytes: per token; age: mean age
    of the weights that generated, in steps.
    """
    config = configured(trial.objective, setup.k)
    live, by_teacher = copy_of(world.student), isinstance(config, objectives.SFT)
    trainee = Trainee(live, world.teacher, world.vocab, config)
    delayed, generator = Delayed(live, trial.lag), torch.Generator().manual_seed(trial.seed)
    points, clocks, tokens, sent, age = [evaluated(world, live, 0)], [], 0, 0, 0.0
    for step in itertools.count():
        clock = [time.process_time()]
        drawn = (world.task.prompt(trial.seed, step * setup.rows + i) for i in range(setup.rows))
        model = world.teacher if by_teacher else delayed.model()
        prompts = [list(prompt.token_ids or ()) for prompt in drawn]
        made = generate(model, prompts, world.limits, generator, objectives.student_topk(config))
        clock.append(time.process_time())
        own = Scored(id="all", logprob=pack(made.logp_C))  # of the teacher, where it generates
        scores = own if by_teacher else score(world.engine, made, config)
        clock.append(time.process_time())
        rows = rows_of(made, scores, max(0, step - trial.lag), by_teacher)
        counts = trainee.step(rows, step, trial.rate * min(1.0, (step + 1) / WARM_UP_STEPS))
        clock.append(time.process_time())
        clocks.append(np.diff(clock))
        tokens, sent, age = tokens + len(made.logp_C), sent + wire_bytes(scores), age + counts["age"]
        if tokens >= setup.tokens * len(points) / setup.evaluations:
            points.append(evaluated(world, live, tokens))
        if tokens >= setup.tokens:
            break
    return {
        "points": points,
        "steps": len(clocks),
        "cpu_seconds": dict(zip(("generate", "score", "train"), np.median(clocks, 0).tolist(), strict=True)),
        "teacher_bytes": sent / tokens,
        "age": age / tokens,
    }


def evaluated(world: World, student: LanguageModel, tokens: int) -> Figures:
    """Exact reverse KL and pass rate after `tokens`, always on the same prompts with the same randomness."""
    found = evaluate(student.model, world.engine, world.held_out, world.limits, world.task.passes)
    return {"tokens": tokens, **found}
