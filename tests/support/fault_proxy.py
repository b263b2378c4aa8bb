"""An HTTP proxy in front of one server, which a test tells what should go wrong."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Literal

import httpx
from ports import Handler, served

Kind = Literal["503", "drop", "lost", "cut"]
HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "content-encoding", "keep-alive"}


@dataclass
class Proxy:
    """`fail` arranges faults; `hits` counts those that happened."""

    upstream: str
    base: str = ""
    hits: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    faults: list[tuple[str, Kind]] = field(default_factory=list)

    def fail(self, pattern: str, kind: Kind, times: int = 1) -> None:
        """The next `times` requests whose "METHOD path" matches go wrong.

        503: refused, not forwarded. drop: closed, not forwarded. lost: forwarded, closed without an answer.
        cut: half of the answer, then closed.
        """
        self.faults += [(pattern, kind)] * times

    def fault(self, line: str) -> Kind | None:
        with self.lock:
            for fault in self.faults:
                if re.search(fault[0], line):
                    self.faults.remove(fault)
                    self.hits += 1
                    return fault[1]
        return None


class ProxyHandler(Handler):
    proxy: Proxy
    client: httpx.Client

    def handle_any(self) -> None:
        body = self.body()
        fault = self.proxy.fault(f"{self.command} {self.path}")
        self.close_connection = fault is not None
        if fault == "drop":
            return
        if fault == "503":
            self.answer(503, b"busy")
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
        upstream = self.client.request(
            self.command, self.proxy.upstream + self.path, headers=headers, content=body
        )
        if fault == "lost":
            return
        ours = HOP_BY_HOP | {"date", "server"}
        answered = {name: value for name, value in upstream.headers.items() if name.lower() not in ours}
        length = len(upstream.content)
        if self.command == "HEAD":
            length = int(upstream.headers.get("content-length", 0))
        body = upstream.content[: length // 2] if fault == "cut" else upstream.content
        self.answer(upstream.status_code, body, {**answered, "content-length": str(length)})

    do_GET = do_POST = do_HEAD = do_PUT = do_DELETE = handle_any


@contextmanager
def proxy(upstream: str) -> Iterator[Proxy]:
    """A running proxy of the server at `upstream`; `base` is its own address."""
    state = Proxy(upstream)
    with httpx.Client(trust_env=False, timeout=30) as client:
        handler = type("BoundHandler", (ProxyHandler,), {"proxy": state, "client": client})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        state.base = f"http://127.0.0.1:{server.server_address[1]}"
        with served(server):
            yield state
