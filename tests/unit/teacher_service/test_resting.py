"""An engine that is loaded when work comes, and released when none does."""

from __future__ import annotations

import time

import numpy as np
import pytest

from sync.errors import ConfigError
from teacher_service.config import TeacherConfig
from teacher_service.engines import build
from teacher_service.engines.base import Asked, Engine, Item
from teacher_service.engines.resting import RestingEngine
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
