"""An HTTP proxy in front of one server, which a test tells what should go wrong."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

import httpx

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


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy
    client: httpx.Client

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def handle_any(self) -> None:
        body = self._body()
        fault = self.proxy.fault(f"{self.command} {self.path}")
        self.close_connection = fault is not None
        if fault == "drop":
            return
        if fault == "503":
            self._answer(503, {}, b"busy", None)
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
        upstream = self.client.request(
            self.command, self.proxy.upstream + self.path, headers=headers, content=body
        )
        if fault != "lost":
            self._answer(upstream.status_code, dict(upstream.headers), upstream.content, fault)

    def _answer(self, status: int, headers: dict[str, str], body: bytes, fault: Kind | None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in HOP_BY_HOP | {"date", "server"}:
                self.send_header(name, value)
        length = headers.get("content-length", "0") if self.command == "HEAD" else str(len(body))
        self.send_header("content-length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if fault == "cut" else body)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    do_GET = do_POST = do_HEAD = do_PUT = do_DELETE = handle_any


@contextmanager
def proxy(upstream: str) -> Iterator[Proxy]:
    """A running proxy of the server at `upstream`; `base` is its own address."""
    state = Proxy(upstream)
    with httpx.Client(trust_env=False, timeout=30) as client:
        handler = type("BoundHandler", (Handler,), {"proxy": state, "client": client})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        state.base = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
