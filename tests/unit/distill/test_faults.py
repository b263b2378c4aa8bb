"""Relays between roles, over real sockets: what passes, what is cut, what arrives malformed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from faults import CUT, MALFORMED, MALFORMED_BYTES, Relay, Relays, malformed

from sync.base.errors import Unreachable
from sync.wire.client import Peer

BODY = bytes(range(128)) * 8


class Server(BaseHTTPRequestHandler):
    """Answers BODY, or "short"; /slow when `gate` is open."""

    protocol_version = "HTTP/1.1"
    gate: threading.Event
    asked: threading.Event

    def do_GET(self) -> None:
        if self.path == "/slow":
            self.asked.set()
            self.gate.wait(20)
        body = b"short" if self.path == "/short" else BODY
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def relayed(folder: Path) -> Iterator[tuple[str, type[Server]]]:
    """URL of a relay before a server, told by files in `folder`."""
    handler = type("Bound", (Server,), {"gate": threading.Event(), "asked": threading.Event()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Relays(folder).before("teacher-a.b", f"http://127.0.0.1:{server.server_port}"), handler
        handler.gate.set()
        server.shutdown()


def happens(order: Path) -> None:
    deadline = time.monotonic() + 20
    while order.exists():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_what_is_not_told_to_go_wrong_passes_unchanged(tmp_path: Path) -> None:
    (tmp_path / "old.cut").touch()
    with relayed(tmp_path) as (url, _):
        assert not list(tmp_path.iterdir()), "orders for an earlier launcher are forgotten"
        assert [httpx.get(url, trust_env=False).content for _ in range(3)] == [BODY] * 3


async def test_a_request_under_way_is_cut_and_the_next_one_passes(tmp_path: Path) -> None:
    with relayed(tmp_path) as (url, server):
        async with Peer(url) as peer:
            asked = asyncio.create_task(peer.once("/slow", b"", 20))
            await asyncio.to_thread(server.asked.wait, 20)
            (tmp_path / f"teacher-a.b.{CUT}").touch()
            with pytest.raises(Unreachable, match=r"ServerDisconnectedError|ClientOSError"):
                await asked
            await asyncio.to_thread(happens, tmp_path / f"teacher-a.b.{CUT}")
            assert await peer.once("/", None, 20) == BODY


def test_one_long_answer_arrives_malformed_with_its_length_and_headers(tmp_path: Path) -> None:
    order = tmp_path / f"teacher-a.b.{MALFORMED}"
    with relayed(tmp_path) as (url, _), httpx.Client(trust_env=False) as client:
        order.touch()
        found = [b"short"]
        while found[-1] in (b"short", BODY):
            assert client.get(f"{url}/short").content == b"short"
            found.append(client.get(url).content)
        happens(order)
        assert client.get(url).content == BODY
    differing = [a != b for a, b in zip(found[-1], BODY, strict=True)]
    assert sum(differing) == MALFORMED_BYTES
    assert found[-1] == malformed(BODY, differing.index(True))


@pytest.mark.parametrize(("role", "hit"), [("environment-guess", True), ("student-0", False)])
def test_a_short_answer_is_malformed_where_turns_are_short(role: str, hit: bool) -> None:
    relay, turn = Relay(role, "http://127.0.0.1:9"), b"HTTP/1.1 200 OK\r\n\r\n" + BODY[:60]
    relay.sound.clear()
    passed = relay.passed(0, turn, answers=True)
    assert relay.sound.is_set() == hit
    assert (passed != turn) == hit
    assert len(passed) == len(turn)


async def test_a_server_that_is_away_is_a_connection_that_breaks(tmp_path: Path) -> None:
    with relayed(tmp_path):
        url = await asyncio.to_thread(Relays(tmp_path).before, "gone", "http://127.0.0.1:9")
        async with Peer(url) as peer:
            assert not await peer.alive()
            with pytest.raises(Unreachable):
                await peer.once("/", None, 20)
