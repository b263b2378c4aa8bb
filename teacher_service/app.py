"""The teacher's HTTP routes (docs/architecture.md), over one engine.

    POST /v1/score       ScoreRequest → ScoreReply
    POST /v1/generate    TeacherGenerateRequest → TeacherGenerateReply
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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from sync.claims import Claim
from sync.errors import Overloaded, Unreachable, WireError
from sync.server import RunGuard, TokenGuard, refuse, reply
from sync.wire import (
    Message,
    Scored,
    ScoreRefused,
    ScoreReply,
    ScoreRequest,
    TeacherCompletion,
    TeacherGenerateReply,
    TeacherGenerateRequest,
    TeacherInfo,
    checks,
    decode,
)
from sync.wire.checks import Problem
from teacher_service.admission import (
    BadRequest,
    admit,
    admit_prompt,
    check_reply_size,
    check_request,
    check_write,
    options_of,
)
from teacher_service.batching import STUCK_SECONDS, Batcher
from teacher_service.body_limit import BodyGate
from teacher_service.engines.base import (
    Engine,
    EngineCompletion,
    EnginePrompt,
    EngineScores,
    GenerationParams,
    Item,
)
from teacher_service.metrics import Metrics
from teacher_service.replies import Small, scored, written
from teacher_service.request_queue import QueuedRequest

log = logging.getLogger(__name__)
INLINE_BYTES: Final = 1 << 20
"""Bodies longer than this are read and checked in a thread, so that the event loop answers others."""

Handler = Callable[[Request], Awaitable[Response]]
R = TypeVar("R")


class _Work(NamedTuple):
    """A request that was read: what of it is computed, and what its answer is."""

    results: int
    """Of the answer."""
    sound: int
    """Those that something is computed for."""
    deadline: float | None
    submit: Callable[[], QueuedRequest]
    reply: Callable[[Sequence[object]], Message]


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
        end_ids: Sequence[int] = (),
        token: str | None = None,
        claim: Claim | None = None,
    ) -> None:
        """`end_ids`: the tokenizer's ids that end a text, besides those that the engine knows.

        `claim`: of a teacher that follows a run; None: it may serve many.
        """
        self.info, self.metrics, self._end_ids = info, Metrics(), end_ids
        self._engine, self._facts, self._queue_tokens = engine, engine.engine_info, queue_tokens
        self._small: Small = "f2" if wire_dtype == "float16" else "f4"
        self._batcher = Batcher(engine, batch_tokens, queue_tokens, self.metrics)
        self._gate = BodyGate()
        routes = [
            Route("/v1/score", self._counted(self.score), methods=["POST"]),
            Route("/v1/generate", self._counted(self.write), methods=["POST"]),
            Route("/v1/info", self._counted(self.get_info)),
            Route("/v1/head", self._counted(self.get_head)),
            Route("/health", self.health),
            Route("/metrics", self.get_metrics),
        ]
        self.app = Starlette(
            routes=routes,
            lifespan=self._lifespan,
            middleware=[
                Middleware(TokenGuard, token=token),
                Middleware(
                    RunGuard, claim=claim, claiming=("/v1/score", "/v1/generate"), model=info.fingerprint
                ),
            ],
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._batcher.start()
        yield
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
        return await self._answer(request, self._scores)

    async def write(self, request: Request) -> Response:
        """POST /v1/generate"""
        return await self._answer(request, self._texts)

    async def _answer(self, request: Request, read: Callable[[bytes], _Work]) -> Response:
        """Admit, queue, wait, answer."""
        async with self._gate.body(request) as body:
            heavy = len(body) > INLINE_BYTES
            work = await asyncio.to_thread(read, body) if heavy else read(body)
            if not work.sound:
                return reply(work.reply([None] * work.results))
            ticket = work.submit()
            try:
                await self._wait(ticket, request, work.deadline)
                answer = work.reply(ticket.outcomes)
                return await asyncio.to_thread(reply, answer) if heavy else reply(answer)
            finally:
                self._batcher.release(ticket)

    def _scores(self, body: bytes) -> _Work:
        message = decode(body, ScoreRequest)
        want, engine_info = message.want, self._facts
        check_request(message, engine_info)
        admitted = [admit(sequence, want, engine_info) for sequence in message.sequences]
        items = [
            (i, item, options_of(item, want, engine_info))
            for i, item in enumerate(admitted)
            if isinstance(item, Item)
        ]
        check_reply_size([item for _, item, _ in items], want, engine_info)
        self._check_tokens(sum(len(item.token_ids_L) for _, item, _ in items), "sequences")
        ids = [sequence.id for sequence in message.sequences]

        def make(id_: str, item: object, outcome: object) -> Scored | Problem | None:
            if not (isinstance(item, Item) and isinstance(outcome, EngineScores)):
                return None
            answer, gather = scored(id_, outcome, self._small), options_of(item, want, engine_info).gather
            wrong = checks.scored(
                answer, item.positions, gather, want, engine_info.vocab_size, engine_info.hidden_size
            )
            return wrong or checks.without_bad_diagnostics(answer, item.positions)

        return _Work(
            results=len(ids),
            sound=len(items),
            deadline=message.deadline,
            submit=lambda: self._batcher.submit(items, len(ids), message.deadline),
            reply=lambda outcomes: ScoreReply(
                teacher=self.info.name, results=self._results(ids, admitted, outcomes, make)
            ),
        )

    def _texts(self, body: bytes) -> _Work:
        message = decode(body, TeacherGenerateRequest)
        check_write(message, self._facts)
        admitted = [admit_prompt(prompt, message.max_tokens, self._facts) for prompt in message.prompts]
        engine_prompts = [
            (i, engine_prompt)
            for i, engine_prompt in enumerate(admitted)
            if isinstance(engine_prompt, EnginePrompt)
        ]
        tokens = sum(
            len(engine_prompt.token_ids_P) + message.max_tokens for _, engine_prompt in engine_prompts
        )
        self._check_tokens(tokens, "prompts")
        ends = tuple(sorted({*self._end_ids, *message.stop_token_ids}))
        generation = GenerationParams(message.max_tokens, message.temperature, ends)
        ids = [prompt.id for prompt in message.prompts]

        def make(id_: str, _: object, outcome: object) -> TeacherCompletion | Problem | None:
            if not isinstance(outcome, EngineCompletion):
                return None
            answer = written(id_, outcome)
            return checks.teacher_completion(answer, message.max_tokens, self._facts.vocab_size) or answer

        return _Work(
            results=len(ids),
            sound=len(engine_prompts),
            deadline=message.deadline,
            submit=lambda: self._batcher.submit_engine_prompts(
                engine_prompts, generation, len(ids), message.deadline
            ),
            reply=lambda outcomes: TeacherGenerateReply(
                teacher=self.info.name, results=self._results(ids, admitted, outcomes, make)
            ),
        )

    def _check_tokens(self, tokens: int, what: str) -> None:
        if tokens > self._queue_tokens:
            raise BadRequest(
                413, f"{tokens} tokens pass queue_tokens = {self._queue_tokens}: send fewer {what}"
            )

    async def _wait(self, ticket: QueuedRequest, request: Request, deadline: float | None) -> None:
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

    def _results(
        self,
        ids: Sequence[str],
        admitted: Sequence[object],
        outcomes: Sequence[object],
        make: Callable[[str, object, object], R | Problem | None],
    ) -> list[R | ScoreRefused]:
        """What `make` makes of each item and its outcome, or why there is none, or why it cannot be used.

        Raises Unreachable that an engine met.
        """
        results: list[R | ScoreRefused] = []
        for id_, item, outcome in zip(ids, admitted, outcomes, strict=True):
            if isinstance(outcome, Unreachable):
                raise outcome
            made = make(id_, item, outcome)
            if isinstance(made, Problem):
                log.error("the engine's answer for %s cannot be used: %s", id_, made)
                results.append(ScoreRefused(id_, f"the engine's answer: {made}", unusable=True))
            elif made is None:
                results.append(ScoreRefused(id_, str(item if isinstance(item, str) else outcome)))
            else:
                results.append(made)
        self.metrics.refused.inc(sum(isinstance(result, ScoreRefused) for result in results))
        return results

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
        return refuse(
            503, f"batching has ended, or one batch took {STUCK_SECONDS:.0f} s: restart this process"
        )

    async def get_metrics(self, _: Request) -> Response:
        """GET /metrics"""
        return PlainTextResponse(generate_latest(self.metrics.registry))
