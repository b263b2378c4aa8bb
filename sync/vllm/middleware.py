"""Our routes and our guard in front of vLLM's server; named by `--middleware`.

vLLM's own routes stay reachable behind the same bearer token, except those that need its development mode.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import Any, Final

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sync import wire
from sync.base.errors import DataError, DistillError, SnapshotError, StoreError, TooLarge, WireError
from sync.base.settings import ReplicaConfig
from sync.vllm import completions, metrics, routing, vllm_compat
from sync.weights.stores import open_store
from sync.weights.subscribe import Mirror, check_local
from sync.wire.claims import Claim
from sync.wire.peers import Role
from sync.wire.server import Gate, read_message, refusal, refuse, reply

logger = logging.getLogger(__name__)
PREFIX: Final = "/distill/v1/"
_POLL_SECONDS: Final = 0.01
"""Pause between two questions whether a version is staged."""
_request_numbers = itertools.count()


class ReplicaMiddleware:
    """ASGI middleware: the gate, our routes, then vLLM."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._config = app, ReplicaConfig.from_environment()
        check_local(self._config.mirror)
        self._claim = Claim(wire.RunIdentity(self._config.run))
        claiming = (PREFIX + "generate", PREFIX + "update")
        self._gate = Gate(self._behind_gate, None, self._claim, claiming, role=Role.STUDENT)
        self._updater: Updater | None = None
        self._generations: set[Generation] = set()
        self._routes: routing.RouteSource | None = None
        """Where routes come from; None: no request has asked for routes so far."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # the gate reads HTTP headers only
            await send({"type": "websocket.close", "code": 1008})
            return
        await self._gate(scope, receive, send)

    async def _behind_gate(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        work = {
            ("POST", "generate"): self._generate,
            ("POST", "update"): self._update,
            ("GET", "state"): self._state,
        }.get((scope["method"], scope["path"].removeprefix(PREFIX)))
        response: ASGIApp
        try:
            if work is None:
                response = refuse(404, f"{scope['method']} {scope['path']} is no route of a replica")
            else:
                response = await work(Request(scope, receive))
        except (SnapshotError, StoreError) as error:  # the old version goes on
            metrics.refused.inc()
            logger.warning("update refused: %s", error)
            response = refuse(409, str(error))
        except (WireError, TooLarge) as error:
            response = refusal(error)
        except (DistillError, OSError, vllm_compat.CallFailed, vllm_compat.EngineDead) as error:
            logger.exception("update failed")
            response = refuse(500, f"{type(error).__name__}: {error}")
        await response(scope, receive, send)

    def _following(self, request: Request) -> Updater:
        """Made at the first request: the engine exists only then."""
        if self._updater is None:
            self._updater = Updater(request.app.state.engine_client, self._config, self._claim)
        return self._updater

    async def _adapter(self, request: Request) -> Any | None:
        """`Updater.adapter`; vLLM's own routes offer it from then on, and not before: it would be read."""
        adapter = await self._following(request).adapter()
        if adapter is not None:
            vllm_compat.offer(request.app)
        return adapter

    async def _generate(self, request: Request) -> ASGIApp:
        message = await read_message(request, wire.GenerateRequest)
        adapter = await self._adapter(request)
        if message.sampling.routes and self._routes is None:
            await self._record_routes(request)
        generation = Generation(request.app.state.engine_client, message, adapter, self._routes)

        async def run(_: Scope, receive: Receive, send: Send) -> None:
            self._generations.add(generation)
            try:
                await generation.run(receive, send)
            finally:
                self._generations.remove(generation)

        return run

    async def _record_routes(self, request: Request) -> None:
        """Have routes recorded from now on. Raises WireError when this engine cannot."""
        engine = request.app.state.engine_client
        answer, *_ = await vllm_compat.call_workers(engine, "distill_record_routes")
        if problem := answer.get("error"):
            raise WireError(problem)
        if (layers := answer.pop("native", None)) is not None:
            self._routes = routing.NativeRoutes(wire.Routing(**answer), layers)
            return

        async def take(requests: list[str]) -> list[dict[str, Any] | None]:
            routes, *_ = await vllm_compat.call_workers(engine, "distill_routes", requests)
            return routes

        self._routes = self._routes or routing.RouteQueue(take)  # another request may have been faster

    async def _update(self, request: Request) -> Response:
        updated = await self._following(request).update(await read_message(request, wire.UpdateRequest))
        await self._adapter(request)
        return reply(updated)

    async def _state(self, request: Request) -> Response:
        updater = self._following(request)
        digests = await updater.digests() if request.query_params.get("digests") == "1" else None
        return reply(
            wire.ReplicaState(
                version=updater.version,
                requests=sum(generation.open for generation in self._generations),
                digests=digests,
                tokens=vllm_compat.tokens_written(),
                workers=vllm_compat.workers(request.app.state.engine_client),
            )
        )


# --- generation -----------------------------------------------------------------------------------------


async def left(receive: Receive) -> None:
    """Return when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Generation:
    """The completions of one request. `run` once; ends early, aborting them all, when the client leaves."""

    def __init__(
        self,
        engine: Any,
        request: wire.GenerateRequest,
        adapter: Any | None,
        routes: routing.RouteSource | None,
    ) -> None:
        """`adapter`: of `Updater.adapter`. `routes`: where `Sampling.routes` asks for them."""
        self._engine, self._request, self._adapter, self._routes = engine, request, adapter, routes
        self._vocab_size, self._context = vllm_compat.limits(engine)
        self._frames: asyncio.Queue[bytes] = asyncio.Queue()
        self.open = len(request.prompts)
        """Prompts without an answer so far."""

    async def run(self, receive: Receive, send: Send) -> None:
        """Answer the request over ASGI. Raises EngineDead when the engine died on the way."""
        headers = [(b"content-type", wire.CONTENT_TYPE.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with asyncio.TaskGroup() as group:
            gone = group.create_task(left(receive))
            tasks = [group.create_task(self._one(prompt)) for prompt in self._request.prompts]
            writer = group.create_task(self._write(send, len(tasks)))
            await asyncio.wait({gone, writer}, return_when=asyncio.FIRST_COMPLETED)
            for task in (gone, writer, *tasks):
                task.cancel()

    async def _write(self, send: Send, expected: int) -> None:
        while expected:
            frames = [await self._frames.get()]
            await asyncio.sleep(0)  # completions of the same engine step join this write
            frames += [self._frames.get_nowait() for _ in range(self._frames.qsize())]
            expected -= len(frames)
            await send({"type": "http.response.body", "body": b"".join(frames), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _one(self, prompt: wire.GeneratePrompt) -> None:
        self._frames.put_nowait(wire.frame(await self._answer(prompt)))
        self.open -= 1

    async def _answer(self, prompt: wire.GeneratePrompt) -> wire.Generated | wire.GenerateFailed:
        if problem := completions.prompt_problem(prompt, self._vocab_size, self._context):
            return wire.GenerateFailed(id=prompt.id, error=problem)
        sampling = self._request.sampling
        params = vllm_compat.sampling_params(sampling, self._vocab_size, prompt.seed, prompt.routes_from)
        request_id = f"{prompt.id}#{next(_request_numbers)}"
        try:
            completion = await vllm_compat.complete(
                self._engine, prompt.token_ids, params, request_id, self._adapter, sampling.max_seconds
            )
        except vllm_compat.RefusedPrompt as error:
            return wire.GenerateFailed(id=prompt.id, error=f"the engine refused the prompt: {error}")
        except vllm_compat.EngineFailed as error:
            return wire.GenerateFailed(id=prompt.id, error=f"the engine failed: {error}", unusable=True)
        routes = None
        try:
            if sampling.routes and self._routes is not None and completion.token_ids.size:
                read = np.array(prompt.token_ids[prompt.routes_from :], np.int32)
                token_ids = np.concatenate([read, completion.token_ids])
                native = None if completion.routes is None else completion.routes[prompt.routes_from :]
                routes = await self._routes.routes(request_id, token_ids, native)
            return completions.generated(prompt.id, completion, sampling, routes)
        except (DataError, WireError) as error:
            return wire.GenerateFailed(id=prompt.id, error=str(error), unusable=True)


# --- updates --------------------------------------------------------------------------------------------


class Updater:
    """Brings one replica from version to version: stage while generating, then pause, swap, stamp, resume.
    Updates wait for each other; one to the version that is served already returns at once."""

    def __init__(self, engine: Any, config: ReplicaConfig, claim: Claim) -> None:
        """`claim`: the run that updates are made for."""
        self._engine, self._config, self._claim = engine, config, claim
        store = open_store(config.store, config.store_path)
        self._mirror = Mirror(config.mirror, store, config.run)
        self._turn = asyncio.Lock()
        self.version: wire.Version | None = None
        """What the engine serves; None: the folder it was started with."""
        self._bare = False
        """The empty adapter is in place; only for a replica that follows adapters."""

    async def adapter(self) -> Any | None:
        """What every completion must name to run through the adapter that is followed, those before the first
        version too: they are in flight when it comes. None: whole checkpoints are followed."""
        if self._config.lora_rank is None:
            return None
        if self.version is None and not self._bare:  # asked twice: an update holds the lock for long
            async with self._turn:
                if self.version is None and not self._bare:
                    await vllm_compat.call_workers(self._engine, "distill_revert")
                    self._bare = True
        return vllm_compat.ADAPTER

    async def digests(self) -> dict[str, str] | None:
        """Digests of the bytes last given to the loader, equal in all workers; None: nothing was loaded yet.
        Raises SnapshotError when workers differ."""
        async with self._turn:
            answers = await vllm_compat.call_workers(self._engine, "distill_digests")
        if any(answer != answers[0] for answer in answers):
            raise SnapshotError("the workers of this replica hold different weights: restart it")
        return answers[0]

    async def update(self, request: wire.UpdateRequest) -> wire.UpdateReply:
        """Serve `request.version`. Raises SnapshotError when it must not be applied, StoreError when it
        cannot be read or the mirror cannot be written; the old one goes on."""
        async with self._turn:
            if request.version == self.version:
                return wire.UpdateReply(
                    version=request.version, bytes_read=0, stage_seconds=0, pause_seconds=0, apply_seconds=0
                )
            if request.kv_on_swap == "keep" and vllm_compat.shares_kv(self._engine):
                raise SnapshotError(  # KV of old weights stays, and would be handed to new requests
                    'kv_on_swap = "keep" would share prefixes between versions while prefix caching or a KV '
                    "connector is on: start the replica without enable-prefix-caching, kv-offloading-size "
                    'and kv-transfer-config, or use kv_on_swap = "recompute"'
                )
            started = time.perf_counter()
            bytes_read = await self._stage(request)
            staged = time.perf_counter()
            load = await self._swap(request)
            reply = wire.UpdateReply(
                version=request.version,
                bytes_read=bytes_read,
                stage_seconds=staged - started,
                pause_seconds=time.perf_counter() - staged,
                apply_seconds=load,
            )
            metrics.updated(reply)
            await vllm_compat.call_workers(self._engine, "distill_settle")
            try:
                await asyncio.to_thread(self._promote)
            except StoreError as error:
                logger.warning("%s is served, and promoted before the next is read: %s", self.version, error)
        return reply

    def _promote(self) -> None:
        """Make the mirror's folder of the served version live, if it has one: a revert reads it, and staging
        writes the spare. Again changes nothing. Raises StoreError."""
        if self.version is not None and self._mirror.holds(self.version):
            self._mirror.promote(self.version)

    async def _stage(self, request: wire.UpdateRequest) -> int:
        """Bytes that came, from the store or by broadcast; the version is staged in all workers. Raises
        SnapshotError or StoreError when it is not; nothing has changed then."""
        path, ticket, bytes_read = None, None, 0
        if request.broadcast is None:
            self._mirror.follow(self._claim.run_id)
            await asyncio.to_thread(self._promote)
            mirrored = await asyncio.to_thread(self._mirror.stage, request.version)
            path, bytes_read = str(mirrored.path), mirrored.bytes_read
        else:
            ticket = msgspec.to_builtins(request.broadcast)
        await vllm_compat.call_workers(self._engine, "distill_prepare", path, ticket)
        while True:
            workers = await vllm_compat.call_workers(self._engine, "distill_prepared")
            if errors := [worker["error"] for worker in workers if worker["error"] is not None]:
                raise SnapshotError(f"{request.version} was not staged, the old version goes on: {errors[0]}")
            if all(worker["done"] for worker in workers):
                return bytes_read + sum(worker["bytes"] for worker in workers)
            await asyncio.sleep(_POLL_SECONDS)

    async def _swap(self, request: wire.UpdateRequest) -> float:
        """Seconds of placing what is staged. The engine resumes on the new version, or on the old one and
        SnapshotError is raised; EngineDead leaves it paused, for its process is ending."""
        try:
            await vllm_compat.pause(self._engine, clear_cache=request.kv_on_swap == "recompute")
        except vllm_compat.CallFailed as error:
            await vllm_compat.resume(self._engine)
            raise SnapshotError(
                f"the engine did not pause for {request.version}, the old version goes on: {error}"
            ) from error
        started = time.perf_counter()
        try:
            failures = [f for f in await vllm_compat.call_workers(self._engine, "distill_apply") if f]
            seconds = time.perf_counter() - started
            if not failures:
                await vllm_compat.stamp(self._engine, str(request.version))
        except vllm_compat.CallFailed as error:
            failures = [str(error)]
        if failures:
            await vllm_compat.call_workers(self._engine, "distill_revert")
            await vllm_compat.resume(self._engine)
            raise SnapshotError(
                f"{request.version} could not be loaded, the old weights are back: {failures[0]}"
            )
        self.version = request.version
        await vllm_compat.resume(self._engine)
        return seconds
