"""Silence is counted in looks: what a watcher that stood still makes of it, and whom it names."""

from __future__ import annotations

import asyncio

import pytest
from virtual_time import advance

from distill.aio import cancel, look_seconds, until_stalled
from distill.events import Events, Stalled
from distill.trainer_api.guard import Heartbeats
from sync.wire import Heartbeat, Version

pytestmark = pytest.mark.virtual_time


async def returns(answers: list[bool], seconds: float) -> bool:
    """Whether the wait is over before the answers are used up."""

    async def sign() -> bool:
        return answers.pop(0)

    try:
        await until_stalled(sign, seconds)
    except IndexError:
        return False
    return True


async def test_four_looks_in_a_row_without_a_sign_are_silence() -> None:
    assert await returns([True, False, False, False, False], 0.04)
    assert not await returns([False, False, False, True, False, False, False], 0.04)


async def test_a_time_out_counts_no_more_than_a_pause() -> None:
    async def times_out() -> bool:
        await asyncio.sleep(0.3)
        looks.append(False)
        return False

    looks: list[bool] = []
    await until_stalled(times_out, 0.04)
    assert len(looks) == 2


async def test_a_watcher_that_stood_still_has_missed_one_look() -> None:
    looks: list[bool] = []

    async def sign() -> bool:
        looks.append(False)
        return False

    wait = asyncio.create_task(until_stalled(sign, 0.2))
    await asyncio.sleep(0)
    advance(0.5)  # the whole process, as after SIGSTOP
    await wait
    assert len(looks) == 4


async def test_no_limit_is_no_silence() -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(until_stalled(lambda: asyncio.sleep(0, False), 0), 0.05)


def test_a_rank_is_looked_for_often_enough_for_its_limit() -> None:
    assert (look_seconds(120), look_seconds(8), look_seconds(0)) == (5.0, 2.0, 0.0)


def beat(rank: int) -> Heartbeat:
    return Heartbeat(version=Version(0, 0), rank=rank)


def watched(seconds: float) -> tuple[Heartbeats, asyncio.Queue[Stalled]]:
    events, stalled = Events(), asyncio.Queue[Stalled]()
    events.on(Stalled, stalled.put_nowait)
    beats = Heartbeats(seconds, events)
    beats.opened()
    return beats, stalled


async def test_the_ranks_without_a_heartbeat_are_named_once_and_the_others_are_not(caplog) -> None:
    beats, stalled = watched(0.2)
    for rank in range(4):
        beats.heard(beat(rank))

    async def alive() -> None:
        while True:
            for rank in (0, 2):
                beats.heard(beat(rank))
            await asyncio.sleep(0.005)

    tasks = [asyncio.create_task(beats.run()), asyncio.create_task(alive())]
    for named in ("1, 3", "5"):
        assert await asyncio.wait_for(stalled.get(), 20) == Stalled("trainer")
        assert f"no heartbeat of trainer rank {named} for" in caplog.messages[-1]
        beats.heard(beat(5))
    await cancel(tasks)


async def test_ranks_that_are_forgotten_or_were_never_heard_are_not_missed(caplog) -> None:
    beats, stalled = watched(0.04)
    beats.heard(beat(0))
    beats.forget()
    beats.heard(beat(4))
    assert not beats.since, "rank 4 lingers on another machine"
    beats.opened()
    watch = asyncio.create_task(beats.run())
    beats.heard(beat(7))
    await asyncio.wait_for(stalled.get(), 20)
    assert "rank 7 for" in caplog.messages[-1]
    await cancel([watch])
