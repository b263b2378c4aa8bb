"""Engines that are loaded again while they serve: when work comes, and for a version of the student."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from table_engine import TableEngine, random_table
from waiting import until

from sync.base.errors import ConfigError, StoreError, Unreachable
from sync.wire import Version
from teacher_service.config import TeacherConfig
from teacher_service.engines import base, build, reload
from teacher_service.engines.reload import FollowingEngine, GpuSlot, GpuSlotsConfig, IdleUnloadEngine

ITEM = base.Item(np.array([1, 2, 3], np.int32), 1)


class Loads:
    """Loads table teachers whose scores depend on the folder, named after a number, and counts."""

    def __init__(self) -> None:
        self.folders: list[str | None] = []
        self.closed = 0

    @property
    def loaded(self) -> int:
        return len(self.folders)

    def __call__(self, folder: Path | None = None) -> TableEngine:
        self.folders.append(None if folder is None else folder.name)
        engine = TableEngine(random_table(11, seed=0 if folder is None else int(folder.name)))
        engine.close = self._close  # type: ignore[method-assign]
        return engine

    def _close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"engine": "vllm", "engine_url": "http://x", "idle_unload_seconds": 5}, "idle_unload_seconds"),
        ({"engine": "vllm", "follow_student_every": 2}, "follow_student_every = 2 and .* need engine"),
        ({"idle_unload_seconds": 5, "follow_student_every": 2}, "follow_student_every = 2 and .* need"),
    ],
)
def test_only_engines_that_can_be_loaded_again_may_be_unloaded_or_follow(
    wrong: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        build(TeacherConfig.model_validate({"path": "m", **wrong}), 10)


# --- unloaded without work, or for another teacher ----------------------------------------------------------


OPEN = ExitStack()
"""Engines and slots of a test."""


@pytest.fixture(autouse=True)
def all_closed() -> Iterator[None]:
    yield
    OPEN.close()


def idle(load: Callable[[], base.Engine], slot: GpuSlot | None = None) -> IdleUnloadEngine:
    """An engine that is unloaded after a minute."""
    return OPEN.enter_context(closing(IdleUnloadEngine(load, 60, slot)))


def slot_in(folder: Path, slots: int = 1) -> GpuSlot:
    slot = GpuSlot(GpuSlotsConfig(folder=folder, slots=slots))
    OPEN.callback(slot.leave)
    return slot


def score(engine: base.Engine) -> list[float]:
    return engine.score([ITEM], base.ScoreOptions()).logprob_C.tolist()


def wait_until_unloaded(engine: IdleUnloadEngine) -> None:
    until(lambda: engine._engine is None)
    with engine._lock:  # which it holds until it has closed what it held
        return


def test_it_is_unloaded_without_work_and_gives_the_same_scores_when_loaded_again() -> None:
    loads = Loads()
    engine = idle(loads)
    before = score(engine)
    engine._idle_seconds = 0.05
    wait_until_unloaded(engine)
    assert (loads.loaded, loads.closed) == (1, 1)
    engine._idle_seconds = 60.0  # it is not to be unloaded again before it was looked at
    assert score(engine) == before
    assert engine._engine is not None
    engine.close()
    engine.close()
    assert (loads.loaded, loads.closed) == (2, 2)


def test_a_batch_that_takes_longer_than_the_limit_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, decided = Loads(), threading.Event()
    engine = idle(loads)
    reason = engine._reason

    def told() -> str | None:
        why = reason()
        decided.set()
        return why

    with ThreadPoolExecutor(1) as threads:
        with engine._in_memory():
            engine._used -= 120
            monkeypatch.setattr(engine, "_reason", told)
            tended = threads.submit(engine._tend)
            assert decided.wait(600)
        tended.result()
    assert (loads.loaded, loads.closed) == (1, 0)


def test_the_teacher_that_was_used_the_longest_time_ago_makes_room(tmp_path: Path) -> None:
    loads = Loads()
    first, second = (idle(loads, slot_in(tmp_path, 2)) for _ in range(2))
    for engine in (first, second, first):
        score(engine)
    os.utime(tmp_path / "slot-0", (0, 0))  # the clock was set back before that use: it decides nothing
    third = idle(loads, slot_in(tmp_path, 2))
    assert [engine._engine is not None for engine in (first, second, third)] == [True, False, True]
    score(second)
    assert [engine._engine is not None for engine in (first, second, third)] == [False, True, True]
    assert (loads.loaded, loads.closed) == (4, 2)
    OPEN.close()
    assert loads.closed == 4


def test_teachers_that_share_one_slot_take_turns_and_never_hold_two(tmp_path: Path) -> None:
    loads, most = Loads(), list[int]()
    expected = score(TableEngine(random_table(11)))

    def work(engine: IdleUnloadEngine) -> None:
        for _ in range(3):
            assert score(engine) == expected
            most.append(loads.loaded - loads.closed)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, [idle(loads, slot_in(tmp_path)) for _ in range(3)]))
    assert max(most) == 1


def test_a_slot_is_kept_as_long_as_loading_took(tmp_path: Path) -> None:
    slot = slot_in(tmp_path)
    slot.take()
    slot.keep_for(60)
    (tmp_path / "slot-0.wanted").touch()
    assert not slot.wanted
    slot.keep_for(0)
    assert slot.wanted
    slot.leave()
    assert not slot._taken


def test_a_slot_that_was_given_up_goes_to_whoever_requested_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a teacher with work to do takes it again at once, and loads its model for nothing."""
    slot, other, request = slot_in(tmp_path), slot_in(tmp_path), tmp_path / "slot-0.wanted"
    slot.take()
    request.touch()

    def meanwhile(_: float) -> None:
        if other._taken:
            other.leave()
        elif free := other._free({request}):
            other._taken = free
            turns.append("whoever requested it")

    turns: list[str] = []
    monkeypatch.setattr(reload, "time", SimpleNamespace(sleep=meanwhile))
    slot.leave()
    slot.take()
    assert turns == ["whoever requested it"]
    assert slot._taken


def test_generation_keeps_the_model_and_the_slot_to_its_end(tmp_path: Path) -> None:
    loads = Loads()
    first = idle(loads, slot_in(tmp_path))
    prompts = [base.EnginePrompt(np.array([1, 2], np.int32), seed) for seed in range(3)]
    steps = first.generate(prompts, base.GenerationParams(2, 1.0, ()))
    assert next(steps) is None
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(idle, loads, slot_in(tmp_path))
        until((tmp_path / "slot-0.wanted").exists)
        time.sleep(4 * reload.SLOT_SECONDS)  # time to close it, if that were done
        assert (loads.loaded, loads.closed) == (1, 0)
        *_, completions = steps  # to its end: it holds the model until then
        assert [len(one.token_ids_T) for one in completions] == [2, 2, 2]
        other = second.result()
    assert (loads.loaded, loads.closed) == (2, 1)
    assert (first._engine is None, other._engine is None) == (True, False)


def test_a_load_that_fails_later_is_no_fault_of_the_work_and_the_next_request_loads_again() -> None:
    loads, problems = Loads(), list[Exception]()

    def load() -> base.Engine:
        if problems:
            raise problems.pop()
        return loads()

    engine = idle(load)
    before = score(engine)
    problems.append(OSError("Stale file handle"))
    engine._idle_seconds = 0.0
    wait_until_unloaded(engine)
    engine._idle_seconds = 60.0
    with pytest.raises(Unreachable, match=r"cannot be loaded again \(OSError: Stale file handle\)"):
        score(engine)
    assert score(engine) == before


def test_a_load_that_fails_gives_its_slot_back(tmp_path: Path) -> None:
    def broken() -> base.Engine:
        raise ConfigError("no such model")

    with pytest.raises(ConfigError):
        idle(broken, slot_in(tmp_path))
    other = slot_in(tmp_path)
    other.take()
    assert other._taken


# --- a self-teacher that follows the published versions -----------------------------------------------------


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


def test_every_second_version_is_taken_over_or_another_lineages_at_once_and_the_old_engine_closed() -> None:
    store, loads = Store(), Loads()
    with closing(FollowingEngine(loads, store, 2, poll_seconds=0.005)) as engine:
        for lineage, step, held in ((0, 0, None), (0, 1, None), (0, 2, 2), (0, 3, 2), (0, 4, 4), (1, 3, 3)):
            store.version = Version(lineage, step)
            another_look(store)
            assert engine.version == (None if held is None else Version(lineage, held))
            assert score(engine) == score(TableEngine(random_table(11, seed=held or 0)))
        assert (loads.folders, loads.closed) == ([None, "2", "4", "3"], 3)
        assert engine.head() is None
        assert engine.engine_info.can == ("topk", "gather", "entropy", "generate", "temperature")
    assert loads.closed == 4


def test_a_version_that_cannot_be_had_or_loaded_is_said_and_tried_again_while_the_old_one_serves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also when it is no error of ours: a full disk, a device without room for two models."""
    store, loads, problems = Store(), Loads(), [OSError("disk full"), RuntimeError("out of memory")]

    def load(folder: Path | None) -> TableEngine:
        if folder is not None and problems:
            raise problems.pop(0)
        return loads(folder)

    with closing(FollowingEngine(load, store, 1, poll_seconds=0.005)) as engine:
        store.broken, store.version = True, Version(0, 1)
        another_look(store)
        assert engine.version is None
        store.broken = False
        until(lambda: engine.version == Version(0, 1))
    for problem in ("the store is gone", "disk full"):
        assert f"the model stays as it is: {problem}" in caplog.text
    assert "out of memory" in caplog.text
