"""The service over a real socket, with a table teacher: exact numbers, refusals, and callers that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.requests import Request
from starlette.types import Message
from table_engine import GatedEngine, TableEngine, random_table

from sync import wire
from sync.base.errors import Overloaded, RemoteError, TooLarge, WireError
from sync.wire import Scored, ScoreRefused, ScoreReply, ScoreRequest, ScoreSequence, Want, pack, unpack
from sync.wire.client import Peer
from sync.wire.server import BodyLimit
from teacher_service.client import TeacherClient
from teacher_service.engines.base import EngineScores, Item, ScoreOptions
from teacher_service.messages import scored

V = 11
TABLE = random_table(V)


def sequence(ids: list[int], start: int, gather: list[list[int]] | None = None) -> ScoreSequence:
    gather_ids = None if gather is None else pack(np.array(gather, np.int32))
    return ScoreSequence(str(len(ids)), pack(np.array(ids, np.int32)), start, gather_ids)


async def test_every_score_equals_the_table(serve: Any) -> None:
    request = ScoreRequest(
        sequences=[sequence([1, 2, 3, 4], 2, [[0, -1], [5, 4]])],
        want=Want(topk=3, entropy=True, hidden=True),
    )
    async with serve(TableEngine(TABLE)) as url, Peer(url) as peer:
        (scores,) = (await peer.call("/v1/score", request, ScoreReply)).results
        head = await peer.call("/v1/head", None, wire.Head)
    assert isinstance(scores, Scored)
    rows = TABLE[[2, 3]]
    assert scores.topk_ids is not None
    assert scores.topk_logprob is not None
    assert scores.gathered is not None
    assert scores.entropy is not None
    assert scores.hidden is not None
    best = np.argsort(-rows, axis=1)[:, :3]
    np.testing.assert_array_equal(unpack(scores.logprob), [TABLE[2, 3], TABLE[3, 4]])
    np.testing.assert_array_equal(unpack(scores.topk_ids), best)
    np.testing.assert_array_equal(unpack(scores.topk_logprob), np.take_along_axis(rows, best, 1))
    np.testing.assert_array_equal(unpack(scores.gathered), [[TABLE[2, 0], 0], [TABLE[3, 5], TABLE[3, 4]]])
    np.testing.assert_allclose(unpack(scores.entropy), -(np.exp(rows) * rows).sum(1), atol=1e-6)
    np.testing.assert_allclose(unpack(scores.hidden) @ unpack(head.weight).T, rows, atol=1e-6)


async def test_prompt_positions_come_only_when_asked_for(serve: Any) -> None:
    async with serve(TableEngine(TABLE)) as url, Peer(url) as peer:
        for want, expected in ((Want(), [TABLE[2, 3]]), (Want(prompt=True), [TABLE[1, 2], TABLE[2, 3]])):
            request = ScoreRequest(sequences=[sequence([1, 2, 3], 2)], want=want)
            (scores,) = (await peer.call("/v1/score", request, ScoreReply)).results
            assert isinstance(scores, Scored)
            np.testing.assert_array_equal(unpack(scores.logprob), expected)


async def test_bad_sequences_are_refused_one_by_one_in_the_order_asked(serve: Any) -> None:
    request = ScoreRequest(sequences=[sequence([1, 99], 1), sequence([1, 2, 3], 1), sequence([1] * 65, 1)])
    async with serve(TableEngine(TABLE, max_length=64)) as url, Peer(url) as peer:
        first, second, third = (await peer.call("/v1/score", request, ScoreReply)).results
        only_bad = ScoreRequest(sequences=[sequence([1, 99], 1)])
        (refused,) = (await peer.call("/v1/score", only_bad, ScoreReply)).results
    assert isinstance(first, ScoreRefused)
    assert "99" in first.error
    assert isinstance(second, Scored)
    assert isinstance(third, ScoreRefused)
    assert "65 tokens" in third.error
    assert isinstance(refused, ScoreRefused)


async def test_a_full_teacher_answers_429_with_retry_after(serve: Any) -> None:
    engine = GatedEngine(TABLE, 64)
    request = ScoreRequest(sequences=[sequence([1] * 20, 1)])
    async with serve(engine, queue_tokens=30) as url, Peer(url) as peer, httpx.AsyncClient() as http:
        engine.gate.clear()
        first = asyncio.create_task(peer.call("/v1/score", request, ScoreReply))
        await asyncio.to_thread(engine.begun.wait, 600)
        refusal = await http.post(f"{url}/v1/score", content=wire.encode(request))
        assert refusal.status_code == 429
        assert float(refusal.headers["retry-after"]) > 0
        with pytest.raises(Overloaded):
            await peer.once("/v1/score", wire.encode(request), 5)
        assert (await http.get(f"{url}/health")).status_code == 200
        engine.gate.set()
        assert len((await first).results) == 1
        assert len((await peer.call("/v1/score", request, ScoreReply)).results) == 1


async def test_a_request_that_could_never_fit_is_refused_for_good(serve: Any) -> None:
    request = ScoreRequest(sequences=[sequence([1] * 20, 1), sequence([1] * 20, 1)])
    async with serve(TableEngine(TABLE), queue_tokens=30) as url, Peer(url) as peer:
        with pytest.raises(RemoteError, match="413: 40 tokens pass queue_tokens = 30"):
            await peer.once("/v1/score", wire.encode(request), 5)


async def test_a_body_that_is_too_long_is_refused_with_the_reason_while_it_is_sent(
    serve: Any,
) -> None:
    async with serve(TableEngine(TABLE), body_bytes=1 << 20) as url, Peer(url) as peer:
        for _ in range(3):
            with pytest.raises(RemoteError, match="413: body is longer than 1048576 bytes"):
                await peer.once("/v1/score", bytes(32 << 20), 60)


async def test_a_deadline_is_answered_in_time_and_the_work_is_not_done(serve: Any) -> None:
    engine = GatedEngine(TABLE, 64)
    request = ScoreRequest(sequences=[sequence([1, 2], 1)])
    async with serve(engine) as url, Peer(url) as peer:
        engine.gate.clear()
        first = asyncio.create_task(peer.call("/v1/score", request, ScoreReply))
        await asyncio.to_thread(engine.begun.wait, 600)
        late = ScoreRequest(sequences=[sequence([1, 2], 1)], deadline=0.05)
        with pytest.raises(RemoteError, match=r"408.*deadline of 0.05 s passed"):
            await peer.once("/v1/score", wire.encode(late), 5)
        engine.gate.set()
        await first
        await peer.call("/v1/score", request, ScoreReply)
    assert engine.sequences == 2


async def test_work_of_a_caller_that_left_is_not_done(serve: Any) -> None:
    engine = GatedEngine(TABLE, 64)
    request = ScoreRequest(sequences=[sequence([1, 2], 1)])
    async with serve(engine) as url, Peer(url) as peer:
        engine.gate.clear()
        first = asyncio.create_task(peer.call("/v1/score", request, ScoreReply))
        await asyncio.to_thread(engine.begun.wait, 600)
        leaver = asyncio.create_task(peer.call("/v1/score", request, ScoreReply))
        await held_tokens(url, 4)
        leaver.cancel()
        await held_tokens(url, 2)
        engine.gate.set()
        await first
        await peer.call("/v1/score", request, ScoreReply)
    assert engine.sequences == 2


async def held_tokens(url: str, expected: int) -> None:
    """Wait until the service's metrics show so many held tokens."""
    async with httpx.AsyncClient() as http:
        for _ in range(500):
            if f"distill_teacher_held_tokens {float(expected)}" in (await http.get(f"{url}/metrics")).text:
                return
            await asyncio.sleep(0.01)
    raise AssertionError(f"held tokens never became {expected}")


async def test_every_route_but_health_needs_the_token(serve: Any) -> None:
    async with serve(TableEngine(TABLE), token="secret") as url, httpx.AsyncClient() as http:
        assert (await http.get(f"{url}/health")).status_code == 200
        assert (await http.get(f"{url}/v1/info")).status_code == 401
        async with Peer(url, "secret") as peer:
            assert (await peer.call("/v1/info", None, wire.TeacherInfo)).vocab_size == V


async def test_a_function_teacher_has_no_head(serve: Any) -> None:
    engine = TableEngine(lambda ids: TABLE[ids], vocab_size=V)
    async with serve(engine) as url, Peer(url) as peer:
        with pytest.raises(RemoteError, match="422"):
            await peer.call("/v1/head", None, wire.Head)


def test_replies_keep_half_precision_only_for_lists() -> None:
    scores = EngineScores(
        np.array([-1.1], np.float32), np.array([[3]], np.int32), np.array([[-1.1]], np.float32)
    )
    half = scored("a", scores, "f2")
    assert half.topk_logprob is not None
    assert (half.logprob.dtype, half.topk_logprob.dtype) == ("f4", "f2")
    body = wire.encode(ScoreReply(results=[half]))
    assert wire.decode(body, ScoreReply).results == [half]


def generation(*prompts: list[int], max_tokens: int = 6, seed: int = 3, **more: Any) -> Any:
    ids = [pack(np.array(prompt, np.int32)) for prompt in prompts]
    prompts = [wire.TeacherPrompt(str(i), part, seed + i) for i, part in enumerate(ids)]
    return wire.TeacherGenerateRequest(prompts=prompts, max_tokens=max_tokens, **more)


async def test_a_completion_has_the_tables_log_probabilities_and_depends_on_its_seed_alone(
    serve: Any,
) -> None:
    async with serve(TableEngine(TABLE)) as url, Peer(url) as peer:
        request = generation([1, 2], [4], stop_token_ids=[5])
        both, (alone,), (other,) = [
            (await peer.call("/v1/generate", asked, wire.TeacherGenerateReply)).results
            for asked in (request, generation([4], seed=4, stop_token_ids=[5]), generation([4], seed=9))
        ]
    for prompt, completion in zip(([1, 2], [4]), both, strict=True):
        assert isinstance(completion, wire.TeacherCompletion)
        ids = [prompt[-1], *unpack(completion.token_ids).tolist()]
        np.testing.assert_allclose(unpack(completion.logprob), TABLE[ids[:-1], ids[1:]], atol=1e-6)
        assert (completion.finish_reason == "stop") == (ids[-1] == 5)
        assert len(ids) == 7 or ids[-1] == 5
    assert isinstance(both[1], wire.TeacherCompletion)
    assert isinstance(alone, wire.TeacherCompletion)
    assert isinstance(other, wire.TeacherCompletion)
    assert alone.token_ids == both[1].token_ids != other.token_ids


async def test_scores_are_of_the_temperature_that_is_asked_for_or_refused(serve: Any) -> None:
    """Against the table: log softmax(log q / T)."""

    class OnlyAtOne(TableEngine):
        def __init__(self) -> None:
            super().__init__(TABLE)
            self.engine_info = replace(self.engine_info, can=("topk",))

    ids, temperature = np.array([3, 1, 4, 1], np.int32), 0.7
    one = ScoreSequence("a", pack(ids), 1)
    logq = TABLE[ids[:-1]] / temperature
    logq -= np.log(np.exp(logq).sum(1, keepdims=True))
    async with serve(TableEngine(TABLE)) as url, TeacherClient("t", [url]) as client:
        ((warm,), _) = await client.score([one], Want(topk=2, temperature=temperature))
        assert isinstance(warm, Scored)
        assert warm.topk_logprob is not None
        np.testing.assert_allclose(unpack(warm.logprob), logq[np.arange(3), ids[1:]], atol=1e-5)
        np.testing.assert_allclose(unpack(warm.topk_logprob), -np.sort(-logq, 1)[:, :2], atol=2e-3)
        with pytest.raises(RemoteError, match=r"temperature is 0\.0, it must be >= 0\.001"):
            await client.score([one], Want(temperature=0.0))
    async with serve(OnlyAtOne()) as url, TeacherClient("t", [url]) as client:
        assert isinstance((await client.score([one], Want())).results[0], Scored)
        with pytest.raises(RemoteError, match="cannot give 'temperature'"):
            await client.score([one], Want(temperature=temperature))


async def test_an_engine_that_cannot_generate_says_so(serve: Any) -> None:
    class ScoresOnly(TableEngine):
        def __init__(self) -> None:
            super().__init__(TABLE)
            self.engine_info = replace(self.engine_info, can=("topk",))

    async with serve(ScoresOnly()) as url, Peer(url) as peer:
        with pytest.raises(RemoteError, match="cannot give 'generate'"):
            await peer.call("/v1/generate", generation([1]), wire.TeacherGenerateReply)


class LyingEngine(TableEngine):
    """A table teacher that spoils one column for sequences that begin with 7."""

    def __init__(self, column: str, value: float) -> None:
        super().__init__(TABLE)
        self.column, self.value = column, value

    def score(self, items: Sequence[Item], options: ScoreOptions) -> EngineScores:
        scores, first = super().score(items, options), 0
        spoilt = np.array(getattr(scores, self.column))
        for item in items:
            if item.token_ids_L[0] == 7:
                spoilt[first] = self.value
            first += item.positions
        return replace(scores, **{self.column: spoilt})


@pytest.mark.parametrize(
    ("column", "value", "field"),
    [
        ("logprob_C", np.nan, "logprob"),
        ("logprob_C", 3.0, "logprob"),
        ("topk_ids_CK", V, "topk_ids"),
        ("topk_ids_CK", 0, "topk_ids"),
        ("topk_logprob_CK", -np.inf, "topk_logprob"),
        ("topk_logprob_CK", 0.0, "topk_logprob"),
        ("hidden_CH", np.nan, "hidden"),
    ],
)
async def test_an_engine_that_lies_costs_that_sequence_alone(
    serve: Any, column: str, value: float, field: str
) -> None:
    request = [
        ScoreSequence(name, pack(np.array([first, 2, 3], "i4")), 1) for name, first in (("a", 7), ("b", 1))
    ]
    async with serve(LyingEngine(column, value)) as url, TeacherClient("t", [url]) as client:
        (first, second), _ = await client.score(request, Want(topk=2, hidden=True))
    assert isinstance(first, ScoreRefused)
    assert first.unusable
    assert first.error.startswith(f"the engine's answer: {field} is ")
    assert isinstance(second, Scored)


async def test_an_entropy_that_cannot_be_used_is_left_out(serve: Any) -> None:
    request = [ScoreSequence("a", pack(np.array([7, 2, 3], "i4")), 1)]
    async with serve(LyingEngine("entropy_C", np.nan)) as url, TeacherClient("t", [url]) as client:
        ((answer,), _) = await client.score(request, Want(entropy=True))
    assert isinstance(answer, Scored)
    assert answer.entropy is None


# --- bodies within bounds, one by one and all together ------------------------------------------------------


def request_of(*chunks: bytes, leaves: bool = False) -> Request:
    """A request whose body comes in chunks, from a caller that may leave before its end."""
    messages: list[Message] = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages.append({"type": "http.disconnect"} if leaves else {"type": "http.request", "body": b""})
    left = iter(messages)

    async def receive() -> Message:
        return next(left)

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


async def read(gate: BodyLimit, options: Request) -> bytes:
    async with gate.read(options) as body:
        return body


async def test_a_body_counts_until_its_request_is_answered_and_not_after() -> None:
    gate = BodyLimit(request_limit=10, total=12)
    for _ in range(5):
        async with gate.read(request_of(b"12345", b"678")) as first:
            assert first == b"12345678"
            assert await read(gate, request_of(b"1234")) == b"1234"
            with pytest.raises(Overloaded):
                await read(gate, request_of(b"12345"))


async def test_a_body_that_is_too_long_or_cut_is_refused_and_leaves_nothing_behind() -> None:
    gate = BodyLimit(request_limit=10, total=12)
    for _ in range(5):
        with pytest.raises(TooLarge, match="longer than 10 bytes"):
            await read(gate, request_of(b"123456", b"123456", b"123456"))
        with pytest.raises(WireError, match="left before"):
            await read(gate, request_of(b"123456", leaves=True))
    assert await read(gate, request_of(b"1234567890")) == b"1234567890"
