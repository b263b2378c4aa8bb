"""The one queue before the teachers: batches of bounded size, retries, and isolation of a bad rollout.

Two jobs use it, each with a queue of its own: `scorer.Scoring` and `on_policy_mix.TeacherGeneration`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from distill.aio import Signal
from distill.config import RunConfig
from distill.events import ErrorBudget, Events, RolloutRejected
from distill.interfaces import Components
from distill.metrics.timeline import Timeline
from distill.run_log.records import Rollout
from sync.errors import DistillError, Overloaded, RemoteError, Unreachable, WireError, WrongServer
from sync.retry import Backoff
from sync.wire import Array, ScoreRefused, checks, pack
from teacher_service.batching import isolate

logger = logging.getLogger(__name__)
PARALLEL = 2
"""Requests in flight to one teacher: the second hides the latency between two."""


class _HasId(Protocol):
    @property
    def id(self) -> str: ...


M = TypeVar("M", bound=_HasId)
"""A rollout's part of a request: ScoreSequence, TeacherPrompt."""
A = TypeVar("A", bound=_HasId)
"""Its answer: Scored, TeacherCompletion."""


class Job(Protocol[M, A]):
    """One kind of teacher request: how to build, send, check and complete it."""

    @property
    def what(self) -> str:
        """Of a request, in the timeline."""
        ...

    @property
    def waits_for(self) -> str | None:
        """What an idle teacher is blocked on; None: nothing."""
        ...

    def message(self, rollout: Rollout, seen: Array) -> M:
        """The rollout's part of a request; `seen`: i4 [P], the prompt as the teacher sees it."""
        ...

    async def send(self, teacher: str, messages: list[M]) -> Sequence[A | ScoreRefused]:
        """One answer per message, in order; may raise what `Teacher.score` raises."""
        ...

    def problem(self, teacher: str, rollout: Rollout, answer: A) -> str | None:
        """Why an answer cannot be used; None: it can."""
        ...

    def finish(self, teacher: str, rollout: Rollout, answer: A) -> None:
        """Emit the event for a usable answer."""
        ...


class _Unusable(NamedTuple):
    """Marks a request without a usable answer; holds the last problem."""

    problem: str


@dataclass
class _Queue(Generic[M]):
    """What waits for one teacher, each with its part of a request."""

    teacher: str
    waiting: deque[tuple[Rollout, M]] = field(default_factory=deque)
    bad: dict[str, int] = field(default_factory=dict)
    """Rollout → unusable answers to it so far."""
    changed: Signal = field(default_factory=Signal)
    busy: int = 0
    """Requests in flight."""


class TeacherQueue(Generic[M, A]):
    """Runs for the length of the run; `put` at any time. Out: what `job` emits, and RolloutRejected.

    A request carries up to `buffer.score_batch` rollouts. While one is in flight a further one is sent only
    when it is full, at most PARALLEL at once; an idle teacher gets what there is after `linger` seconds. The
    capacity rule bounds what can wait here.

    A teacher that is gone is retried with backoff, halving the batch each time: one that is too slow for a
    whole request answers a part of it. A request that is refused as a whole is bisected to find the rollout
    at fault, which is rejected. So is a rollout after `rollout.max_attempts` unusable answers.
    """

    linger = 0.005
    """Seconds that an idle teacher waits for a batch to fill."""

    def __init__(
        self,
        job: Job[M, A],
        parts: Components,
        config: RunConfig,
        timeline: Timeline,
        budget: ErrorBudget,
        events: Events,
    ) -> None:
        self._job, self._parts = job, parts
        self._batch, self._attempts = config.buffer.score_batch, config.rollout.max_attempts
        self._timeline, self._budget, self._events = timeline, budget, events
        self._queues: dict[str, _Queue[M]] = {name: _Queue(name) for name in parts.teachers}
        self.open = 0
        """Rollouts queued or in flight."""

    def put(self, rollout: Rollout) -> None:
        """Queue a rollout for the teacher of its source."""
        prompt = rollout.source_prompt
        teacher = self._parts.route(prompt.source)
        transform = self._parts.transforms.get(teacher)
        try:
            seen = pack(np.asarray(prompt.token_ids if transform is None else transform(prompt), "i4"))
        except DistillError as error:
            self._budget.function_failed(f"the prompt_transform of teacher {teacher}", rollout, error)
        else:
            self._put(self._queues[teacher], rollout, self._job.message(rollout, seen))

    def _put(self, queue: _Queue[M], rollout: Rollout, message: M) -> None:
        queue.waiting.append((rollout, message))
        self.open += 1
        queue.changed.wake()

    async def run(self) -> None:
        """Serve all queues until cancelled."""
        async with asyncio.TaskGroup() as group:
            for queue in self._queues.values():
                self._note_busy(queue, 0)
                for _ in range(PARALLEL):
                    group.create_task(self._serve(queue))

    async def _serve(self, queue: _Queue[M]) -> None:
        while True:
            batch = await self._collect(queue)
            if not batch:
                continue
            self._note_busy(queue, 1)
            try:
                answers = await self._answers(queue, [message for _, message in batch])
                for (rollout, message), answer in zip(batch, answers, strict=True):
                    self._settle(queue, rollout, message, answer)
            finally:
                self.open -= len(batch)
                self._note_busy(queue, -1)

    def _note_busy(self, queue: _Queue[M], change: int) -> None:
        queue.busy += change
        role = f"teacher {queue.teacher}"
        self._timeline.level(role, self._job.what, queue.busy)
        if self._job.waits_for is not None:
            self._timeline.waits(role, None if queue.busy else self._job.waits_for)
        queue.changed.wake()

    async def _collect(self, queue: _Queue[M]) -> list[tuple[Rollout, M]]:
        while not queue.waiting or (queue.busy and len(queue.waiting) < self._batch):
            await queue.changed.wait()
        if len(queue.waiting) < self._batch:
            await asyncio.sleep(self.linger)
        return [queue.waiting.popleft() for _ in range(min(self._batch, len(queue.waiting)))]

    async def _answers(self, queue: _Queue[M], messages: list[M]) -> list[A | ScoreRefused | _Unusable]:
        """One answer per message; a request that fails is halved until the message at fault fails alone."""

        def failed(message: M, error: Exception) -> A | ScoreRefused | _Unusable:
            return (
                _Unusable(str(error))
                if isinstance(error, WireError)
                else ScoreRefused(message.id, str(error))
            )

        return await isolate(
            messages,
            lambda part: self._send(queue.teacher, [*part]),
            failed,
            on=(RemoteError, WireError, Unreachable),
            never=(WrongServer,),  # no rollout is at fault
        )

    async def _send(self, teacher: str, messages: list[M]) -> list[A | ScoreRefused | _Unusable]:
        """One request, once the teacher has room; a single message is retried until the teacher is back.

        Raises Unreachable for several messages, so that a teacher too slow for all of them gets each half
        on its own.
        """
        backoff = Backoff(0.5, 5.0)
        while True:
            try:
                answers = await self._job.send(teacher, messages)
            except Overloaded as error:
                await asyncio.sleep(error.retry_after)
            except Unreachable as error:
                pause = backoff.next()
                logger.warning("teacher %s is retried in %.1f s: %s", teacher, pause, error)
                await asyncio.sleep(pause)
                if len(messages) > 1:
                    raise
            else:
                if problem := checks.echo([one.id for one in answers], [one.id for one in messages]):
                    raise WireError(
                        f"teacher {teacher} returned ids that do not match the request: {problem}"
                    )
                return [*answers]

    def _settle(
        self, queue: _Queue[M], rollout: Rollout, message: M, answer: A | ScoreRefused | _Unusable
    ) -> None:
        """Finish, reject or requeue a rollout."""
        problem: str | None
        if isinstance(answer, ScoreRefused):
            if not answer.unusable:
                detail = f"teacher {queue.teacher}: {answer.error}"
                return self._events.emit(RolloutRejected(rollout, "teacher_refused", detail))
            problem = answer.error
        elif isinstance(answer, _Unusable):
            problem = answer.problem
        else:
            problem = self._job.problem(queue.teacher, rollout, answer)
        teacher = self._parts.teachers[queue.teacher]
        server = teacher.answered_by(rollout.id)
        name = f"teacher {queue.teacher} at {server}"
        if problem is None:
            assert not isinstance(answer, ScoreRefused | _Unusable)
            self._budget.good(name)
            queue.bad.pop(rollout.id, None)
            return self._job.finish(queue.teacher, rollout, answer)
        detail = f"{name}, {self._job.what} of {rollout.id}: {problem}"
        logger.warning("an answer cannot be used: %s", detail)
        self._budget.bad(name, rollout.id, detail, lambda: teacher.leave_out(server))
        attempts = queue.bad[rollout.id] = queue.bad.get(rollout.id, 0) + 1
        if attempts >= self._attempts:
            del queue.bad[rollout.id]
            return self._events.emit(RolloutRejected(rollout, "unusable", detail))
        return self._put(queue, rollout, message)
