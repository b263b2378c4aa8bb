"""Requests to the teachers: scores of completions, and completions of their own.

`ask` is the one place where a request is split, repeated and halved, for whoever asks a teacher.
`TeacherQueue` forms the batches of a run. Two jobs use it, each with a queue of its own: Scoring, and
TeacherGeneration for the prompts that the teacher completes (objective.on_policy below 1; the rule is
`is_teacher_turn` in distill.record.record).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from msgspec.structs import replace

from distill import waits
from distill.aio import Signal
from distill.events import AT_FAULT
from distill.interfaces import Common, Components, Teacher
from distill.metrics.timeline import REPLICAS
from distill.record.rollout import Rollout
from distill.rollout.ends import Unusable
from distill.waits import SCORING, TEACHER_GENERATION
from sync.base.errors import (
    DataError,
    DistillError,
    Overloaded,
    RemoteError,
    TooLarge,
    Unreachable,
    WireError,
    WrongServer,
)
from sync.wire import (
    Array,
    Kept,
    Scored,
    ScoreRefused,
    ScoreSequence,
    TeacherCompletion,
    TeacherPrompt,
    Want,
    checks,
    pack,
)
from sync.wire.checks import Problem
from teacher_service.client import REQUEST_SECONDS, Reply, tokens_of

logger = logging.getLogger(__name__)
PARALLEL = 2  # batches in flight to one process of a teacher: the second hides the latency between two
REQUEST_TOKENS: Final = 1 << 16
"""Most tokens of one request to a teacher."""
HIDDEN_COST: Final = 8
"""Hidden states make long answers: a token with them counts as so many towards REQUEST_TOKENS."""
_SAMPLES = 2  # stream of random numbers of a run's seed, beside that of the prompts' order

A = TypeVar("A")
M = TypeVar("M", bound="Message")
Message = ScoreSequence | TeacherPrompt  # a rollout's part of a request
Answer = Scored | TeacherCompletion


# --- requests ---------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """What became of one message."""

    result: Any
    server: str
    """URL of the process that gave it; empty where its request was refused as a whole."""


async def until_answered(
    teacher: Teacher, call: Callable[[], Awaitable[A]], within: float = REQUEST_SECONDS
) -> A:
    """Call until the teacher has room and can be reached; each time another of its processes may answer.

    Raises the last Unreachable or Overloaded when the next call would begin after `within` seconds.
    """
    clock = asyncio.get_running_loop().time
    expires = clock() + within
    while True:
        await asyncio.sleep(min(teacher.pause, max(0.0, expires - clock())))
        try:
            return await call()
        except (Unreachable, Overloaded) as error:
            if clock() + teacher.pause >= expires:
                raise
            logger.warning("%s; retrying", error)


async def ask(
    teacher: Teacher,
    messages: Sequence[M],
    request: Callable[..., Awaitable[Reply[Any]]],
    within: float = REQUEST_SECONDS,
    *,
    cost: int = 1,
    extra: int = 0,
    isolate: bool = False,
) -> list[Asked]:
    """What became of each message, in order, from requests of at most REQUEST_TOKENS at the same time.

        what fails                                        who acts
        a process is gone, stalls, is another's, is full  client: leaves it alone; here: tries again
        too many messages, or too slow for so many        here: halves
        the engine fails on a batch                       service: takes it apart into requests, then as above
        a request is refused, or answered with nonsense   here, with `isolate`: halves, down to the message
        one message is refused                            caller: its rollout is dropped
        a result cannot be used                           caller: repeats, `rollout.max_attempts` in all
        a process gives `guard.bad_answers` such results  caller: leaves it out

    `request(part, limit=…)` makes one of up to `limit` seconds, as the client's methods do; None: their own
    limit. A token of a message counts `cost`, and each message `extra` more; one with too many travels alone.
    Raises Unreachable or Overloaded after `within` seconds, and what the client raises for the rest; with
    `isolate`, of that WrongServer alone.
    """
    clock = asyncio.get_running_loop().time
    expires = clock() + within

    async def send(part: Sequence[M]) -> list[Asked]:
        def once() -> Awaitable[Reply[Any]]:
            return request(part, limit=None if within == math.inf else max(0.05, expires - clock()))

        reply = await until_answered(teacher, once, expires - clock())
        if problem := checks.echo([result.id for result in reply.results], [message.id for message in part]):
            raise WireError(f"{reply.server} returned ids that do not match the request: {problem}")
        return [Asked(result, reply.server) for result in reply.results]

    tasks = [asyncio.ensure_future(_halved(part, send, isolate)) for part in in_parts(messages, cost, extra)]
    try:
        return [asked for part in await asyncio.gather(*tasks) for asked in part]
    finally:
        for task in tasks:
            task.cancel()


async def _halved(
    whole: Sequence[M], send: Callable[[Sequence[M]], Awaitable[list[Asked]]], isolate: bool
) -> list[Asked]:
    """What became of messages that are sent in halves where they fail together.

    Not a closure that calls itself: that would be garbage in a circle, one a request.
    """
    left, done = [whole], list[Asked]()
    while left:
        part = left.pop()
        try:
            done += await send(part)
        except (Overloaded, WrongServer):
            raise
        except (RemoteError, WireError) as error:
            if not isolate and (len(part) == 1 or not isinstance(error, TooLarge)):
                raise
            if len(part) == 1:
                refused = ScoreRefused(part[0].id, str(error), isinstance(error, WireError))
                done.append(Asked(refused, ""))
            else:
                middle = len(part) // 2
                left += [part[middle:], part[:middle]]
    return done


def in_parts(messages: Sequence[M], cost: int, extra: int) -> list[Sequence[M]]:
    """Consecutive messages of at most REQUEST_TOKENS as `ask` counts them, and at least one each."""
    parts, first, total = list[Sequence[M]](), 0, 0
    for end, message in enumerate(messages):
        size = cost * tokens_of(message) + extra
        if end > first and total + size > REQUEST_TOKENS:
            parts.append(messages[first:end])
            first, total = end, 0
        total += size
    return [*parts, messages[first:]] if messages else []


# --- jobs: how to build, send, check and complete a request -----------------------------------------------


class Scoring:
    """Adds to completed rollouts the scores by the teacher of their source."""

    what, name = "score", SCORING
    waits_for = REPLICAS

    def __init__(self, common: Common) -> None:
        self._parts, self._config = common.parts, common.config.buffer
        self._hidden_sizes: dict[str, int] = {}

    def message(self, rollout: Rollout, seen: Array) -> Message:
        return ScoreSequence.of(rollout.id, seen, rollout.tokens, rollout.topk_ids)

    async def send(self, teacher: str, messages: Sequence[Any]) -> list[Asked]:
        cost, request = HIDDEN_COST if self._parts.want.hidden else 1, partial(self._request, teacher)
        return await ask(self._parts.teachers[teacher], messages, request, math.inf, cost=cost, isolate=True)

    async def _request(self, teacher: str, part: Sequence[Any], limit: float | None) -> Reply[Any]:
        want, engine = self._parts.want, self._parts.teachers[teacher]
        if want.hidden and teacher not in self._hidden_sizes:
            self._hidden_sizes[teacher] = (await engine.first_info()).hidden_size
        return await engine.score(part, self._want(teacher), limit)

    def _want(self, teacher: str) -> Want:
        """With `keep` where its scores go by reference."""
        parts, width = self._parts, self._hidden_sizes.get(teacher, 0)
        keep = self._config.by_reference(parts.want.bulk_bytes(parts.student_topk, width))
        return replace(parts.want, keep=keep)

    def finish(self, teacher: str, rollout: Rollout, message: Message, answer: Answer) -> Rollout | Problem:
        assert isinstance(answer, Scored)
        assert isinstance(message, ScoreSequence)
        parts, asked, width = self._parts, self._want(teacher), self._hidden_sizes.get(teacher)
        length, k = rollout.length, parts.student_topk
        if problem := checks.scored(answer, length, k, asked, parts.vocab_size, width):
            return problem
        seen, ended = message.token_ids.cut(message.start), rollout.ended()
        return replace(
            ended,
            teacher_prompt=seen if answer.kept and seen != ended.prompt else None,
            topk_ids=None if answer.kept else rollout.topk_ids,
            teacher=teacher,
            scored=checks.without_bad_entropy(answer, length),
        )


class TeacherGeneration:
    """Completes issued rollouts.

    The teacher samples from its whole distribution, at the temperature of its scores, with the prompt that it
    sees when it scores. What it generates looks like a student's completion without versions, and is scored
    like one.
    """

    what, name = "teacher_generate", TEACHER_GENERATION
    waits_for = None

    def __init__(self, common: Common) -> None:
        self._parts, self._seed, self._rollout = common.parts, common.config.run.seed, common.config.rollout

    def message(self, rollout: Rollout, seen: Array) -> Message:
        return TeacherPrompt(rollout.id, seen, seed_of(self._seed, rollout.number))

    async def send(self, teacher: str, messages: Sequence[Any]) -> list[Asked]:
        engine, rollout = self._parts.teachers[teacher], self._rollout
        request = partial(
            engine.generate,
            max_tokens=rollout.max_tokens,
            stop_token_ids=rollout.stop_token_ids,
            temperature=self._parts.want.temperature,
        )
        return await ask(engine, messages, request, math.inf, extra=rollout.max_tokens, isolate=True)

    def finish(self, teacher: str, rollout: Rollout, message: Message, answer: Answer) -> Rollout | Problem:
        assert isinstance(answer, TeacherCompletion)
        if problem := checks.teacher_completion(answer, self._rollout.max_tokens, self._parts.vocab_size):
            return problem
        count, k = answer.token_ids.shape[0], self._parts.student_topk
        return replace(
            rollout,
            tokens=answer.token_ids,
            logprob=answer.logprob,
            truncated=answer.finish_reason == "length",
            topk_ids=pack(np.full((count, k), -1, "i4")) if k else None,
        )


def seed_of(seed: int, number: int) -> int:
    """Sampling seed in [0, 2^32) of completion `number`; a requeued one uses the same seed."""
    return int(np.random.SeedSequence([seed, number, _SAMPLES]).generate_state(1)[0])


class ScoreReleases:
    """Has teachers forget the scores that no trainer will fetch again; `run` for the length of the run.

    Best effort: what a teacher is not told of it evicts in time.
    """

    pause = 1.0  # seconds in which releases are collected

    def __init__(self, parts: Components) -> None:
        self._parts, self._added = parts, Signal()
        self._waiting: dict[str, list[Kept]] = {}

    def put(self, rollouts: list[Rollout]) -> None:
        """Release the scores of these soon."""
        for rollout in rollouts:
            if rollout.kept is not None and rollout.teacher in self._parts.teachers:
                self._waiting.setdefault(rollout.teacher, []).append(rollout.kept)
        self._added.wake()

    async def run(self) -> None:
        while True:
            while not self._waiting:
                await self._added.wait()
            await asyncio.sleep(self.pause)
            waiting, self._waiting = self._waiting, {}
            for teacher, kept in waiting.items():
                await self._parts.teachers[teacher].release(kept)


# --- the queue --------------------------------------------------------------------------------------------


@dataclass
class _Question:
    """A rollout that waits for a teacher's answer."""

    rollout: Rollout
    message: Message  # its part of a request
    answered: asyncio.Future[Rollout]  # with the answer in it
    unusable: int = 0  # answers to it so far


@dataclass
class _Queue:
    """What waits for one teacher."""

    teacher: str
    waiting: deque[_Question] = field(default_factory=deque)
    changed: Signal = field(default_factory=Signal)
    busy: int = 0  # batches in flight


class TeacherQueue:
    """Runs for the length of the run; `answer` at any time.

    A batch has up to `buffer.score_batch` rollouts. While one is in flight for each process of the teacher, a
    further one is sent only when it is full, at most PARALLEL for each; an idle process gets what there is
    after `linger` seconds. The capacity rule bounds what can wait here. `ask` makes the requests of a batch
    and says what follows each failure.
    """

    linger = 0.005  # seconds that an idle teacher waits for a batch to fill

    def __init__(self, job: Scoring | TeacherGeneration, common: Common) -> None:
        self._job, self._parts, config = job, common.parts, common.config
        self._batch, self._attempts = config.buffer.score_batch, config.rollout.max_attempts
        self._timeline, self._budget = common.timeline, common.budget
        self._queues = {name: _Queue(name) for name in self._parts.teachers}
        self.open = 0  # rollouts queued or in flight

    async def answer(self, rollout: Rollout) -> Rollout:
        """A rollout with the answer of its source's teacher. Raises Unusable when there is none for it."""
        prompt = rollout.source_prompt
        teacher = self._parts.route(prompt.source)
        transform = self._parts.transforms.get(teacher)
        function = f"the prompt_transform of teacher {teacher}"
        try:
            seen = pack(np.asarray(prompt.token_ids if transform is None else transform(prompt), "i4"))
            self._budget.good(function)
        except DistillError as error:
            self._budget.function_failed(function, rollout.id, error)
            raise Unusable("function_failed", str(error)) from error
        answered = asyncio.get_running_loop().create_future()
        self._put(self._queues[teacher], _Question(rollout, self._job.message(rollout, seen), answered))
        return await answered

    def _put(self, queue: _Queue, question: _Question) -> None:
        queue.waiting.append(question)
        self.open += 1
        queue.changed.wake()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for queue in self._queues.values():
                self._note_busy(queue, 0)
                for _ in range(PARALLEL * self._parts.teachers[queue.teacher].processes):
                    group.create_task(self._serve(queue))

    async def _serve(self, queue: _Queue) -> None:
        role = f"teacher {queue.teacher}"
        while True:
            teacher = self._parts.teachers[queue.teacher]
            while not queue.waiting or (queue.busy >= teacher.processes and len(queue.waiting) < self._batch):
                cause = None if queue.busy else self._job.waits_for
                with waits.on(role, "rollouts", cause=cause, idle=True):
                    await queue.changed.wait()
            if len(queue.waiting) < self._batch:
                await asyncio.sleep(self.linger)
            batch = [queue.waiting.popleft() for _ in range(min(self._batch, len(queue.waiting)))]
            if not batch:
                continue
            self._note_busy(queue, 1)
            try:
                with waits.on(self._job.name, role, partial("{} rollouts".format, len(batch))):
                    asked = await self._job.send(queue.teacher, [question.message for question in batch])
                for question, outcome in zip(batch, asked, strict=True):
                    self._settle(queue, question, outcome)
            finally:
                self.open -= len(batch)
                self._note_busy(queue, -1)

    def _note_busy(self, queue: _Queue, change: int) -> None:
        queue.busy += change
        self._timeline.level(f"teacher {queue.teacher}", self._job.what, queue.busy)
        queue.changed.wake()

    def _settle(self, queue: _Queue, question: _Question, asked: Asked) -> None:
        """Answer a question, give it up or ask it again."""
        teacher, rollout = self._parts.teachers[queue.teacher], question.rollout
        outcome, server = asked.result, asked.server or queue.teacher
        name = f"teacher {queue.teacher} at {server}"
        tokenizer = f"the tokenizer of teacher {queue.teacher}"
        if isinstance(outcome, ScoreRefused) and outcome.no_text:
            self._budget.function_failed(tokenizer, rollout.id, DataError(outcome.error))
            return question.answered.set_exception(Unusable("function_failed", outcome.error))
        if isinstance(outcome, ScoreRefused) and not outcome.unusable:
            question.answered.set_exception(
                Unusable("teacher_refused", f"teacher {queue.teacher}: {outcome.error}")
            )
            refused = f"{name} refused {rollout.id}: {outcome.error} ({AT_FAULT})"
            return self._budget.bad(name, rollout.id, refused, lambda: teacher.leave_out(server))
        finished: Rollout | Problem | str
        if isinstance(outcome, ScoreRefused):
            finished = outcome.error
        else:
            finished = self._job.finish(queue.teacher, rollout, question.message, outcome)
        if isinstance(finished, Rollout):
            self._budget.good(name)
            self._budget.good(tokenizer)
            return question.answered.set_result(finished)
        detail = f"{name}, {self._job.what} of {rollout.id}: {finished}"
        logger.warning("an answer cannot be used: %s", detail)
        self._budget.bad(name, rollout.id, detail, lambda: teacher.leave_out(server))
        question.unusable += 1
        if question.unusable >= self._attempts:
            return question.answered.set_exception(Unusable("unusable", detail))
        return self._put(queue, question)
