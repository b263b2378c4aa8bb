"""The client against real services: one request to one process, and what is reported of it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from ports import free_port, refusing, silent
from served_teacher import serving
from table_engine import TABLE, GatedEngine, V, right, sequences

from sync.base.errors import ConfigError, Overloaded, TooLarge, Unreachable, WrongServer
from sync.wire import RunIdentity, ScoreRefused, ScoreSequence, pack, unpack
from sync.wire.claims import Claim
from teacher_service import client as client_module
from teacher_service.client import TeacherClient


async def test_what_a_teacher_did_is_counted_and_a_refused_sequence_costs_no_other() -> None:
    bad = ScoreSequence("bad", pack(np.array([1, V], np.int32)), 1)
    async with serving(GatedEngine(TABLE)) as url, TeacherClient("t", [url]) as client:
        given = [sequences(3, seed=seed) for seed in range(10)]
        *answers, refused = await asyncio.gather(*(client.score(part) for part in [*given, [bad]]))
        assert all(right(part, answer.results) for part, answer in zip(given, answers, strict=True))
        assert {answer.server for answer in answers} == {url}
        assert isinstance(refused.results[0], ScoreRefused)
        counted = client.counters
        assert (counted.requests, counted.sequences, counted.tokens, counted.refused) == (11, 31, 182, 1)


@pytest.mark.parametrize(("process", "error"), [(refusing, Unreachable), (silent, client_module.Stalled)])
async def test_a_process_that_is_gone_or_hangs_is_reported_and_its_work_left_to_the_others(
    process: Any, error: type[Unreachable], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one at once, the other after two polls of its health."""
    monkeypatch.setattr(client_module, "HEALTH_SECONDS", 0.1)
    engine = GatedEngine(TABLE)
    with process() as mute:
        async with serving(engine) as url, TeacherClient("t", [mute, url]) as client:
            with pytest.raises(Unreachable) as caught:
                await client.score(sequences(2))
            assert type(caught.value) is error
            assert client.pause == 0.0, "the other may be asked"
            assert (await client.score(sequences(2))).server == url
    assert engine.sequences == 2


async def test_several_messages_that_take_too_long_are_too_large_and_one_is_unreachable() -> None:
    engine = GatedEngine(TABLE)
    async with serving(engine) as url, TeacherClient("t", [url]) as client:
        engine.gate.clear()
        with pytest.raises(TooLarge, match=r"2 messages were not answered in 0\.2 s"):
            await client.score(sequences(2), limit=0.2)
        with pytest.raises(Unreachable):
            await client.score(sequences(1), limit=0.2)
        engine.gate.set()


async def test_a_full_process_is_left_alone_for_as_long_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teacher_service.batching.RETRY_AFTER_SECONDS", 60.0)
    engine = GatedEngine(TABLE)
    async with serving(engine, queue_tokens=10) as url, TeacherClient("t", [url]) as client:
        engine.gate.clear()
        first = asyncio.create_task(client.score(sequences(1)))
        await asyncio.to_thread(engine.begun.wait, 600)
        with pytest.raises(Overloaded):
            await client.score(sequences(1))
        assert 1 < client.pause <= 60, "its backoff begins with 0.05 s"
        engine.gate.set()
        assert right(sequences(1), (await first).results)


async def test_a_process_that_is_left_out_gets_nothing_until_none_is_left() -> None:
    good, bad = GatedEngine(TABLE), GatedEngine(TABLE)
    async with serving(good) as url, serving(bad) as other, TeacherClient("t", [other, url]) as client:
        assert (await client.score(sequences(2))).server == other
        assert client.leave_out(other)
        for seed in range(4):
            reply = await client.score(sequences(2, seed=seed))
            assert right(sequences(2, seed=seed), reply.results)
            assert reply.server == url
        assert not client.leave_out(url)
    assert (bad.sequences, good.sequences) == (2, 8)


async def test_a_process_with_another_model_is_unreachable_while_there_is_one_with_the_right_one() -> None:
    engines, port = [GatedEngine(TABLE) for _ in range(3)], free_port()
    moving = f"http://127.0.0.1:{port}"
    why = "answers with model other, and table was checked"
    async with (
        serving(engines[0]) as steady,
        TeacherClient("t", [moving, steady]) as client,
        TeacherClient("t", [moving]) as alone,
    ):
        async with serving(engines[1], port=port):
            await client.info()
            await alone.info()
        async with serving(engines[2], port=port, model="other"):
            with pytest.raises(Unreachable, match=why):
                await client.score(sequences(1))
            for _ in range(4):
                assert (await client.score(sequences(1))).server == steady
            for ask in (alone.score(sequences(1)), alone.head()):
                with pytest.raises(WrongServer, match=why):
                    await ask


async def test_a_teacher_that_follows_a_run_serves_that_run_alone() -> None:
    mine, other = Claim(RunIdentity("toy", "aa")), Claim(RunIdentity("toy", "bb"))
    async with (
        serving(GatedEngine(TABLE), claim=Claim(RunIdentity("toy"))) as url,
        TeacherClient("t", [url], claim=mine) as one,
        TeacherClient("t", [url], claim=other) as two,
    ):
        assert await two.info() == await one.info()  # to look claims nothing
        assert right(sequences(2), (await one.score(sequences(2))).results)
        with pytest.raises(WrongServer, match=r"it serves run 'toy' \(id aa\) and was asked for .*bb"):
            await two.score(sequences(2))
    async with serving(GatedEngine(TABLE)) as url:
        for claim in (mine, other):
            async with TeacherClient("t", [url], claim=claim) as client:
                assert right(sequences(2), (await client.score(sequences(2))).results)


async def test_replicas_are_the_same_teacher_and_may_differ_in_the_length_that_their_memory_takes() -> None:
    long, short, other = (GatedEngine(TABLE, length) for length in (3072, 2048, 3072))
    async with serving(long) as one, serving(short) as two, serving(other, model="other") as three:
        async with TeacherClient("t", [one, two]) as client:
            info = await client.info()
            assert (info.vocab_size, info.max_length) == (V, 2048)
            np.testing.assert_array_equal(unpack((await client.head()).weight), TABLE.T)
        async with TeacherClient("t", [one, three]) as client:
            with pytest.raises(ConfigError, match="differ"):
                await client.info()
    with pytest.raises(ConfigError, match="no urls"):
        TeacherClient("t", [])
