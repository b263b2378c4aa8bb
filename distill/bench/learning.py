"""One student that learns a toy task in one process: write, mark, train, again; no pipeline around it.

The trainer's own objectives and chunked head make loss and gradients (`student_trainer.model.Student`);
AdamW and a loop are all that is added, so a figure says something about the objective and nothing about
engines.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import msgspec
import numpy as np
import torch

from distill.bench.toy import (
    Delayed,
    TeacherCompletion,
    World,
    copy_of,
    rows_of,
    score_hidden,
    wire_bytes,
    write,
)
from distill.bench.trials import Point, Result, Setup, Trial
from distill.evaluation.evaluation import LanguageModel, evaluate
from student_trainer.batch import collate
from student_trainer.head import RHO_MAX, HeadShape, HeadWeights, Loss
from student_trainer.model import Student, head_shape
from student_trainer.objectives.config import SFT, ObjectiveConfig, needs, student_topk
from student_trainer.objectives.diagnostics import STATS
from student_trainer.step import loss_of
from sync.wire import Rows, Scored, pack

MAX_NORM, BETAS, WARM_UP_STEPS = 1.0, (0.9, 0.95), 10
_TEACHER = "teacher"


class Clock:
    """Seconds of every step, by what was done: of the wall, and of this process's processor time."""

    def __init__(self) -> None:
        self._wall: dict[str, list[float]] = {}
        self._cpu: dict[str, list[float]] = {}

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time spent inside to `part`."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self._wall.setdefault(part, []).append(time.perf_counter() - wall)
        self._cpu.setdefault(part, []).append(time.process_time() - cpu)

    def medians(self) -> tuple[dict[str, float], dict[str, float]]:
        """Wall and processor seconds of the median step, by part."""
        return (
            {part: median(seconds) for part, seconds in self._wall.items()},
            {part: median(seconds) for part, seconds in self._cpu.items()},
        )


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
        self.clock = Clock()
        self.steps = self.tokens = self.bytes = 0
        self._sums = dict.fromkeys(STATS, 0.0)
        self._age = 0.0

    def step(self) -> None:
        """Write, mark, train."""
        with self.clock.measure("generate"):
            written = self._write()
        with self.clock.measure("score"):
            scores = self._mark(written)
        with self.clock.measure("train"):
            rows = rows_of(written, scores, max(0, self.steps - self._trial.lag))
            authors = np.full(len(rows.ids), self._by_teacher, np.uint8)
            self._train(msgspec.structs.replace(rows, by_teacher=pack(authors)))
        self.steps += 1
        self.tokens += len(written.logp_C)
        self.bytes += wire_bytes(scores)

    def _write(self) -> TeacherCompletion:
        first, count = self.steps * self._setup.rows, self._setup.rows
        made = (self._world.task.prompt(self._trial.seed, first + i) for i in range(count))
        prompts = [list(prompt.token_ids or ()) for prompt in made]
        author = self._world.teacher if self._by_teacher else self._delayed.author()
        return write(author, prompts, self._world.limits, self._generator, student_topk(self._config))

    @property
    def _by_teacher(self) -> bool:
        return isinstance(self._config, SFT)

    def _mark(self, written: TeacherCompletion) -> Scored:
        if self._by_teacher:  # it knows what it thought of its own tokens
            return Scored(id="all", logprob=pack(written.logp_C))
        return score_hidden(self._world.engine, written, self._config)

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

    @property
    def effective_samples(self) -> float:
        """Effective sample size of the importance weights, as a share of their number; 1: there are none."""
        own, squares = self._sums["own_tokens"], self._sums["rho_squared"]
        return self._sums["rho"] ** 2 / (squares * own) if own else 1.0

    @property
    def age(self) -> float:
        """Mean over all tokens so far of the steps between the weights that wrote and those that trained."""
        return self._age / self.tokens

    @property
    def support_mass(self) -> float | None:
        """Mean mass that the student gave to the tokens of S; None: the objective has no S."""
        tokens = self._sums["support_tokens"]
        return self._sums["student_mass"] / tokens if tokens else None

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


def evaluated(world: World, student: LanguageModel, tokens: int) -> Point:
    """Exact reverse KL and pass rate after `tokens`, always on the same prompts with the same randomness."""
    report = evaluate(
        student,
        {_TEACHER: world.teacher},
        world.held_out,
        world.limits,
        route=lambda source: _TEACHER,
        reward_fn=world.task.passes,
    ).report
    assert report.pass_rate is not None, "every task has a reward_fn"
    return Point(tokens, report.reverse_kl, report.pass_rate)


def learn(world: World, setup: Setup, trial: Trial, objective: ObjectiveConfig) -> Result:
    """Train a copy of the student on `setup.tokens` completion tokens, evaluating at even distances."""
    learner = Learner(world, setup, trial, objective)
    points = [learner.point()]
    while learner.tokens < setup.tokens:
        learner.step()
        if learner.tokens >= setup.tokens * len(points) / setup.evaluations:
            points.append(learner.point())
    wall, cpu = learner.clock.medians()
    return Result(
        trial=trial,
        points=points,
        steps=learner.steps,
        wall_seconds=wall,
        cpu_seconds=cpu,
        teacher_bytes=learner.bytes / learner.tokens,
        effective_samples=learner.effective_samples,
        support_mass=learner.support_mass,
        age=learner.age,
    )
