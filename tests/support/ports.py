"""Servers that a test starts: free ports, a handler of whole requests, and a thread that serves."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

import httpx

S = TypeVar("S", bound=ThreadingHTTPServer)
PATIENCE = 600
"""Seconds of a client for an answer, and of a server for the next request: a busy machine breaks no rule."""
_BELOW_EPHEMERAL = range(15_000, 32_000)
"""No outgoing connection is given one of these, so a port that was free stays free until its server binds."""


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on, and that no other test that runs now is given."""
    while True:
        port = random.choice(_BELOW_EPHEMERAL)
        with socket.socket() as probe, socket.socket(socket.AF_UNIX) as given:
            try:
                given.bind(f"\0port {port} of a test")  # a name that is taken until this process ends
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            given.detach()
            return port


def healthy(url: str) -> bool:
    """Whether a server answers at /health."""
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", trust_env=False, timeout=60).is_success
    return False


class Handler(BaseHTTPRequestHandler):
    """Reads whole requests, gives whole answers, and prints nothing."""

    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        with suppress(ConnectionError):  # of a client that is gone
            super().handle()

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""

    def body(self) -> bytes:
        """The request's, which no client of ours sends in chunks."""
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def answer(self, status: int, body: bytes = b"", headers: Mapping[str, str] = {}) -> None:
        """Send it; to HEAD without its body. A content-length in `headers` stands."""
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def client(**options: Any) -> httpx.AsyncClient:
    """Patient, and asks no proxy."""
    return httpx.AsyncClient(timeout=PATIENCE, trust_env=False, **options)


@contextmanager
def served(server: S) -> Iterator[S]:
    """The server, answering in threads while inside; clients may keep their connections."""
    accept, connections = server.get_request, list[socket.socket]()

    def accepted() -> tuple[socket.socket, Any]:
        connection, address = accept()
        connections.append(connection)
        return connection, address

    server.get_request, server.daemon_threads = accepted, False  # type: ignore[method-assign]
    with server:  # which joins the threads
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
            for connection in connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def answering(app: Any) -> Iterator[str]:
    """URL of an ASGI application, answering in a thread while inside."""
    import uvicorn

    with socket.create_server(("127.0.0.1", 0)) as bound:
        config = uvicorn.Config(app, log_level="error", ws="none", timeout_keep_alive=PATIENCE)
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, args=([bound],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            running.should_exit = True
            thread.join()


@contextmanager
def refusing() -> Iterator[str]:
    """URL of a port that is taken and where nobody listens: connections are refused."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield "http://127.0.0.1:{1}".format(*held.getsockname())


@contextmanager
def silent() -> Iterator[str]:
    """URL of a server that accepts connections and sends nothing, as a stopped process does."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield "http://127.0.0.1:{1}".format(*listener.getsockname())


@asynccontextmanager
async def saying(answer: bytes) -> AsyncIterator[str]:
    """URL of a server that answers the head of each request with these bytes, which no library might give,
    and closes the connection."""

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(answered, "127.0.0.1", 0) as listening:
        yield "http://127.0.0.1:{1}".format(*listening.sockets[0].getsockname())
