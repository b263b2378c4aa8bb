"""A record: its cache is what its rows say, and no order of events and restarts loses or doubles anything."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import random_history
from audited import check
from hypothesis import given, settings
from hypothesis import strategies as st
from in_memory import MemoryPrompts
from random_history import FRESHNESS, GROUPS, KINDS, PLAIN, History, differences, lived, scored, seen
from recorded import rows_of
from small_config import make_config
from small_record import checkpoint
from started import begun

from distill.buffer import Batch, Bound, Rules
from distill.prompts.stream import PromptStream
from distill.record.audit import audit
from distill.record.changes import Checkpointed, Dropped, HandedOut, Stepped
from distill.record.load import load
from distill.record.record import Record
from distill.record.resume import Start, record_of, resume
from distill.record.rollout import Location, Rollout
from distill.record.store import RECORD, Store, arrays_path
from distill.trainer_api.guard import retreat
from sync.base.errors import ConfigError, DataError
from sync.wire import Version


async def same_as_its_rows(history: History) -> None:
    reloaded = await history.reloaded()  # which commits
    assert not differences(seen(history.state), seen(reloaded))


@pytest.mark.parametrize("rules", KINDS.values(), ids=KINDS)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_after_every_event_the_cache_is_what_the_rows_say(tmp_path_factory, rules: Rules, seed: int) -> None:
    lived(tmp_path_factory.mktemp("run"), seed, rules, 120, same_as_its_rows)


def test_a_restart_scans_nothing_that_grows_with_the_run(tmp_path: Path) -> None:
    lived(tmp_path, 1, PLAIN, 60)
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
    history = lived(folder, seed, rules, 80)
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
    lived(tmp_path, 3, PLAIN, 40)
    newest = checkpoint(tmp_path, Version(0, 1))
    kept = record_of(make_config(run={"name": "r"}), {"prompts": "a", "held_out": None, "deepspeed": {}})
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
    alter(newest / "checkpoint.json", format="1")  # which is damage: the older one is taken
    assert resume(tmp_path, start).trainer.checkpoint == Version(0, 0)
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
    lived(tmp_path, 1, PLAIN, 5)
    store = Store(tmp_path, "never")
    with closing(store), pytest.raises(DataError, match="another controller has written to"):
        Record(store, prompts, told)


# --- under every order of events and restarts: nothing lost, nothing twice, nothing too old

BATCH = PLAIN.batch
MAX_ATTEMPTS = PLAIN.max_attempts


OPEN: list[Store] = []


@pytest.fixture(autouse=True)
def _closes() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def opened(folder: Path, rules: Rules = PLAIN) -> Record:
    record = random_history.opened(folder, rules)
    OPEN.append(record.store)
    return record


async def reopened(record: Record, rules: Rules = PLAIN) -> Record:
    """Committed, closed, and opened again."""
    await record.store.commit()
    record.store.close()
    return opened(record.store.folder, rules)


def episode(asked: Rollout, version: Version) -> Rollout:
    """Five tokens, two of them an environment's."""
    return msgspec.structs.replace(scored(asked, *[version] * 5), own=((0, 2), (4, 5)))


class Slow(History):
    """Completions may begin with a version that was served lately, and kills may tear the arrays."""

    def __init__(self, folder: Path, seed: int, rules: Rules) -> None:
        super().__init__(folder, seed, rules)
        self.served = [self.applied]

    def versions(self) -> tuple[Version, ...]:
        return self.rng.choice(self.served), self.applied

    async def issue(self) -> None:
        room = self.state.room(self.applied, self.rules.bound.limit)
        await super().issue()
        left = self.state.step_of(self.applied) + self.rules.bound.limit + 1 - self.state.next_step
        assert self.state.outstanding <= max(0, left * self.rules.batch) or not room

    async def follow(self) -> None:
        await super().follow()
        self.served = [*self.served[-3:], self.applied]

    def tear(self) -> None:
        path = arrays_path(self.folder, 0)
        if path.exists():
            with path.open("ab") as file:
                file.write(b"(\xb5/\xfd\0\0"[: self.rng.randint(0, 6)])


@pytest.mark.parametrize("rules", KINDS.values(), ids=KINDS)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_any_order_of_events_keeps_the_guarantees(tmp_path_factory, rules: Rules, seed: int) -> None:
    folder = tmp_path_factory.mktemp("run")
    history = lived(folder, seed, rules, 250, of=Slow)
    report = check(folder, history.ledger)
    assert report.ok, report
    assert report.oldest <= rules.bound.hard
    assert report.late == 0 or rules.bound.hard > rules.bound.limit
    assert report.trained > 0 or report.dropped.get("rolled_back")
    state, (issued,) = history.state, rows_of(folder, "SELECT sum(NOT continues) FROM rollout")
    statuses = dict(rows_of(folder, "SELECT status, count(*) FROM rollout GROUP BY status"))
    assert issued == state.counters.issued
    assert statuses.get("dropped", 0) == state.counters.dropped.total()
    assert statuses.get("pending", 0) + statuses.get("buffered", 0) == state.outstanding


async def trained(folder: Path, steps: int, *saved_at: int, keep: int = 3, rules: Rules = PLAIN) -> Record:
    """A record of a trainer's first steps; `saved_at`: those with a checkpoint."""
    record = opened(folder, rules)
    await record.open_lineage(None, "model")
    for step in range(steps):
        await trained_step(record, step, Version(0, step))
        if step + 1 in saved_at:
            await saved(record, Version(0, step + 1), keep)
    return record


async def formed(record: Record, *versions: Version, complete: Callable[..., Rollout] = scored) -> Batch:
    """A batch is issued, generated with `versions` in turn, and formed."""
    for number, asked in enumerate(record.issue(record.state.rules.batch)):
        record.admit(complete(asked, versions[number % len(versions)]))
    batch = await record.form_batch()
    assert batch is not None
    return batch


async def trained_step(record: Record, step: int, *versions: Version, **options: Any) -> None:
    await formed(record, *versions, **options)
    record.write(Stepped(Version(0, step + 1)))


async def saved(record: Record, version: Version, keep: int) -> None:
    record.write(Checkpointed(version, "somewhere"))
    await record.store.commit()
    await record.tidy(keep)


async def test_batches_whose_rollouts_were_forgotten_are_formed_anew(tmp_path: Path) -> None:
    record = await trained(tmp_path, 4)
    await saved(record, Version(0, 2), keep=1)

    opening = await record.open_lineage(None, "model")
    assert (opening.start, opening.branch) == (0, 0)
    assert set(record.state.buffer) == {f"0:{i}:0" for i in range(6, 12)}


async def test_a_checkpoint_that_was_removed_is_never_gone_back_to(tmp_path: Path) -> None:
    """With two of three kept, a trainer that begins from the older of them has no second one."""
    record = await trained(tmp_path, 5, 1, 3, 5, keep=2)
    assert record.state.kept(2) == [Version(0, 3), Version(0, 5)]
    await record.open_lineage(Version(0, 3), "model")
    assert record.state.kept(2) == [Version(0, 3)]
    assert retreat(record.state, 3, 2, "worse") is None
    assert (await reopened(record)).state.kept(2) == [Version(0, 3)]


async def test_a_checkpoint_that_came_back_without_a_report_is_on_record(tmp_path) -> None:
    record = await trained(tmp_path, 0)
    for step in range(2):
        await formed(record, Version(0, 0))
        record.write(HandedOut(Version(0, step)))

    opening = await record.open_lineage(Version(0, 1), "model")
    assert (opening.start, opening.branch) == (1, 2)
    assert record.state.trained_tokens == {0: BATCH}
    assert record.state.checkpoints == [Version(0, 1)]
    assert record.state.bisection.died_on == Version(0, 1), "the batch that the trainer had next"
    assert (await reopened(record)).state.trained_tokens == {0: BATCH}


async def test_what_no_snapshot_covers_is_replayed_after_a_start_from_the_model_folder(tmp_path) -> None:
    record = await trained(tmp_path, 6, 4)
    await record.open_lineage(None, "model")  # the folder of checkpoints is gone
    again_trained = []
    for step in range(2):
        again_trained += record.state.batches[Version(0, step)].ids
        record.write(Stepped(Version(1, step + 1)))
    await saved(record, Version(1, 2), keep=3)

    again = await reopened(record)
    opening = await again.open_lineage(Version(1, 2), "model")
    assert (opening.start, opening.branch) == (2, 6)
    left = [one for batch in again.state.batches.values() for one in batch.ids]
    assert {*again_trained, *left} == {f"0:{i}:0" for i in range(6 * BATCH)}


async def test_a_bisection_after_a_start_from_the_model_folder_survives_a_restart(tmp_path: Path) -> None:
    record = await trained(tmp_path, 6, 2, 4)
    for lineage in (1, 2):
        await record.open_lineage(None, "model")
        record.write(HandedOut(Version(lineage, 0)))
    await record.open_lineage(None, "model")
    part = await record.form_batch()
    assert part.is_part
    again = await reopened(record)
    assert again.state.batch_of(0).ids == part.ids


async def test_behind_a_part_that_has_become_too_old_the_next_batch_is_formed_as_any(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The step of the first part leaves no version of which the second would be young enough."""
    record = opened(tmp_path, Rules(4, Bound(0, 0)))
    await record.open_lineage(None, "model")
    for asked in record.issue(4):
        record.admit(scored(asked, Version(0, 0)))
    for lineage in range(2):
        await record.form_batch()
        record.write(HandedOut(Version(lineage, 0)))
        await record.open_lineage(None, "model")
    assert (await record.form_batch()).ids == ["0:0:0", "0:1:0"]
    record.write(Stepped(Version(2, 1)))
    batch = await formed(record, Version(2, 1))
    assert (batch.ids, batch.is_part) == ([f"0:{number}:0" for number in range(4, 8)], False)
    assert record.state.counters.dropped == {"too_old": 2}
    assert "died on a batch with ['0:2:0', '0:3:0']: too old to be tried by themselves" in caplog.text


async def test_a_batch_is_read_back_though_a_trainer_that_begins_meanwhile_leaves_it(tmp_path: Path) -> None:
    """A thread reads it, which may take long, beside the event loop."""
    record = opened(tmp_path)
    for asked in record.issue(BATCH):
        record.admit(scored(asked, Version(0, 0)))
    record = await reopened(record)
    await record.open_lineage(None, "model")
    batch = await record.form_batch()
    read = record.store.read

    def left(location: Location) -> Rollout:
        record.state.where.clear()
        return read(location)

    record.store.read = left
    assert all(rollout.tokens.data for rollout in record.rollouts(batch))


async def test_a_prompt_that_never_ends_is_dropped_after_some_attempts_and_a_lost_replica_is_none(
    tmp_path: Path,
) -> None:
    """Tokens of completions that are requested again count as generated."""
    record = opened(tmp_path)
    (asked,) = record.issue(1)
    for reason in ("replica_lost",) * 3 * MAX_ATTEMPTS + ("straggler",) * (MAX_ATTEMPTS - 1):
        asked = record.requeue(asked, reason, tokens=7 * (reason == "straggler"))
        assert asked is not None
    assert record.requeue(asked, "straggler") is None
    counters = record.state.counters
    assert counters.dropped == {"straggler": 1}
    assert counters.requeued == {"replica_lost": 3 * MAX_ATTEMPTS, "straggler": MAX_ATTEMPTS}
    tokens = 7 * (MAX_ATTEMPTS - 1)
    assert (counters.generated_tokens, counters.dropped_tokens["straggler"]) == (tokens, tokens)


async def test_tokens_of_environments_are_counted_apart_live_after_a_restart_and_in_the_archive(
    tmp_path: Path,
) -> None:
    """Of 5 tokens 3 are the student's; the last of 7 episodes is dropped."""
    record = await trained(tmp_path, 0)
    for step in range(2):
        await trained_step(record, step, Version(0, 0), complete=episode)
    (asked,) = record.issue(1)
    record.reject(msgspec.structs.replace(episode(asked, Version(0, 0)), issued=asked.issued), "empty", "")
    counters, tokens = record.state.counters, dict(record.state.trained_tokens)
    assert (counters.episodes, counters.turns, counters.environment_tokens) == (6, 12, 12)
    assert (counters.generated_tokens, counters.dropped_tokens) == (21, {"empty": 3})
    assert tokens == {0: 9, 1: 9}
    await saved(record, Version(0, 2), keep=1)
    record = await reopened(record)
    assert not record.state.batches
    assert (record.state.counters, record.state.trained_tokens) == (counters, tokens)


async def test_another_runs_record_is_refused(tmp_path: Path) -> None:
    (await trained(tmp_path, 0)).store.close()
    prompts = PromptStream(MemoryPrompts(), seed=1)
    with pytest.raises(ConfigError, match="is of run 'r' with seed 0, this is 'r' with seed 1"):
        begun(Store(tmp_path), prompts, Rules(BATCH, Bound(1, 1)), seed=1)


@dataclass
class Table(MemoryPrompts):
    rows: int = 100

    def __len__(self) -> int:
        return self.rows


@pytest.mark.parametrize(("rows", "per_prompt"), [(100, 2), (99, 1)])
async def test_prompts_that_would_come_twice_after_a_resume_are_refused(
    tmp_path: Path, rows: int, per_prompt: int
) -> None:
    record = begun(Store(tmp_path), PromptStream(Table(), seed=0), PLAIN)
    first = {asked.id for asked in record.issue(40)}
    await record.store.commit()
    record.store.close()
    other = PromptStream(Table(rows=rows), seed=0, per_prompt=per_prompt)
    other.cursor = record.state.cursor
    assert first & {prompt.id for prompt in other.take(40)}, "the same ids again"
    with pytest.raises(ConfigError, match=f"of 100 prompts, 1 of each, and these are {rows}"):
        begun(Store(tmp_path), other, PLAIN)
    again = begun(Store(tmp_path), PromptStream(Table(), seed=0), PLAIN)
    assert not first & {asked.id for asked in again.issue(40)}


# --- policies ---------------------------------------------------------------------------------------------


async def test_a_resumed_run_hands_out_batches_with_the_weights_on_record_whatever_it_says_now(
    tmp_path: Path,
) -> None:
    record = await trained(tmp_path, 0, rules=FRESHNESS)
    for step in range(4):
        await trained_step(record, step, *(Version(0, max(0, step - age)) for age in range(1, BATCH + 1)))
    await record.store.commit()
    weights, half_life = [batch.weights for batch in record.state.batches.values()], FRESHNESS.bound.half_life
    assert weights[3] == [1.0, 2 ** (-1 / half_life), 2 ** (-2 / half_life)]
    assert record.state.counters.late == sum(weight < 1 for batch in weights for weight in batch) > 0
    again = opened(tmp_path, Rules(BATCH, Bound(1, 4, 9.0)))
    await again.open_lineage(None, "model")
    for step in range(4):
        old, new = record.state.batches[Version(0, step)], again.state.batch_of(step)
        assert (new.weights, [e.id for e in new.rollouts]) == (old.weights, [e.id for e in old.rollouts])


async def test_a_group_without_a_member_goes_together_buffered_in_flight_or_asked_again(tmp_path) -> None:
    record = await trained(tmp_path, 0, rules=Rules(6, Bound(2, 2), group=3))
    first, second = record.issue(6)[:3], list(record.state.pending.values())[3:]
    for one in (first[0], second[0]):
        record.admit(scored(one, Version(0, 0)))
    record.drop([first[1].id], "empty", "a completion without tokens")
    assert record.state.counters.dropped == {"empty": 1, "group_broken": 1}
    assert record.state.is_broken(first[2].id)
    assert list(record.state.buffer) == [second[0].id]

    record.admit(scored(first[2], Version(0, 0)))  # it was in flight
    assert record.state.counters.dropped == {"empty": 1, "group_broken": 2}
    assert not record.state.broken

    record.drop([second[1].id], "engine_failed", "not finite")
    assert record.requeue(second[2], "replica_lost") is None
    assert record.state.outstanding == 0


async def test_a_lost_member_is_mended_by_a_restart_that_cut_its_record_off(tmp_path: Path) -> None:
    record = await trained(tmp_path, 0, rules=GROUPS)
    one, other = record.issue(2)
    record.admit(scored(one, Version(0, 0)))
    record.write(Dropped([other.id], "empty", 0))  # and a crash before what follows from it
    again = await reopened(record, GROUPS)
    assert again.state.counters.dropped == {"empty": 1, "group_broken": 1}
    assert again.state.outstanding == 0


async def test_a_power_cut_right_after_a_rollback_gives_none_of_its_rollouts_back(tmp_path: Path) -> None:
    record = await trained(tmp_path, 0)
    good, bad = [(await formed(record, Version(0, step))).ids for step in range(2)]
    await record.open_lineage(None, "model", without=bad)
    record.store.close()
    again = opened(tmp_path)
    assert list(again.state.buffer) == good
    assert again.state.counters.dropped == {"rolled_back": BATCH}
    report = check(tmp_path, {})
    assert ("lost" in report.violations, report.dropped) == (False, {"rolled_back": BATCH})
