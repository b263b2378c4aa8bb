"""The replica's client against a server that speaks its routes."""

from __future__ import annotations

import asyncio
import socket

import pytest
from in_memory import MemoryReplica, weights_of
from served_app import at_url, replica_app

from distill.rollout.replica_client import HttpReplica
from sync import wire
from sync.base.errors import RemoteError, Unreachable
from sync.wire import Generated, GenerateFailed, GeneratePrompt, GenerateRequest, UpdateRequest, Version

PROMPTS = [GeneratePrompt(f"p{i}", [1, 2]) for i in range(3)]
REQUEST = GenerateRequest(sampling=wire.Sampling(max_tokens=8), prompts=PROMPTS)


async def collect(client: HttpReplica, into: list[Generated | GenerateFailed]) -> None:
    async for answer in client.generate(REQUEST):
        into.append(answer)


async def test_completions_updates_and_digests_come_over_http() -> None:
    engine = MemoryReplica(spoil=lambda a: GenerateFailed(id=a.id, error="no") if a.id == "p1" else a)
    async with at_url(replica_app(engine)) as url:
        client = HttpReplica(url)
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
    async with at_url(replica_app(MemoryReplica(), cut=2)) as url:
        client = HttpReplica(url)
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
        ticket = wire.BroadcastTicket("127.0.0.1:1", "group", 1, 2)
        with pytest.raises(Unreachable, match="ClientConnectorError"):
            await client.update(UpdateRequest(version=Version(0, 1), broadcast=ticket), 3600.0)
        await client.aclose()
