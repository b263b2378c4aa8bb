"""Servers that a test starts: free ports, and a thread that serves."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any, TypeVar

S = TypeVar("S", bound=ThreadingHTTPServer)
_BELOW_EPHEMERAL = range(15_000, 32_000)
"""No outgoing connection is given one of these, so a port that was free stays free until its server binds."""


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on; two calls hardly ever give the same."""
    while True:
        port = random.choice(_BELOW_EPHEMERAL)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


@contextmanager
def served(server: S) -> Iterator[S]:
    """The server, answering in a thread while inside."""
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def answering(app: Any) -> Iterator[str]:
    """URL of an ASGI application, answering in a thread while inside."""
    import uvicorn

    with socket.create_server(("127.0.0.1", 0)) as bound:
        running = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none"))
        thread = threading.Thread(target=running.run, args=([bound],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            running.should_exit = True
            thread.join()
