"""An environment in this process, and the episodes that it plays: what the service puts behind HTTP.

play ─▶ complete(context) ─▶ next(): Turn ─▶ answer(ids) ─▶ back in play … ─▶ next(): over, or failed
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeAlias

import numpy as np

from distill.environments.episode import EnvironmentAnswer, FinishReason
from sync.base.errors import DataError
from sync.wire import EpisodeFailed, EpisodeOver, Turn, pack


class Host(Protocol):
    """An environment; `name` is that of its section."""

    name: str
    tasks: int | None
    """How many there are, known once `serving` is entered; None: they have no end."""

    def serving(self) -> AbstractAsyncContextManager[object]:
        """What it needs while it plays; entered before the first episode begins."""
        ...

    async def play(self, playing: Playing, task: int) -> EpisodeOver:
        """Play an episode to its end. What it raises costs the episode."""
        ...


Answer: TypeAlias = asyncio.Future[tuple[list[int], FinishReason]]


class Playing:
    """One episode, under way from its construction on. Order: `next`, (`answer`, `next`)*, `stop`."""

    def __init__(self, host: Host, id: str, task: int) -> None:
        self.id, self.turn = id, -1  # the newest turn that was given
        self._said: asyncio.Queue[np.ndarray | EpisodeOver | EpisodeFailed] = asyncio.Queue()
        """Contexts that the host wants completed, int32; at last how it ended."""
        self._answers: list[Answer] = []  # by turn, whatever a host asks for at a time
        self._token_ids: list[int] = []  # the sequence so far
        self._play = asyncio.create_task(self._played(host, task), name=f"episode {id}")

    async def _played(self, host: Host, task: int) -> None:
        try:
            said: EpisodeOver | EpisodeFailed = await host.play(self, task)
        except Exception as error:  # noqa: BLE001 - of the environment's own code, and it costs one episode
            kind = "" if isinstance(error, DataError) else f"{type(error).__name__}: "
            said = EpisodeFailed(id=self.id, error=f"{kind}{error}")
        self._said.put_nowait(said)

    async def complete(self, context: list[int]) -> tuple[list[int], FinishReason]:
        """For the host: what the student says behind a context, and why that ended."""
        ids = np.array(context, "i4")  # what is no id is refused where it comes from
        answer: Answer = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        self._said.put_nowait(ids)
        return await answer

    async def next(self) -> EnvironmentAnswer:
        """The next turn, or how the episode ended."""
        said = await self._said.get()
        if not isinstance(said, np.ndarray):
            return said
        context, self.turn = said.tolist(), self.turn + 1
        keep = _shared(self._token_ids, context)
        self._token_ids = context
        return Turn(id=self.id, turn=self.turn, token_ids=pack(said[keep:]), keep=keep)

    def answer(self, token_ids: list[int], finish_reason: FinishReason) -> None:
        """Give the host what the student said to the newest turn."""
        self._token_ids = self._token_ids + token_ids
        if not (answer := self._answers[self.turn]).done():
            answer.set_result((token_ids, finish_reason))

    async def stop(self, seconds: float) -> None:
        """End it, and wait so long at most, for it may ignore that; one that is over has ended."""
        for answer in self._answers:
            answer.cancel()
        self._play.cancel()
        await asyncio.wait({self._play}, timeout=seconds)


def _shared(before: list[int], after: list[int]) -> int:
    """Ids that both begin with; at least one of `after` is left."""
    length = max(0, min(len(before), len(after) - 1))
    if before[:length] == after[:length]:
        return length
    return next(i for i in range(length) if before[i] != after[i])
