"""The controller's HTTP server: the routes of docs/architecture.md, in its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, BinaryIO

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from distill.interfaces import Components
from distill.metrics.prometheus import Figures
from distill.registry import Registry
from distill.trainer_api.session import Event, TrainerSession
from sync import wire
from sync.base.errors import ConfigError, RemoteError
from sync.wire import Message, checks, server
from sync.wire.peers import Role
from sync.wire.server import bind_alone, check_bind, process_registry, read_message, refuse, reply

Handler = Callable[[Request], Awaitable[Response]]


def application(
    session: TrainerSession,
    registry: Registry,
    parts: Components,
    figures: Callable[[], dict[str, float]],
    why: Callable[[], list[str]],
    token: str | None,
) -> Starlette:
    """The ASGI application. `figures` by name, for Prometheus; `why`: what the run waits for, in lines.
    `token` None: no guard."""
    teachers, metrics = parts.teachers, process_registry()
    metrics.register(Figures(figures))
    heads: dict[str, bytes] = {}
    fetching = {name: asyncio.Lock() for name in teachers}

    async def batch(request: Request) -> Response:
        body = await session.batch(await read_message(request, wire.BatchRequest))
        return Response(body, media_type=wire.CONTENT_TYPE)

    async def broadcast(request: Request) -> Response:
        lost = session.broadcasts.lost_members(request.path_params["group"])
        return reply(wire.BroadcastMembers(lost=lost))

    def unknown(name: str) -> Response:
        return refuse(404, f"no teacher {name!r}; there are {', '.join(sorted(teachers))}")

    async def head(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in teachers:
            return unknown(name)
        async with fetching[name]:  # all ranks ask at the same time, and it may take gigabytes
            if name not in heads:
                answer = await teachers[name].head()
                if problem := checks.head(answer):
                    raise RemoteError(f"the output head of teacher {name} cannot be used: {problem}")
                heads[name] = wire.encode(answer)
        return Response(heads[name], media_type=wire.CONTENT_TYPE)

    async def servers(request: Request) -> Response:
        name = request.path_params["name"]
        return reply(teachers[name].servers()) if name in teachers else unknown(name)

    async def record(_: Request) -> Response:
        return StreamingResponse(_pieces(await parts.store.copy()), media_type="application/vnd.sqlite3")

    routes = [
        Route("/v1/hello", _messages(wire.TrainerHello, session.hello), methods=["POST"]),
        Route("/v1/batch", while_serving(batch), methods=["POST"]),
        Route("/v1/event", _messages(Event, session.event), methods=["POST"]),
        Route("/v1/broadcasts/{group}", broadcast),
        Route("/v1/teachers/{name}/head", while_serving(head)),
        Route("/v1/teachers/{name}", servers),
        Route("/v1/servers", _message(registry.listing)),
        Route("/v1/servers", _messages(wire.ServerRegisters, registry.register), methods=["POST"]),
        Route("/v1/servers/leave", _messages(wire.ServerLeaves, registry.leave), methods=["POST"]),
        Route("/v1/record", while_serving(record)),
        Route("/v1/why", _message(lambda: wire.Why(lines=why()))),
    ]
    return server.application(Role.CONTROLLER, routes, metrics, token or "", parts.claim)


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(1 << 20):
            yield piece


def _message(answer: Callable[[], Message]) -> Handler:
    async def handler(_: Request) -> Response:
        return reply(answer())

    return handler


def _messages(kind: Any, answer: Callable[[Any], Awaitable[Message]]) -> Handler:
    """A handler that takes a message of `kind` (a type, or a union of types) and answers with another."""

    async def handler(request: Request) -> Response:
        return reply(await answer(await read_message(request, kind)))

    return while_serving(handler)


def while_serving(handler: Handler) -> Handler:
    """`handler`, and a refusal when the server leaves while a request waits, such as a long poll."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except asyncio.CancelledError:
            return refuse(503, "the controller is leaving: ask again where it comes back")

    return guarded


def listen(host: str, port: int, token: str | None) -> socket.socket:
    """A bound socket. Raises ConfigError when the port is taken, or the host is not safe without a token."""
    check_bind(host, token)
    try:
        bound = bind_alone(host, port)
    except OSError as error:
        raise ConfigError(
            f"controller cannot listen on {host}:{port} ({error.strerror}): "
            "choose another controller.port, or 0 for any free one"
        ) from None
    # its connections will not keep a successor out
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return bound


@contextlib.asynccontextmanager
async def serving(app: Starlette, bound: socket.socket) -> AsyncIterator[None]:
    """Serve on `bound` while inside; running requests are cut off at the end."""
    controller = server.guest_server(app)
    bound.listen()  # who connects before the server has started waits for it
    task = asyncio.create_task(controller.serve(sockets=[bound]))
    try:
        yield
    finally:
        controller.should_exit = True
        await task
        bound.close()
