"""The teacher's HTTP routes (docs/architecture.md), over one engine.

    POST /v1/score   ScoreRequest → ScoreReply
    GET  /v1/info    → TeacherInfo        GET /v1/head     → Head
    GET  /health     200 while batches are computed        GET /metrics   Prometheus

Every refusal is a 4xx with value, rule and remedy; sequences that cannot be marked are refused one by one in
the reply. 429 carries Retry-After; 503 means that the process must be restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import msgspec
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from sync.errors import Overloaded, Unreachable, WireError
from sync.transport import TokenGuard, refuse, reply
from sync.wire import Scored, ScoreRefused, ScoreReply, ScoreRequest, TeacherInfo, decode
from teacher_service.admission import BadRequest, admit, asked_of, check_reply_size, check_request
from teacher_service.batching import Batcher, Ticket
from teacher_service.bodies import BodyGate
from teacher_service.engines.base import Engine, Item, Marks
from teacher_service.metrics import Metrics
from teacher_service.replies import Small, scored

log = logging.getLogger(__name__)
INLINE_BYTES: Final = 1 << 20
"""Bodies longer than this are read and checked in a thread, so that the event loop answers others."""

Handler = Callable[[Request], Awaitable[Response]]


class TeacherService:
    """One engine behind HTTP; `app` is the ASGI application, whose lifespan runs and closes the engine."""

    def __init__(
        self,
        engine: Engine,
        info: TeacherInfo,
        *,
        batch_tokens: int = 16384,
        queue_tokens: int = 1 << 20,
        wire_dtype: str = "float16",
        token: str | None = None,
    ) -> None:
        self.info, self.metrics = info, Metrics()
        self._engine, self._facts, self._queue_tokens = engine, engine.facts, queue_tokens
        self._small: Small = "f2" if wire_dtype == "float16" else "f4"
        self._batcher = Batcher(engine, batch_tokens, queue_tokens, self.metrics)
        self._gate = BodyGate()
        routes = [
            Route("/v1/score", self._counted(self.score), methods=["POST"]),
            Route("/v1/info", self._counted(self.get_info)),
            Route("/v1/head", self._counted(self.get_head)),
            Route("/health", self.health),
            Route("/metrics", self.get_metrics),
        ]
        self.app = Starlette(
            routes=routes, lifespan=self._lifespan, middleware=[Middleware(TokenGuard, token=token)]
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._batcher.start()
        yield
        await self._batcher.stop()
        self._engine.close()

    def _counted(self, handler: Handler) -> Handler:
        """`handler`, with refusals turned into answers and every answer counted."""

        async def answer(request: Request) -> Response:
            started = time.monotonic()
            try:
                response = await handler(request)
            except BadRequest as error:
                response = refuse(error.status, str(error))
            except WireError as error:
                response = refuse(400, str(error))
            except Unreachable as error:
                response = refuse(503, f"what computes for this teacher is gone: {error}")
            except Overloaded as error:
                response = refuse(429, str(error), error.retry_after)
            self.metrics.requests.labels(response.status_code).inc()
            self.metrics.latency.observe(time.monotonic() - started)
            return response

        return answer

    # --- routes -------------------------------------------------------------------------------------------

    async def score(self, request: Request) -> Response:
        """POST /v1/score"""
        async with self._gate.body(request) as body:
            if len(body) > INLINE_BYTES:
                message, admitted = await asyncio.to_thread(self._admit, body)
            else:
                message, admitted = self._admit(body)
            items = [
                (i, it, asked_of(it, message.want)) for i, it in enumerate(admitted) if isinstance(it, Item)
            ]
            if not items:
                return reply(self._reply(message, admitted, [None] * len(admitted)))
            ticket = self._batcher.submit(items, len(admitted), message.deadline)
            try:
                await self._wait(ticket, request, message.deadline)
                answer = self._reply(message, admitted, ticket.outcomes)
                return reply(answer) if len(body) <= INLINE_BYTES else await asyncio.to_thread(reply, answer)
            finally:
                self._batcher.release(ticket)

    def _admit(self, body: bytes) -> tuple[ScoreRequest, list[Item | str]]:
        message = decode(body, ScoreRequest)
        check_request(message, self._facts)
        admitted = [admit(sequence, message.want, self._facts) for sequence in message.sequences]
        items = [item for item in admitted if isinstance(item, Item)]
        check_reply_size(items, message.want, self._facts)
        if (tokens := sum(len(item.token_ids_L) for item in items)) > self._queue_tokens:
            raise BadRequest(
                413, f"{tokens} tokens pass queue_tokens = {self._queue_tokens}: send fewer sequences"
            )
        return message, admitted

    async def _wait(self, ticket: Ticket, request: Request, deadline: float | None) -> None:
        """Until every outcome is there. Raises BadRequest when the caller gives up first."""
        finished = asyncio.ensure_future(ticket.done.wait())
        left = asyncio.ensure_future(request.receive())  # the body is read: only a disconnect can come
        try:
            await asyncio.wait({finished, left}, timeout=deadline, return_when=asyncio.FIRST_COMPLETED)
            if ticket.missing:
                why = "its caller left" if left.done() else f"its deadline of {deadline} s passed"
                raise BadRequest(408, f"the request was given up because {why}: allow more time or send less")
        finally:
            finished.cancel()
            left.cancel()

    def _reply(self, request: ScoreRequest, admitted: list[Item | str], outcomes: list) -> ScoreReply:
        results: list[Scored | ScoreRefused] = []
        for sequence, item, outcome in zip(request.sequences, admitted, outcomes, strict=True):
            answer = item if isinstance(item, str) else outcome
            if isinstance(answer, Unreachable):
                raise answer
            if isinstance(answer, Marks):
                results.append(scored(sequence.id, answer, self._small))
            else:
                results.append(ScoreRefused(sequence.id, str(answer)))
        self.metrics.refused.inc(sum(isinstance(result, ScoreRefused) for result in results))
        return ScoreReply(teacher=self.info.name, results=results)

    async def get_info(self, _: Request) -> Response:
        """GET /v1/info"""
        return reply(self.info)

    async def get_head(self, _: Request) -> Response:
        """GET /v1/head"""
        return await self._batcher.in_engine_thread(self._head_reply)

    def _head_reply(self) -> Response:
        head = self._engine.head()
        if head is None:
            raise BadRequest(
                422, f'engine {self._facts.engine!r} shows no output head: use engine = "transformers"'
            )
        return reply(msgspec.structs.replace(head, teacher=self.info.name))

    async def health(self, _: Request) -> Response:
        """GET /health"""
        if self._batcher.healthy:
            return PlainTextResponse("ok")
        return refuse(503, "the batching task has ended: restart this process, its log says why")

    async def get_metrics(self, _: Request) -> Response:
        """GET /metrics"""
        return PlainTextResponse(generate_latest(self.metrics.registry))
