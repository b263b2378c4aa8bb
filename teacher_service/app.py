"""The teacher's HTTP routes (docs/architecture.md), over one engine.

    POST /v1/score   ScoreRequest → ScoreReply
    POST /v1/generate    TeacherGenerateRequest → TeacherGenerateReply
    GET  /v1/info    → TeacherInfo        GET /v1/head     → Head
    GET  /health     200 while batches are computed        GET /metrics   Prometheus

Every refusal is a 4xx with value, rule and remedy; sequences that cannot be scored are refused one by one in
the reply. 429 carries Retry-After; 503 means that the process must be restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from sync.claims import Claim
from sync.errors import Overloaded, Unreachable, WireError
from sync.server import RunGuard, TokenGuard, refuse, reply
from sync.wire import (
    Scored,
    ScoreRefused,
    ScoreReply,
    ScoreRequest,
    TeacherCompletion,
    TeacherGenerateReply,
    TeacherGenerateRequest,
    TeacherInfo,
    decode,
)
from sync.wire.checks import Problem
from teacher_service.batching import STUCK_SECONDS, Batcher, Metrics, Outcome, QueuedRequest, Work
from teacher_service.config import TeacherConfig
from teacher_service.engines.base import Engine, EnginePrompt, GenerationParams, Item
from teacher_service.messages import (
    BadRequest,
    HalfOrSingle,
    admit,
    admit_prompt,
    check_generate,
    check_reply_size,
    check_score,
    checked_completion,
    checked_scores,
    score_options,
)

log = logging.getLogger(__name__)
INLINE_BYTES: Final = 1 << 20
"""Bodies longer than this are read and checked in a thread, so that the event loop answers others."""
MAX_BODY: Final = 1 << 28
"""Bytes of one request."""
MAX_BODIES: Final = 1 << 29
"""Bytes of all requests that are being read or answered."""

Handler = Callable[[Request], Awaitable[Response]]


class _Parsed(NamedTuple):
    """A request that was read and checked."""

    ids: list[str]
    admitted: list[Work | str]
    """What to compute for each id, or why nothing is."""
    deadline: float | None
    result: Callable[[str, Any, Any], Scored | TeacherCompletion | Problem]
    """(id, item or prompt, the engine's outcome) → the result."""
    reply: type[ScoreReply] | type[TeacherGenerateReply]


class TeacherService:
    """One engine behind HTTP; `app` is the ASGI application, whose lifespan runs and closes the engine."""

    def __init__(
        self,
        engine: Engine,
        info: TeacherInfo,
        config: TeacherConfig,
        *,
        end_ids: Sequence[int] = (),
        token: str | None = None,
        claim: Claim | None = None,
    ) -> None:
        """`end_ids`: the tokenizer's ids that end a completion, besides those that the engine knows.

        `claim`: of a teacher that follows a run; None: it may serve many.
        """
        self.info, self.metrics, self._end_ids = info, Metrics(), end_ids
        self._engine, self._engine_info, self._queue_tokens = engine, engine.engine_info, config.queue_tokens
        self._dtype: HalfOrSingle = "f2" if config.wire_dtype == "float16" else "f4"
        self._batcher = Batcher(engine, config.batch_tokens, config.queue_tokens, self.metrics)
        self._bodies = BodyLimit()
        routes = [
            Route("/v1/score", self._counted(self.score), methods=["POST"]),
            Route("/v1/generate", self._counted(self.generate), methods=["POST"]),
            Route("/v1/info", self._counted(self.get_info)),
            Route("/v1/head", self._counted(self.get_head)),
            Route("/health", self.health),
            Route("/metrics", self.get_metrics),
        ]
        claiming = ("/v1/score", "/v1/generate")
        guard = Middleware(RunGuard, claim=claim, claiming=claiming, model=info.fingerprint)
        self.app = Starlette(
            routes=routes, lifespan=self._lifespan, middleware=[Middleware(TokenGuard, token=token), guard]
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
                response = refuse(503, f"the server that computes for this teacher is gone: {error}")
            except Overloaded as error:
                response = refuse(429, str(error), error.retry_after)
            self.metrics.requests.labels(response.status_code).inc()
            self.metrics.latency.observe(time.monotonic() - started)
            return response

        return answer

    # --- scores and completions ---------------------------------------------------------------------------

    async def score(self, request: Request) -> Response:
        """POST /v1/score"""
        return await self._answer(request, self._read_score)

    async def generate(self, request: Request) -> Response:
        """POST /v1/generate"""
        return await self._answer(request, self._read_generate)

    async def _answer(self, request: Request, read: Callable[[bytes], _Parsed]) -> Response:
        """Check, queue, wait, answer."""
        async with self._bodies.read(request) as body:
            heavy = len(body) > INLINE_BYTES
            parsed = await asyncio.to_thread(read, body) if heavy else read(body)
            work = [one for one in parsed.admitted if isinstance(one, Work)]
            queued = self._batcher.submit(work, len(parsed.ids), parsed.deadline)
            try:
                await _wait(queued, request)
                results = self._results(parsed, queued.outcomes)
                message = parsed.reply(teacher=self.info.name, results=results)
                return await asyncio.to_thread(reply, message) if heavy else reply(message)
            finally:
                self._batcher.release(queued)

    def _read_score(self, body: bytes) -> _Parsed:
        message, info = decode(body, ScoreRequest), self._engine_info
        want = message.want
        check_score(message, info)
        items = [admit(sequence, want, info) for sequence in message.sequences]
        check_reply_size([item for item in items if isinstance(item, Item)], want, info)
        admitted = [
            item if isinstance(item, str) else Work(i, item, score_options(item, want, info))
            for i, item in enumerate(items)
        ]
        self._check_tokens(admitted, "sequences")
        return _Parsed(
            [sequence.id for sequence in message.sequences],
            admitted,
            message.deadline,
            lambda id_, item, scores: checked_scores(id_, item, scores, want, info, self._dtype),
            ScoreReply,
        )

    def _read_generate(self, body: bytes) -> _Parsed:
        message, info = decode(body, TeacherGenerateRequest), self._engine_info
        check_generate(message, info)
        ends = tuple(sorted({*self._end_ids, *message.stop_token_ids}))
        params = GenerationParams(message.max_tokens, message.temperature, ends)
        prompts = [admit_prompt(prompt, message.max_tokens, info) for prompt in message.prompts]
        admitted = [
            Work(i, prompt, params) if isinstance(prompt, EnginePrompt) else prompt
            for i, prompt in enumerate(prompts)
        ]
        self._check_tokens(admitted, "prompts")
        return _Parsed(
            [prompt.id for prompt in message.prompts],
            admitted,
            message.deadline,
            lambda id_, _, completion: checked_completion(id_, completion, message.max_tokens, info),
            TeacherGenerateReply,
        )

    def _check_tokens(self, admitted: list[Work | str], what: str) -> None:
        tokens = sum(one.tokens for one in admitted if isinstance(one, Work))
        if tokens > self._queue_tokens:
            raise BadRequest(
                413, f"{tokens} tokens pass queue_tokens = {self._queue_tokens}: send fewer {what}"
            )

    def _results(self, parsed: _Parsed, outcomes: Sequence[Outcome | None]) -> list[Any]:
        """A result for each id. Raises Unreachable that the engine met."""
        results: list[Scored | TeacherCompletion | ScoreRefused] = []
        for id_, admitted, outcome in zip(parsed.ids, parsed.admitted, outcomes, strict=True):
            if isinstance(outcome, Unreachable):
                raise outcome
            if isinstance(admitted, str) or isinstance(outcome, str):
                results.append(ScoreRefused(id_, str(admitted if outcome is None else outcome)))
                continue
            result = parsed.result(id_, admitted.item, outcome)
            if isinstance(result, Problem):
                log.error("the engine's answer for %s cannot be used: %s", id_, result)
                results.append(ScoreRefused(id_, f"the engine's answer: {result}", unusable=True))
            else:
                results.append(result)
        self.metrics.refused.inc(sum(isinstance(result, ScoreRefused) for result in results))
        return results

    # --- the other routes ---------------------------------------------------------------------------------

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
                422, f'engine {self._engine_info.engine!r} gives no output head: use engine = "transformers"'
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


async def _wait(queued: QueuedRequest, request: Request) -> None:
    """Until every outcome is there. Raises BadRequest (408) when the caller gives up first."""
    finished = asyncio.ensure_future(queued.done.wait())
    left = asyncio.ensure_future(request.receive())  # the body is read: only a disconnect can come
    try:
        await asyncio.wait({finished, left}, timeout=queued.deadline, return_when=asyncio.FIRST_COMPLETED)
        if queued.missing:
            why = "its caller left" if left.done() else f"its deadline of {queued.deadline} s passed"
            raise BadRequest(408, f"the request was dropped because {why}: allow more time or send less")
    finally:
        finished.cancel()
        left.cancel()


class BodyLimit:
    """Reads request bodies within a bound on each, and on all that are being read or answered."""

    def __init__(self, one: int = MAX_BODY, total: int = MAX_BODIES) -> None:
        self._one, self._total, self._held = one, total, 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body; its bytes count from their arrival until the context ends.

        A body over a bound is read to its end and thrown away, so that the caller gets its refusal instead of
        a broken connection. Raises WireError (one body too long, caller left) or Overloaded (all together).
        """
        body, refusal = bytearray(), None
        try:
            async for chunk in request.stream():
                if refusal is None:
                    body += chunk
                    self._held += len(chunk)
                    if (refusal := self._refusal(len(body))) is not None:
                        self._held -= len(body)
                        body.clear()
            if refusal is not None:
                raise refusal
            yield bytes(body)
        except ClientDisconnect:
            raise WireError("the caller left before its request was complete") from None
        finally:
            self._held -= len(body)

    def _refusal(self, size: int) -> WireError | Overloaded | None:
        if size > self._one:
            return WireError(f"body is longer than {self._one} bytes: send fewer sequences a request")
        if self._held > self._total:
            return Overloaded(
                f"requests in work hold {self._total} bytes: come back later, or add a replica", 1.0
            )
        return None
