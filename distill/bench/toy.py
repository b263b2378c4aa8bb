"""Distil a toy in one process: generate, score, train, again; no pipeline around it.

Completions come from `distill.evaluation.evaluation.sample`, scores from the teacher service's transformers
engine, as the wire arrays that a trainer rank is sent; loss and gradients from the trainer's own objectives
and chunked head. AdamW and a loop are all that is added, so that figures depend on the objective and
not on engines.

Letters in shapes: B completions, T longest of them, C completion tokens, K ids per token, V vocabulary.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from distill.bench.runner import Figures, Seconds
from distill.evaluation.evaluation import LanguageModel, Limits, evaluate, sample
from distill.evaluation.models import load_model
from distill.prompts.stream import Prompt
from distill.tasks import Task, spellings
from student_trainer.engine import Student, head_shape
from student_trainer.head import RHO_MAX, HeadShape, HeadWeights, Loss
from student_trainer.objectives.config import SFT, ObjectiveConfig, needs, student_topk
from student_trainer.objectives.token_statistics import STATS
from student_trainer.step import collate, loss_of
from sync.settings import ModelSource
from sync.wire import Array, Rows, Scored, pack
from teacher_service.engines.base import Item, ScoreOptions
from teacher_service.engines.head import find_head
from teacher_service.engines.transformers import TransformersEngine
from teacher_service.messages import scored

SPARE_TOKENS: Final = 2
"""Of a completion, beyond the longest right one."""
MAX_NORM, BETAS, WARM_UP_STEPS = 1.0, (0.9, 0.95), 10
_TEACHER = "teacher"


@dataclass(frozen=True)
class World:
    """What all trials share: two models of one vocabulary, a task, held-out prompts."""

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


def open_world(folder: Path, held_out: int, seed: int = 0) -> tuple[World, str]:
    """The models of `spellings`, made or found in `folder`, and the name of the folder that holds them."""
    from transformers import AutoTokenizer

    models, task = spellings.make_models(folder, seed), spellings.make()
    tokenizer = AutoTokenizer.from_pretrained(models.teacher)
    teacher, student = (load_model(ModelSource(path=str(path)), tokenizer, "cpu") for path in models)
    made = [task.held_out(seed, index) for index in range(held_out)]
    prompts = [Prompt(str(i), list(one.token_ids or ()), text=one.text) for i, one in enumerate(made)]
    limits = Limits(spellings.LONGEST + 1 + SPARE_TOKENS, (spellings.EOS_ID,))
    engine = TransformersEngine(teacher.model, len(spellings.VOCABULARY))
    return World(teacher, engine, student, task, prompts, limits), models.teacher.parent.name


# --- generate ---------------------------------------------------------------------------------------------


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

    sampled = sample(model, prompts, limits, generator, watch)
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
        self._live, self._lag = live, lag
        self._old = copy_of(live) if lag else live
        self._past: deque[list[Tensor]] = deque(maxlen=lag + 1)

    @torch.no_grad()
    def model(self) -> LanguageModel:
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


# --- score ------------------------------------------------------------------------------------------------


def score(engine: TransformersEngine, made: Completions, objective: ObjectiveConfig) -> Scored:
    """What a teacher sends for all completions, one after the other; hidden states in bf16, top-k in fp16."""
    want = needs(objective)
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
    return [
        Item(row_L, int(first), ids_TK)
        for row_L, first, ids_TK in zip(rows, made.prompt_B, gather, strict=True)
    ]


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


# --- train ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """What all trials of a benchmark share."""

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
    head_chunk: int = 1024


class Trial(NamedTuple):
    """One student."""

    objective: str
    rate: float
    """Learning rate."""
    seed: int
    """Of prompts and samples."""
    lag: int = 0
    """Age of the weights that generate, in optimizer steps."""


@dataclass(frozen=True)
class Point:
    """One evaluation."""

    tokens: int
    """Completion tokens trained on so far."""
    reverse_kl: float
    """Nats a token, exact."""
    pass_rate: float


class Learner:
    """One trial under way. `step` trains once; `point` evaluates."""

    def __init__(self, world: World, setup: Setup, trial: Trial, objective: ObjectiveConfig) -> None:
        self._world, self._setup, self._trial, self._config = world, setup, trial, objective
        self._live = copy_of(world.student)
        shape = head_shape(self._live.model.config, world.vocab, temperature=1.0)
        self._student = Student(self._live.model, shape, setup.head_chunk)
        self._optimizer = torch.optim.AdamW(self._student.parameters(), trial.rate, BETAS, weight_decay=0.0)
        self._delayed = Delayed(self._live, trial.lag)
        self._generator = torch.Generator().manual_seed(trial.seed)
        self._loss = self._make_loss()
        self._by_teacher = isinstance(objective, SFT)
        self._seconds: dict[str, list[Seconds]] = defaultdict(list)
        self.steps = self.tokens = self.bytes = 0
        self._sums = dict.fromkeys(STATS, 0.0)
        self._age = 0.0

    def step(self) -> None:
        """Generate, score, train."""
        with self._timed("generate"):
            made = self._generate()
        with self._timed("score"):
            scores = self._score(made)
        with self._timed("train"):
            sampled_by = max(0, self.steps - self._trial.lag)
            self._train(rows_of(made, scores, sampled_by, self._by_teacher))
        self.steps += 1
        self.tokens += len(made.logp_C)
        self.bytes += wire_bytes(scores)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self._seconds[part].append(Seconds(time.perf_counter() - wall, time.process_time() - cpu))

    def _generate(self) -> Completions:
        first, count = self.steps * self._setup.rows, self._setup.rows
        made = (self._world.task.prompt(self._trial.seed, first + i) for i in range(count))
        prompts = [list(prompt.token_ids or ()) for prompt in made]
        model = self._world.teacher if self._by_teacher else self._delayed.model()
        return generate(model, prompts, self._world.limits, self._generator, student_topk(self._config))

    def _score(self, made: Completions) -> Scored:
        if self._by_teacher:  # it knows the log-probabilities of its own tokens
            return Scored(id="all", logprob=pack(made.logp_C))
        return score(self._world.engine, made, self._config)

    def _train(self, rows: Rows) -> None:
        micro = collate(rows, self.steps, self._world.vocab)
        for group in self._optimizer.param_groups:
            group["lr"] = self._trial.rate * min(1.0, (self.steps + 1) / WARM_UP_STEPS)
        loss, stats = self._student(micro.tokens_RL, micro.positions_C, micro.targets, self._loss)
        (loss / micro.counts["tokens"]).backward()
        torch.nn.utils.clip_grad_norm_(self._student.parameters(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._age += micro.counts["age"]
        for name, value in zip(STATS, stats[:RHO_MAX].tolist(), strict=True):
            self._sums[name] += value

    def _make_loss(self) -> Loss:
        heads: tuple[HeadWeights, ...] = ()
        if needs(self._config).hidden:
            head = self._world.teacher.head
            shape = HeadShape(self._world.vocab, head.scale, head.soft_cap)
            heads = (HeadWeights(head.weight_VH, head.bias_V, shape),)
        return loss_of(self._config, (), heads)

    def point(self) -> Point:
        """The student as it is now, on held-out prompts."""
        return evaluated(self._world, self._live, self.tokens)

    def figures(self) -> Figures:
        """Medians of a step by part in seconds, and means over all tokens so far.

        teacher_bytes: per token; effective_samples: effective sample size of the importance weights, as a
        share of their number, 1 where there are none; support_mass: mass that the student gave to the k
        tokens, None where the objective has none; age: of the weights that generated, in steps.
        """
        sums = self._sums
        own, support = sums["own_tokens"], sums["support_tokens"]
        return {
            "steps": self.steps,
            "wall_seconds": {part: median(s.wall for s in taken) for part, taken in self._seconds.items()},
            "cpu_seconds": {part: median(s.cpu for s in taken) for part, taken in self._seconds.items()},
            "teacher_bytes": self.bytes / self.tokens,
            "effective_samples": sums["rho"] ** 2 / (sums["rho_squared"] * own) if own else 1.0,
            "support_mass": sums["student_mass"] / support if support else None,
            "age": self._age / self.tokens,
        }


def evaluated(world: World, student: LanguageModel, tokens: int) -> Point:
    """Exact reverse KL and pass rate after `tokens`, always on the same prompts with the same randomness."""
    report = evaluate(
        student,
        {_TEACHER: world.teacher},
        world.held_out,
        world.limits,
        route=lambda source: _TEACHER,
        reward_fn=world.task.passes,
    )
    assert report.pass_rate is not None, "every task has a reward_fn"
    return Point(tokens, report.reverse_kl, report.pass_rate)


def learn(world: World, setup: Setup, trial: Trial, objective: ObjectiveConfig) -> Figures:
    """Train a copy of the student on `setup.tokens` completion tokens, evaluating at even distances.

    The learner's figures, and "points": the evaluations.
    """
    learner = Learner(world, setup, trial, objective)
    points = [learner.point()]
    while learner.tokens < setup.tokens:
        learner.step()
        if learner.tokens >= setup.tokens * len(points) / setup.evaluations:
            points.append(learner.point())
    return {"points": [asdict(point) for point in points], **learner.figures()}
