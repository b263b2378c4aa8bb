"""A host's episodes in the process of a test, without its service."""

from __future__ import annotations

from distill.environments.episode import EnvironmentAnswer, FinishReason
from distill.environments.host import Host, Playing
from sync.wire import Array, unpack


class Played:
    """An `Environment`; `under_way`: episodes that no `end` was for."""

    def __init__(self, host: Host) -> None:
        self._host, self.name = host, host.name
        self.under_way: dict[str, Playing] = {}

    async def begin(self, id: str, task: int) -> EnvironmentAnswer:
        self.under_way[id] = playing = Playing(self._host, id, task)
        return await playing.next()

    async def proceed(
        self, id: str, turn: int, token_ids: Array, finish_reason: FinishReason
    ) -> EnvironmentAnswer:
        self.under_way[id].answer(unpack(token_ids).tolist(), finish_reason)
        return await self.under_way[id].next()

    async def end(self, ids: list[str]) -> None:
        for id in ids:
            if (playing := self.under_way.pop(id, None)) is not None:
                await playing.stop(1.0)
