"""Clients of one process over HTTP: requests with retries, bounded answers, connections.

A request is POST (or GET without a body); a refusal is JSON `{"error": text}` with a 4xx status: 429 with
Retry-After when the peer is full, 413 when it takes less at once, 421 when it serves another run
(`sync.wire.claims`), 410 to a server that was replaced. An answer is read up to a limit and never
decompressed: a few kilobytes of gzip can stand for gigabytes. The server's half is `sync.wire.server`.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping
from concurrent.futures import CancelledError, Future, wait
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, Final, TypeVar

import aiohttp
import httpx

from sync.base.address import Address, Place
from sync.base.errors import (
    STATUSES,
    ConfigError,
    Overloaded,
    RemoteError,
    Replaced,
    TooLarge,
    Unreachable,
    WireError,
    WrongServer,
)
from sync.base.retry import pause_told, retrying_async
from sync.wire import CONTENT_TYPE, Message, decode, encode
from sync.wire.claims import MODEL_HEADER, Claim

MAX_ANSWER: Final = 1 << 32
"""Bytes of the longest answers: a rank's share of a batch with hidden states, the head of a large teacher."""
MAX_SMALL: Final = 1 << 26
"""Bytes of all other answers: digests of 100,000 tensors, with their names, are 20 MB."""
SLOWEST: Final = 1 << 18
"""Bytes a second that a long answer must bring: its time limit is longer by a second for each so many."""
MAX_REFUSAL: Final = 1 << 16
"""Bytes of an answer with another status than 200."""
LONGEST_PAUSE_SECONDS: Final = 60.0
"""However much later a full peer asks to be asked."""
_REFUSALS: Final = {STATUSES[error]: error for error in (Replaced, TooLarge, WrongServer)}
MAX_FRAME: Final = 1 << 30
"""Bytes of one frame of a stream."""
IDLE_SECONDS: Final = 4.0
"""A connection is used again within it: uvicorn, in vLLM, closes one after 5 s."""
PROBE_SECONDS: Final = 60
"""How often a connection without traffic is probed: a lost one ends an answer that has no time limit."""
LARGE_BODY: Final = 1 << 20
"""Bytes of a request that is sent in pieces, between which others run."""

_FAILED: Final = (aiohttp.ClientError, TimeoutError)
"""No answer, or not all of it."""
A = TypeVar("A")
M = TypeVar("M", bound=Message)


async def _read(
    response: aiohttp.ClientResponse, limit: asyncio.Timeout, max_bytes: int, gone: Collection[int] = ()
) -> memoryview:
    """The content of a 200, no copy, before `limit`, which grows with it (SLOWEST). Raises RemoteError for an
    answer that announces or has more than `max_bytes`; for another status its error (`gone`: Unreachable)."""
    url, status, content, ends = response.url, response.status, bytearray(), limit.when()
    longest = max_bytes if status == 200 else MAX_REFUSAL

    def check(length: int) -> None:
        if length > longest:
            raise RemoteError(f"{url} answered with more than {longest} bytes: ask for fewer at once")

    check(response.content_length or 0)
    async for part in response.content.iter_any():
        content.extend(part)
        check(len(content))
        if ends is not None:
            limit.reschedule(ends + len(content) / SLOWEST)
    if status == 200:
        return memoryview(content)
    try:
        text = str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        text = content[:500].decode("utf-8", "replace")
    message = f"{url} answered {status}: {text}"
    if status in gone:
        raise Unreachable(message)
    if status == 429:
        pause = pause_told(response.headers.get("retry-after"))
        raise Overloaded(message, 1.0 if pause is None else min(pause, LONGEST_PAUSE_SECONDS))
    raise _REFUSALS.get(status, RemoteError)(message)


# --- clients ----------------------------------------------------------------------------------------------


@cache
def _tls() -> ssl.SSLContext:
    """One for all clients: making it takes 20 ms."""
    return httpx.create_ssl_context(trust_env=False)


def _probed_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket for an address as of getaddrinfo, with TCP keepalive."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        made.setsockopt(socket.IPPROTO_TCP, option, PROBE_SECONDS)
    return made


class Peer:
    """Asynchronous client of one process. Use inside `async with`, or call `aclose()`.

    Raises ConfigError when made with a URL where no server can be. One whose Address has no URL yet is not
    reached, as one that does not answer.
    `call` retries with backoff what is safe to retry (no connection, 502-504, 429 as told) until `timeout`
    seconds have passed in all, then raises Unreachable (Overloaded for 429). A time limit is of the whole
    exchange; a long answer has a second more for every 256 KiB that have come (`SLOWEST`).
    """

    def __init__(
        self,
        place: Place,
        token: str | None = None,
        timeout: float = 60.0,
        claim: Claim | None = None,
        content_type: str = CONTENT_TYPE,
    ) -> None:
        """`claim`: the run that requests are made for; None: they name none. `content_type`: of a body of
        `once`, for a server that is not of this project."""
        self._address = place if isinstance(place, Address) else Address(place, place)
        self.timeout = timeout
        self.model: str | None = None
        """What a teacher's answers must be of (`TeacherInfo.fingerprint`); None: anything."""
        self._claim = claim or Claim()
        if token and httpx.URL(self._address.url or "").userinfo:
            raise ConfigError(
                "a server's URL holds a user's name, and there is a bearer token: a request carries one of "
                "both, so leave the name and its password out"
            )
        bearer = {"authorization": f"Bearer {token}"} if token else {}
        self._headers = {"accept-encoding": "identity", "content-type": content_type, **bearer}
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    @property
    def url(self) -> str:
        """Where it is now, for people and as a key; its name while it has not registered."""
        return str(self._address)

    @property
    def placed(self) -> bool:
        return self._address.url is not None

    async def __aenter__(self) -> Peer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def _open(
        self, path: str, content: bytes | None, headers: Mapping[str, str], timeout: float | None
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, asyncio.Timeout]]:
        """POST `content`, GET when None. `timeout`: seconds until the end, which the Timeout can put off.
        aiohttp sends a GET again, once, when its connection turns out to be closed."""
        if self._closed:
            raise Unreachable(f"the client of {self.url} is closed")
        if (url := self._address.url) is None:
            raise aiohttp.ClientConnectionError(
                f"{self._address.name} has not registered with the controller"
            )
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(
                    limit=0, keepalive_timeout=IDLE_SECONDS, socket_factory=_probed_socket
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        connect = min(5.0, self.timeout if timeout is None else timeout)
        limits = aiohttp.ClientTimeout(total=None, connect=connect, sock_connect=connect, sock_read=timeout)
        data = io.BytesIO(content) if content and len(content) > LARGE_BODY else content
        method, tls = "GET" if content is None else "POST", _tls() if url.startswith("https:") else True
        async with asyncio.timeout(timeout) as limit:
            async with self._session.request(
                method, url + path, data=data, headers=headers, allow_redirects=False, timeout=limits, ssl=tls
            ) as response:
                yield response, limit

    async def health(self, timeout: float) -> tuple[int, Mapping[str, str], bool]:
        """Status and headers of the answer to GET /health, and whether it has content. Raises Unreachable
        when closed, aiohttp.ClientError, TimeoutError."""
        async with self._open("/health", None, {}, timeout) as (response, _):
            return response.status, response.headers, await response.content.read(1) != b""

    async def alive(self) -> bool:
        """Whether /health answers 200 within two seconds."""
        try:
            return (await self.health(2.0))[0] == 200
        except (Unreachable, *_FAILED):
            return False

    async def call(
        self,
        path: str,
        body: Message | None,
        kind: type[M],
        timeout: float | None = None,
        max_bytes: int = MAX_SMALL,
        try_seconds: float = math.inf,
    ) -> M:
        """POST `body` (GET when None) and decode the answer of up to `max_bytes`; a try has `try_seconds`."""
        limit = timeout or self.timeout
        deadline, content = time.monotonic() + limit, None if body is None else encode(body)

        async def attempt() -> memoryview:
            left = max(0.1, min(deadline - time.monotonic(), try_seconds))
            return await self.once(path, content, left, max_bytes, gone=(502, 503, 504))

        def is_retried(error: BaseException) -> bool:
            return isinstance(error, Overloaded | Unreachable) and not self._closed

        try:
            return decode(await retrying_async(is_retried, within=limit)(attempt), kind)
        except Unreachable as error:
            if self._closed:
                raise
            raise Unreachable(f"{error} (tried for {limit:.0f} s): is the process running?") from None

    async def once(
        self,
        path: str,
        body: bytes | None,
        timeout: float | None,
        max_bytes: int = MAX_ANSWER,
        model: str | None = None,
        gone: Collection[int] = range(500, 600),
    ) -> memoryview:
        """POST an encoded body (GET when None), a single time: for callers that retry elsewhere. Raises
        Unreachable (no connection, no answer in `timeout` seconds, a status of `gone`), Overloaded,
        RemoteError. None: no limit once it is connected. `model`: of this answer, else the client's."""
        try:
            async with self._open(path, body, self._claim.headers(), timeout) as (response, limit):
                self._check(response, model or self.model)
                return await _read(response, limit, max_bytes, gone)
        except _FAILED as error:
            raise Unreachable(f"{self.url}{path}: {type(error).__name__}: {error}") from None

    def _check(self, response: aiohttp.ClientResponse, expected: str | None) -> None:
        """Raises WrongServer when the answer is another run's or another model's, and RemoteError when it
        would have to be decompressed."""
        if response.status == 200:
            self._claim.check(self.url, response.headers)
            if expected not in (None, model := response.headers.get(MODEL_HEADER)):
                raise WrongServer(
                    f"{self.url} answers with model {model}, and {expected} was checked when the run "
                    "started: start the teacher again with the model of this run's configuration"
                )
        encoding = response.headers.get("content-encoding", "identity")
        if encoding.strip().lower() != "identity":
            raise RemoteError(
                f"{response.url} answered with content-encoding {encoding[:100]!r}: send plain bytes"
            )

    async def stream(self, path: str, body: Message, kind: type[M]) -> AsyncIterator[M]:
        """POST `body` and yield the frames of the answer as they come. Nothing is retried: a lost connection
        raises Unreachable, and the caller knows which frames it has. There is no time limit of an answer with
        status 200 (a long completion is no fault)."""
        try:
            async with self._open(path, encode(body), self._claim.headers(), None) as (response, limit):
                self._check(response, self.model)
                if response.status != 200:
                    limit.reschedule(asyncio.get_running_loop().time() + self.timeout)
                    await _read(response, limit, MAX_REFUSAL)
                buffer = bytearray()
                async for chunk in response.content.iter_any():
                    buffer += chunk
                    while len(buffer) >= 4 and len(buffer) - 4 >= (n := _frame_length(buffer)):
                        message = decode(bytes(buffer[4 : 4 + n]), kind)
                        del buffer[: 4 + n]
                        yield message
                if buffer:
                    raise Unreachable(f"{self.url}{path} ended in the middle of a frame")
        except _FAILED as error:
            raise Unreachable(f"{self.url}{path}: {type(error).__name__}: {error}") from None


_begins = threading.RLock()  # a client may be collected, and so closed, at any time


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="requests", daemon=True).start()
    return loop


os.register_at_fork(after_in_child=_loop.cache_clear)


def in_loop(call: Coroutine[None, None, A]) -> Future[A]:
    """Have a call made by the event loop of all blocking clients, which has a thread of its own."""
    with _begins:
        return asyncio.run_coroutine_threadsafe(call, _loop())


class BlockingPeer:
    """`Peer` for threads without an event loop; any of them may call it."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        timeout: float = 60.0,
        claim: Claim | None = None,
        content_type: str = CONTENT_TYPE,
    ) -> None:
        self._peer = peer = Peer(url, token, timeout, claim, content_type)
        self.url, self.timeout = peer.url, timeout
        weakref.finalize(self, self._close, peer)

    def call(
        self,
        path: str,
        body: Message | None,
        kind: type[M],
        timeout: float | None = None,
        max_bytes: int = MAX_SMALL,
    ) -> M:
        """The answer, as of `Peer.call`; one try takes at most the client's `timeout`, all this one."""
        return self._wait(self._peer.call(path, body, kind, timeout, max_bytes, self.timeout))

    def once(
        self,
        path: str,
        body: bytes | None,
        timeout: float,
        model: str | None = None,
        max_bytes: int = MAX_ANSWER,
    ) -> memoryview:
        """The answer, as of `Peer.once`."""
        return self._wait(self._peer.once(path, body, timeout, max_bytes, model=model))

    @staticmethod
    def _close(peer: Peer) -> None:
        # Without a loop there is none that it was used in: this process is a fork, or another thread begins
        # the loop just now and holds the lock until the new one runs, which may be this.
        if peer._session is not None and _loop.cache_info().currsize:
            closing = in_loop(peer.aclose())
            if threading.current_thread() is threading.main_thread():  # else nobody would, at its end
                wait([closing], 1.0)

    def _wait(self, call: Coroutine[None, None, A]) -> A:
        answer = in_loop(call)
        try:
            return answer.result()
        except (CancelledError, RuntimeError) as error:  # closed, or no thread begins that looks a name up
            if isinstance(error, RuntimeError) and "shutdown" not in str(error):
                raise
            raise Unreachable(f"{self.url} is asked no more: this process ends") from None
        finally:
            answer.cancel()  # of a caller that was interrupted


def _frame_length(buffer: bytearray) -> int:
    """Bytes of the frame that `buffer` begins with. Raises WireError for more than any frame has."""
    if (length := int.from_bytes(buffer[:4], "little")) > MAX_FRAME:
        raise WireError(f"a frame of {length} bytes is announced, the limit is {MAX_FRAME}: it is no frame")
    return length
