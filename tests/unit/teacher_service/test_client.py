"""The client against real services: bounded requests, choice of replica, and replicas that fail."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from ports import free_port
from table_engine import GatedEngine, random_table

from sync import wire
from sync.base.errors import ConfigError, Overloaded, RemoteError, Unreachable, WrongServer
from sync.wire import RunIdentity, Scored, ScoreRefused, ScoreSequence, TeacherPrompt, pack, unpack
from sync.wire.claims import Claim
from teacher_service import client as client_module
from teacher_service.client import TeacherClient
from teacher_service.engines import base

V = 11
TABLE = random_table(V)


def sequences(n: int, length: int = 6, seed: int = 0) -> list[ScoreSequence]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, V, (n, length)).astype(np.int32)
    return [ScoreSequence(f"{seed}-{i}", pack(ids[i]), 2) for i in range(n)]


def right(given: Sequence[ScoreSequence], results: Sequence[Scored | ScoreRefused]) -> bool:
    """Whether every result is the table's scores of the sequence at its place."""
    for sequence, result in zip(given, results, strict=True):
        ids = unpack(sequence.token_ids)
        assert isinstance(result, Scored)
        np.testing.assert_array_equal(unpack(result.logprob), TABLE[ids[1:-1], ids[2:]])
    return True


async def test_what_a_teacher_did_is_counted_and_a_refused_sequence_costs_no_other(serve: Any) -> None:
    bad = ScoreSequence("bad", pack(np.array([1, V], np.int32)), 1)
    async with serve(GatedEngine(TABLE)) as url, TeacherClient("t", [url]) as client:
        given = [sequences(3, seed=seed) for seed in range(10)]
        *answers, refused = await asyncio.gather(*(client.score(part) for part in [*given, [bad]]))
        assert all(right(part, answer) for part, answer in zip(given, answers, strict=True))
        assert isinstance(refused[0], ScoreRefused)
        counted = client.counters
        assert (counted.requests, counted.sequences, counted.tokens, counted.refused) == (11, 31, 182, 1)


async def test_a_long_call_is_cut_into_bounded_requests(serve: Any) -> None:
    async with serve(GatedEngine(TABLE)) as url, TeacherClient("t", [url], request_tokens=20) as client:
        assert await client.score([]) == []
        assert client.counters.requests == 0
        given = sequences(10)
        assert right(given, await client.score(given))
        assert client.counters.requests == 4


async def test_what_a_teacher_does_not_queue_at_once_is_sent_in_halves(serve: Any) -> None:
    """10 × 6 tokens, of which 15 may wait."""
    async with serve(GatedEngine(TABLE), queue_tokens=15) as url, TeacherClient("t", [url]) as client:
        given = sequences(10)
        assert right(given, await client.score(given, deadline=60))
        assert (client.counters.sequences, client.counters.tokens) == (10, 60)


async def test_work_goes_to_the_replica_with_the_least_outstanding(serve: Any) -> None:
    one, two = GatedEngine(TABLE), GatedEngine(TABLE)
    async with (
        serve(one) as first,
        serve(two) as second,
        TeacherClient("t", [first, second], request_tokens=6) as client,
    ):
        given = sequences(40)
        assert right(given, await client.score(given))
    assert one.sequences == two.sequences == 20


async def test_a_dead_replica_is_passed_over_and_used_again_when_it_is_back(serve: Any) -> None:
    one, two, port = GatedEngine(TABLE), GatedEngine(TABLE), free_port()
    urls = [f"http://127.0.0.1:{port}"]
    async with serve(one) as living, TeacherClient("t", [*urls, living], request_tokens=6) as client:
        given = sequences(8)
        assert right(given, await client.score(given))
        assert one.sequences == 8
        async with serve(two, port=port):
            for seed in range(200):
                assert right(sequences(4, seed=seed), await client.score(sequences(4, seed=seed)))
                if two.sequences:
                    break
                await asyncio.sleep(0.02)
    assert two.sequences


async def test_a_replica_that_stops_answering_loses_its_work_to_another(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that accepts connections and sends nothing, as a stopped process does."""
    monkeypatch.setattr(client_module, "HEALTH_SECONDS", 0.1)
    engine = GatedEngine(TABLE)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        mute = "http://127.0.0.1:{1}".format(*silent.getsockname())
        async with serve(engine) as living, TeacherClient("t", [mute, living]) as client:
            given = sequences(2)
            assert right(given, await client.score(given, deadline=300))
    assert engine.sequences == 2


async def test_a_replica_whose_answers_cannot_be_used_is_left_out_until_none_is_left(serve: Any) -> None:
    good, bad = GatedEngine(TABLE), GatedEngine(TABLE)
    async with serve(good) as url, serve(bad) as other, TeacherClient("t", [other, url]) as client:
        given = sequences(2)
        await client.score(given)
        assert client.answered_by(given[0].id) == other
        assert client.leave_out(other)
        before = bad.sequences
        for seed in range(4):
            given = sequences(2, seed=seed)
            assert right(given, await client.score(given))
            assert client.answered_by(given[1].id) == url
        assert bad.sequences == before
        assert not client.leave_out(url)


async def test_a_completion_may_take_longer_than_other_calls(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "TIMEOUT_SECONDS", 0.1)

    class Slow(GatedEngine):
        begun_prompts = 0

        def generate(self, prompts: Sequence[base.EnginePrompt], params: base.GenerationParams) -> base.Steps:
            self.begun_prompts += len(prompts)
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                yield None
            yield from super().generate(prompts, params)

    engine, gone = Slow(TABLE), f"http://127.0.0.1:{free_port()}"
    async with serve(engine) as url, TeacherClient("t", [gone, url]) as client:
        prompts = [TeacherPrompt(f"{seed}", pack(np.array([1, 2], np.int32)), seed) for seed in range(3)]
        completions = await client.generate(prompts, 4)
        assert [one.id for one in completions] == ["0", "1", "2"]
        assert all(isinstance(one, wire.TeacherCompletion) for one in completions)
        assert engine.begun_prompts == 3
        with pytest.raises(Unreachable):
            await client.generate(prompts, 4, deadline=0.1)


async def test_a_teacher_that_is_gone_is_a_typed_error_at_the_deadline() -> None:
    async with TeacherClient("t", [f"http://127.0.0.1:{free_port()}"]) as client:
        started = time.monotonic()
        with pytest.raises(Unreachable):
            await client.score(sequences(1), deadline=0.5)
        assert time.monotonic() - started < 60


async def test_a_teacher_that_stays_full_is_overloaded_at_the_deadline(serve: Any) -> None:
    engine = GatedEngine(TABLE)
    async with serve(engine, queue_tokens=10) as url, TeacherClient("t", [url], request_tokens=6) as client:
        engine.gate.clear()
        first = asyncio.create_task(client.score(sequences(1)))
        await asyncio.to_thread(engine.begun.wait, 600)
        with pytest.raises((Overloaded, Unreachable)):
            await client.score(sequences(1), deadline=0.3)
        engine.gate.set()
        assert right(sequences(1), await first)


async def test_what_the_teacher_cannot_do_is_not_tried_again(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(GatedEngine(TABLE)) as url, TeacherClient("t", [url]) as client:
        with pytest.raises(RemoteError, match="topk is 12"):
            await client.score(sequences(1), wire.Want(topk=12))
    assert "retrying" not in caplog.text


async def test_cancelling_aborts_the_callers_own_work_alone(serve: Any) -> None:
    engine = GatedEngine(TABLE)
    async with serve(engine) as url, TeacherClient("t", [url]) as client:
        engine.gate.clear()
        stays = asyncio.create_task(client.score(sequences(2)))
        leaves = asyncio.create_task(client.score(sequences(2, seed=1)))
        await asyncio.to_thread(engine.begun.wait, 600)
        leaves.cancel()
        engine.gate.set()
        assert right(sequences(2), await stays)


async def test_replicas_that_are_not_the_same_teacher_are_refused(serve: Any) -> None:
    async with serve(GatedEngine(TABLE)) as one, serve(GatedEngine(TABLE), model="other") as two:
        async with TeacherClient("t", [one]) as client:
            assert (await client.info()).vocab_size == V
            np.testing.assert_array_equal(unpack((await client.head()).weight), TABLE.T)
        async with TeacherClient("t", [one, two]) as client:
            with pytest.raises(ConfigError, match="differ"):
                await client.info()


async def test_replicas_may_differ_in_the_length_that_their_memory_takes(serve: Any) -> None:
    engines = [GatedEngine(TABLE), GatedEngine(TABLE)]
    for engine, length in zip(engines, (3072, 2048), strict=True):
        engine.engine_info = dataclasses.replace(engine.engine_info, max_length=length)
    async with serve(engines[0]) as one, serve(engines[1]) as two, TeacherClient("t", [one, two]) as client:
        assert (await client.info()).max_length == 2048


async def test_a_replica_that_comes_back_with_another_model_is_left_to_the_others(serve: Any) -> None:
    engines, port = [GatedEngine(TABLE) for _ in range(3)], free_port()
    async with serve(engines[0]) as steady:
        urls = [steady, f"http://127.0.0.1:{port}"]
        async with TeacherClient("t", urls, request_tokens=6) as client:
            async with serve(engines[1], port=port):
                await client.info()
            async with serve(engines[2], port=port, model="other"):
                assert right(sequences(8), await client.score(sequences(8)))
                assert engines[0].sequences == 8
        async with TeacherClient("t", urls[1:]) as client:
            async with serve(engines[1], port=port):
                await client.info()
            async with serve(engines[2], port=port, model="other"):
                for ask in (client.score(sequences(1)), client.head()):
                    with pytest.raises(WrongServer, match="answers with model other, and table was checked"):
                        await ask


async def test_a_teacher_that_follows_a_run_serves_that_run_alone(serve: Any) -> None:
    mine, other = Claim(RunIdentity("toy", "aa")), Claim(RunIdentity("toy", "bb"))
    async with (
        serve(GatedEngine(TABLE), claim=Claim(RunIdentity("toy"))) as url,
        TeacherClient("t", [url], claim=mine) as one,
        TeacherClient("t", [url], claim=other) as two,
    ):
        assert await two.info() == await one.info()  # to look claims nothing
        assert right(sequences(2), await one.score(sequences(2)))
        with pytest.raises(WrongServer, match=r"it serves run 'toy' \(id aa\) and was asked for .*bb"):
            await two.score(sequences(2))
    async with serve(GatedEngine(TABLE)) as url:
        for claim in (mine, other):
            async with TeacherClient("t", [url], claim=claim) as client:
                assert right(sequences(2), await client.score(sequences(2)))


def test_a_teacher_without_urls_is_refused() -> None:
    with pytest.raises(ConfigError, match="no urls"):
        TeacherClient("t", [])
