"""The replica's client against a server that speaks its routes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from in_memory import MemoryReplica, weights_of
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from distill.rollout.replica_client import HttpReplica
from distill.trainer_api.http_api import listen, serving
from sync.base.errors import RemoteError, Unreachable
from sync.wire import (
    BroadcastTicket,
    Generated,
    GenerateFailed,
    GeneratePrompt,
    GenerateRequest,
    Sampling,
    UpdateRequest,
    Version,
    frame,
)
from sync.wire.server import read_message, refuse, reply


def application(engine: MemoryReplica, cut: int | None = None) -> Starlette:
    """Routes of a replica over one in memory; after `cut` frames the stream ends inside one."""

    async def generate(request: Request) -> Response:
        asked = await read_message(request, GenerateRequest)

        async def frames() -> AsyncIterator[bytes]:
            sent = 0
            async for answer in engine.generate(asked):
                if sent == cut:
                    yield frame(answer)[:9]
                    return
                sent += 1
                yield frame(answer)

        return StreamingResponse(frames())

    async def update(request: Request) -> Response:
        asked = await read_message(request, UpdateRequest)
        if asked.version.step == 13:
            return refuse(409, "digest of model.weight differs")
        return reply(await engine.update(asked, 1.0))

    async def state(request: Request) -> Response:
        return reply(await engine.state("digests" in request.query_params))

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok")

    return Starlette(
        routes=[
            Route("/distill/v1/generate", generate, methods=["POST"]),
            Route("/distill/v1/update", update, methods=["POST"]),
            Route("/distill/v1/state", state),
            Route("/health", health),
        ]
    )


REQUEST = GenerateRequest(
    sampling=Sampling(max_tokens=8), prompts=[GeneratePrompt(f"p{i}", [1, 2]) for i in range(3)]
)


async def collect(client: HttpReplica, into: list[Generated | GenerateFailed]) -> None:
    async for answer in client.generate(REQUEST):
        into.append(answer)


async def test_completions_updates_and_digests_come_over_http() -> None:
    engine = MemoryReplica(spoil=lambda a: GenerateFailed(id=a.id, error="no") if a.id == "p1" else a)
    bound = listen("127.0.0.1", 0, None)
    async with serving(application(engine), bound):
        client = HttpReplica(f"http://127.0.0.1:{bound.getsockname()[1]}")
        assert await client.alive()
        answers: list[Generated | GenerateFailed] = []
        await collect(client, answers)
        assert [answer.id for answer in answers] == ["p0", "p1", "p2"]
        assert isinstance(answers[1], GenerateFailed)
        assert isinstance(answers[2], Generated)

        reply = await client.update(UpdateRequest(version=Version(0, 4)), 5.0)
        assert reply.version == (await client.state()).version == Version(0, 4)
        assert (await client.state(digests=True)).digests == weights_of(Version(0, 4))
        with pytest.raises(RemoteError, match=r"409: digest of model\.weight differs"):
            await client.update(UpdateRequest(version=Version(0, 13)), 5.0)
        await client.aclose()


async def test_a_stream_that_breaks_keeps_what_came_before() -> None:
    bound = listen("127.0.0.1", 0, None)
    async with serving(application(MemoryReplica(), cut=2), bound):
        client = HttpReplica(f"http://127.0.0.1:{bound.getsockname()[1]}")
        answers: list[Generated | GenerateFailed] = []
        with pytest.raises(Unreachable, match="in the middle of a frame"):
            await collect(client, answers)
        assert len(answers) == 2
        await client.aclose()


async def test_nobody_there_is_not_alive() -> None:
    client = HttpReplica("http://127.0.0.1:9")
    assert not await client.alive()
    with pytest.raises(Unreachable):
        await asyncio.wait_for(collect(client, []), 60)
    await client.aclose()


async def test_membership_of_a_broadcast_is_not_requested_twice() -> None:
    """A snapshot may be asked for until its time is over; here that would be an hour."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        client = HttpReplica(f"http://127.0.0.1:{bound.getsockname()[1]}")
        ticket = BroadcastTicket("127.0.0.1:1", "group", 1, 2)
        with pytest.raises(Unreachable, match="ClientConnectorError"):
            await client.update(UpdateRequest(version=Version(0, 1), broadcast=ticket), 3600.0)
        await client.aclose()
