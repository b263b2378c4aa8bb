"""What the bench does to a replica: load without end, every version once, and vLLM's own reload."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from distill.bench import sync_transports as bench
from distill.rollout.replica_client import HttpReplica
from distill.trainer_api.http_api import listen, serving
from sync.base.errors import DistillError
from sync.wire import (
    Generated,
    GenerateFailed,
    GenerateRequest,
    UpdateReply,
    UpdateRequest,
    Version,
    VersionSpan,
    frame,
    pack,
)
from sync.wire.server import read_message, reply


class Events:
    """Requests that a replica got, in order; its pauses grow by a millisecond from version to version."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.swapped: list[int] = []
        self.reloads: list[Any] = []
        self.lengths: set[int] = set()

    def application(self) -> Starlette:
        async def generate(request: Request) -> Response:
            asked = await read_message(request, GenerateRequest)
            self.lengths.add(asked.sampling.max_tokens)

            async def frames() -> AsyncIterator[bytes]:
                await asyncio.sleep(0.001)
                for prompt in asked.prompts:
                    if self.fails:
                        yield frame(GenerateFailed(prompt.id, "out of memory"))
                    tokens = np.zeros(asked.sampling.max_tokens, np.int32)
                    span = VersionSpan(Version(0, 0), 0, len(tokens))
                    logprob = pack(np.zeros(len(tokens), np.float32))
                    yield frame(Generated(prompt.id, pack(tokens), logprob, [span], "length"))

            return StreamingResponse(frames())

        async def update(request: Request) -> Response:
            step = (await read_message(request, UpdateRequest)).version.step
            self.swapped.append(step)
            return reply(UpdateReply(Version(0, step), 10, 0.5, step / 1000, step / 2000))

        async def reload(request: Request) -> Response:
            self.reloads.append(await request.json())
            return JSONResponse({"results": [None]})

        routes = {"/distill/v1/generate": generate, "/distill/v1/update": update, "/collective_rpc": reload}
        return Starlette(routes=[Route(path, route, methods=["POST"]) for path, route in routes.items()])


class Load(bench.Load):
    """Its windows last until something was generated, on a slow machine too."""

    async def pace(self, meanwhile: Awaitable[None]) -> float:
        async def generated() -> None:
            before = self._tokens
            await meanwhile
            while self._tokens == before:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

        return await super().pace(generated())


@pytest.fixture
def shape(monkeypatch: pytest.MonkeyPatch) -> bench.Shape:
    """The toy in short windows: two full versions, then two turns of three deltas."""
    monkeypatch.setattr(bench, "TURNS", 2)
    monkeypatch.setattr(bench, "Load", Load)
    return bench.SHAPES["toy"]._replace(window_seconds=0.05, swaps=3, repeats=2, in_flight=16)


def stand_in(monkeypatch: pytest.MonkeyPatch, events: Events) -> None:
    """Serve `events` where a vLLM would be."""

    @contextlib.asynccontextmanager
    async def started(model: Path, work: Path, rank: int | None = None) -> AsyncIterator[HttpReplica]:
        sock = listen("127.0.0.1", 0, None)
        async with serving(events.application(), sock):
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            async with contextlib.aclosing(HttpReplica(url)) as replica:
                yield replica

    monkeypatch.setattr(bench, "started", started)


async def test_a_replica_takes_every_version_once_under_load_and_then_reloads(
    shape: bench.Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events()
    stand_in(monkeypatch, events)
    model, _ = bench.make(shape, tmp_path)
    found = await bench.weights(shape, model, tmp_path / "work")
    assert events.swapped == list(range(8))
    assert events.reloads == [{"method": "reload_weights"}] * 2
    assert events.lengths == {bench.TOKENS}
    assert found["swaps"]["full"]["pause_seconds"] == pytest.approx(0.0005)
    assert found["swaps"]["delta"]["pause_seconds"] == pytest.approx(0.0045)
    assert found["decode_step_seconds"] > 0


async def test_a_replica_that_cannot_generate_ends_the_bench(
    shape: bench.Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, Events(fails=True))
    model, _ = bench.make(shape, tmp_path)
    with pytest.raises(DistillError, match="out of memory"):
        await bench.weights(shape, model, tmp_path / "work")


async def test_every_adapter_is_swapped_once(
    shape: bench.Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events()
    stand_in(monkeypatch, events)
    model, adapter = bench.make(shape, tmp_path)
    await bench.adapters(shape, model, adapter, tmp_path / "work")
    assert events.swapped == [0, 1, 2, 3]
