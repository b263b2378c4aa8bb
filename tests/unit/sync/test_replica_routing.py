"""The record of routes: whole under chunks, preemptions, discarded tokens; dropped when nobody takes it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sync.base.errors import DataError
from sync.vllm.routing import KEPT_SECONDS, NativeRoutes, RouteQueue, RouteRecord, routes_of
from sync.wire import Routing

SHAPE = Routing(layers=3, chosen=2, experts=8)


class Engine:
    """Passes over tokens, each of which routes as nothing before it did."""

    def __init__(self, shape: Routing = SHAPE) -> None:
        self.now = 0.0
        self.record, self.shape = RouteRecord(shape, lambda: self.now), shape
        self._random = np.random.default_rng(0)

    def run(self, request: str, start: int, *tokens: int, first: int = 0) -> np.ndarray:
        size = (len(tokens), self.shape.layers, self.shape.chosen)
        routes = self._random.integers(0, self.shape.experts, size).astype(self.shape.dtype)
        self.record.write(request, start, np.array(tokens, np.int32), routes, first)
        return routes

    def routes(self, request: str, *tokens: int) -> np.ndarray:
        return routes_of(self.record.take(request), np.array(tokens, np.int32))


def test_routes_of_a_request_are_taken_once_and_those_of_another_stay() -> None:
    engine = Engine()
    passes = [engine.run("a", 0, 5, 6), engine.run("b", 0, 9), engine.run("a", 2, 7)]
    np.testing.assert_array_equal(engine.routes("a", 5, 6, 7, 1), np.concatenate(passes[::2]))
    assert engine.record.take("a") is None
    np.testing.assert_array_equal(engine.routes("b", 9, 1), passes[1])


@given(
    st.lists(st.tuples(st.integers(0, 6), st.lists(st.integers(0, 1), min_size=1, max_size=5))),
    st.integers(0, 3),
)
def test_any_order_of_passes_gives_each_position_the_first_route_of_its_token(
    passes: list[tuple[int, list[int]]], first: int
) -> None:
    engine, expected = Engine(), dict[int, tuple[int, Any]]()
    for behind, tokens in passes:
        start = max(0, len(expected) - behind)
        tokens = [0 if place < first else token for place, token in enumerate(tokens, start)]  # of a prompt
        routes = engine.run("a", start, *tokens, first=first)
        for position, (token, route) in enumerate(zip(tokens, routes, strict=True), start):
            if position in expected and expected[position][0] != token:
                expected = {place: held for place, held in expected.items() if place < position}
            expected.setdefault(position, (token, route))
    held = [*expected.values()][first:]
    if held:
        tokens = [token for token, _ in held]
        for route, (_, wanted) in zip(engine.routes("a", *tokens, 0), held, strict=True):
            np.testing.assert_array_equal(route, wanted)


def test_a_request_that_ended_waits_for_a_minute_to_be_taken() -> None:
    engine = Engine()
    for name in ("taken", "left", "running"):
        engine.run(name, 0, 5)
    engine.record.end(["taken", "left", "unknown"])
    engine.now = KEPT_SECONDS
    engine.record.end([])
    assert engine.routes("taken", 5, 1).shape == (1, 3, 2)
    engine.now += 1
    engine.record.end([])
    assert len(engine.record._requests) == 1
    assert engine.routes("running", 5, 1).shape == (1, 3, 2)
    with pytest.raises(DataError, match="taken before, or it ended more than 60 s ago"):
        engine.routes("left", 5, 1)


def test_positions_whose_routes_are_wanted_and_that_no_pass_read_are_refused() -> None:
    engine = Engine()
    engine.run("a", 0, 5, 6, first=2)
    assert len(engine.record._requests) == 1, "held since the first part of its prompt"
    engine.run("a", 16, 7, first=2)
    engine.run("a", 17, 8, first=2)
    with pytest.raises(DataError, match="positions 2 to 15 came from a cache"):
        engine.routes("a", *range(2, 19))


@pytest.mark.parametrize("tokens", [(5, 6, 7, 8, 9), (5, 9, 7, 8)])
def test_routes_of_other_tokens_are_refused(tokens: tuple[int, ...]) -> None:
    engine = Engine()
    engine.run("a", 0, 5, 6, 7)
    with pytest.raises(DataError, match=rf"routes of 3 tokens do not belong to a sequence of {len(tokens)}"):
        engine.routes("a", *tokens)


def test_a_pass_beyond_the_completion_is_cut_off() -> None:
    engine = Engine()
    passes = engine.run("a", 0, 5, 6, 7)
    np.testing.assert_array_equal(engine.routes("a", 5, 6, 3), passes[:2])


def test_a_request_is_found_by_the_name_that_its_caller_gave_it() -> None:
    engine = Engine()
    for name in ("p-1#0", "p-1#0-12ab34cd"):
        passes = engine.run("p-1#0-12ab34cd", 0, 5)
        assert engine.record.take("p-1") is None
        np.testing.assert_array_equal(engine.routes(name, 5, 6), passes)


@pytest.mark.parametrize(("shape", "size"), [(Routing(58, 8, 256), 464), (Routing(2, 2, 257), 16)])
def test_a_token_takes_a_byte_an_expert_where_a_byte_can_name_it(shape: Routing, size: int) -> None:
    assert shape.bytes_per_token == size
    engine = Engine(shape)
    passes = engine.run("a", 0, 5, 6)
    routes = engine.routes("a", 5, 6, 7)
    assert routes.nbytes == 2 * size
    np.testing.assert_array_equal(routes, passes)


async def test_those_that_end_while_a_call_is_under_way_share_the_next() -> None:
    calls: list[list[str]] = []
    begun, others_wait = asyncio.Event(), asyncio.Event()

    async def take(requests: list[str]) -> list[dict[str, str] | None]:
        calls.append(requests)
        begun.set()
        await others_wait.wait()
        return [None if request == "gone" else {"of": request} for request in requests]

    queue = RouteQueue(take)
    first = asyncio.create_task(queue.take("a"))
    await begun.wait()
    others = [asyncio.create_task(queue.take(name)) for name in ("b", "gone", "left")]
    await asyncio.sleep(0)
    others[-1].cancel()
    others_wait.set()
    found = await asyncio.gather(first, *others, return_exceptions=True)
    assert found[:3] == [{"of": "a"}, {"of": "b"}, None]
    assert calls == [["a"], ["b", "gone", "left"]]
    assert await queue.take("later") == {"of": "later"}


async def test_a_call_that_fails_is_told_to_all_that_wait_for_it_and_to_no_other() -> None:
    async def take(requests: list[str]) -> list[dict[str, str] | None]:
        await asyncio.sleep(0)
        if "bad" in requests:
            raise DataError("the engine is gone")
        return [{} for _ in requests]

    queue = RouteQueue(take)
    failed = await asyncio.gather(queue.take("bad"), queue.take("beside"), return_exceptions=True)
    assert [str(error) for error in failed] == ["the engine is gone"] * 2
    assert await queue.take("next") == {}


@pytest.mark.parametrize(("experts", "dtype"), [(256, np.uint8), (300, np.int32)])
async def test_native_routes_are_those_of_the_layers_with_experts(experts: int, dtype: Any) -> None:
    source = NativeRoutes(Routing(2, 3, experts), [1, 3])
    native = np.random.default_rng(0).integers(0, experts, (6, 4, 3)).astype(np.uint16)
    routes = await source.routes("a", np.arange(7), native)
    assert routes.dtype == dtype
    np.testing.assert_array_equal(routes, native[:, [1, 3]])


@pytest.mark.parametrize("native", [None, np.zeros((5, 4, 2)), np.zeros((7, 4, 2)), np.zeros((6, 4, 3))])
async def test_native_routes_of_other_tokens_or_experts_are_refused(native: np.ndarray | None) -> None:
    with pytest.raises(DataError, match=r"gave .* routes of a sequence of 7 tokens"):
        await NativeRoutes(SHAPE, [0, 1, 3]).routes("a", np.arange(7), native)
