"""Our routes and our guard in front of vLLM's server; named by `--middleware`.

vLLM's own routes stay reachable behind the same bearer token, except those that need its development mode.
"""

from __future__ import annotations

import logging
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sync.claims import Claim
from sync.errors import DistillError, SnapshotError, StoreError, WireError
from sync.replica import vllm_compat
from sync.replica.completions import sampling_problem
from sync.replica.config import ReplicaConfig
from sync.replica.generation import Generation
from sync.replica.updates import Updater
from sync.server import RunGuard, TokenGuard, read_message, refuse, reply
from sync.wire import GenerateRequest, ReplicaState, RunIdentity, UpdateRequest

logger = logging.getLogger(__name__)
PREFIX: Final = "/distill/v1/"


class ReplicaMiddleware:
    """ASGI middleware: the token guard, the run guard, our routes, then vLLM."""

    def __init__(self, app: ASGIApp) -> None:
        config = ReplicaConfig.from_environment()
        claim = Claim(RunIdentity(config.run))
        claiming = (PREFIX + "generate", PREFIX + "update")
        self._guarded = TokenGuard(RunGuard(_Routes(app, config, claim), claim, claiming))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # nothing of ours speaks it, and the guard reads HTTP headers only
            await send({"type": "websocket.close", "code": 1008})
            return
        await self._guarded(scope, receive, send)


class _Routes:
    """Our routes; everything else goes on to vLLM."""

    def __init__(self, app: ASGIApp, config: ReplicaConfig, claim: Claim) -> None:
        self._app, self._config, self._claim = app, config, claim
        self._updater: Updater | None = None
        self._generations: set[Generation] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        key = (scope["method"], scope["path"].removeprefix(PREFIX))
        request = Request(scope, receive)
        if key == ("POST", "generate"):
            await self._generate(request, send)
            return
        try:
            if key == ("POST", "update"):
                response = await self._update(request)
            elif key == ("GET", "state"):
                response = await self._state(request)
            else:
                response = refuse(404, f"{key[0]} {scope['path']} is no route of a replica")
        except (SnapshotError, StoreError) as error:  # the old version goes on
            logger.warning("update refused: %s", error)
            response = refuse(409, str(error))
        except WireError as error:
            response = refuse(400, str(error))
        except (DistillError, OSError, vllm_compat.EngineDead) as error:
            logger.exception("update failed")
            response = refuse(500, f"{type(error).__name__}: {error}")
        await response(scope, receive, send)

    def _following(self, request: Request) -> Updater:
        """Made at the first request: the engine exists only then."""
        if self._updater is None:
            self._updater = Updater(request.app.state.engine_client, self._config, self._claim)
            if self._config.lora_rank is not None:
                vllm_compat.offer(request.app)
        return self._updater

    async def _generate(self, request: Request, send: Send) -> None:
        try:
            wanted = await read_message(request, GenerateRequest)
            problem = sampling_problem(wanted.sampling)
        except WireError as error:
            problem = str(error)
        if problem is not None:
            await refuse(400, problem)(request.scope, request.receive, send)
            return
        adapter = await self._following(request).adapter()
        generation = Generation(request.app.state.engine_client, wanted, adapter)
        self._generations.add(generation)
        try:
            await generation.run(request.receive, send)
        finally:
            self._generations.remove(generation)

    async def _update(self, request: Request) -> Response:
        wanted = await read_message(request, UpdateRequest)
        return reply(await self._following(request).update(wanted))

    async def _state(self, request: Request) -> Response:
        updater = self._following(request)
        digests = await updater.digests() if request.query_params.get("digests") == "1" else None
        requests = sum(generation.open for generation in self._generations)
        return reply(
            ReplicaState(
                version=updater.version,
                requests=requests,
                digests=digests,
                tokens=vllm_compat.tokens_written(),
            )
        )
