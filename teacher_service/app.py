"""The teacher's HTTP routes (docs/architecture.md lists them), over one engine.

Every refusal is a 4xx with value, rule and remedy; sequences that cannot be scored are refused one by one in
the reply. 429 carries Retry-After; 503 means that nothing can be computed now, from /health that
the process must be restarted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from sync.base.errors import DistillError
from sync.wire import (
    CONTENT_TYPE,
    Ok,
    Scored,
    ScoreRefused,
    ScoresRelease,
    TeacherCompletion,
    TeacherInfo,
    decode,
)
from sync.wire.checks import Problem
from sync.wire.claims import Claim
from sync.wire.peers import Role
from sync.wire.server import BodyLimit, application, refusal, refuse, reply
from teacher_service import messages
from teacher_service.batching import STALLED_SECONDS, Batcher, Metrics, Outcome, Work
from teacher_service.config import TeacherConfig
from teacher_service.engines.base import Engine
from teacher_service.kept import PART_BYTES, KeptScores
from teacher_service.limits import Limits
from teacher_service.messages import BadRequest, Call

log = logging.getLogger(__name__)
GIB: Final = 1 << 30

Handler = Callable[[Request], Awaitable[Response]]


class TeacherService:
    """One engine behind HTTP; `app` is the ASGI application, whose lifespan runs and closes the engine."""

    def __init__(
        self,
        engine: Engine,
        info: TeacherInfo,
        config: TeacherConfig,
        limits: Limits,
        *,
        end_ids: Sequence[int] = (),
        token: str | None = None,
        claim: Claim | None = None,
    ) -> None:
        """`end_ids`: of the model, besides the engine's own. `claim`: of a teacher that follows a run."""
        self.info, self.metrics = info, Metrics()
        self._engine = engine
        dtype: messages.HalfOrSingle = "f2" if config.wire_dtype == "float16" else "f4"
        self._batcher = Batcher(engine, config.batch_tokens, limits.queue_tokens, self.metrics)
        self._bodies = BodyLimit(limits.bodies_bytes // 2, limits.bodies_bytes)
        memory, disk = (int(gib * GIB) for gib in (config.keep_memory_gib, config.keep_disk_gib))
        self._kept = KeptScores(config.keep_folder, memory, disk, self.metrics.registry)
        facts, limit, keep = engine.engine_info, limits.bodies_bytes, self._kept.put
        score = partial(messages.read_score, info=facts, dtype=dtype, limit_bytes=limit, keep=keep)
        generate = partial(messages.read_generate, info=facts, end_ids={*end_ids})
        routes = [
            Route("/v1/score", self._counted(partial(self._answer, score)), methods=["POST"]),
            Route("/v1/generate", self._counted(partial(self._answer, generate)), methods=["POST"]),
            Route("/v1/scores/release", self._counted(self.release), methods=["POST"]),
            Route("/v1/scores/{key}", self._counted(self.get_scores)),
            Route("/v1/info", self._counted(self.get_info)),
            Route("/v1/head", self._counted(self.get_head)),
            Route("/health", self.health),
        ]
        claiming, registry = ("/v1/score", "/v1/generate"), self.metrics.registry
        model = info.fingerprint
        self.app = application(Role.TEACHER, routes, registry, token, claim, claiming, model, self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._batcher.start()
        yield
        await asyncio.to_thread(self._kept.close)
        if await self._batcher.stop():
            self._engine.close()
        else:
            log.warning("the engine is still at work: it is left to the end of the process")

    def _counted(self, handler: Handler) -> Handler:
        """`handler`, with refusals turned into answers and every answer counted."""

        async def answer(request: Request) -> Response:
            started = time.monotonic()
            try:
                response = await handler(request)
            except DistillError as error:
                response = refusal(error)
            self.metrics.requests.labels(response.status_code).inc()
            self.metrics.latency.observe(time.monotonic() - started)
            return response

        return answer

    async def _answer(self, read: Callable[[bytes], Call], request: Request) -> Response:
        async with self._bodies.read(request) as body:
            call = await asyncio.to_thread(read, body)  # it may be long, and others are answered meanwhile
            work = [item for item in call.admitted if isinstance(item, Work)]
            with self._batcher.submit(work) as outcomes:
                waits: list[asyncio.Future[Any]] = [
                    asyncio.gather(*outcomes, return_exceptions=True),  # else asyncio logs their end
                    asyncio.ensure_future(request.receive()),  # the body is read: it can only disconnect
                ]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waits[1].cancel()
                if not waits[0].done():
                    return refuse(408, "the request was dropped: its caller left")
                return await asyncio.to_thread(self._reply, call, [outcome.result() for outcome in outcomes])

    def _reply(self, call: Call, outcomes: Sequence[Outcome]) -> Response:
        """A result for each id, from the outcomes of its work. Raises what the engine met with all of it."""
        for outcome in outcomes:
            if isinstance(outcome, DistillError):
                raise outcome
        results: list[Scored | TeacherCompletion | ScoreRefused] = []
        computed = iter(outcomes)
        for id_, admitted in zip(call.ids, call.admitted, strict=True):
            outcome = admitted if isinstance(admitted, str) else next(computed)
            if isinstance(admitted, str) or isinstance(outcome, str):
                results.append(ScoreRefused(id_, str(outcome)))
            elif isinstance(result := call.result(id_, admitted.item, outcome), Problem):
                log.error("the engine's answer for %s cannot be used: %s", id_, result)
                results.append(ScoreRefused(id_, f"the engine's answer: {result}", unusable=True))
            else:
                results.append(result)
        self.metrics.refused.inc(sum(isinstance(result, ScoreRefused) for result in results))
        return reply(call.reply(results=results))  # type: ignore[arg-type]

    async def get_scores(self, request: Request) -> Response:
        body = await asyncio.to_thread(self._kept.open, request.path_params["key"])
        if body is None:
            return refuse(404, "these scores are released, evicted, or of an earlier start: score again")
        size, parts = body
        if size <= PART_BYTES:  # a response in parts costs 0.4 ms more
            return Response(await asyncio.to_thread(b"".join, parts), media_type=CONTENT_TYPE)
        return StreamingResponse(parts, media_type=CONTENT_TYPE, headers={"content-length": str(size)})

    async def release(self, request: Request) -> Response:
        async with self._bodies.read(request) as body:
            await asyncio.to_thread(self._kept.release, decode(body, ScoresRelease).keys)
        return reply(Ok())

    async def get_info(self, _: Request) -> Response:
        return reply(self.info)

    async def get_head(self, _: Request) -> Response:
        def head_reply() -> Response:  # a head of gigabytes is encoded there too
            if (head := self._engine.head()) is None:
                raise BadRequest(
                    f'engine {self.info.engine!r} gives no output head: use engine = "transformers"'
                )
            return reply(head)

        return await self._batcher.in_engine_thread(head_reply)

    async def health(self, _: Request) -> Response:
        if self._batcher.healthy:
            return PlainTextResponse("ok")
        return refuse(
            503, f"batching has ended, or one batch took {STALLED_SECONDS:.0f} s: restart this process"
        )
