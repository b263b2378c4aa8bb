"""A teacher service on a real socket, over any engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict

from served_app import at_url
from table_engine import GatedEngine

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
    facts = asdict(engine.engine_info) | {"name": "t", "model": model, "fingerprint": model}
    facts |= {"tokenizer_fingerprint": "0", "chat_template_fingerprint": None, "can": [*facts["can"]]}
    del facts["concurrency"]
    config = TeacherConfig(path="t", queue_tokens=queue_tokens, wire_dtype="float32")
    limits = Limits(facts["max_length"], queue_tokens, 2 * body_bytes)
    app = TeacherService(engine, TeacherInfo(**facts), config, limits, token=token, claim=claim).app
    async with app.router.lifespan_context(app), at_url(app, port=port) as url:
        try:
            yield url
        finally:
            if isinstance(engine, GatedEngine):
                engine.gate.set()  # of a test that failed: nothing waits at it
