"""The controller's HTTP server: the routes of docs/architecture.md, in its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import cast

import uvicorn
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from distill.interfaces import Components
from distill.rollout.replica_client import ReplicaEngine
from distill.rollout.replica_pool import ReplicaPool
from distill.trainer_api.session import Event, TrainerSession
from sync.client import url_problem
from sync.errors import ConfigError, DistillError, Overloaded, RemoteError, Unreachable, WireError
from sync.server import RunGuard, TokenGuard, bind_alone, check_bind, read_message, refuse, reply
from sync.wire import (
    CONTENT_TYPE,
    BatchRequest,
    BroadcastMembers,
    ReplicaJoins,
    ReplicaLeaves,
    StepReport,
    TrainerHello,
    checks,
    encode,
)

Handler = Callable[[Request], Awaitable[Response]]


def application(
    session: TrainerSession,
    pool: ReplicaPool,
    parts: Components,
    metrics: Callable[[], dict[str, float]],
    token: str | None,
) -> Starlette:
    """The ASGI application. `metrics` gives name → value for Prometheus; `token` None: no guard."""
    teachers = parts.teachers
    heads: dict[str, bytes] = {}

    async def hello(request: Request) -> Response:
        return reply(await session.hello(await read_message(request, TrainerHello)))

    async def batch(request: Request) -> Response:
        body = await session.batch(await read_message(request, BatchRequest))
        return Response(body, media_type=CONTENT_TYPE)

    async def event(request: Request) -> Response:
        kind = cast(type[StepReport], Event)
        return reply(await session.event(await read_message(request, kind)))

    async def broadcast(request: Request) -> Response:
        return reply(BroadcastMembers(lost=session.broadcasts.lost_members(request.path_params["group"])))

    async def head(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in teachers:
            return refuse(404, f"no teacher {name!r}; there are {', '.join(sorted(teachers))}")
        if name not in heads:
            found = await teachers[name].head()
            if problem := checks.head(found):
                raise RemoteError(f"the output head of teacher {name} cannot be used: {problem}")
            heads[name] = encode(found)
        return Response(heads[name], media_type=CONTENT_TYPE)

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok")

    async def prometheus(_: Request) -> Response:
        return PlainTextResponse(exposition(metrics()))

    return Starlette(
        routes=[
            Route("/v1/hello", answered(hello), methods=["POST"]),
            Route("/v1/batch", answered(batch), methods=["POST"]),
            Route("/v1/event", answered(event), methods=["POST"]),
            Route("/v1/broadcasts/{group}", answered(broadcast)),
            Route("/v1/teachers/{name}/head", answered(head)),
            *replica_routes(pool, parts.connect),
            Route("/health", health),
            Route("/metrics", prometheus),
        ],
        middleware=[Middleware(TokenGuard, token=token or ""), Middleware(RunGuard, claim=parts.claim)],
    )


def replica_routes(pool: ReplicaPool, connect: Callable[[str], ReplicaEngine] | None) -> list[Route]:
    """Which replicas the run has, and how they join and leave while it goes on.

    `connect`: a replica by its URL; None: none can join.
    """

    async def replicas(_: Request) -> Response:
        return reply(pool.listing())

    async def join(request: Request) -> Response:
        wanted = await read_message(request, ReplicaJoins)
        url = wanted.url.rstrip("/")
        if connect is None or url_problem(url):
            raise RemoteError(f"replica {url!r} cannot join: give its URL, http://host:port")
        await pool.join(url, connect(url), wanted.name)
        return reply(pool.listing())

    async def leave(request: Request) -> Response:
        await pool.remove((await read_message(request, ReplicaLeaves)).name)
        return reply(pool.listing())

    return [
        Route("/v1/replicas", answered(replicas)),
        Route("/v1/replicas/join", answered(join), methods=["POST"]),
        Route("/v1/replicas/leave", answered(leave), methods=["POST"]),
    ]


def answered(handler: Handler) -> Handler:
    """Expected errors as refusals: 400 a bad message, 409 never, 429 not yet, 503 the controller leaves."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except asyncio.CancelledError:  # the server leaves while a long poll waits
            return refuse(503, "the controller is leaving: ask again where it comes back")
        except WireError as error:
            return refuse(400, str(error))
        except Unreachable as error:
            return refuse(503, str(error))
        except Overloaded as error:
            return refuse(429, str(error), error.retry_after)
        except DistillError as error:
            return refuse(409, str(error))

    return guarded


def exposition(values: dict[str, float]) -> str:
    """Prometheus text of name → value."""
    registry = CollectorRegistry()
    for name, value in values.items():
        Gauge(f"distill_{re.sub('[^A-Za-z0-9]', '_', name)}", name, registry=registry).set(value)
    return generate_latest(registry).decode()


def listen(host: str, port: int, token: str | None) -> socket.socket:
    """A bound socket. Raises ConfigError when the port is taken, or the host is not safe without a token."""
    check_bind(host, token)
    try:
        return bind_alone(host, port)
    except OSError as error:
        raise ConfigError(
            f"controller cannot listen on {host}:{port} ({error.strerror}): "
            "choose another controller.port, or 0 for any free one"
        ) from None


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: those are the launcher's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(app: Starlette, bound: socket.socket) -> AsyncIterator[None]:
    """Serve on `bound` while inside; running requests are cut off at the end."""
    server = _Server(
        uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    )
    task = asyncio.create_task(server.serve(sockets=[bound]))
    try:
        yield
    finally:
        server.should_exit = True
        await task
        bound.close()
