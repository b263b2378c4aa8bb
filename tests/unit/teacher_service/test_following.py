"""A self-teacher takes over the student's published versions, one in so many."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from counted_loads import Loads
from table_engine import TableEngine, random_table
from waiting import until

from sync.base.errors import ConfigError, StoreError
from sync.wire import Version
from teacher_service.config import TeacherConfig
from teacher_service.engines import build
from teacher_service.engines.base import Item, ScoreOptions
from teacher_service.engines.reload import FollowingEngine

ITEM = Item(np.array([1, 2, 3], np.int32), 1)


class Store:
    """Versions protocol: what is newest is set by hand; folders are named after versions."""

    def __init__(self) -> None:
        self.version: Version | None = None
        self.broken = False
        self.looks = 0

    def newest(self) -> Version | None:
        self.looks += 1
        return self.version

    def folder(self, version: Version) -> Path:
        if self.broken:
            raise StoreError("the store is gone")
        return Path(str(version.step))


def another_look(store: Store) -> None:
    seen = store.looks
    until(lambda: store.looks >= seen + 2)


def test_every_second_version_is_taken_over_and_the_old_engine_closed() -> None:
    store, loads = Store(), Loads()
    with closing(FollowingEngine(loads, store, 2, poll_seconds=0.005)) as engine:
        for step, held in ((0, None), (1, None), (2, 2), (3, 2), (4, 4)):
            store.version = Version(0, step)
            another_look(store)
            assert (engine.version and engine.version.step) == held
            scores = engine.score([ITEM], ScoreOptions()).logprob_C
            expected = TableEngine(random_table(11, seed=held or 0)).score([ITEM], ScoreOptions()).logprob_C
            assert scores.tolist() == expected.tolist()
        assert loads.folders == [None, "2", "4"]
        assert loads.closed == 2
        assert engine.head() is None
        assert engine.engine_info.can == ("topk", "gather", "entropy", "prompt", "generate", "temperature")
    assert loads.closed == 3


def test_a_trainer_that_went_back_is_followed_at_once() -> None:
    store = Store()
    with closing(FollowingEngine(Loads(), store, 4, poll_seconds=0.005)) as engine:
        store.version = Version(0, 8)
        until(lambda: engine.version == Version(0, 8))
        store.version = Version(1, 6)
        until(lambda: engine.version == Version(1, 6))


def test_a_version_that_cannot_be_had_leaves_the_old_one_serving(caplog: pytest.LogCaptureFixture) -> None:
    store = Store()
    with closing(FollowingEngine(Loads(), store, 1, poll_seconds=0.005)) as engine:
        store.broken, store.version = True, Version(0, 1)
        another_look(store)
        assert engine.version is None
        assert "the model stays as it is: the store is gone" in caplog.text
        store.broken = False
        until(lambda: engine.version == Version(0, 1))


def test_a_version_that_cannot_be_loaded_is_said_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """Also when it is no error of ours: a full disk, a device without room for two models."""
    store, loads, problems = Store(), Loads(), [OSError("disk full"), RuntimeError("out of memory")]

    def load(folder: Path | None) -> TableEngine:
        if folder is not None and problems:
            raise problems.pop(0)
        return loads(folder)

    with closing(FollowingEngine(load, store, 1, poll_seconds=0.005)) as engine:
        store.version = Version(0, 1)
        until(lambda: engine.version == Version(0, 1))
    assert "the model stays as it is: disk full" in caplog.text
    assert "out of memory" in caplog.text


def test_only_an_engine_that_can_be_swapped_may_follow() -> None:
    for wrong in ({"engine": "vllm"}, {"idle_unload_seconds": 5.0}):
        config = TeacherConfig.model_validate({"path": "m", "follow_student_every": 2, **wrong})
        with pytest.raises(ConfigError, match=r"follow_student_every = 2 and .* need engine"):
            build(config, 10)
