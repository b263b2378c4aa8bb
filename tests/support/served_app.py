"""Applications on this loop, on real sockets: any, and a replica's routes over one in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from in_memory import MemoryReplica
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from distill.trainer_api.http_api import listen, serving
from sync.wire import GenerateRequest, UpdateRequest, frame
from sync.wire.server import read_message, refuse, reply


@asynccontextmanager
async def at_url(app: Any, token: str | None = None, port: int = 0) -> AsyncIterator[str]:
    bound = listen("127.0.0.1", port, token)
    async with serving(app, bound):
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def replica_app(engine: MemoryReplica) -> Starlette:
    """Refuses step 13."""

    async def generate(request: Request) -> Response:
        answers = engine.generate(await read_message(request, GenerateRequest))
        return StreamingResponse(frame(answer) async for answer in answers)

    async def update(request: Request) -> Response:
        asked = await read_message(request, UpdateRequest)
        if asked.version.step == 13:
            return refuse(409, "digest of model.weight differs")
        return reply(await engine.update(asked, 1.0))

    async def state(request: Request) -> Response:
        return reply(await engine.state("digests" in request.query_params))

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok")

    posts = {"generate": generate, "update": update}
    routes = [Route(f"/distill/v1/{name}", does, methods=["POST"]) for name, does in posts.items()]
    return Starlette(routes=[*routes, Route("/distill/v1/state", state), Route("/health", health)])
