"""Work for teachers: one lane each, requests of bounded size, asked again until they are answered."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from distill.aio import Signal
from distill.metrics.timeline import Timeline
from distill.rollout.bad_answers import Trust
from sync.errors import Overloaded, RemoteError, Unreachable, WireError, WrongServer
from teacher_service.isolate import isolate

logger = logging.getLogger(__name__)
PARALLEL = 2
"""Requests under way to one teacher: while it answers one, the next is on its way."""
W = TypeVar("W")
A = TypeVar("A")


class Servers(Protocol):
    """A teacher, as far as its processes can be told apart."""

    def answered_by(self, id: str) -> str:
        """Who answered last for this id."""
        ...

    def leave_out(self, server: str) -> bool:
        """Ask this one nothing more; whether another is left."""
        ...


class Unusable(NamedTuple):
    """No answer could be used; the last one's problem."""

    problem: str


@dataclass
class _Piece(Generic[W]):
    """One piece of work."""

    id: str
    work: W
    bad: int = 0
    """Answers to it that could not be used."""


@dataclass
class _Queue(Generic[W]):
    """What waits for one teacher."""

    name: str
    queue: deque[_Piece[W]] = field(default_factory=deque)
    changed: Signal = field(default_factory=Signal)
    busy: int = 0
    """Requests under way."""


class TeacherQueue(Generic[W, A]):
    """Runs for the length of the run; `put` at any time.

    A request carries up to `batch` pieces of work. While one is under way a further one is sent only when it
    is full, at most PARALLEL at once; an idle teacher is asked after `linger` seconds with what there is. A
    teacher that is gone is asked again until it is back, for half as much each time: one that is too slow for
    a whole request answers a part of it. Nothing is bounded here: the capacity rule bounds what can wait.

    `ask` gives one answer per piece of work and may raise what a `Teacher` raises; a request that is refused
    as a whole is halved to find the culprit, which `settle` gets with the refusal's text for its answer. An
    answer that `problem` finds wrong, or that is no reply, is asked for again, up to `attempts` times; then
    it is Unusable.
    """

    def __init__(
        self,
        what: str,
        teachers: Mapping[str, Servers],
        batch: int,
        *,
        ask: Callable[[str, list[W]], Awaitable[list[A]]],
        problem: Callable[[str, W, A], str | None],
        settle: Callable[[str, list[tuple[W, A | str | Unusable]]], Awaitable[None]],
        timeline: Timeline,
        trust: Trust,
        attempts: int,
        linger: float = 0.005,
        waits_for: str | None = None,
    ) -> None:
        """`what`: the work's name in the timeline; `waits_for`: whom an idle teacher waits for."""
        self._what, self._batch, self._teachers = what, batch, teachers
        self._queues: dict[str, _Queue[W]] = {name: _Queue(name) for name in teachers}
        self._ask_teacher, self._problem, self._settle = ask, problem, settle
        self._trust, self._attempts = trust, attempts
        self._timeline = timeline
        self._linger = linger
        self._waits_for = waits_for
        self.open = 0
        """Pieces of work that wait or are under way."""

    def put(self, teacher: str, id: str, work: W) -> None:
        """Queue work for a teacher."""
        self._put(self._queues[teacher], _Piece(id, work))

    def _put(self, queue: _Queue[W], piece: _Piece[W]) -> None:
        queue.queue.append(piece)
        self.open += 1
        queue.changed.wake()

    async def run(self) -> None:
        """Ask until cancelled."""
        async with asyncio.TaskGroup() as group:
            for queue in self._queues.values():
                self._busy(queue, 0)
                for _ in range(PARALLEL):
                    group.create_task(self._serve(queue))

    async def _serve(self, queue: _Queue[W]) -> None:
        while True:
            pieces = await self._collect(queue)
            if not pieces:
                continue
            self._busy(queue, 1)
            try:
                answers = await self._ask(queue, [piece.work for piece in pieces])
                looked = [self._look(queue, *one) for one in zip(pieces, answers, strict=True)]
                await self._settle(queue.name, [one for one in looked if one is not None])
            finally:
                self.open -= len(pieces)
                self._busy(queue, -1)

    def _look(
        self, queue: _Queue[W], piece: _Piece[W], answer: A | str | Unusable
    ) -> tuple[W, A | str | Unusable] | None:
        """Piece and answer when that settles it; None: it is asked again."""
        if isinstance(answer, str):
            return piece.work, answer
        server, teacher = self._teachers[queue.name].answered_by(piece.id), self._teachers[queue.name]
        if not isinstance(answer, Unusable):
            if (found := self._problem(queue.name, piece.work, answer)) is None:
                self._trust.good(f"teacher {queue.name} at {server}")
                return piece.work, answer
            answer = Unusable(found)
        problem = f"teacher {queue.name} at {server}, {self._what} of {piece.id}: {answer.problem}"
        logger.warning("an answer cannot be used: %s", problem)
        self._trust.bad(
            f"teacher {queue.name} at {server}", piece.id, problem, lambda: teacher.leave_out(server)
        )
        piece.bad += 1
        if piece.bad >= self._attempts:
            return piece.work, Unusable(problem)
        self._put(queue, piece)
        return None

    def _busy(self, queue: _Queue[W], change: int) -> None:
        queue.busy += change
        self._timeline.level(f"teacher {queue.name}", self._what, queue.busy)
        if self._waits_for is not None:
            self._timeline.waits(f"teacher {queue.name}", None if queue.busy else self._waits_for)
        queue.changed.wake()

    async def _collect(self, queue: _Queue[W]) -> list[_Piece[W]]:
        while not queue.queue or (queue.busy and len(queue.queue) < self._batch):
            await queue.changed.wait()
        if len(queue.queue) < self._batch:
            await asyncio.sleep(self._linger)
        return [queue.queue.popleft() for _ in range(min(self._batch, len(queue.queue)))]

    async def _ask(self, queue: _Queue[W], work: list[W]) -> list[A | str | Unusable]:
        """Answers; a request that fails is halved until the piece of work at fault fails alone."""
        return await isolate(
            work,
            lambda part: self._send(queue.name, [*part]),
            lambda _, error: Unusable(str(error)) if isinstance(error, WireError) else str(error),
            on=(RemoteError, WireError, Unreachable),
            never=(WrongServer,),  # no rollout is at fault
        )

    async def _send(self, name: str, work: list[W]) -> Sequence[A | str | Unusable]:
        """One request, once the teacher has room; retried with backoff while it is gone.

        Raises Unreachable for more than one piece of work, so that a teacher that is too slow for all of it
        gets each half on its own.
        """
        pause = 0.5
        while True:
            try:
                return await self._ask_teacher(name, work)
            except Overloaded as error:
                await asyncio.sleep(error.retry_after)
            except Unreachable as error:
                logger.warning("teacher %s is retried in %.1f s: %s", name, pause, error)
                await asyncio.sleep(pause)
                pause = min(pause * 2, 5.0)
                if len(work) > 1:
                    raise
