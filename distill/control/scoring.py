"""Finished completions to their teachers, in batches, and scored rollouts back."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from distill.control.records import Rollout
from distill.control.signals import Signal
from distill.control.state import Asked
from distill.control.timeline import REPLICAS, Timeline
from distill.prompts.stream import Prompt
from sync.errors import Overloaded, RemoteError, Unreachable, WireError
from sync.wire import Array, Generated, Head, Scored, ScoreRefused, ScoreSequence, Want, pack, unpack

logger = logging.getLogger(__name__)
Transform = Callable[[Prompt], Sequence[int]]
Judge = Callable[[Prompt, Sequence[int]], float]


class Teacher(Protocol):
    """What the controller needs of a teacher: teacher_service.client has it over HTTP.

    `score` answers in the order asked; it retries, and raises Unreachable when the teacher is really gone,
    RemoteError when the whole request was refused.
    """

    async def score(
        self, sequences: list[ScoreSequence], want: Want, deadline: float | None = None
    ) -> list[Scored | ScoreRefused]: ...
    async def head(self) -> Head: ...


@dataclass(slots=True)
class Finished:
    """A completion that waits for its marks."""

    asked: Asked
    answer: Generated


@dataclass
class _Lane:
    """What waits for one teacher."""

    name: str
    teacher: Teacher
    queue: deque[Finished] = field(default_factory=deque)
    changed: Signal = field(default_factory=Signal)
    busy: int = 0
    """Requests under way."""


class Scoring:
    """Runs for the length of the run; `put` at any time.

    A request carries up to `batch` completions. While one is under way a further one is sent only when it is
    full, at most `parallel` at once; an idle teacher is asked after `linger` seconds with what there is. A
    teacher that is gone is asked again until it is back. Nothing is bounded here: the capacity rule bounds
    what can wait.

    `route` gives the teacher's name of a data source. `transforms`: what a teacher sees instead of the
    prompt. `judge` gives the task's reward. `scored` is awaited with every answered batch, `refused` is
    called with a completion that its teacher cannot score.
    """

    def __init__(
        self,
        teachers: dict[str, Teacher],
        route: Callable[[str], str],
        want: Want,
        batch: int,
        *,
        scored: Callable[[list[Rollout]], Awaitable[None]],
        refused: Callable[[Finished, str], None],
        timeline: Timeline,
        transforms: dict[str, Transform] | None = None,
        judge: Judge | None = None,
        parallel: int = 2,
        linger: float = 0.005,
    ) -> None:
        self._lanes = {name: _Lane(name, teacher) for name, teacher in teachers.items()}
        self._route = route
        self._want = want
        self._batch = batch
        self._scored = scored
        self._refused = refused
        self._timeline = timeline
        self._transforms = transforms or {}
        self._judge = judge
        self._parallel = parallel
        self._linger = linger
        self._open = 0

    @property
    def open(self) -> int:
        """Completions that wait for a teacher or are with one."""
        return self._open

    def put(self, finished: Finished) -> None:
        """Queue a completion for its teacher."""
        lane = self._lanes[self._route(finished.asked.prompt.source)]
        lane.queue.append(finished)
        self._open += 1
        lane.changed.wake()

    async def run(self) -> None:
        """Score until cancelled."""
        async with asyncio.TaskGroup() as group:
            for lane in self._lanes.values():
                self._timeline.waits(f"teacher {lane.name}", REPLICAS)
                for _ in range(self._parallel):
                    group.create_task(self._work(lane))

    async def _work(self, lane: _Lane) -> None:
        while True:
            work = await self._collect(lane)
            if not work:
                continue
            self._busy(lane, 1)
            try:
                await self._settle(lane, work, await self._ask(lane, work))
            finally:
                self._open -= len(work)
                self._busy(lane, -1)

    def _busy(self, lane: _Lane, change: int) -> None:
        lane.busy += change
        self._timeline.level(f"teacher {lane.name}", "score", lane.busy)
        self._timeline.waits(f"teacher {lane.name}", None if lane.busy else REPLICAS)
        lane.changed.wake()

    async def _collect(self, lane: _Lane) -> list[Finished]:
        while not lane.queue or (lane.busy and len(lane.queue) < self._batch):
            await lane.changed.wait()
        if len(lane.queue) < self._batch:
            await asyncio.sleep(self._linger)
        return [lane.queue.popleft() for _ in range(min(self._batch, len(lane.queue)))]

    async def _ask(self, lane: _Lane, work: list[Finished]) -> list[Scored | ScoreRefused]:
        """One answer per completion; a request that is refused as a whole is halved to find the culprit."""
        sequences = [self._sequence(lane.name, finished) for finished in work]
        pause = 0.5
        while True:
            try:
                return await lane.teacher.score(sequences, self._want)
            except Overloaded as error:
                await asyncio.sleep(error.retry_after)
            except Unreachable as error:
                logger.warning("teacher %s is asked again in %.1f s: %s", lane.name, pause, error)
                await asyncio.sleep(pause)
                pause = min(pause * 2, 5.0)
            except (RemoteError, WireError) as error:
                if len(work) == 1:
                    return [ScoreRefused(sequences[0].id, str(error))]
                half = len(work) // 2
                return await self._ask(lane, work[:half]) + await self._ask(lane, work[half:])

    def _sequence(self, teacher: str, finished: Finished) -> ScoreSequence:
        prompt, answer = finished.asked.prompt, finished.answer
        transform = self._transforms.get(teacher)
        seen = prompt_array(prompt.token_ids if transform is None else transform(prompt))
        start = seen.shape[0]
        tokens = Array("i4", (start + answer.token_ids.shape[0],), seen.data + answer.token_ids.data)
        return ScoreSequence(prompt.id, tokens, start, answer.topk_ids)

    async def _settle(self, lane: _Lane, work: list[Finished], answers: list[Scored | ScoreRefused]) -> None:
        rollouts = []
        for finished, answer in zip(work, answers, strict=True):
            problem = answer.error if isinstance(answer, ScoreRefused) else self._fault(finished, answer)
            if isinstance(answer, ScoreRefused) or problem:
                self._refused(finished, f"teacher {lane.name}: {problem}")
            else:
                rollouts.append(self._rollout(lane.name, finished, answer))
        await self._scored(rollouts)

    def _rollout(self, teacher: str, finished: Finished, marks: Scored) -> Rollout:
        asked, answer = finished.asked, finished.answer
        reward = None
        if self._judge is not None:
            reward = float(self._judge(asked.prompt, unpack(answer.token_ids).tolist()))
        return Rollout(
            asked.prompt.id,
            asked.number,
            prompt_array(asked.prompt.token_ids),
            answer.token_ids,
            answer.logprob,
            answer.spans,
            answer.finish_reason in ("length", "time"),
            teacher,
            marks,
            answer.topk_ids,
            reward,
        )

    def _fault(self, finished: Finished, marks: Scored) -> str | None:
        """What makes a teacher's marks unusable; None: nothing."""
        answer, want = finished.answer, self._want
        asked = {
            "logprob": True,
            "topk_ids": want.topk > 0,
            "topk_logprob": want.topk > 0,
            "hidden": want.hidden,
            "entropy": want.entropy,
            "gathered": answer.topk_ids is not None,
        }
        for name in (name for name, wanted in asked.items() if wanted):
            array: Array | None = getattr(marks, name)
            if array is None or array.shape[0] != answer.token_ids.shape[0]:
                got = "nothing" if array is None else f"shape {array.shape}"
                return f"{name} was asked for {answer.token_ids.shape[0]} positions and came as {got}"
        if not np.isfinite(unpack(marks.logprob)).all():
            return "a log-probability is not finite"
        return None


def prompt_array(token_ids: Sequence[int]) -> Array:
    """i4 [P]"""
    return pack(np.asarray(token_ids, "i4"))
