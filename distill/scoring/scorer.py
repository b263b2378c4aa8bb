"""Finished completions to their teachers, in batches, and scored rollouts back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from distill.metrics.timeline import REPLICAS, Timeline
from distill.prompts.rewards import RewardFn
from distill.prompts.stream import Prompt
from distill.rollout.bad_answers import Trust
from distill.run_log.records import DropReason, Rollout
from distill.run_log.state import PendingPrompt
from distill.run_log.validation import Validator
from distill.scoring.teacher_queue import Servers, TeacherQueue, Unusable
from sync.errors import DistillError, WireError
from sync.wire import (
    Array,
    Generated,
    Head,
    Scored,
    ScoreRefused,
    ScoreSequence,
    TeacherCompletion,
    TeacherInfo,
    TeacherPrompt,
    Want,
    checks,
    pack,
    unpack,
)
from teacher_service.client import Counters

Transform = Callable[[Prompt], Sequence[int]]
Answer = Scored | ScoreRefused


class Teacher(Servers, Protocol):
    """What the controller needs of a teacher: teacher_service.client has it over HTTP.

    `score` and `generate` answer in the order asked; they retry, and raise Unreachable when the teacher is
    really gone, RemoteError when the whole request was refused (as `generate` is by a teacher that cannot).
    """

    @property
    def counters(self) -> Counters: ...

    async def score(
        self, sequences: list[ScoreSequence], want: Want, deadline: float | None = None
    ) -> list[Scored | ScoreRefused]: ...
    async def generate(
        self,
        prompts: list[TeacherPrompt],
        max_tokens: int,
        stop_token_ids: Sequence[int],
        *,
        temperature: float = 1.0,
    ) -> list[TeacherCompletion | ScoreRefused]: ...
    async def head(self) -> Head: ...
    async def first_info(self) -> TeacherInfo:
        """What it is, of whichever of its processes answers first."""
        ...


@dataclass(slots=True)
class PendingScore:
    """A completion that waits for its marks."""

    asked: PendingPrompt
    answer: Generated


Refused = Callable[[PendingScore, DropReason, str], None]
"""Takes a completion that is not trained on, with the reason."""


@dataclass(slots=True)
class _Work:
    """A completion on its way to its teacher."""

    finished: PendingScore
    sequence: ScoreSequence


class Scoring:
    """Runs for the length of the run; `put` at any time.

    `route` gives the teacher's name of a data source. `transforms`: what a teacher sees instead of the
    prompt. `reward_fn` gives the task's reward. `scored` is awaited with every answered batch, `refused` is
    called with a completion that its teacher cannot score, whose scores stay unusable, or that a function of
    the user's fails on.
    """

    def __init__(
        self,
        teachers: dict[str, Teacher],
        route: Callable[[str], str],
        sound: Validator,
        batch: int,
        *,
        scored: Callable[[list[Rollout]], Awaitable[None]],
        refused: Refused,
        timeline: Timeline,
        trust: Trust,
        attempts: int = 5,
        transforms: dict[str, Transform] | None = None,
        reward_fn: RewardFn | None = None,
        linger: float = 0.005,
    ) -> None:
        """`batch`: completions in one request to a teacher; `attempts`, `linger`: see `Lanes`."""
        self._teachers, self._route, self._sound, self._trust = teachers, route, sound, trust
        self._scored, self._refused = scored, refused
        self._transforms, self._reward_fn = transforms or {}, reward_fn
        self._hidden_sizes: dict[str, int] = {}
        self._queues: TeacherQueue[_Work, Answer] = TeacherQueue(
            "score",
            teachers,
            batch,
            ask=self._ask,
            problem=self._problem,
            settle=self._settle,
            timeline=timeline,
            trust=trust,
            attempts=attempts,
            linger=linger,
            waits_for=REPLICAS,
        )

    @property
    def open(self) -> int:
        """Completions that wait for a teacher or are with one."""
        return self._queues.open

    def put(self, finished: PendingScore) -> None:
        """Queue a completion for its teacher."""
        prompt = finished.asked.prompt
        name = self._route(prompt.source)
        try:
            transform = self._transforms.get(name)
            seen = prompt.token_ids if transform is None else transform(prompt)
        except DistillError as error:
            self._function_failed(f"the prompt_transform of teacher {name}", finished, error)
            return
        self._queues.put(name, prompt.id, _Work(finished, score_sequence(seen, finished.answer)))

    def _function_failed(self, function: str, finished: PendingScore, error: DistillError) -> None:
        """A function of the user's raised: it costs this rollout; too often in a row it ends the run."""
        self._refused(finished, "function_failed", str(error))
        self._trust.bad(function, finished.asked.prompt.id, str(error), lambda: False)

    async def run(self) -> None:
        """Score until cancelled."""
        await self._queues.run()

    async def _ask(self, name: str, work: list[_Work]) -> list[Answer]:
        teacher = self._teachers[name]
        if self._sound.want.hidden and name not in self._hidden_sizes:
            self._hidden_sizes[name] = (await teacher.first_info()).hidden_size
        sequences = [one.sequence for one in work]
        answers = await teacher.score(sequences, self._sound.want)
        check_echo(name, answers, sequences)
        return answers

    def _problem(self, name: str, work: _Work, answer: Answer) -> str | None:
        if isinstance(answer, ScoreRefused):
            return answer.error if answer.unusable else None
        count = work.finished.answer.token_ids.shape[0]
        problem = self._sound.scored(answer, count, self._hidden_sizes.get(name))
        return None if problem is None else str(problem)

    async def _settle(self, name: str, work: list[tuple[_Work, Answer | str | Unusable]]) -> None:
        rollouts = []
        for one, answer in work:
            if isinstance(answer, Scored):
                try:
                    rollouts.append(self._rollout(name, one.finished, answer))
                except DistillError as error:
                    self._function_failed("the reward_fn", one.finished, error)
            elif isinstance(answer, Unusable):
                self._refused(one.finished, "unusable", answer.problem)
            else:
                why = answer if isinstance(answer, str) else answer.error
                self._refused(one.finished, "teacher_refused", f"teacher {name}: {why}")
        await self._scored(rollouts)

    def _rollout(self, teacher: str, finished: PendingScore, marks: Scored) -> Rollout:
        asked, answer = finished.asked, finished.answer
        reward = None
        if self._reward_fn is not None:
            reward = float(self._reward_fn(asked.prompt, unpack(answer.token_ids).tolist()))
            self._trust.good("the reward_fn")
        return Rollout(
            asked.prompt.id,
            asked.number,
            prompt_array(asked.prompt.token_ids),
            answer.token_ids,
            answer.logprob,
            answer.spans,
            answer.finish_reason in ("length", "time"),
            teacher,
            checks.without_bad_diagnostics(marks, answer.token_ids.shape[0]),
            answer.topk_ids,
            reward,
            asked.by_teacher,
        )


def check_echo(
    teacher: str,
    answers: Sequence[Scored | TeacherCompletion | ScoreRefused],
    asked: Sequence[ScoreSequence | TeacherPrompt],
) -> None:
    """Raise WireError unless there is one result for each that was asked, in that order."""
    if problem := checks.echo([one.id for one in answers], [one.id for one in asked]):
        raise WireError(f"teacher {teacher} answered for others than asked: {problem}")


def score_sequence(prompt: Sequence[int], answer: Generated) -> ScoreSequence:
    """A completion behind its prompt, to be scored."""
    seen, written = prompt_array(prompt), answer.token_ids
    start = seen.shape[0]
    tokens = Array("i4", (start + written.shape[0],), seen.data + written.data)
    return ScoreSequence(answer.id, tokens, start, answer.topk_ids)


def prompt_array(token_ids: Sequence[int]) -> Array:
    """i4 [P]"""
    return pack(np.asarray(token_ids, "i4"))
