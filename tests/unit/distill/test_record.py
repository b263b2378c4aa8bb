"""A record's cache is what its rows say, whatever happens and whenever the controller is killed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_history import KINDS, PLAIN, History, differences, opened, seen
from small_record import checkpoint

from distill.buffer import Rules
from distill.record.load import load
from distill.record.resume import resume_of
from distill.record.store import RECORD, Store


def lived(folder: Path, seed: int, rules: Rules, events: int, after: Callable[[History], Any]) -> History:
    async def live() -> History:
        history = History(folder, seed, rules)
        for _ in range(events):
            await history.event()
            await after(history)
        await history.record.store.commit()
        history.record.store.close()
        return history

    return asyncio.run(live())


async def same_as_its_rows(history: History) -> None:
    found = await history.reloaded()
    assert not differences(seen(history.state), seen(found))


@pytest.mark.parametrize("rules", KINDS.values(), ids=KINDS)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_after_every_event_the_cache_is_what_the_rows_say(
    tmp_path_factory: pytest.TempPathFactory, rules: Rules, seed: int
) -> None:
    lived(tmp_path_factory.mktemp("run"), seed, rules, 120, same_as_its_rows)


def test_a_restart_scans_nothing_that_grows_with_the_run(tmp_path: Path) -> None:
    lived(tmp_path, 1, PLAIN, 60, lambda _: asyncio.sleep(0))
    store = Store(tmp_path, "never")
    asked, connection = list[str](), store.connection
    connection.set_trace_callback(asked.append)
    load(connection, PLAIN, store.read)
    connection.set_trace_callback(None)
    plans = {
        question: [line for *_, line in connection.execute(f"EXPLAIN QUERY PLAN {question}")]
        for question in asked
    }
    store.close()
    assert len(plans) > 10
    growing = re.compile(r"SCAN (rollout_row|batch|block)(?! USING (COVERING )?INDEX)")
    assert not {question: plan for question, plan in plans.items() if any(map(growing.match, plan))}


@pytest.mark.parametrize("rules", KINDS.values(), ids=KINDS)
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_a_resume_goes_on_from_what_the_dry_run_says(
    tmp_path_factory: pytest.TempPathFactory, rules: Rules, seed: int
) -> None:
    """`checkpoints/latest` names the newest checkpoint of the path, or what the run was rolled back to."""
    folder = tmp_path_factory.mktemp("run")
    history = lived(folder, seed, rules, 80, lambda _: asyncio.sleep(0))
    kept = [version for version in history.saved if history.state.passed(version)]
    back = history.state.rolled_back
    newest = back.to if back else kept[-1] if kept else None
    if newest is not None:
        checkpoint(folder, newest)
    before = (folder / RECORD).read_bytes()
    told = resume_of(folder, rules)
    assert before == (folder / RECORD).read_bytes()

    async def go_on() -> None:
        record = opened(folder, rules)
        assert (told.pending, told.buffered) == (len(record.state.pending), len(record.state.buffer))
        assert told.cursor == record.state.cursor
        made = await record.open_lineage(newest, "model", back.without if back else None)
        assert (told.checkpoint, told.start) == (made.checkpoint, made.start)
        assert (told.origin, told.branch) == (made.origin, made.branch)
        record.store.close()

    asyncio.run(go_on())
