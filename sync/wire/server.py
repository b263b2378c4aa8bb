"""The server's half of HTTP between processes: who is admitted, what is read and answered, where it listens.

A bearer token guards every route but /health; headers name the run that asks and the one that answers
(`sync.wire.claims`). The clients' half is `sync.wire.client`.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import socket
import sys
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send
from starlette.types import Message as Event

from sync.base.address import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, is_loopback, token_from_environment
from sync.base.errors import STATUSES, ConfigError, DistillError, Overloaded, TooLarge, WireError
from sync.base.secrets import redact_process
from sync.wire import CONTENT_TYPE, Message, decode, encode
from sync.wire.claims import MODEL_HEADER, RUN_HEADER, Claim, parse
from sync.wire.peers import ROLE_HEADER, Role

if TYPE_CHECKING:
    import uvicorn

logger = logging.getLogger(__name__)
MAX_BODY: Final = 1 << 30
"""Bytes of a request."""
ON_LOOPBACK: Final = {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
"""Environment of a process that has to do with this machine alone: where gloo and vLLM listen."""
NCCL_ON_LOOPBACK: Final = {"NCCL_SOCKET_IFNAME": "lo"}
"""The same for NCCL, where no broadcast leaves this machine either."""

M = TypeVar("M", bound=Message)


# --- who is admitted ------------------------------------------------------------------------------------


def stray(scope: Scope) -> str | None:
    """Why a request was not meant for this server; None: it was. A page in a browser of this machine reaches
    loopback too, under its own origin, or under a name of its own that is made to resolve to loopback (DNS
    rebinding). Nothing of a run sends an origin, or another name."""
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


class Gate:
    """ASGI middleware: lets through what is meant for this server (else 403, see `stray`), holds its token
    (else 401; /health needs none) and comes from the run that it serves (else 421). Answers name run, role
    and model."""

    def __init__(
        self,
        app: ASGIApp,
        token: str | None = None,
        claim: Claim | None = None,
        claiming: Collection[str] = (),
        model: str | None = None,
        role: Role | None = None,
    ) -> None:
        """`token`: None: of the environment; "": everybody may ask. `claim`: None for a server that may serve
        many runs; a request to a path of `claiming` claims one that no run has. `model`: of a teacher."""
        self.app = app
        self._token = token if token is not None else token_from_environment()
        self._claim, self._claiming = claim, claiming
        names = {MODEL_HEADER: model, ROLE_HEADER: role}
        self._names = {header: name for header, name in names.items() if name is not None}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Event) -> None:
            if message["type"] == "http.response.start":
                served = self._claim.headers() if self._claim else {}
                message.setdefault("headers", [])
                MutableHeaders(scope=message).update({**self._names, **served})
            await send(message)

        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif refused := self._refused(scope):
            await refused(scope, receive, send)
        else:
            answer = self.app
            try:
                if self._claim is not None:
                    asking = parse(Headers(scope=scope).get(RUN_HEADER))
                    self._claim.admit(asking, scope["path"] in self._claiming)
            except DistillError as error:
                answer = refusal(error)
            await answer(scope, receive, named)

    def _refused(self, scope: Scope) -> Response | None:
        """The refusal of a stranger, who is told nothing else; None: it is none."""
        if (problem := stray(scope)) is not None:
            return refuse(403, f"the request is refused: {problem}")
        header = dict(scope["headers"]).get(b"authorization", b"")
        expected = b"Bearer " + (self._token or "").encode()
        if not self._token or scope["path"] == "/health" or hmac.compare_digest(header, expected):
            return None
        address, _ = scope.get("client") or ("somebody", 0)
        logger.warning("%s was refused: it does not hold the run's token", address)
        return refuse(401, f"this route needs the bearer token of {TOKEN_VARIABLE}")


# --- requests and answers -------------------------------------------------------------------------------


class BodyLimit:
    """Reads request bodies within a bound on each, and on all that are being read or answered."""

    def __init__(self, request_limit: int, total: int) -> None:
        self._limit, self._total, self._bytes = request_limit, total, 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body; its bytes count from their arrival until the context ends.

        Raises TooLarge (one body), Overloaded (all together) or WireError (caller left); uvicorn reads and
        drops the rest of a refused body, so that the caller gets its refusal.
        """
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                self._bytes += len(chunk)
                if len(body) > self._limit:
                    raise TooLarge(f"body is longer than {self._limit} bytes: send fewer at once")
                if self._bytes > self._total:
                    raise Overloaded(
                        f"requests in work hold {self._total} bytes: come back later, or add a replica", 1.0
                    )
            yield bytes(body)
        except ClientDisconnect:
            raise WireError("the caller left before its request was complete") from None
        finally:
            self._bytes -= len(body)


async def read_message(request: Request, kind: type[M], limit: int = MAX_BODY) -> M:
    """Body of a request as a message of `kind`. Raises TooLarge for more than `limit` bytes, WireError when
    it is no such message, or the caller left early."""
    async with BodyLimit(limit, limit).read(request) as body:
        return decode(body, kind)


def reply(message: Message) -> Response:
    """200 with a message."""
    return Response(encode(message), media_type=CONTENT_TYPE)


def refuse(status: int, text: str, retry_after: float | None = None) -> Response:
    """A refusal that `Peer` turns into RemoteError, such as Overloaded for 429."""
    headers = {} if retry_after is None else {"retry-after": f"{retry_after:g}"}
    return JSONResponse({"error": text}, status, headers)


def refusal(error: DistillError) -> Response:
    """The refusal that `error` stands for: with a `status` of its own, else that of STATUSES."""
    status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 409)
    return refuse(getattr(error, "status", status), str(error), getattr(error, "retry_after", None))


# --- the application of a role --------------------------------------------------------------------------


def process_registry() -> CollectorRegistry:
    """Prometheus metrics of this process (start, CPU seconds, memory, open files), for those of a role."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def application(
    role: Role | None,
    routes: Sequence[Route],
    registry: CollectorRegistry,
    token: str | None,
    claim: Claim | None,
    claiming: Collection[str] = (),
    model: str | None = None,
    lifespan: Lifespan[Starlette] | None = None,
) -> Starlette:
    """`routes` behind the `Gate`, with GET /metrics (Prometheus) and, unless they have one, GET /health. A
    DistillError that they raise becomes its `refusal`."""

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok")

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, DistillError)
        return refusal(error)

    gate = Middleware(Gate, token=token, claim=claim, claiming=claiming, model=model, role=role)
    every = [*routes, Route("/health", health), Route("/metrics", metrics)]
    handlers = {DistillError: refused}
    return Starlette(routes=every, middleware=[gate], lifespan=lifespan, exception_handlers=handlers)


def run_role(log: logging.Logger, title: str, serve: Callable[[], None], quiet: Sequence[str] = ()) -> int:
    """`serve`, with a log on stderr in which every line has `title`; the exit status, 2 for a DistillError.
    `quiet`: loggers of which only warnings are shown."""
    redact_process()
    form = f"%(asctime)s %(levelname)s {title} %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=form)
    for name in quiet:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        serve()
    except DistillError as error:
        log.error("%s", error)
        return 2
    return 0


# --- where a server listens -----------------------------------------------------------------------------


def check_bind(host: str, token: str | None) -> None:
    """Refuse to listen beyond this machine without a token. Raises ConfigError."""
    if not token and not is_loopback(host):
        raise ConfigError(
            f"host {host!r} can be reached from other machines and no token is set: "
            f"bind 127.0.0.1, or set {TOKEN_VARIABLE} (or {TOKEN_FILE_VARIABLE}) for every role"
        )


KEEP_ALIVE_SECONDS: Final = 60
"""An idle connection is closed after it; far longer than a loop may stall. To uvicorn one is idle that was
refused while its body was still coming, and who is cut off then does not learn of the refusal."""


def serve_app(app: ASGIApp, host: str, port: int, grace: int) -> None:
    """Answer on a port that a launcher may hold, until SIGTERM or SIGINT and `grace` seconds more. Raises
    ConfigError when another server has the port."""
    _uvicorn(app, grace, log_level="warning").run(sockets=[join_port(host, port)])


def guest_server(app: ASGIApp) -> uvicorn.Server:
    """A server for an event loop that is not its own: signals and logs are left to the process. Requests
    under way are cut off a second after its `should_exit`."""
    server = _uvicorn(app, 1, log_config=None, lifespan="off")
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment]
    return server


def _uvicorn(app: ASGIApp, grace: int, **options: Any) -> uvicorn.Server:
    import uvicorn

    limits: Any = {"timeout_graceful_shutdown": grace, "timeout_keep_alive": KEEP_ALIVE_SECONDS}
    return uvicorn.Server(uvicorn.Config(app, access_log=False, **limits, **options))


def bind_alone(host: str, port: int) -> socket.socket:
    """A socket on a free port; connections that an earlier server left behind do not count. Raises OSError,
    or OverflowError for a number that is no port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as closing:
        bound = closing.enter_context(socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP))
        try:
            bound.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((host, port))
        closing.pop_all()
    return bound


def hold_port(host: str, port: int) -> socket.socket:
    """A socket that never listens and keeps a port for servers of this user, which come later (`join_port`):
    for everybody else it is in use. Raises as `bind_alone` does."""
    holder = bind_alone(host, port)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return holder


def join_port(host: str, port: int) -> socket.socket:
    """A socket to listen with, on a port that a launcher may hold. ConfigError: a server has it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    joined = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        joined.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        joined.bind((host, port))
        with socket.socket(family) as probe:  # servers that share a port share its calls
            if port and probe.connect_ex((host, port)) == 0:
                raise OSError(errno.EADDRINUSE, "another server answers there")
    except OSError as error:
        joined.close()
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}): choose another port") from None
    return joined
