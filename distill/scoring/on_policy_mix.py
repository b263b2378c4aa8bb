"""Prompts that a teacher completes instead of the student (objective.on_policy below 1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from distill.config import RunConfig
from distill.interfaces import Components
from distill.metrics.timeline import Timeline
from distill.rollout.bad_answers import Trust
from distill.run_log.state import PendingPrompt
from distill.run_log.validation import Validator
from distill.scoring.scorer import PendingScore, Refused, check_echo, prompt_array
from distill.scoring.teacher_queue import TeacherQueue, Unusable
from sync.errors import DistillError
from sync.wire import Generated, ScoreRefused, TeacherCompletion, TeacherPrompt, pack

Answer = TeacherCompletion | ScoreRefused


@dataclass(slots=True)
class _Work:
    """A prompt on its way to the teacher that completes it."""

    asked: PendingPrompt
    prompt: TeacherPrompt


class Writing:
    """Runs for the length of the run; `put` at any time.

    The teacher samples from its whole distribution, at the temperature of its scores, with the prompt that
    it sees when it scores. What it wrote goes to `finished`, looks like a student's completion without
    versions, and is scored like one; `refused` is called with an empty completion and the reason.
    """

    def __init__(
        self,
        parts: Components,
        config: RunConfig,
        finished: Callable[[PendingScore], None],
        refused: Refused,
        timeline: Timeline,
        sound: Validator,
        trust: Trust,
    ) -> None:
        self._parts, self._config, self._sound, self._trust = parts, config, sound, trust
        self._finished, self._refused = finished, refused
        self._queues: TeacherQueue[_Work, Answer] = TeacherQueue(
            "write",
            parts.teachers,
            config.buffer.score_batch,
            ask=self._ask,
            problem=self._problem,
            settle=self._settle,
            timeline=timeline,
            trust=trust,
            attempts=config.rollout.max_attempts,
        )

    def put(self, asked: PendingPrompt) -> None:
        """Queue a prompt for its teacher."""
        name = self._parts.route(asked.prompt.source)
        try:
            prompt = self._prompt(name, asked)
        except DistillError as error:
            self._refused(self._nothing(asked), "function_failed", str(error))
            function = f"the prompt_transform of teacher {name}"
            self._trust.bad(function, asked.prompt.id, str(error), lambda: False)
            return
        self._queues.put(name, asked.prompt.id, _Work(asked, prompt))

    async def run(self) -> None:
        """Let teachers write until cancelled."""
        await self._queues.run()

    async def _ask(self, name: str, work: list[_Work]) -> list[Answer]:
        prompts, rollout = [one.prompt for one in work], self._config.rollout
        teacher = self._parts.teachers[name]
        answers = await teacher.generate(
            prompts,
            rollout.max_tokens,
            rollout.stop_token_ids,
            temperature=self._parts.want.temperature,
        )
        check_echo(name, answers, prompts)
        return answers

    def _problem(self, name: str, work: _Work, answer: Answer) -> str | None:
        if isinstance(answer, ScoreRefused):
            return answer.error if answer.unusable else None
        problem = self._sound.generated_by_teacher(answer)
        return None if problem is None else str(problem)

    def _prompt(self, name: str, asked: PendingPrompt) -> TeacherPrompt:
        transform, prompt = (self._parts.transforms or {}).get(name), asked.prompt
        seen = prompt_array(prompt.token_ids if transform is None else transform(prompt))
        return TeacherPrompt(prompt.id, seen, seed_of(self._config.run.seed, asked.number))

    async def _settle(self, name: str, work: list[tuple[_Work, Answer | str | Unusable]]) -> None:
        for one, answer in work:
            if isinstance(answer, TeacherCompletion):
                self._finished(PendingScore(one.asked, self._completion(answer)))
            elif isinstance(answer, Unusable):
                self._refused(self._nothing(one.asked), "unusable", answer.problem)
            else:
                why = answer if isinstance(answer, str) else answer.error
                self._refused(self._nothing(one.asked), "teacher_refused", f"teacher {name}: {why}")

    def _nothing(self, asked: PendingPrompt) -> PendingScore:
        """An empty completion."""
        nothing = TeacherCompletion(
            asked.prompt.id, pack(np.empty(0, "i4")), pack(np.empty(0, "f4")), "length"
        )
        return PendingScore(asked, self._completion(nothing))

    def _completion(self, answer: TeacherCompletion) -> Generated:
        count, k = answer.token_ids.shape[0], self._parts.student_topk
        return Generated(
            id=answer.id,
            token_ids=answer.token_ids,
            logprob=answer.logprob,
            spans=[],
            finish_reason=answer.finish_reason,
            topk_ids=pack(np.full((count, k), -1, "i4")) if k else None,
        )


_AUTHORS, _WORDS = 1, 2
"""Streams of random numbers of a run's seed, beside that of the prompts' order."""


def authors(seed: int, batch: int, on_policy: float) -> Callable[[int], bool]:
    """Tells of a prompt, by its number in the order of issue, whether the teacher completes it.

    Of each `batch` consecutive numbers the teacher has (1 − on_policy) · batch, rounded so that the sum over
    all of them is right; which ones depends on `seed`.
    """
    if on_policy >= 1:
        return lambda number: False
    return lambda number: number % batch in _written(seed, number // batch, batch, on_policy)


@lru_cache(maxsize=16)
def _written(seed: int, block: int, batch: int, on_policy: float) -> frozenset[int]:
    """Places in one block that the teacher has."""
    share = (1 - on_policy) * batch
    count = math.floor((block + 1) * share + 1e-6) - math.floor(block * share + 1e-6)
    order = np.random.default_rng([seed, block, _AUTHORS]).permutation(batch)
    return frozenset(order[:count].tolist())


def seed_of(seed: int, number: int) -> int:
    """What the completion of this number is drawn with, 0 … 2^32 - 1: asked again it is the same."""
    return int(np.random.SeedSequence([seed, number, _WORDS]).generate_state(1)[0])
