"""Our routes and our guard in front of vLLM's server; named by `--middleware`.

vLLM's own routes stay reachable behind the same bearer token, except those that need its development mode.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sync.claims import Claim
from sync.errors import DistillError, SnapshotError, StoreError, WireError
from sync.replica import vllm_compat
from sync.replica.completions import Limits, generated, prompt_problem, sampling_problem
from sync.replica.updates import Updater
from sync.server import RunGuard, TokenGuard, read_message, refuse, reply
from sync.settings import ReplicaConfig
from sync.wire import (
    CONTENT_TYPE,
    Generated,
    GenerateFailed,
    GeneratePrompt,
    GenerateRequest,
    ReplicaState,
    RunIdentity,
    UpdateRequest,
    frame,
)

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


# --- generation -----------------------------------------------------------------------------------------


_request_numbers = itertools.count()


async def left(receive: Receive) -> None:
    """Return when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Generation:
    """The completions of one request. `run` once; ends early, aborting them all, when the client leaves."""

    def __init__(self, engine: Any, request: GenerateRequest, adapter: Any | None = None) -> None:
        """`adapter`: what `Updater.adapter` says."""
        self._engine = engine
        self._adapter = adapter
        self._request = request
        self._limits: Limits = vllm_compat.limits(engine)
        self._frames: list[bytes] = []
        self.open = len(request.prompts)
        """Prompts without an answer so far."""
        self._news = asyncio.Event()

    async def run(self, receive: Receive, send: Send) -> None:
        """Answer the request over ASGI. Raises EngineDead when the engine died on the way."""
        headers = [(b"content-type", CONTENT_TYPE.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with asyncio.TaskGroup() as group:
            gone = group.create_task(left(receive))
            tasks = [group.create_task(self._one(prompt)) for prompt in self._request.prompts]
            writer = group.create_task(self._write(send, len(tasks)))
            await asyncio.wait({gone, writer}, return_when=asyncio.FIRST_COMPLETED)
            for task in (gone, writer, *tasks):
                task.cancel()

    async def _write(self, send: Send, expected: int) -> None:
        written = 0
        while written < expected:
            await self._news.wait()
            await asyncio.sleep(0)  # completions of the same engine step join this write
            frames, self._frames = self._frames, []
            self._news.clear()
            written += len(frames)
            await send({"type": "http.response.body", "body": b"".join(frames), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _one(self, prompt: GeneratePrompt) -> None:
        answer = await self._answer(prompt)  # before the list is looked up: the writer swaps it meanwhile
        self._frames.append(frame(answer))
        self.open -= 1
        self._news.set()

    async def _answer(self, prompt: GeneratePrompt) -> Generated | GenerateFailed:
        problem = prompt_problem(prompt, self._limits)
        if problem is not None:
            return GenerateFailed(id=prompt.id, error=problem)
        sampling = self._request.sampling
        params = vllm_compat.sampling_params(sampling, self._limits.vocab_size, prompt.seed)
        request_id = f"{prompt.id}#{next(_request_numbers)}"
        try:
            completion = await vllm_compat.complete(
                self._engine, prompt.token_ids, params, request_id, self._adapter, sampling.max_seconds
            )
        except vllm_compat.RefusedPrompt as error:
            return GenerateFailed(id=prompt.id, error=f"the engine refused the prompt: {error}")
        return generated(prompt.id, completion, sampling.student_topk)
