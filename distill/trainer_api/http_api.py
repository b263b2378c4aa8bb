"""The controller's HTTP server: the routes of docs/architecture.md, in its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from distill.interfaces import Components
from distill.metrics.prometheus import Figures
from distill.rollout.replica_pool import ReplicaPool
from distill.trainer_api.session import Event, TrainerSession
from sync import wire
from sync.address import url_problem
from sync.errors import ConfigError, DistillError, Overloaded, RemoteError, Unreachable, WireError
from sync.server import (
    KEEP_ALIVE_SECONDS,
    RunGuard,
    TokenGuard,
    bind_alone,
    check_bind,
    exposition,
    process_registry,
    read_message,
    refuse,
    reply,
)
from sync.wire import Message, checks

Handler = Callable[[Request], Awaitable[Response]]


def application(
    session: TrainerSession,
    pool: ReplicaPool,
    parts: Components,
    figures: Callable[[], dict[str, float]],
    token: str | None,
) -> Starlette:
    """The ASGI application. `figures` by name, for Prometheus; `token` None: no guard."""
    teachers, registry = parts.teachers, process_registry()
    registry.register(Figures(figures))
    heads: dict[str, bytes] = {}

    async def batch(request: Request) -> Response:
        body = await session.batch(await read_message(request, wire.BatchRequest))
        return Response(body, media_type=wire.CONTENT_TYPE)

    async def broadcast(request: Request) -> Response:
        return reply(
            wire.BroadcastMembers(lost=session.broadcasts.lost_members(request.path_params["group"]))
        )

    def unknown(name: str) -> Response:
        return refuse(404, f"no teacher {name!r}; there are {', '.join(sorted(teachers))}")

    async def head(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in teachers:
            return unknown(name)
        if name not in heads:
            found = await teachers[name].head()
            if problem := checks.head(found):
                raise RemoteError(f"the output head of teacher {name} cannot be used: {problem}")
            heads[name] = wire.encode(found)
        return Response(heads[name], media_type=wire.CONTENT_TYPE)

    async def servers(request: Request) -> Response:
        name = request.path_params["name"]
        return reply(teachers[name].servers()) if name in teachers else unknown(name)

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok")

    async def prometheus(_: Request) -> Response:
        return exposition(registry)

    return Starlette(
        routes=[
            Route("/v1/hello", _messages(wire.TrainerHello, session.hello), methods=["POST"]),
            Route("/v1/batch", answered(batch), methods=["POST"]),
            Route("/v1/event", _messages(Event, session.event), methods=["POST"]),
            Route("/v1/broadcasts/{group}", answered(broadcast)),
            Route("/v1/teachers/{name}/head", answered(head)),
            Route("/v1/teachers/{name}", answered(servers)),
            *_replica_routes(pool, parts),
            Route("/health", health),
            Route("/metrics", prometheus),
        ],
        middleware=[Middleware(TokenGuard, token=token or ""), Middleware(RunGuard, claim=parts.claim)],
    )


def _replica_routes(pool: ReplicaPool, parts: Components) -> list[Route]:
    """Which replicas the run has, and how they join and leave while it goes on."""

    async def replicas(_: Request) -> Response:
        return reply(pool.listing())

    async def join(wanted: wire.ReplicaJoins) -> wire.Replicas:
        url = wanted.url.rstrip("/")
        if parts.connect is None or url_problem(url):
            raise RemoteError(f"replica {url!r} cannot join: give its URL, http://host:port")
        await pool.join(url, parts.connect(url), wanted.name)
        return pool.listing()

    async def leave(wanted: wire.ReplicaLeaves) -> wire.Replicas:
        await pool.remove(wanted.name)
        return pool.listing()

    return [
        Route("/v1/replicas", answered(replicas)),
        Route("/v1/replicas/join", _messages(wire.ReplicaJoins, join), methods=["POST"]),
        Route("/v1/replicas/leave", _messages(wire.ReplicaLeaves, leave), methods=["POST"]),
    ]


def _messages(kind: Any, answer: Callable[[Any], Awaitable[Message]]) -> Handler:
    """A handler that takes a message of `kind` (a type, or a union of types) and answers with another."""

    async def handler(request: Request) -> Response:
        return reply(await answer(await read_message(request, kind)))

    return answered(handler)


def answered(handler: Handler) -> Handler:
    """Expected errors as refusals: 400 a bad message, 409 never, 429 not yet, 503 the controller leaves."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except asyncio.CancelledError:  # the server leaves while a long poll waits
            return refuse(503, "the controller is leaving: ask again where it comes back")
        except Overloaded as error:
            return refuse(429, str(error), error.retry_after)
        except DistillError as error:
            status = 400 if isinstance(error, WireError) else 503 if isinstance(error, Unreachable) else 409
            return refuse(status, str(error))

    return guarded


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
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
    )
    bound.listen()  # who connects before the server has started waits for it
    task = asyncio.create_task(server.serve(sockets=[bound]))
    try:
        yield
    finally:
        server.should_exit = True
        await task
        bound.close()
