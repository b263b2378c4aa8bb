"""Over real HTTP: the trainer's routes, those of servers, and the replica's client."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import pytest
from in_memory import MemoryReplica, MemoryTeacher, rows_in, weights_of
from ports import refusing
from served_app import at_url, replica_app
from starlette.requests import Request
from starlette.responses import Response
from typer.testing import CliRunner
from waiting import until

from distill.aio import cancel
from distill.cli.main import app
from distill.controller import Controller
from distill.interfaces import Hooks
from distill.rollout.replica_client import HttpReplica
from distill.trainer_api.http_api import listen, while_serving
from student_trainer.controller_client import ControllerClient
from sync import wire
from sync.base.errors import ConfigError, RemoteError, Unreachable
from sync.wire import BatchRequest, Head, Servers, TeacherServers, TrainBatch, TrainerWelcome, Version
from sync.wire.client import BlockingPeer

TOKEN = "secret"
ANSWER = cast(type[TrainBatch], TrainBatch | wire.Wait | wire.Stop)


def hello(
    world_size: int = 1, checkpoint: Version | None = None, model: str = "model", sharing: int = 1
) -> wire.TrainerHello:
    return wire.TrainerHello(world_size, checkpoint, model, "test", sequence_parallel=sharing)


def request(version: Version, rank: int = 0, world_size: int = 1) -> BatchRequest:
    return BatchRequest(version, rank, world_size)


class Remote:
    """A trainer's blocking client, called off the controller's loop."""

    def __init__(self, controller: Controller) -> None:
        self.url = controller.url
        self.peer = BlockingPeer(self.url, TOKEN, timeout=60.0)

    async def call(self, path: str, body: wire.Message | None, kind: type[Any] = wire.Ok) -> Any:
        return await asyncio.to_thread(self.peer.call, path, body, kind)

    async def batch(self, version: Version, rank: int = 0, world_size: int = 1) -> Any:
        return await self.call("/v1/batch", request(version, rank, world_size), ANSWER)

    async def get(self, path: str, **headers: str) -> httpx.Response:
        async with httpx.AsyncClient(trust_env=False) as client:
            return await client.get(self.url + path, headers=headers)


@asynccontextmanager
async def running(run: Controller) -> AsyncIterator[Remote]:
    """A client of a controller that runs meanwhile."""
    task = asyncio.create_task(run.run())
    yield Remote(run)
    await cancel([task])


@pytest.fixture
async def remote(controller, config) -> AsyncIterator[Remote]:
    run = controller(config(run={"steps": 2}, controller={"port": 0}), token=TOKEN)
    async with running(run) as client:
        yield client


async def test_a_trainer_goes_from_hello_to_its_last_word(controller, config) -> None:
    run = controller(config(run={"steps": 2}), token=TOKEN)
    task = asyncio.create_task(run.run())
    client = Remote(run)
    welcome = await client.call("/v1/hello", hello(2), TrainerWelcome)
    mine = wire.RunIdentity("test", run.record.run.id, "model")
    assert welcome == TrainerWelcome(version=Version(0, 0), parent=None, teachers=["t"], run=mine)
    for step in range(2):
        version, after = Version(0, step), Version(0, step + 1)
        shares = await asyncio.gather(*(client.batch(version, rank, 2) for rank in range(2)))
        assert all(isinstance(share, TrainBatch) for share in shares)
        assert await client.batch(version, 0, 2) == shares[0]
        await client.call("/v1/event", wire.Published(after, "full", 1, 1, 0.0))
        await client.call("/v1/event", wire.StepReport(version=after, metrics={}, seconds={"train": 0.1}))
    stops = [await client.batch(Version(0, 2), rank, 2) for rank in range(2)]
    assert stops == [wire.Stop(reason="all steps are done", checkpoint=True)] * 2
    await client.call("/v1/event", wire.CheckpointSaved(version=Version(0, 2), path="c"))
    await client.call("/v1/event", wire.FinalDigests(version=Version(0, 2), digests={"w": "0"}))
    summary = await asyncio.wait_for(task, 60)
    assert summary["completed"] is True
    assert summary["weights_identical"] is False  # the replica's digests are others


async def test_a_rank_that_sends_no_heartbeat_is_told_of_and_a_replaced_trainer_sends_none(
    controller, config, caplog
) -> None:
    stalled: asyncio.Queue[str] = asyncio.Queue()
    settings = config(run={"health_timeout_seconds": 1.0})
    run = controller(settings, Hooks(stalled=stalled.put_nowait), token=TOKEN)
    async with running(run) as client:
        await client.call("/v1/hello", hello(2), TrainerWelcome)
        for rank in range(2):
            await client.call("/v1/event", wire.Heartbeat(version=Version(0, 0), rank=rank))
        ControllerClient(client.peer).beat(Version(0, 0), 0.05)
        assert await asyncio.wait_for(stalled.get(), 60) == "trainer"
        await asyncio.to_thread(until, lambda: run.heartbeats.since.keys() == {0})
        assert any("no heartbeat of trainer rank 1 for" in message for message in caplog.messages)

        await client.call("/v1/hello", hello(2), TrainerWelcome)
        assert not run.heartbeats.since
        await asyncio.to_thread(until, lambda: "heartbeat" not in [one.name for one in threading.enumerate()])
        assert stalled.empty()


async def test_heartbeats_behind_the_last_word_make_nobody_wait_for_more(controller, config) -> None:
    run = controller(config(run={"steps": 1, "health_timeout_seconds": 0.2}), Hooks(stalled=pytest.fail))
    session, version = run.session, Version(0, 0)
    task = asyncio.create_task(run.run())
    await session.hello(hello())
    await session.batch(request(version))
    await session.event(wire.StepReport(version=Version(0, 1), metrics={}, seconds={}))
    await session.event(wire.FinalDigests(version=Version(0, 1), digests={"w": "0"}))
    await asyncio.wait_for(task, 60)
    await session.event(wire.Heartbeat(version=version, rank=0))
    assert not run.heartbeats.since


async def test_a_poll_without_a_batch_waits_and_is_told_to_ask_again(controller, config) -> None:
    run = controller(config(controller={"port": 0}), token=TOKEN, replicas={})
    run.session.poll_seconds = 0.2
    async with running(run) as client:
        await client.call("/v1/hello", hello(), TrainerWelcome)
        assert await client.batch(Version(0, 0)) == wire.Wait()


@pytest.mark.parametrize(
    ("hellos", "said", "problem"),
    [
        (1, request(Version(3, 0)), "409: .*not of the current lineage 0"),
        (1, request(Version(0, 5)), "409: .*step 5 cannot be requested"),
        (1, request(Version(0, 0), 1), "409: .*rank 1 of 1 is not one of the 1 ranks"),
        (1, request(Version(0, 0), 0, 4), "409: .*rank 0 of 4 is not one of the 1 ranks"),
        (0, request(Version(0, 0)), "say hello again"),
        (2, request(Version(0, 0)), "another trainer has started"),
        (0, hello(checkpoint=Version(4, 2)), "belongs to no lineage"),
        (1, hello(model="other"), "is not the run's model"),
        (0, hello(3, sharing=2), r"2 ranks are to share rows and the trainer has 3: trainer\.seq"),
        (0, wire.Ok(), "400: .* is not a"),
    ],
)
async def test_what_a_trainer_cannot_say_is_refused(remote, hellos: int, said: Any, problem: str) -> None:
    for _ in range(hellos):
        await remote.call("/v1/hello", hello(), TrainerWelcome)
    path = "/v1/batch" if isinstance(said, BatchRequest) else "/v1/hello"
    with pytest.raises(RemoteError, match=problem):
        await remote.call(path, said)


@pytest.mark.parametrize(("ranks", "sharing"), [(1, 1), (4, 2), (2, 2)])
async def test_ranks_that_share_rows_get_the_same_of_as_many_more_tokens(
    controller, config, ranks: int, sharing: int
) -> None:
    run = controller(config(run={"steps": 1}, trainer={"micro_batch_tokens": 24}))
    async with running(run):
        await run.session.hello(hello(ranks, sharing=sharing))
        shares = [await run.session.batch(request(Version(0, 0), rank, ranks)) for rank in range(ranks)]
        assert [shares[rank // sharing * sharing] for rank in range(ranks)] == shares
        parts = [wire.decode(share, TrainBatch) for share in shares[::sharing]]
        ids = [id for rows in rows_in(parts) for id in rows.ids]
        assert sorted(ids) == sorted(one.id for one in run.record.state.batch_of(0).rollouts)
        longest = max(rows.tokens.shape[0] for rows in rows_in(parts))
        assert longest <= 24 * sharing
        assert (longest > 24) == (sharing > 1)


async def test_a_teachers_head_is_passed_through(remote, monkeypatch) -> None:
    asked, give = [], MemoryTeacher.head

    async def slowly(self: MemoryTeacher) -> Head:
        asked.append(self)
        await asyncio.sleep(0.05)
        return await give(self)

    monkeypatch.setattr(MemoryTeacher, "head", slowly)
    ranks = (remote.call("/v1/teachers/t/head", None, Head) for _ in range(8))
    assert {head.weight.shape for head in await asyncio.gather(*ranks)} == {(50, 4)}
    assert len(asked) == 1, "it is fetched once for all ranks"
    with pytest.raises(RemoteError, match="no teacher 'x'; there are t"):
        await remote.call("/v1/teachers/x/head", None, Head)


async def test_a_rank_learns_where_a_teacher_keeps_scores(remote) -> None:
    found = await remote.call("/v1/teachers/t", None, TeacherServers)
    assert found == TeacherServers(urls=["memory"], fingerprint=None)
    with pytest.raises(RemoteError, match="404: no teacher 'x'; there are t"):
        await remote.call("/v1/teachers/x", None, TeacherServers)


async def test_every_route_but_health_needs_the_token(remote) -> None:
    assert (await remote.get("/health")).status_code == 200
    assert (await remote.get("/metrics")).status_code == 401
    assert (await remote.get("/metrics", authorization=f"Bearer {TOKEN}")).status_code == 200


def test_an_open_address_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="no token is set"):
        listen("0.0.0.0", 0, None)


async def test_a_request_that_is_cut_off_by_the_end_is_told_so() -> None:
    async def forever(_: Request) -> Response:
        await asyncio.Event().wait()
        raise AssertionError("nothing ends this wait but cancellation")

    poll = asyncio.create_task(while_serving(forever)(Request({"type": "http"})))
    await asyncio.sleep(0)
    poll.cancel()
    assert (await poll).status_code == 503


# --- replicas ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "name", "message"),
    [
        ("b:1", None, "'b:1' cannot register: it is not a server's URL: write http://"),
        ("http://a:1/", None, "replica student-7 is a member already: remove it first"),
        ("http://c:1", "student-7", "replica student-7 is a member already"),
        ("http://c:1", "zz", "no server 'zz' is expected to register"),
        (None, "zz", "no replica 'zz': there are student-7"),
    ],
)
async def test_a_replica_that_cannot_join_or_leave_is_named(controller, url, name, message) -> None:
    replicas = {"student-7": MemoryReplica(url="http://a:1")}
    run = controller(token=TOKEN, connect=lambda there: MemoryReplica(url=str(there)), replicas=replicas)
    async with running(run) as client:
        with pytest.raises(RemoteError, match=message):
            if url is None:
                await client.call("/v1/servers/leave", wire.ServerLeaves(name=name), Servers)
            else:
                await client.call("/v1/servers", wire.ServerRegisters(None, url, name), Servers)
        assert (await client.get("/v1/servers")).status_code == 401


async def test_the_command_lists_adds_and_removes(controller, monkeypatch) -> None:
    """What the removed one was generating is requeued."""
    monkeypatch.setenv("DISTILL_TOKEN", TOKEN)
    endless = MemoryReplica(token_seconds=1e6)
    run = controller(token=TOKEN, connect=lambda to: MemoryReplica(url=str(to)), replicas={"r0": endless})

    async def command(*words: str) -> str:
        arguments = ["servers", *words, "--controller", run.url]
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert result.exit_code == 0, result.exception
        return result.output

    async with running(run):
        assert "r0 " in await command("ls")
        assert "student-9" in await command("add", "http://b:1", "--name", "student-9")
        await asyncio.to_thread(until, lambda: endless.served)
        output = await command("remove", "r0")
        await asyncio.to_thread(until, lambda: run.record.state.counters.requeued["replica_lost"], 60.0)
    assert "student-9" in output
    assert "r0 " not in output


async def test_the_members_of_a_broadcast_that_is_over_are_lost(remote, monkeypatch) -> None:
    monkeypatch.setattr("student_trainer.controller_client._MEMBERS_SECONDS", 60.0)  # on a busy machine
    lost = await asyncio.to_thread(ControllerClient(remote.peer).lost, "0-7")
    assert "broadcast 0-7 is over, the newest is None" in (lost or "")


def test_a_controller_that_is_away_says_nothing_about_replicas() -> None:
    with refusing() as url:
        assert ControllerClient(BlockingPeer(url, TOKEN)).lost("0-1") is None


def test_a_taken_port_is_named_and_that_of_a_controller_that_was_killed_is_free() -> None:
    """Its clients may not have noticed yet: their connections are half closed."""
    first = listen("127.0.0.1", 0, None)
    host, port = first.getsockname()
    first.listen()
    with socket.create_connection((host, port)) as client:
        accepted, _ = first.accept()
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} .*choose another controller\.port"):
            listen(host, port, None)
        accepted.close()
        first.close()
        with listen(host, port, None) as second:
            second.listen()
            assert client.recv(1) == b""


# --- the replica's client against a server that speaks its routes -----------------------------------------


PROMPTS = [wire.GeneratePrompt(f"p{i}", [1, 2]) for i in range(3)]
REQUEST = wire.GenerateRequest(sampling=wire.Sampling(max_tokens=8), prompts=PROMPTS)


async def test_completions_updates_and_digests_come_over_http() -> None:
    engine = MemoryReplica(spoil=lambda a: wire.GenerateFailed(id=a.id, error="no") if a.id == "p1" else a)
    async with at_url(replica_app(engine)) as url, HttpReplica(url) as client:
        assert await client.alive()
        answers = {answer.id: type(answer) async for answer in client.generate(REQUEST)}
        assert answers == {"p0": wire.Generated, "p1": wire.GenerateFailed, "p2": wire.Generated}

        reply = await client.update(wire.UpdateRequest(version=Version(0, 4)), 5.0)
        assert reply.version == (await client.state()).version == Version(0, 4)
        assert (await client.state(digests=True)).digests == weights_of(Version(0, 4))
        with pytest.raises(RemoteError, match=r"409: digest of model\.weight differs"):
            await client.update(wire.UpdateRequest(version=Version(0, 13)), 5.0)


async def test_of_a_replica_that_is_gone_neither_completions_nor_a_broadcast_are_requested_twice() -> None:
    """A snapshot may be asked for until its time is over, which is then said."""
    ticket = wire.BroadcastTicket("127.0.0.1:1", "group", 1, 2)
    with refusing() as url:
        async with HttpReplica(url) as client:
            with pytest.raises(Unreachable, match="/generate: ClientConnectorError"):
                await anext(client.generate(REQUEST))
            with pytest.raises(Unreachable, match="/update: ClientConnectorError"):
                await client.update(wire.UpdateRequest(version=Version(0, 1), broadcast=ticket), 30.0)
