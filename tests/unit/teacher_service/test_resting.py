"""An engine that is loaded when work comes, and released when none does."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sync.errors import ConfigError
from teacher_service.config import TeacherConfig
from teacher_service.engines import build
from teacher_service.engines.base import Asked, Engine, Item
from teacher_service.engines.resting import RestingEngine
from teacher_service.engines.seats import Seat, SeatsConfig
from teacher_service.engines.table import TableEngine, random_table

ITEM = Item(np.array([1, 2, 3], np.int32), 1)


class Loads:
    """Counts how often an engine was loaded and closed."""

    def __init__(self) -> None:
        self.loaded = self.closed = 0

    def __call__(self) -> Engine:
        self.loaded += 1
        loads = self

        class Counted(TableEngine):
            def close(self) -> None:
                loads.closed += 1

        return Counted(random_table(11))


def wait_until_it_rests(engine: RestingEngine) -> None:
    for _ in range(500):
        if not engine.awake:
            return
        time.sleep(0.01)
    raise AssertionError("it never rested")


def test_it_rests_without_work_and_gives_the_same_marks_after_waking() -> None:
    loads = Loads()
    engine = RestingEngine(loads, 0.05)
    before = engine.score([ITEM], Asked()).logprob_C
    wait_until_it_rests(engine)
    assert (loads.loaded, loads.closed) == (1, 1)
    after = engine.score([ITEM], Asked()).logprob_C
    assert np.array_equal(before, after)
    assert engine.awake
    assert loads.loaded == 2
    engine.close()
    engine.close()
    assert loads.closed == 2


def test_work_keeps_it_awake() -> None:
    loads = Loads()
    engine = RestingEngine(loads, 60)
    for _ in range(3):
        engine.score([ITEM], Asked())
    assert engine.head() is not None
    assert (loads.loaded, loads.closed) == (1, 0)
    engine.close()


def test_only_engines_that_can_be_loaded_again_may_rest() -> None:
    config = TeacherConfig(path="m", engine="vllm", engine_url="http://x", idle_unload_seconds=5)
    with pytest.raises(ConfigError, match="idle_unload_seconds"):
        build(config, 10)


def seated(loads: Loads, tmp_path: Path, seats: int = 1) -> RestingEngine:
    return RestingEngine(loads, 60, Seat(SeatsConfig(folder=tmp_path, seats=seats)))


def test_the_teacher_that_was_used_the_longest_time_ago_makes_room(tmp_path: Path) -> None:
    loads = Loads()
    first, second = seated(loads, tmp_path, 2), seated(loads, tmp_path, 2)
    first.score([ITEM], Asked())
    second.score([ITEM], Asked())
    first.score([ITEM], Asked())
    third = seated(loads, tmp_path, 2)
    assert [engine.awake for engine in (first, second, third)] == [True, False, True]
    second.score([ITEM], Asked())
    assert [engine.awake for engine in (first, second, third)] == [False, True, True]
    assert (loads.loaded, loads.closed) == (4, 2)
    for engine in (first, second, third):
        engine.close()
    assert loads.closed == 4


def test_teachers_that_share_one_seat_take_turns_and_never_hold_two(tmp_path: Path) -> None:
    loads = Loads()
    engines = [seated(loads, tmp_path) for _ in range(3)]
    expected = TableEngine(random_table(11)).score([ITEM], Asked()).logprob_C
    most = []

    def work(engine: RestingEngine) -> None:
        for _ in range(3):
            assert np.array_equal(engine.score([ITEM], Asked()).logprob_C, expected)
            most.append(loads.loaded - loads.closed)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, engines))
    assert max(most) == 1
    for engine in engines:
        engine.close()


def test_a_seat_is_kept_as_long_as_loading_took(tmp_path: Path) -> None:
    config = SeatsConfig(folder=tmp_path, seats=1)
    seat = Seat(config)
    seat.take()
    seat.keep_for(60)
    (tmp_path / "seat-0.wanted").touch()
    assert not seat.wanted
    seat.keep_for(0)
    assert seat.wanted
    seat.leave()
    assert not seat.taken


def test_a_load_that_fails_gives_its_seat_back(tmp_path: Path) -> None:
    def broken() -> Engine:
        raise ConfigError("no such model")

    config = SeatsConfig(folder=tmp_path, seats=1)
    with pytest.raises(ConfigError):
        RestingEngine(broken, 60, Seat(config))
    other = Seat(config)
    other.take()
    assert other.taken
    other.leave()
