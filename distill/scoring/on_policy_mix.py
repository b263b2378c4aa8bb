"""Completions that a teacher generates instead of the student (objective.on_policy below 1).

`run_log.is_teacher_turn` says which prompts those are.
"""

from __future__ import annotations

import msgspec
import numpy as np

from distill.config import RunConfig
from distill.events import Events, TeacherCompleted
from distill.interfaces import Components
from distill.run_log.records import Rollout
from distill.run_log.validation import Validator
from sync.wire import Array, ScoreRefused, TeacherCompletion, TeacherPrompt, pack

_SAMPLES = 2
"""Stream of random numbers of a run's seed, beside that of the prompts' order."""


class TeacherGeneration:
    """A job of `TeacherQueue`: issued rollouts in, TeacherCompleted out.

    The teacher samples from its whole distribution, at the temperature of its scores, with the prompt that it
    sees when it scores. What it generates looks like a student's completion without versions, and is scored
    like one.
    """

    what = "teacher_generate"
    waits_for = None

    def __init__(self, parts: Components, config: RunConfig, validator: Validator, events: Events) -> None:
        self._parts, self._validator, self._events = parts, validator, events
        self._seed, self._rollout = config.run.seed, config.rollout

    def message(self, rollout: Rollout, seen: Array) -> TeacherPrompt:
        return TeacherPrompt(rollout.id, seen, seed_of(self._seed, rollout.number))

    async def send(
        self, teacher: str, messages: list[TeacherPrompt]
    ) -> list[TeacherCompletion | ScoreRefused]:
        engine, rollout = self._parts.teachers[teacher], self._rollout
        temperature = self._parts.want.temperature
        return await engine.generate(
            messages, rollout.max_tokens, rollout.stop_token_ids, temperature=temperature
        )

    def problem(self, teacher: str, rollout: Rollout, answer: TeacherCompletion) -> str | None:
        problem = self._validator.generated_by_teacher(answer)
        return None if problem is None else str(problem)

    def finish(self, teacher: str, rollout: Rollout, answer: TeacherCompletion) -> None:
        count, k = answer.token_ids.shape[0], self._parts.student_topk
        completed = msgspec.structs.replace(
            rollout,
            tokens=answer.token_ids,
            logprob=answer.logprob,
            truncated=answer.finish_reason == "length",
            topk_ids=pack(np.full((count, k), -1, "i4")) if k else None,
        )
        self._events.emit(TeacherCompleted(completed))


def seed_of(seed: int, number: int) -> int:
    """Sampling seed in [0, 2^32) of completion `number`; a requeued one uses the same seed."""
    return int(np.random.SeedSequence([seed, number, _SAMPLES]).generate_state(1)[0])
