"""Work for teachers: one lane each, requests of bounded size, asked again until they are answered."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from distill.aio import Signal
from distill.metrics.timeline import Timeline
from distill.rollout.bad_answers import Trust
from sync.errors import Overloaded, RemoteError, Unreachable, WireError, WrongServer

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
class _Lane(Generic[W]):
    """What waits for one teacher."""

    name: str
    queue: deque[_Piece[W]] = field(default_factory=deque)
    changed: Signal = field(default_factory=Signal)
    busy: int = 0
    """Requests under way."""


class Lanes(Generic[W, A]):
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
        self._lanes: dict[str, _Lane[W]] = {name: _Lane(name) for name in teachers}
        self._ask_teacher, self._problem, self._settle = ask, problem, settle
        self._trust, self._attempts = trust, attempts
        self._timeline = timeline
        self._linger = linger
        self._waits_for = waits_for
        self.open = 0
        """Pieces of work that wait or are under way."""

    def put(self, teacher: str, id: str, work: W) -> None:
        """Queue work for a teacher."""
        self._put(self._lanes[teacher], _Piece(id, work))

    def _put(self, lane: _Lane[W], piece: _Piece[W]) -> None:
        lane.queue.append(piece)
        self.open += 1
        lane.changed.wake()

    async def run(self) -> None:
        """Ask until cancelled."""
        async with asyncio.TaskGroup() as group:
            for lane in self._lanes.values():
                self._busy(lane, 0)
                for _ in range(PARALLEL):
                    group.create_task(self._serve(lane))

    async def _serve(self, lane: _Lane[W]) -> None:
        while True:
            pieces = await self._collect(lane)
            if not pieces:
                continue
            self._busy(lane, 1)
            try:
                answers = await self._ask(lane, [piece.work for piece in pieces])
                looked = [self._look(lane, *one) for one in zip(pieces, answers, strict=True)]
                await self._settle(lane.name, [one for one in looked if one is not None])
            finally:
                self.open -= len(pieces)
                self._busy(lane, -1)

    def _look(
        self, lane: _Lane[W], piece: _Piece[W], answer: A | str | Unusable
    ) -> tuple[W, A | str | Unusable] | None:
        """Piece and answer when that settles it; None: it is asked again."""
        if isinstance(answer, str):
            return piece.work, answer
        server, teacher = self._teachers[lane.name].answered_by(piece.id), self._teachers[lane.name]
        if not isinstance(answer, Unusable):
            if (found := self._problem(lane.name, piece.work, answer)) is None:
                self._trust.good(f"teacher {lane.name} at {server}")
                return piece.work, answer
            answer = Unusable(found)
        problem = f"teacher {lane.name} at {server}, {self._what} of {piece.id}: {answer.problem}"
        logger.warning("an answer cannot be used: %s", problem)
        self._trust.bad(
            f"teacher {lane.name} at {server}", piece.id, problem, lambda: teacher.leave_out(server)
        )
        piece.bad += 1
        if piece.bad >= self._attempts:
            return piece.work, Unusable(problem)
        self._put(lane, piece)
        return None

    def _busy(self, lane: _Lane[W], change: int) -> None:
        lane.busy += change
        self._timeline.level(f"teacher {lane.name}", self._what, lane.busy)
        if self._waits_for is not None:
            self._timeline.waits(f"teacher {lane.name}", None if lane.busy else self._waits_for)
        lane.changed.wake()

    async def _collect(self, lane: _Lane[W]) -> list[_Piece[W]]:
        while not lane.queue or (lane.busy and len(lane.queue) < self._batch):
            await lane.changed.wait()
        if len(lane.queue) < self._batch:
            await asyncio.sleep(self._linger)
        return [lane.queue.popleft() for _ in range(min(self._batch, len(lane.queue)))]

    async def _ask(self, lane: _Lane[W], work: list[W]) -> list[A | str | Unusable]:
        pause = 0.5
        while True:
            try:
                return [*await self._ask_teacher(lane.name, work)]
            except Overloaded as error:
                await asyncio.sleep(error.retry_after)
            except Unreachable as error:
                logger.warning("teacher %s is asked again in %.1f s: %s", lane.name, pause, error)
                await asyncio.sleep(pause)
                pause = min(pause * 2, 5.0)
                if len(work) > 1:
                    return await self._ask_in_halves(lane, work)
            except WrongServer:  # no rollout is at fault
                raise
            except (RemoteError, WireError) as error:
                if len(work) == 1:
                    return [Unusable(str(error)) if isinstance(error, WireError) else str(error)]
                return await self._ask_in_halves(lane, work)

    async def _ask_in_halves(self, lane: _Lane[W], work: list[W]) -> list[A | str | Unusable]:
        half = len(work) // 2
        return await self._ask(lane, work[:half]) + await self._ask(lane, work[half:])
