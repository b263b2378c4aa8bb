"""What the controller needs of a student replica, and its client over HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol, cast

from sync import wire
from sync.wire import Generated, GenerateFailed, GenerateRequest
from sync.wire.client import MAX_SMALL, Peer

Answer = Generated | GenerateFailed


class ReplicaEngine(Protocol):
    """What the controller needs of a student replica. All may raise Unreachable and RemoteError."""

    @property
    def url(self) -> str: ...
    def generate(self, request: GenerateRequest) -> AsyncGenerator[Answer, None]:
        """One answer per prompt, as each ends; leaving the iterator aborts the rest."""
        ...

    async def update(self, request: wire.UpdateRequest, timeout: float) -> wire.UpdateReply: ...
    async def state(self, digests: bool = False) -> wire.ReplicaState: ...
    async def alive(self) -> bool: ...
    async def aclose(self) -> None: ...


class HttpReplica(Peer):
    """A replica behind a URL."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Answer, None]:
        kind = cast(type[Generated], Answer)
        answers = self.stream("/distill/v1/generate", request, kind)
        return cast(AsyncGenerator[Answer, None], answers)

    async def update(self, request: wire.UpdateRequest, timeout: float) -> wire.UpdateReply:
        if request.broadcast is not None:  # a group cannot be joined twice: no retry
            body = await self.once("/distill/v1/update", wire.encode(request), timeout, MAX_SMALL)
            return wire.decode(body, wire.UpdateReply)
        return await self.call("/distill/v1/update", request, wire.UpdateReply, timeout)

    async def state(self, digests: bool = False) -> wire.ReplicaState:
        path = "/distill/v1/state" + ("?digests=1" if digests else "")
        return await self.call(path, None, wire.ReplicaState, 120.0 if digests else 10.0)
