"""One HTTP exchange of wire messages: a client, a blocking client, and the server's half.

A request is POST (or GET without a body); a refusal is JSON `{"error": text}` with a 4xx status, 429 with
Retry-After when the peer is full, 421 when it serves another run. A bearer token guards every route but
/health; headers name the run that asks and the one that answers (`sync.claims`).
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sync.answers import MOST_REFUSAL, PLAIN, BoundedBlockingTransport, BoundedTransport
from sync.claims import MODEL_HEADER, Claim
from sync.errors import ConfigError, Overloaded, RemoteError, Unreachable, WireError, WrongServer
from sync.urls import checked_url
from sync.wire import CONTENT_TYPE, Message, decode, encode

TOKEN_VARIABLE: Final = "DISTILL_TOKEN"
"""Environment variable that carries the bearer token; never a flag, never in a file of the run."""
TOKEN_FILE_VARIABLE: Final = "DISTILL_TOKEN_FILE"
"""Path of a file that holds the bearer token, where the variable itself does not reach."""
MAX_BODY: Final = 1 << 30
_RETRY_STATUS: Final = {502, 503, 504}
MISDIRECTED: Final = 421

M = TypeVar("M", bound=Message)


def token_from_environment() -> str | None:
    """The bearer token of this process; None when unset or empty.

    Raises ConfigError for a token file that cannot be read.
    """
    token, path = os.environ.get(TOKEN_VARIABLE), os.environ.get(TOKEN_FILE_VARIABLE)
    if token or not path:
        return token or None
    try:
        token = Path(path).read_text().strip()
    except OSError as error:
        raise ConfigError(f"{TOKEN_FILE_VARIABLE} {path} cannot be read: {error.strerror}") from None
    if not token:
        raise ConfigError(f"{TOKEN_FILE_VARIABLE} {path} is empty: write the token into it")
    return token


def check_bind(host: str, token: str | None) -> None:
    """Refuse to listen beyond this machine without a token. Raises ConfigError."""
    if not token and not is_loopback(host):
        raise ConfigError(
            f"host {host!r} can be reached from other machines and no token is set: "
            f"bind 127.0.0.1, or set {TOKEN_VARIABLE} (or {TOKEN_FILE_VARIABLE}) for every role"
        )


def is_loopback(host: str) -> bool:
    """Whether a host name or address is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# --- client -----------------------------------------------------------------------------------------------


def _headers(token: str | None) -> dict[str, str]:
    return PLAIN | ({"authorization": f"Bearer {token}"} if token else {})


def _raise_refusal(url: str, response: httpx.Response) -> None:
    """Raise what a non-200 response means; `response` must be read."""
    if response.status_code == 200:
        return
    try:
        text = str(json.loads(response.content)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        text = response.content[:500].decode("utf-8", "replace")
    message = f"{url} answered {response.status_code}: {text}"
    if response.status_code == 429:
        try:
            retry_after = float(response.headers.get("retry-after", "1"))
        except ValueError:
            retry_after = 1.0
        raise Overloaded(message, retry_after)
    raise (WrongServer if response.status_code == MISDIRECTED else RemoteError)(message)


class Unavailable(RemoteError):
    """A status that says to come back; never leaves this file."""


_RETRIED: Final = (Overloaded, Unavailable, httpx.RequestError)


class _Patience:
    """Of one call to `url`: pauses that double, until `limit` seconds have passed in all."""

    def __init__(self, url: str, limit: float) -> None:
        self._url, self._limit = url, limit
        self._end, self._pause = time.monotonic() + limit, 0.05

    def left(self) -> float:
        """Seconds that the next try may take."""
        return max(0.1, self._end - time.monotonic())

    def content(self, response: httpx.Response) -> bytes:
        """Body of an answer. Raises RemoteError for a refusal, and what `pause` knows."""
        if response.status_code in _RETRY_STATUS:
            raise Unavailable(f"status {response.status_code}")
        _raise_refusal(self._url, response)
        return response.content

    def pause(self, problem: Overloaded | Unavailable | httpx.RequestError) -> float:
        """Seconds until the next try. Raises Unreachable, or Overloaded itself, when there is none left."""
        wait = max(self._pause, problem.retry_after) if isinstance(problem, Overloaded) else self._pause
        if time.monotonic() + wait > self._end:
            if isinstance(problem, Overloaded):
                raise problem
            raise Unreachable(
                f"{self._url} did not answer within {self._limit:.0f} s "
                f"({type(problem).__name__}: {problem}): is the process running?"
            )
        self._pause = min(self._pause * 2, 2.0)
        return wait


class Peer:
    """Asynchronous client of one process. Use inside `async with`, or call `aclose()`.

    Raises ConfigError when made with a URL where no server can be.
    `call` retries with doubling pauses what is safe to retry (no connection, 502-504, 429 as told) until
    `timeout` seconds have passed in all, then raises Unreachable (Overloaded for 429).
    """

    def __init__(
        self, url: str, token: str | None = None, timeout: float = 60.0, claim: Claim | None = None
    ) -> None:
        """`claim`: the run that requests are made for; None: they name none."""
        self.url = checked_url(url).rstrip("/")
        self.timeout = timeout
        self.model: str | None = None
        """What a teacher's answers must be of (`TeacherInfo.fingerprint`); None: anything."""
        self._claim = claim or Claim()
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=_headers(token),
            timeout=httpx.Timeout(timeout, connect=min(5.0, timeout)),
            transport=BoundedTransport(
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64), trust_env=False
            ),
            trust_env=False,
        )

    async def __aenter__(self) -> Peer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def alive(self) -> bool:
        """Whether /health answers 200 within two seconds."""
        try:
            answer = await self._http.get("/health", timeout=2.0, extensions={"most": MOST_REFUSAL})
            return answer.status_code == 200
        except (httpx.HTTPError, RemoteError):
            return False

    async def call(self, path: str, body: Message | None, kind: type[M], timeout: float | None = None) -> M:
        """POST `body` (GET when None) and decode the answer as `kind`."""
        return decode(await self.raw(path, body, timeout), kind)

    async def raw(self, path: str, body: Message | None, timeout: float | None = None) -> bytes:
        """Like `call`, undecoded: for proxies."""
        patience = _Patience(self.url + path, timeout or self.timeout)
        content = None if body is None else encode(body)
        while True:
            try:
                return patience.content(await self._send(path, content, patience.left()))
            except _RETRIED as error:
                wait = patience.pause(error)
            await asyncio.sleep(wait)

    async def once(self, path: str, body: bytes | None, timeout: float) -> bytes:
        """POST an encoded body (GET when None), a single time: for callers that retry elsewhere.

        Raises Unreachable (no connection, no answer in `timeout` seconds, any 5xx), Overloaded, RemoteError.
        """
        try:
            response = await self._send(path, body, timeout)
        except httpx.RequestError as error:
            raise Unreachable(f"{self.url}{path}: {type(error).__name__}: {error}") from None
        if response.status_code >= 500:
            raise Unreachable(f"{self.url}{path} answered {response.status_code}: {response.text[:500]}")
        _raise_refusal(self.url + path, response)
        return response.content

    async def _send(self, path: str, content: bytes | None, timeout: float) -> httpx.Response:
        method = "GET" if content is None else "POST"
        response = await self._http.request(
            method, path, content=content, headers=self._named(), timeout=timeout
        )
        self._check(response)
        return response

    def _named(self) -> dict[str, str]:
        return {"content-type": CONTENT_TYPE, **self._claim.headers()}

    def _check(self, response: httpx.Response) -> None:
        """Raises WrongServer when the answer is another run's or another model's."""
        if response.status_code != 200:
            return
        self._claim.check(self.url, response.headers)
        model = response.headers.get(MODEL_HEADER)
        if self.model not in (None, model):
            raise WrongServer(
                f"{self.url} answers with model {model}, and {self.model} was checked when the run started: "
                "start the teacher again with the model of this run's configuration"
            )

    async def stream(self, path: str, body: Message, kind: type[M]) -> AsyncIterator[M]:
        """POST `body` and yield the frames of the answer as they come.

        Nothing is retried: a lost connection raises Unreachable, and the caller knows which frames it has.
        There is no time-out between frames (a long completion is no fault).
        """
        try:
            async with self._http.stream(
                "POST",
                path,
                content=encode(body),
                headers=self._named(),
                timeout=httpx.Timeout(None, connect=5.0),
                extensions={"most": None},
            ) as response:
                if response.status_code != 200:
                    await response.aread()
                    _raise_refusal(self.url + path, response)
                self._check(response)
                buffer = bytearray()
                async for chunk in response.aiter_bytes():
                    buffer += chunk
                    while len(buffer) >= 4 and len(buffer) - 4 >= (n := _frame_length(buffer)):
                        message = decode(bytes(buffer[4 : 4 + n]), kind)
                        del buffer[: 4 + n]
                        yield message
                if buffer:
                    raise Unreachable(f"{self.url}{path} ended in the middle of a frame")
        except httpx.RequestError as error:
            raise Unreachable(f"{self.url}{path}: {type(error).__name__}: {error}") from None


class BlockingPeer:
    """Synchronous client of one process, for code that has no event loop. Behaves like `Peer`."""

    def __init__(
        self, url: str, token: str | None = None, timeout: float = 60.0, claim: Claim | None = None
    ) -> None:
        self.url = checked_url(url).rstrip("/")
        self.timeout = timeout
        self._claim = claim or Claim()
        self._http = httpx.Client(
            base_url=self.url,
            headers=_headers(token),
            timeout=timeout,
            transport=BoundedBlockingTransport(trust_env=False),
            trust_env=False,
        )

    def call(self, path: str, body: Message | None, kind: type[M], timeout: float | None = None) -> M:
        """POST `body` (GET when None) and decode the answer as `kind`.

        A single try takes at most the client's own `timeout`, all of them at most this one.
        """
        patience = _Patience(self.url + path, timeout or self.timeout)
        content = None if body is None else encode(body)
        while True:
            try:
                response = self._send(path, content, min(self.timeout, patience.left()))
                return decode(patience.content(response), kind)
            except _RETRIED as error:
                time.sleep(patience.pause(error))

    def _send(self, path: str, content: bytes | None, timeout: float) -> httpx.Response:
        method = "GET" if content is None else "POST"
        headers = {"content-type": CONTENT_TYPE, **self._claim.headers()}
        response = self._http.request(method, path, content=content, headers=headers, timeout=timeout)
        if response.status_code == 200:
            self._claim.check(self.url, response.headers)
        return response

    def close(self) -> None:
        self._http.close()


def _frame_length(buffer: bytearray) -> int:
    """Bytes of the frame that `buffer` begins with. Raises WireError for more than any frame has."""
    if (length := int.from_bytes(buffer[:4], "little")) > MAX_BODY:
        raise WireError(f"a frame of {length} bytes is announced, the limit is {MAX_BODY}: it is no frame")
    return length


# --- server -----------------------------------------------------------------------------------------------


def stray(scope: Scope) -> str | None:
    """Why a request was not meant for this server; None: it was.

    A page in a browser of this machine reaches loopback too, under its own origin, or under a name of its own
    that is made to resolve to loopback (DNS rebinding). Nothing of a run sends an origin, or another name.
    """
    headers = dict(scope["headers"])
    if (origin := headers.get(b"origin")) is not None:
        return f"it comes from a page of {origin.decode('latin-1')}, and this server is not for browsers"
    server, host = scope.get("server"), headers.get(b"host", b"").decode("latin-1")
    if server is None or not is_loopback(server[0]):
        return None
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    if is_loopback(name) or name == socket.gethostname().lower():
        return None
    return f"it is for the host {host!r}, and this server is reached as 127.0.0.1 or localhost"


class TokenGuard:
    """ASGI middleware: 403 for what is not for this server (`stray`), 401 unless the bearer token fits.

    /health needs no token; where none is set, nothing does.
    """

    def __init__(self, app: ASGIApp, token: str | None = None) -> None:
        self.app = app
        self._token = token if token is not None else token_from_environment()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (problem := stray(scope)) is not None:
            await refuse(403, f"the request is refused: {problem}")(scope, receive, send)
            return
        if scope["type"] == "http" and self._token and scope["path"] != "/health":
            header = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(header, b"Bearer " + self._token.encode()):
                await refuse(401, f"this route needs the bearer token of {TOKEN_VARIABLE}")(
                    scope, receive, send
                )
                return
        await self.app(scope, receive, send)


async def read_message(request: Request, kind: type[M], limit: int = MAX_BODY) -> M:
    """Body of a request as a message of `kind`.

    Raises WireError when it is none, when it is longer than `limit` bytes, or when the caller left early.
    """
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise WireError(f"body is longer than {limit} bytes: send fewer sequences a request")
    except ClientDisconnect:
        raise WireError("the caller left before its request was complete") from None
    return decode(bytes(body), kind)


def reply(message: Message) -> Response:
    """200 with a message."""
    return Response(encode(message), media_type=CONTENT_TYPE)


def refuse(status: int, text: str, retry_after: float | None = None) -> Response:
    """A refusal that `Peer` turns into RemoteError, or Overloaded for 429."""
    headers = {} if retry_after is None else {"retry-after": f"{retry_after:g}"}
    return JSONResponse({"error": text}, status, headers)
