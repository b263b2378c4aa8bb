"""A record's cache is what its rows say, whatever happens and whenever the controller is killed."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_memory import MemoryPrompts
from random_history import KINDS, PLAIN, History, differences, seen
from small_config import make_config
from small_record import checkpoint

from distill.buffer import Rules
from distill.prompts.stream import PromptStream
from distill.record.audit import audit
from distill.record.configuration import record_of
from distill.record.load import load
from distill.record.record import Record
from distill.record.resume import Start, resume
from distill.record.store import RECORD, Store
from sync.base.errors import DataError
from sync.wire import Version


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
def test_after_every_event_the_cache_is_what_the_rows_say(tmp_path_factory, rules: Rules, seed: int) -> None:
    lived(tmp_path_factory.mktemp("run"), seed, rules, 120, same_as_its_rows)


def test_a_restart_scans_nothing_that_grows_with_the_run(tmp_path: Path) -> None:
    lived(tmp_path, 1, PLAIN, 60, lambda _: asyncio.sleep(0))
    store = Store(tmp_path, "never")
    asked, connection = list[str](), store.connection
    connection.set_trace_callback(asked.append)
    load(connection, PLAIN, store.read)
    connection.set_trace_callback(None)
    explained = {question: connection.execute(f"EXPLAIN QUERY PLAN {question}") for question in asked}
    plans = {question: [line for *_, line in rows] for question, rows in explained.items()}
    store.close()
    assert len(plans) > 10
    growing = re.compile(r"SCAN (rollout_row|batch|block)(?! USING (COVERING )?INDEX)")
    assert not {question: plan for question, plan in plans.items() if any(map(growing.match, plan))}


@pytest.mark.parametrize("rules", KINDS.values(), ids=KINDS)
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_a_resume_goes_on_from_what_the_dry_run_says(tmp_path_factory, rules: Rules, seed: int) -> None:
    """`checkpoints/latest` names the newest checkpoint of the path, or what the run was rolled back to."""
    folder = tmp_path_factory.mktemp("run")
    history = lived(folder, seed, rules, 80, lambda _: asyncio.sleep(0))
    kept = [version for version in history.state.checkpoints if history.state.passed(version)]
    back = history.state.rolled_back
    newest = back.to if back else kept[-1] if kept else None
    if newest is not None:
        checkpoint(folder, newest)
    before = (folder / RECORD).read_bytes()
    prompts = PromptStream(MemoryPrompts(), seed=0, per_prompt=rules.group)
    told = resume(folder, Start("r", 0, rules, prompts))
    assert before == (folder / RECORD).read_bytes()

    async def go_on() -> None:
        record = Record(Store(folder, "never"), prompts, told)
        assert prompts.cursor == history.state.cursor
        made = await record.open_lineage(newest, "model", back.without if back else None)
        assert told.trainer == (made.checkpoint, made.origin, made.branch)
        assert told.trainer.start == made.start
        record.store.close()

    asyncio.run(go_on())


def alter(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_source_of_another_format_is_refused_whichever_it_is(tmp_path: Path) -> None:
    history = lived(tmp_path, 3, PLAIN, 40, lambda _: asyncio.sleep(0))
    assert history.state.lineage is not None
    newest = checkpoint(tmp_path, Version(0, 1))
    config = make_config(run={"name": "r"})
    kept = record_of(config, {"prompts": "a", "held_out": None, "deepspeed": {}})
    (tmp_path / "config.json").write_text(json.dumps(kept))
    (tmp_path / "stream-prompts.json").write_text('{"stream": "x", "starts": {}}')
    start = Start("r", 0, PLAIN, PromptStream(MemoryPrompts(), seed=0), kept)
    read = resume(tmp_path, start).formats
    sources = {name: tmp_path / name for name in ("config.json", "stream-prompts.json")}
    sources["checkpoints/"] = newest / "checkpoint.json"
    assert read.keys() == {*sources, "run.db and arrays/"}
    for source, path in sources.items():
        alter(path, format=read[source] + 1)
        with pytest.raises(DataError, match=refusal(path, read[source] + 1, read[source])):
            resume(tmp_path, start)
        alter(path, format=read[source])
    checkpoint(tmp_path, Version(0, 0)).parent.joinpath("latest").write_text(f"{newest.name}\n")
    alter(newest / "checkpoint.json", format=7)
    with pytest.raises(DataError, match="has format 7"):  # although an older one is whole
        resume(tmp_path, start)
    alter(newest / "checkpoint.json", format=1)
    alter(sources["stream-prompts.json"], format=9)
    assert "has format 9" in audit(tmp_path).violations["record_damaged"][0]
    alter(sources["stream-prompts.json"], format=2)
    with closing(sqlite3.connect(tmp_path / RECORD)) as tables:
        tables.execute("PRAGMA user_version = 9")
    with pytest.raises(DataError, match=refusal(tmp_path / RECORD, 9, read["run.db and arrays/"])):
        resume(tmp_path, start)


def refusal(path: Path, number: int, reads: int) -> str:
    told = f"{path} has format {number}, this release reads {reads}: go on with the release that wrote it"
    return re.escape(told)


def test_a_record_that_was_written_to_since_a_start_read_it_is_refused(tmp_path: Path) -> None:
    prompts = PromptStream(MemoryPrompts(), seed=0)
    told = resume(tmp_path, Start("r", 0, PLAIN, prompts))
    lived(tmp_path, 1, PLAIN, 5, lambda _: asyncio.sleep(0))
    store = Store(tmp_path, "never")
    with closing(store), pytest.raises(DataError, match="another controller has written to"):
        Record(store, prompts, told)
