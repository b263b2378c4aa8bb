"""A teacher service on a real socket, over any engine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn

from sync.wire import TeacherInfo
from sync.wire.claims import Claim
from teacher_service.app import TeacherService
from teacher_service.config import TeacherConfig
from teacher_service.engines.base import Engine
from teacher_service.limits import Limits


@asynccontextmanager
async def serving(
    engine: Engine,
    queue_tokens: int = 1000,
    token: str | None = None,
    port: int = 0,
    model: str = "table",
    claim: Claim | None = None,
    body_bytes: int = 1 << 28,
) -> AsyncIterator[str]:
    """URL of the service while it runs."""
    engine_info = engine.engine_info
    info = TeacherInfo(
        name="t",
        model=model,
        revision=None,
        dtype=engine_info.dtype,
        engine=engine_info.engine,
        vocab_size=engine_info.vocab_size,
        hidden_size=engine_info.hidden_size,
        max_length=engine_info.max_length,
        max_topk=engine_info.max_topk,
        tokenizer_fingerprint="0",
        chat_template_fingerprint=None,
        fingerprint=model,
        can=list(engine_info.can),
    )
    config = TeacherConfig(path="t", queue_tokens=queue_tokens, wire_dtype="float32")
    limits = Limits(engine_info.max_length, queue_tokens, 1 << 29, body_bytes, 4 * body_bytes)
    service = TeacherService(engine, info, config, limits, token=token, claim=claim)
    server = uvicorn.Server(uvicorn.Config(service.app, log_level="error", timeout_graceful_shutdown=1))
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:  # else asyncio lets answers wait for 40 ms
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield "http://127.0.0.1:{1}".format(*listener.getsockname())
        finally:
            server.should_exit = True
            await task
