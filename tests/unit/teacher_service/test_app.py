"""The service over a real socket, with a table teacher: exact numbers, refusals, and callers that leave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import httpx
import numpy as np
import pytest

from sync.errors import Overloaded, RemoteError
from sync.transport import Peer
from sync.wire import (
    Head,
    Ok,
    Scored,
    ScoreRefused,
    ScoreReply,
    ScoreRequest,
    ScoreSequence,
    TeacherInfo,
    Want,
    decode,
    encode,
    pack,
    unpack,
)
from teacher_service.engines.base import Asked, Item, Marks
from teacher_service.engines.table import TableEngine, random_table

V = 11
TABLE = random_table(V)
Serve = Callable[..., AbstractAsyncContextManager[str]]


class GatedEngine(TableEngine):
    """A table teacher whose batches wait for a gate, and are counted."""

    def __init__(self) -> None:
        super().__init__(TABLE, max_length=64)
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.sequences = 0

    def score(self, items: Sequence[Item], asked: Asked) -> Marks:
        self.begun.set()
        self.gate.wait(10)
        self.sequences += len(items)
        return super().score(items, asked)


def sequence(ids: list[int], start: int, gather: list[list[int]] | None = None) -> ScoreSequence:
    gather_ids = None if gather is None else pack(np.array(gather, np.int32))
    return ScoreSequence(str(len(ids)), pack(np.array(ids, np.int32)), start, gather_ids)


async def test_every_mark_equals_the_table(serve: Serve) -> None:
    asked = ScoreRequest(
        sequences=[sequence([1, 2, 3, 4], 2, [[0, -1], [5, 4]])],
        want=Want(topk=3, entropy=True, hidden=True),
    )
    async with serve(TableEngine(TABLE)) as url, Peer(url) as peer:
        (marks,) = (await peer.call("/v1/score", asked, ScoreReply)).results
        head = await peer.call("/v1/head", None, Head)
    assert isinstance(marks, Scored)
    rows = TABLE[[2, 3]]
    assert marks.topk_ids is not None
    assert marks.topk_logprob is not None
    assert marks.tail is not None
    assert marks.gathered is not None
    assert marks.entropy is not None
    assert marks.hidden is not None
    best = np.argsort(-rows, axis=1)[:, :3]
    np.testing.assert_array_equal(unpack(marks.logprob), [TABLE[2, 3], TABLE[3, 4]])
    np.testing.assert_array_equal(unpack(marks.topk_ids), best)
    np.testing.assert_array_equal(unpack(marks.topk_logprob), np.take_along_axis(rows, best, 1))
    np.testing.assert_allclose(
        unpack(marks.tail) + np.exp(unpack(marks.topk_logprob)).sum(1), [1, 1], atol=1e-6
    )
    np.testing.assert_array_equal(unpack(marks.gathered), [[TABLE[2, 0], 0], [TABLE[3, 5], TABLE[3, 4]]])
    np.testing.assert_allclose(unpack(marks.entropy), -(np.exp(rows) * rows).sum(1), atol=1e-6)
    np.testing.assert_allclose(unpack(marks.hidden) @ unpack(head.weight).T, rows, atol=1e-6)


async def test_prompt_positions_come_only_when_asked_for(serve: Serve) -> None:
    async with serve(TableEngine(TABLE)) as url, Peer(url) as peer:
        for want, expected in ((Want(), [TABLE[2, 3]]), (Want(prompt=True), [TABLE[1, 2], TABLE[2, 3]])):
            asked = ScoreRequest(sequences=[sequence([1, 2, 3], 2)], want=want)
            (marks,) = (await peer.call("/v1/score", asked, ScoreReply)).results
            assert isinstance(marks, Scored)
            np.testing.assert_array_equal(unpack(marks.logprob), expected)


async def test_bad_sequences_are_refused_one_by_one_in_the_order_asked(serve: Serve) -> None:
    asked = ScoreRequest(sequences=[sequence([1, 99], 1), sequence([1, 2, 3], 1), sequence([1] * 65, 1)])
    async with serve(TableEngine(TABLE, max_length=64)) as url, Peer(url) as peer:
        first, second, third = (await peer.call("/v1/score", asked, ScoreReply)).results
        only_bad = ScoreRequest(sequences=[sequence([1, 99], 1)])
        (refused,) = (await peer.call("/v1/score", only_bad, ScoreReply)).results
    assert isinstance(first, ScoreRefused)
    assert "99" in first.error
    assert isinstance(second, Scored)
    assert isinstance(third, ScoreRefused)
    assert "65 tokens" in third.error
    assert isinstance(refused, ScoreRefused)


async def test_a_full_teacher_answers_429_with_retry_after(serve: Serve) -> None:
    engine = GatedEngine()
    asked = ScoreRequest(sequences=[sequence([1] * 20, 1)])
    async with serve(engine, queue_tokens=30) as url, Peer(url) as peer, httpx.AsyncClient() as http:
        engine.gate.clear()
        first = asyncio.create_task(peer.call("/v1/score", asked, ScoreReply))
        await asyncio.to_thread(engine.begun.wait, 10)
        refusal = await http.post(f"{url}/v1/score", content=encode(asked))
        assert refusal.status_code == 429
        assert float(refusal.headers["retry-after"]) > 0
        with pytest.raises(Overloaded):
            await peer.once("/v1/score", encode(asked), 5)
        assert (await http.get(f"{url}/health")).status_code == 200
        engine.gate.set()
        assert len((await first).results) == 1
        assert len((await peer.call("/v1/score", asked, ScoreReply)).results) == 1


async def test_a_request_that_could_never_fit_is_refused_for_good(serve: Serve) -> None:
    asked = ScoreRequest(sequences=[sequence([1] * 20, 1), sequence([1] * 20, 1)])
    async with serve(TableEngine(TABLE), queue_tokens=30) as url, Peer(url) as peer:
        with pytest.raises(RemoteError, match="413: 40 tokens pass queue_tokens = 30"):
            await peer.once("/v1/score", encode(asked), 5)


async def test_a_deadline_is_answered_in_time_and_the_work_is_not_done(serve: Serve) -> None:
    engine = GatedEngine()
    asked = ScoreRequest(sequences=[sequence([1, 2], 1)])
    async with serve(engine) as url, Peer(url) as peer:
        engine.gate.clear()
        first = asyncio.create_task(peer.call("/v1/score", asked, ScoreReply))
        await asyncio.to_thread(engine.begun.wait, 10)
        late = ScoreRequest(sequences=[sequence([1, 2], 1)], deadline=0.05)
        with pytest.raises(RemoteError, match=r"408.*deadline of 0.05 s passed"):
            await peer.once("/v1/score", encode(late), 5)
        engine.gate.set()
        await first
        await peer.call("/v1/score", asked, ScoreReply)
    assert engine.sequences == 2


async def test_work_of_a_caller_that_left_is_not_done(serve: Serve) -> None:
    engine = GatedEngine()
    asked = ScoreRequest(sequences=[sequence([1, 2], 1)])
    async with serve(engine) as url, Peer(url) as peer:
        engine.gate.clear()
        first = asyncio.create_task(peer.call("/v1/score", asked, ScoreReply))
        await asyncio.to_thread(engine.begun.wait, 10)
        leaver = asyncio.create_task(peer.call("/v1/score", asked, ScoreReply))
        await held_tokens(url, 4)
        leaver.cancel()
        await held_tokens(url, 2)
        engine.gate.set()
        await first
        await peer.call("/v1/score", asked, ScoreReply)
    assert engine.sequences == 2


async def held_tokens(url: str, expected: int) -> None:
    """Wait until the service's metrics show so many held tokens."""
    async with httpx.AsyncClient() as http:
        for _ in range(500):
            if f"teacher_held_tokens {float(expected)}" in (await http.get(f"{url}/metrics")).text:
                return
            await asyncio.sleep(0.01)
    raise AssertionError(f"held tokens never became {expected}")


async def test_every_route_but_health_needs_the_token(serve: Serve) -> None:
    async with serve(TableEngine(TABLE), token="secret") as url, httpx.AsyncClient() as http:
        assert (await http.get(f"{url}/health")).status_code == 200
        assert (await http.get(f"{url}/v1/info")).status_code == 401
        async with Peer(url, "secret") as peer:
            assert (await peer.call("/v1/info", None, TeacherInfo)).vocab_size == V


@pytest.mark.parametrize("body", [b"", b"\xc1", b"{}", encode(Ok()), encode(ScoreRequest(sequences=[]))[:-3]])
async def test_what_is_no_score_request_is_answered_with_400(serve: Serve, body: bytes) -> None:
    async with serve(TableEngine(TABLE)) as url, httpx.AsyncClient() as http:
        answer = await http.post(f"{url}/v1/score", content=body)
        assert answer.status_code == 400
        assert "is not a ScoreRequest" in answer.json()["error"]


async def test_a_function_teacher_has_no_head(serve: Serve) -> None:
    engine = TableEngine(lambda ids: TABLE[ids], vocab_size=V)
    async with serve(engine) as url, Peer(url) as peer:
        with pytest.raises(RemoteError, match="422"):
            await peer.call("/v1/head", None, Head)


def test_replies_keep_half_precision_only_for_lists() -> None:
    from teacher_service.replies import scored

    marks = Marks(np.array([-1.1], np.float32), np.array([[3]], np.int32), np.array([[-1.1]], np.float32))
    half = scored("a", marks, "f2")
    assert half.topk_logprob is not None
    assert (half.logprob.dtype, half.topk_logprob.dtype) == ("f4", "f2")
    body = encode(ScoreReply(teacher="t", results=[half]))
    assert decode(body, ScoreReply).results == [half]
