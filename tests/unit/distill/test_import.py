"""A run that a release with a journal began goes on from the record that is made of it.

journals.tar.xz holds four such runs, whose events that release drew at random, with kills, rollbacks and
drops, and beside each what a restart by that release found.
"""

from __future__ import annotations

import json
import struct
import tarfile
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from in_memory import MemoryPrompts
from random_history import KINDS, opened
from recorded import rows_of

from distill.batching.packing import Shape, pack_batch
from distill.buffer import Bound, Rules
from distill.prompts.stream import PromptStream
from distill.record.audit import audit
from distill.record.journal import JOURNAL, import_journal
from distill.record.load import load
from distill.record.resume import Start, resume
from distill.record.store import RECORD, Store
from sync.base.errors import DataError
from sync.wire import Version

JOURNALS = Path(__file__).with_name("journals.tar.xz")
RUNS = {"plain11": "plain", "freshness4": "freshness", "groups4": "groups", "both2": "both"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with tarfile.open(JOURNALS) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def expected_of(run: Path) -> dict[str, Any]:
    """What a restart by that release found, less the checkpoints that it had removed with the batches after
    them: it named those still."""
    expected: dict[str, Any] = json.loads((run / "state.json").read_bytes())
    first = min(Version.parse(batch).step for batch in expected["batches"])
    named = expected["checkpoints"]
    expected["checkpoints"] = [name for name in named if Version.parse(name).step >= first]
    assert expected["checkpoints"] != named
    return expected


def on_record(run: Path, rules: str) -> dict[str, Any]:
    """The state on record, as that release wrote it down; every array of it is read."""
    store = Store(run, "never")
    with closing(store):
        state = load(store.connection, KINDS[rules], store.read)
        for location in state.where.values():
            store.read(location)
        rows = store.connection.execute("SELECT lineage, step, trained FROM batch").fetchall()
    trained = {(lineage, step): bool(done) for lineage, step, done in rows}
    batches = {str(v): [b.ids, b.ages, b.weights, trained[v]] for v, b in sorted(state.batches.items())}
    return {
        "cursor": [*state.cursor],
        "counters": vars(state.counters),
        "pending": {id: rollout.attempts for id, rollout in state.pending.items()},
        "buffer": [*state.buffer],
        "batches": batches,
        "lineages": [[*lineage] for lineage in state.lineages.nodes],
        "checkpoints": [*map(str, state.checkpoints)],
        "reached": str(state.reached),
        "next_step": state.next_step,
        "evaluations": len(state.evaluations),
        "rollbacks": state.rollbacks,
        "arrays": sorted(state.where),
    }


@pytest.mark.parametrize("name", RUNS)
async def test_a_run_with_a_journal_goes_on_as_it_would_have(folder: Path, name: str) -> None:
    """Its batches are handed out again, and what is buffered in a new one."""
    run, expected = folder / name, expected_of(folder / name)
    with pytest.raises(DataError, match=r"holds a journal and no run\.db: leave --dry-run out"):
        resume(run, Start("r", 0, KINDS[RUNS[name]], PromptStream(MemoryPrompts(), seed=0)))
    await import_journal(run, Rules(1, Bound(0, 0)), expected.pop("keep"))  # those on record count
    assert on_record(run, RUNS[name]) == expected
    damage = {"record_damaged", "lost", "issued_twice", "wrong_weight", "impossible_version"}
    assert not damage & audit(run).violations.keys()
    record = opened(run, KINDS[RUNS[name]])
    await record.open_lineage(record.state.checkpoints[-1], "model")
    await record.form_batch()
    for batch in [*record.state.batches.values()]:
        batch.rollouts = record.rollouts(batch)
        (share,) = pack_batch(batch, 1, Shape(64, ["t"]), lambda version: version.step)
        for rows in share.micro_batches:
            assert rows.teacher_logprob.shape == rows.behavior_logprob.shape
            assert rows.prompt_lens == rows.completion_lens, "as that release drew them"
    record.issue(2)
    await record.store.commit()
    record.store.close()
    (run / RECORD).rename(run / "kept")
    await import_journal(run, KINDS[RUNS[name]], 1)  # the journal is still there
    assert on_record(run, RUNS[name])["counters"] == expected["counters"]


async def test_what_a_crash_tore_is_left_out_and_damage_is_named(folder: Path) -> None:
    run = folder / "plain11"
    expected = expected_of(run)
    with max((run / JOURNAL).glob("journal-*.log")).open("ab") as file:
        file.write(b"DJ\x50\0\0\0\1")
    await import_journal(run, KINDS["plain"], expected.pop("keep"))
    assert on_record(run, "plain") == expected
    (run / RECORD).unlink()
    first = min((run / JOURNAL).iterdir())
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 1
    first.write_bytes(data)
    with pytest.raises(DataError, match=f"{first.name} is damaged: restore it from a copy"):
        await import_journal(run, KINDS["plain"], 1)
    first.unlink()
    with pytest.raises(DataError, match=r"holds segments \[1, .*restore those that are missing"):
        await import_journal(run, KINDS["plain"], 1)
    assert not (run / RECORD).exists()


async def test_the_reward_of_a_rollout_and_that_it_was_cut_off_are_imported(folder: Path) -> None:
    """The runs that are kept have neither: both are written into the entries of an archive."""
    path = folder / "plain11" / JOURNAL / "archive-00000000.log"
    entries, columns = msgspec.msgpack.decode(zstandard.decompress(path.read_bytes()[10:]))
    scored = [entry for entry in entries if entry[0] == "Rollout"]
    for entry in scored:
        entry[7], entry[11] = True, 0.5
    payload = msgspec.msgpack.encode((entries, columns))
    crc = zlib.crc32(payload, zlib.crc32(struct.pack("<2sIQQ", b"DA", len(payload), 0, 0)))
    path.write_bytes(struct.pack("<2sII", b"DA", len(payload), crc) + payload)
    await import_journal(folder / "plain11", KINDS["plain"], 1)
    cut = "SELECT id FROM rollout WHERE truncated AND reward = 0.5 ORDER BY scored"
    assert rows_of(folder / "plain11", cut) == [entry[1] for entry in scored] != []
