"""Client and server halves against each other, over real sockets on loopback."""

import asyncio
import gc
import gzip
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ports import answering, saying, silent
from ports import client as plain
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from sync.base.errors import (
    ConfigError,
    DataError,
    DistillError,
    Overloaded,
    RemoteError,
    Unreachable,
    WireError,
)
from sync.base.own_code import own_code
from sync.wire import EpisodeFailed, EvalRequest, Ok, Version, Wait, client, decode, encode, frame
from sync.wire.client import SLOWEST, BlockingPeer, Peer
from sync.wire.server import (
    Gate,
    bind_alone,
    check_bind,
    join_port,
    read_message,
    refusal,
    refuse,
    reply,
)

REQUEST = EvalRequest(version=Version(0, 1))


class Scripted:
    """A server that answers POST /x with the given answers in turn, then with Ok; it counts calls."""

    def __init__(self, *answers: Response) -> None:
        self.answers = list(answers)
        self.calls = 0
        self.clients: set[object] = set()
        routes = [
            Route("/x", self.x, methods=["GET", "POST"]),
            Route("/stream", self.frames, methods=["POST"]),
            Route("/health", lambda _: Response()),
        ]
        self.app = Gate(Starlette(routes=routes), "secret")

    async def x(self, request: Request) -> Response:
        self.calls += 1
        self.clients.add(request.client)
        if self.answers:
            return self.answers.pop(0)
        if request.method == "POST":
            try:
                await read_message(request, EvalRequest, limit=100)
            except DistillError as error:
                return refusal(error)
        return reply(Ok())

    async def frames(self, request: Request) -> Response:
        cut = (await read_message(request, EvalRequest)).version.step

        async def body() -> AsyncIterator[bytes]:
            data = frame(Ok()) + frame(Wait())
            for start in range(0, len(data) - cut, 3):
                yield data[start : min(start + 3, len(data) - cut)]

        return StreamingResponse(body())


@asynccontextmanager
async def asking(scripted: Scripted, token: str = "secret") -> AsyncIterator[Peer]:
    with answering(scripted.app) as url:
        async with Peer(url, token) as peer:
            yield peer


def frames_of(peer: Peer, cut: int = 0) -> AsyncIterator[Ok | Wait]:
    """What comes of a stream of two frames that ends so many bytes too early."""
    return peer.stream("/stream", EvalRequest(version=Version(0, cut)), Ok | Wait)


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    async with asking(Scripted()) as peer:
        yield peer


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:5"}, 200),
        ({"host": "[::1]:5"}, 200),
        ({"host": socket.gethostname()}, 200),
        ({"host": "a.page.example"}, 403),
        ({"host": "127.0.0.1.a.page.example:5"}, 403),
        ({"host": "[::1"}, 403),
        ({"host": "10.0.0.1"}, 403),
        ({"origin": "http://a.page.example"}, 403),
        ({"origin": "null"}, 403),
    ],
)
async def test_what_a_page_in_a_browser_sends_to_loopback_is_refused(
    headers: dict[str, str], status: int
) -> None:
    with answering(Scripted().app) as url:
        async with plain(base_url=url, headers={"authorization": "Bearer secret"} | headers) as http:
            assert [(await http.get(path)).status_code for path in ("/x", "/health")] == [status] * 2


async def test_a_server_for_other_machines_goes_by_any_name() -> None:
    app = Scripted().app
    async with plain(transport=httpx.ASGITransport(app), base_url="http://10.0.0.1") as http:
        assert (await http.get("/health", headers={"host": "node-1"})).status_code == 200


@pytest.mark.parametrize(
    ("told", "pause"),
    [("0.7", 0.7), ("1e9", 60.0), ("-5", 0.05), ("0", 0.05)]
    + [(text, 1.0) for text in ("inf", "-inf", "nan", "soon", "", "9" * 400)],
)
async def test_a_peer_that_is_full_is_asked_again_within_a_minute_whatever_it_says(
    told: str, pause: float
) -> None:
    full = refuse(429, "full")
    full.headers["retry-after"] = told
    async with asking(Scripted(full)) as peer:
        with pytest.raises(Overloaded) as caught:
            await peer.once("/x", None, 600.0)
    assert caught.value.retry_after == pause


async def test_a_peer_that_stays_full_says_so() -> None:
    """At once, when it asks for more time than there is."""
    full = [refuse(429, "queue of 8 tokens is full", retry_after=seconds) for seconds in (0.05, 0.05, 60.0)]
    scripted = Scripted(*full)
    async with asking(scripted) as peer:
        with pytest.raises(Overloaded, match="queue of 8 tokens is full"):
            await peer.call("/x", REQUEST, Ok, timeout=60.0)
    assert scripted.calls == 3


async def test_a_full_peer_is_asked_again_when_it_said_and_one_that_refuses_is_not() -> None:
    full = refuse(429, "full", retry_after=0.01), refuse(503, "starting")
    scripted = Scripted(*full, Response(encode(Ok())), refuse(422, "start 0 must be at least 1"))
    async with asking(scripted) as peer:
        assert await peer.call("/x", REQUEST, Ok) == Ok()
        assert scripted.calls == 3
        with pytest.raises(RemoteError, match="422: start 0 must be at least 1"):
            await peer.call("/x", REQUEST, Ok)
    assert scripted.calls == 4


async def test_half_a_character_of_a_peer_or_of_user_code_can_be_written_down() -> None:
    async with asking(Scripted(Response(b'{"error": "no \\ud83d"}', 400))) as peer:
        with pytest.raises(RemoteError, match=r"400: no \?$") as refused:
            await peer.call("/x", REQUEST, Ok)
    match = r"f raised ValueError \(\?\) for row 1: mend it"
    with pytest.raises(DataError, match=match) as raised, own_code("f", "row 1", "mend it"):
        raise ValueError("\ud83d")
    for caught in (refused, raised):
        assert decode(encode(EpisodeFailed(id="a", error=str(caught.value))), EpisodeFailed)


async def test_a_peer_that_is_gone_is_named() -> None:
    async with Peer("http://127.0.0.1:9", "secret") as peer:
        with pytest.raises(Unreachable, match=r"127.0.0.1:9/x: \w+: .*tried for 0 s"):
            await peer.call("/x", REQUEST, Ok, timeout=0.2)
        assert not await peer.alive()


async def test_frames_arrive_whole_however_the_bytes_are_cut_and_half_a_one_is_a_loss(peer: Peer) -> None:
    assert [message async for message in frames_of(peer)] == [Ok(), Wait()]
    frames = frames_of(peer, cut=2)
    assert await anext(frames) == Ok()
    with pytest.raises(Unreachable, match="in the middle of a frame"):
        await anext(frames)


def test_threads_that_call_at_once_share_one_event_loop_and_its_connections() -> None:
    scripted = Scripted()
    gc.collect()  # what was used in the loop until now
    client._loop.cache_clear()  # they begin it
    with answering(scripted.app) as url, ThreadPoolExecutor(16) as threads:
        peer = BlockingPeer(url, "secret")
        assert {*threads.map(lambda _: peer.call("/x", REQUEST, Ok), range(100))} == {Ok()}
    assert len(scripted.clients) <= 16


def test_a_client_that_is_collected_by_the_thread_of_a_loop_that_begins_waits_for_nobody() -> None:
    """Whoever begins it holds the lock until that thread runs."""
    with answering(Scripted().app) as url:
        peer = BlockingPeer(url, "secret")
        assert peer.call("/x", REQUEST, Ok) == Ok()
        loop = client._loop()
        with client._begins:
            client._loop.cache_clear()
            begun = threading.Thread(target=BlockingPeer._close, args=(peer._peer,), daemon=True)
            begun.start()
            begun.join(10)
            assert not begun.is_alive()
        asyncio.run_coroutine_threadsafe(peer._peer.aclose(), loop).result()


def test_the_blocking_client_takes_no_longer_than_it_was_given() -> None:
    """Less than its own limit of each try, which no test waits for."""
    with silent() as url, pytest.raises(Unreachable, match=r"TimeoutError: .*tried for 1 s"):
        BlockingPeer(url, timeout=3600.0).call("/x", REQUEST, Ok, timeout=1.2)


def test_the_blocking_client_asks_a_silent_peer_again() -> None:
    """Its own limit is of each try, the call's of all."""

    async def silence() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    scripted = Scripted(StreamingResponse(silence()))
    with answering(scripted.app) as url:
        assert BlockingPeer(url, "secret", timeout=0.3).call("/x", REQUEST, Ok, timeout=600.0) == Ok()
    assert scripted.calls >= 2


ENDING = """
import atexit, threading, time
from sync.base.errors import Unreachable
from sync.wire import Ok
from sync.wire.client import BlockingPeer
peer = BlockingPeer("http://localhost:9")
def ask():
    while True:
        try:
            peer.call("/x", None, Ok, 0.1)
        except Unreachable:
            time.sleep(0.01)
threading.Thread(target=ask, daemon=True).start()
atexit.register(time.sleep, 0.5)
"""


def test_a_thread_that_asks_while_its_process_ends_is_told_so_and_prints_nothing() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, check=True)
    assert ended.stderr == ""


async def test_a_connection_without_traffic_is_probed(peer: Peer) -> None:
    await peer.once("/x", None, None)
    ((protocol, _),) = next(iter(peer._session.connector._conns.values()))
    connection = protocol.transport.get_extra_info("socket")
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


async def test_a_peer_that_answers_byte_by_byte_is_given_up_in_time() -> None:
    async def drip() -> AsyncIterator[bytes]:
        for _ in range(100):
            await asyncio.sleep(0.1)
            yield b"x"

    async with asking(Scripted(*(StreamingResponse(drip(), status) for status in (200, 400)))) as peer:
        with pytest.raises(Unreachable, match="tried for 1 s"):
            await peer.call("/x", REQUEST, Ok, timeout=0.6)
        with pytest.raises(Unreachable, match="TimeoutError"):
            await peer.once("/x", None, 0.6)


@pytest.mark.virtual_time
@pytest.mark.parametrize("late", [False, True])
async def test_a_long_answer_has_a_second_more_for_every_256_kib(late: bool) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield bytes(64 * SLOWEST)
        await asyncio.sleep(64.9 if late else 64.7)
        yield b"x"

    response: Any = SimpleNamespace(url="", status=200, content_length=None)
    response.content = SimpleNamespace(iter_any=parts)
    with pytest.raises(TimeoutError) if late else nullcontext():
        async with asyncio.timeout(0.8) as limit:
            assert len(await client._read(response, limit, 1 << 30)) == 64 * SLOWEST + 1


async def test_a_body_beyond_the_limit_is_refused(peer: Peer) -> None:
    with pytest.raises(RemoteError, match=r"413: .*longer than 100 bytes"):
        await peer.once("/x", encode(REQUEST) + b"\0" * 200, 60)


def test_only_loopback_may_be_bound_without_a_token() -> None:
    for host in ("127.0.0.1", "127.0.0.7", "::1", "localhost"):
        check_bind(host, None)
    check_bind("0.0.0.0", "secret")
    for host in ("0.0.0.0", "10.0.0.1", "::", "example"):
        with pytest.raises(ConfigError, match=host):
            check_bind(host, None)


async def test_calls_share_connections_until_the_client_is_closed() -> None:
    scripted = Scripted()
    async with asking(scripted) as peer:
        for _ in range(5):
            assert await asyncio.gather(*(peer.call("/x", REQUEST, Ok) for _ in range(20))) == [Ok()] * 20
        assert len(scripted.clients) <= 20
        await peer.aclose()
        with pytest.raises(Unreachable, match="is closed"):
            await peer.call("/x", REQUEST, Ok)
        assert not await peer.alive()


async def test_a_request_that_nobody_reads_ends_in_time() -> None:
    with silent() as url, pytest.raises(Unreachable, match="TimeoutError"):
        async with Peer(url) as peer, asyncio.timeout(30):
            await peer.once("/x", bytes(1 << 25), 0.3)


def test_a_user_in_a_url_and_a_token_are_too_much() -> None:
    with pytest.raises(ConfigError, match="leave the name and its password out"):
        Peer("http://u:p@h", "secret")


@pytest.mark.parametrize(
    "url",
    ["", "h", "h:1", "ftp://h", "http://", "http://h:port", "http://h:0", "http://h:70000", "http://[::1"],
)
def test_a_client_of_no_servers_url_is_refused_with_value_rule_and_remedy(url: str) -> None:
    with pytest.raises(ConfigError, match=r"not a server's URL.*: write http://host:port") as caught:
        BlockingPeer(url)
    assert str(caught.value).startswith(f"URL {url!r} is ")


@pytest.mark.parametrize("url", ["http://h", "https://h:1/below/", "HTTP://[::1]:80", "http://u:p@h:65535"])
def test_a_servers_url_is_taken(url: str) -> None:
    assert BlockingPeer(url).url == url.rstrip("/")


def test_an_encoded_answer_is_refused_and_never_decompressed() -> None:
    """Fifty megabytes in fifty thousand bytes."""
    bomb, headers = gzip.compress(bytes(50 << 20)), {"content-encoding": "gzip"}
    with answering(Scripted(Response(bomb, headers=headers), Response(bomb, 400, headers)).app) as url:
        peer = BlockingPeer(url, "secret")
        tracemalloc.start()
        for _ in range(2):
            with pytest.raises(RemoteError, match="content-encoding 'gzip': send plain bytes"):
                peer.call("/x", REQUEST, Ok)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
        tracemalloc.stop()
        assert peer.call("/x", REQUEST, Ok) == Ok()


async def test_an_answer_is_read_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its length is announced or not; a refusal has a limit of its own, and so has a frame."""

    async def long() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield bytes(1000)

    answers = [Response(bytes(10_001)), StreamingResponse(long()), StreamingResponse(long(), 400)]
    async with asking(Scripted(*answers, Response(b"[" * 60_000, 400))) as peer:
        for most in (10_000, 10_000, 65_536):
            with pytest.raises(RemoteError, match=f"more than {most} bytes: ask for fewer"):
                await peer.call("/x", REQUEST, Ok, max_bytes=10_000)
        with pytest.raises(RemoteError, match=r"answered 400: \[\[\["):  # too deep to be read as JSON
            await peer.call("/x", REQUEST, Ok)
        assert await peer.call("/x", REQUEST, Ok) == Ok()
        monkeypatch.setattr("sync.wire.client.MAX_FRAME", 3)
        with pytest.raises(WireError, match="the limit is 3: it is no frame"):
            await anext(frames_of(peer))


async def test_only_answers_that_may_be_long_are_read_beyond_64_mib_and_none_is_copied(peer: Peer) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % ((1 << 26) + 1)
    async with saying(head) as url, Peer(url) as long:
        with pytest.raises(RemoteError, match="more than 67108864 bytes: ask for fewer"):
            await long.call("/x", None, Ok, timeout=600.0)
        with pytest.raises(Unreachable, match="ClientPayloadError"):  # read, and cut short
            await long.once("/x", None, 600.0)
    assert isinstance(await peer.once("/x", None, 600.0), memoryview)


@pytest.mark.parametrize("listen", [bind_alone, join_port])
def test_an_answer_of_several_writes_does_not_wait_for_the_peers_acknowledgement(listen) -> None:
    """asyncio turns Nagle's algorithm off for sockets that name TCP, which those it is given need not do."""
    with listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP
