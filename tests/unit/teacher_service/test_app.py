"""The service over a real socket, with a table teacher: exact numbers, refusals, and callers that leave."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ports import client
from served_teacher import serving
from starlette.requests import Request
from starlette.types import Message
from table_engine import GatedEngine, TableEngine, random_table

from sync import wire
from sync.base.errors import Overloaded, RemoteError, TooLarge, Unreachable, WireError
from sync.wire import Scored, ScoreRefused, ScoreReply, ScoreRequest, ScoreSequence, Want, pack, unpack
from sync.wire.client import Peer
from sync.wire.server import BodyLimit
from teacher_service import batching
from teacher_service.engines.base import EngineEnded, EngineScores, Item, ScoreOptions
from teacher_service.messages import scored

V = 11
TABLE = random_table(V)


def sequence(ids: list[int], start: int = 1, gather: list[list[int]] | None = None) -> ScoreSequence:
    gather_ids = None if gather is None else pack(np.array(gather, np.int32))
    return ScoreSequence(str(ids), pack(np.array(ids, np.int32)), start, gather_ids)


async def score(peer: Peer, *sequences: ScoreSequence, **want: Any) -> list[Any]:
    request = ScoreRequest(sequences=[*sequences], want=Want(**want))
    return (await peer.call("/v1/score", request, ScoreReply)).results


async def busy(peer: Peer, engine: GatedEngine, asked: ScoreSequence) -> asyncio.Task[list[Any]]:
    """A request that is held in the engine until its gate is open."""
    engine.gate.clear()
    first = asyncio.create_task(score(peer, asked))
    await asyncio.to_thread(engine.begun.wait, 600)
    return first


async def test_every_score_equals_the_table_at_its_temperature() -> None:
    """log softmax(log q / T); hidden states have none."""
    asked = sequence([1, 2, 3, 4], 2, [[0, -1], [5, 4]])
    async with serving(TableEngine(TABLE)) as url, Peer(url) as peer:
        (scores,) = await score(peer, asked, topk=3, entropy=True, hidden=True, temperature=0.7)
        head = await peer.call("/v1/head", None, wire.Head)
    rows = TABLE[[2, 3]] / 0.7
    rows -= np.log(np.exp(rows).sum(1, keepdims=True))
    best = np.argsort(-rows, axis=1)[:, :3]
    np.testing.assert_array_equal(unpack(scores.topk_ids), best)
    for name, expected in {
        "logprob": [rows[0, 3], rows[1, 4]],
        "topk_logprob": np.take_along_axis(rows, best, 1),
        "gathered": [[rows[0, 0], 0], [rows[1, 5], rows[1, 4]]],
        "entropy": -(np.exp(rows) * rows).sum(1),
    }.items():
        np.testing.assert_allclose(unpack(getattr(scores, name)), expected, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(unpack(scores.hidden) @ unpack(head.weight).T, TABLE[[2, 3]], atol=1e-6)


async def test_bad_sequences_are_refused_one_by_one_in_the_order_asked() -> None:
    unknown, good, long = sequence([1, 99]), sequence([1, 2, 3]), sequence([1] * 65)
    async with serving(TableEngine(TABLE, max_length=64)) as url, Peer(url) as peer:
        first, second, third = await score(peer, unknown, good, long)
        (alone,) = await score(peer, unknown)
    assert "99" in first.error
    assert isinstance(second, Scored)
    assert "65 tokens" in third.error
    assert isinstance(alone, ScoreRefused)


async def test_a_body_that_is_too_long_is_refused_with_the_reason_while_it_is_sent() -> None:
    async with serving(TableEngine(TABLE), body_bytes=1 << 20) as url, Peer(url) as peer:
        for _ in range(3):
            with pytest.raises(RemoteError, match="413: body is longer than 1048576 bytes"):
                await peer.once("/v1/score", bytes(32 << 20), 60)


async def test_work_of_a_caller_that_left_is_not_done_and_nothing_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, asked = GatedEngine(TABLE, 64), sequence([1, 2])
    async with serving(engine) as url, Peer(url) as peer:
        first = await busy(peer, engine, asked)
        leaver = asyncio.create_task(score(peer, asked))
        await held_tokens(url, 4)
        leaver.cancel()
        await held_tokens(url, 2)
        engine.gate.set()
        await first
        await score(peer, asked)
    assert engine.sequences == 2
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_an_engine_that_does_not_come_back_is_told_at_health(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = GatedEngine(TABLE, 64)
    async with serving(engine) as url, Peer(url) as peer, client(base_url=url) as http:
        first = await busy(peer, engine, sequence([1, 2]))
        assert (await http.get("/health")).status_code == 200
        monkeypatch.setattr(batching, "STALLED_SECONDS", 0.0)
        stalled = await http.get("/health")
        assert stalled.status_code == 503
        assert stalled.json()["error"].endswith("restart this process")
        engine.gate.set()
        await first
        assert (await http.get("/health")).status_code == 200


async def held_tokens(url: str, expected: int) -> None:
    """Wait until the service's metrics show so many held tokens."""
    async with client() as http:
        for _ in itertools.count():
            if f"distill_teacher_held_tokens {expected:.1f}" in (await http.get(f"{url}/metrics")).text:
                return
            await asyncio.sleep(0.01)


async def test_every_route_but_health_needs_the_token_and_the_engine_is_closed_with_its_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, closed = TableEngine(TABLE), list[str]()
    monkeypatch.setattr(engine, "close", lambda: closed.append("closed"))
    async with serving(engine, token="secret") as url, client() as http, Peer(url, "secret") as peer:
        assert (await http.get(f"{url}/health")).status_code == 200
        assert (await http.get(f"{url}/v1/info")).status_code == 401
        assert (await peer.call("/v1/info", None, wire.TeacherInfo)).vocab_size == V
        assert not closed
    assert closed == ["closed"]


def test_replies_keep_half_precision_only_for_lists() -> None:
    logprob = np.array([-1.1], np.float32)
    half = scored("a", EngineScores(logprob, np.array([[3]], np.int32), logprob[None]), "f2")
    assert (half.logprob.dtype, half.topk_logprob.dtype) == ("f4", "f2")


def generation(*prompts: list[int], max_tokens: int = 6, seed: int = 3, **more: Any) -> Any:
    ids = [pack(np.array(prompt, np.int32)) for prompt in prompts]
    prompts = [wire.TeacherPrompt(str(i), part, seed + i) for i, part in enumerate(ids)]
    return wire.TeacherGenerateRequest(prompts=prompts, max_tokens=max_tokens, **more)


async def test_a_completion_has_the_tables_log_probabilities_and_depends_on_its_seed_alone() -> None:
    async with serving(TableEngine(TABLE)) as url, Peer(url) as peer:
        request = generation([1, 2], [4], stop_token_ids=[5])
        both, (alone,), (other,) = [
            (await peer.call("/v1/generate", asked, wire.TeacherGenerateReply)).results
            for asked in (request, generation([4], seed=4, stop_token_ids=[5]), generation([4], seed=9))
        ]
    for prompt, completion in zip(([1, 2], [4]), both, strict=True):
        ids = [prompt[-1], *unpack(completion.token_ids).tolist()]
        np.testing.assert_allclose(unpack(completion.logprob), TABLE[ids[:-1], ids[1:]], atol=1e-6)
        assert (completion.finish_reason == "stop") == (ids[-1] == 5)
        assert len(ids) == 7 or ids[-1] == 5
    assert alone.token_ids == both[1].token_ids != other.token_ids


async def test_an_engine_that_has_no_head_cannot_generate_or_is_away_says_so() -> None:
    class Away(TableEngine):
        def score(self, items: Sequence[Item], options: ScoreOptions) -> EngineScores:
            raise EngineEnded("vLLM restarts")

    engine, asked = Away(TABLE), ScoreRequest(sequences=[sequence([1, 2])])
    engine.engine_info, engine.head = replace(engine.engine_info, can=("topk",)), lambda: None
    async with serving(engine) as url, Peer(url) as peer:
        with pytest.raises(RemoteError, match="422"):
            await peer.call("/v1/head", None, wire.Head)
        with pytest.raises(RemoteError, match="cannot give 'generate'"):
            await peer.call("/v1/generate", generation([1]), wire.TeacherGenerateReply)
        with pytest.raises(Unreachable, match="answered 503: vLLM restarts"):
            await peer.once("/v1/score", wire.encode(asked), 600)


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
        ("logprob_C", 3.0, "logprob"),
        ("topk_ids_CK", V, "topk_ids"),
        ("topk_ids_CK", 0, "topk_ids"),
        ("topk_logprob_CK", -np.inf, "topk_logprob"),
        ("topk_logprob_CK", 0.0, "topk_logprob"),
        ("hidden_CH", np.nan, "hidden"),
    ],
)
async def test_an_engine_that_lies_costs_that_sequence_alone(column: str, value: float, field: str) -> None:
    async with serving(LyingEngine(column, value)) as url, Peer(url) as peer:
        first, second = await score(peer, sequence([7, 2, 3]), sequence([1, 2, 3]), topk=2, hidden=True)
    assert first.unusable
    assert first.error.startswith(f"the engine's answer: {field} is ")
    assert isinstance(second, Scored)


async def test_an_entropy_that_cannot_be_used_is_left_out() -> None:
    async with serving(LyingEngine("entropy_C", np.nan)) as url, Peer(url) as peer:
        (answer,) = await score(peer, sequence([7, 2, 3]), entropy=True)
    assert answer.entropy is None


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


async def test_a_body_counts_until_its_request_is_answered_and_one_that_is_refused_or_cut_does_not() -> None:
    gate = BodyLimit(request_limit=10, total=12)
    for _ in range(5):
        with pytest.raises(TooLarge, match="longer than 10 bytes"):
            await read(gate, request_of(b"123456", b"123456", b"123456"))
        with pytest.raises(WireError, match="left before"):
            await read(gate, request_of(b"123456", leaves=True))
        async with gate.read(request_of(b"12345", b"67890")) as first:
            assert first == b"1234567890"
            assert await read(gate, request_of(b"12")) == b"12"
            with pytest.raises(Overloaded):
                await read(gate, request_of(b"123"))
