"""The audit: a run's folder that lies is refused by the name of what it breaks, and no other one is."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from in_memory import MemoryPrompts
from small_record import LEDGER, WEIGHTED, checkpoint, ledgers, record
from started import begun

from distill.buffer import Batch, Bound, Rules
from distill.cli.main import app
from distill.prompts.stream import PromptStream
from distill.record.audit import VIOLATIONS, AuditReport, audit
from distill.record.changes import Checkpointed, Stepped, VersionPublished
from distill.record.rollout import Rollout
from distill.record.store import RECORD, Store
from student_trainer.ledger import Ledger, read
from sync.base.errors import DataError, DistillError
from sync.wire import Scored, Version, VersionSpan, pack

RULES = Rules(6, Bound(1, 3, 2.0), on_policy=0.8)
ARRAYS = 600
"""Bytes of a file of them."""


class Run:
    """A run that is resumed on another number of ranks, with everything that the audit looks at."""

    def __init__(self, folder: Path, watch: Callable[[Version, str], None] = lambda version, what: None):
        """`watch` is told of each version and batch once it is on record."""
        self.folder, self.watch = folder, watch
        store = Store(folder, "batch", ARRAYS)
        prompts = PromptStream(MemoryPrompts(), seed=0)
        self.record = begun(store, prompts, RULES)

    async def live(self) -> None:
        await self.train(ranks=2, checkpoint=None, steps=5)
        await self.train(ranks=3, checkpoint=Version(0, 4), steps=4)
        self.record.issue(2)
        await self.record.store.commit()
        self.record.store.close()

    async def train(self, ranks: int, checkpoint: Version | None, steps: int) -> None:
        opened = await self.record.open_lineage(checkpoint, "model", None, ranks)
        start = Version(opened.lineage, opened.start)
        ledgers = [Ledger(self.folder / "ledger", start, checkpoint, rank) for rank in range(ranks)]
        for step in range(opened.start, opened.start + steps):
            batch = self.record.state.batch_of(step) or await self.compose(Version(opened.lineage, step))
            for rank, ledger in enumerate(ledgers):
                share = batch.rollouts[rank::ranks]
                tokens = sum(one.own_length for one in share)
                ledger.record(step + 1, [one.id for one in share], f"bits {step + 1} of {rank}", tokens)
            await self.report(Version(opened.lineage, step + 1))
        batch = await self.compose(Version(opened.lineage, opened.start + steps))
        ids = [one.id for one in batch.rollouts][0::ranks]
        ledgers[0].record(batch.version.step + 1, ids, "killed before the others")

    async def compose(self, version: Version) -> Batch:
        for number, asked in enumerate(self.record.issue(RULES.batch + 1)):
            self.record.admit(generated(asked, Version(version.lineage, max(0, version.step - number % 3))))
        batch = await self.record.form_batch()
        self.watch(version, "batch")
        return batch

    async def report(self, version: Version) -> None:
        self.record.write(VersionPublished(version, "delta", 1, 2, 0.1))
        if version.step % 2 == 0:
            path = checkpoint(self.folder, version)
            self.record.write(Checkpointed(version, str(path)))
        self.record.write(Stepped(version))
        await self.record.store.commit()
        self.watch(version, "version")


def generated(asked: Rollout, version: Version) -> Rollout:
    """Every third one is an episode of two turns, of one token each."""
    is_episode = asked.number % 3 == 0 and not asked.by_teacher
    count = 3 if is_episode else 2
    values, ids, name = pack(np.zeros(count, "f4")), pack(np.zeros(count, "i4")), asked.id
    spans = [] if asked.by_teacher else [VersionSpan(version, 0, count)]
    made = Rollout(name, asked.number, ids, ids, values, spans, False, "t", Scored(name, values))
    own = [(0, 1), (2, 3)] if is_episode else []
    return msgspec.structs.replace(made, by_teacher=asked.by_teacher, own=own)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    asyncio.run(Run(folder).live())
    return folder


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "run"))


# --- what a liar does to a record -------------------------------------------------------------------------


def sql(statements: str) -> Callable[[Path], None]:
    """Rows are other ones, in a database that is sound page by page."""

    def doctor(run: Path) -> None:
        with closing(sqlite3.connect(run / RECORD, isolation_level=None)) as tables:
            tables.executescript(f"PRAGMA ignore_check_constraints = ON; {statements}")

    return doctor


def arrays(run: Path) -> Path:
    return max((run / "arrays").iterdir())


def with_bytes(path: Callable[[Path], Path], change: Callable[[bytearray], object]) -> Callable[[Path], None]:
    def doctor(run: Path) -> None:
        data = bytearray(path(run).read_bytes())
        change(data)
        path(run).write_bytes(data)

    return doctor


def database(run: Path) -> Path:
    return run / RECORD


def linked_to_itself(run: Path) -> None:
    (run / RECORD).unlink()
    (run / RECORD).symlink_to(RECORD)


# --- and to a ledger --------------------------------------------------------------------------------------


def ledger(run: Path, lineage: int = 1, rank: int = 0) -> Path:
    return run / "ledger" / f"L{lineage:03d}-rank{rank}.jsonl"


def with_lines(change: Callable[[list[bytes]], list[bytes]], rank: int = 0) -> Callable[[Path], None]:
    return lambda run: ledger(run, rank=rank).write_bytes(  # type: ignore[func-returns-value, return-value]
        b"".join(change(ledger(run, rank=rank).read_bytes().splitlines(keepends=True)))
    )


def forged(
    change: Callable[[list[dict]], list[dict]],
    lineage: int = 1,
    rank: int = 0,
    parent: Version | None = Version(0, 4),
) -> Callable[[Path], None]:
    """The file of a rank is written anew with other steps, and its chain holds."""

    def doctor(run: Path) -> None:
        lines = [json.loads(line) for line in ledger(run).read_text().splitlines()]
        ledger(run, lineage, rank).unlink(missing_ok=True)
        again = Ledger(run / "ledger", Version(lineage, lines[0]["step"]), parent, rank)
        for line in change(lines[1:]):
            again.record(line["step"], line["ids"], line["weights"], line.get("tokens"))

    return doctor


def newest(run: Path) -> Path:
    return run / "checkpoints" / (run / "checkpoints/latest").read_text().strip()


def latest_names(name: str) -> Callable[[Path], object]:
    return lambda run: (run / "checkpoints/latest").write_text(f"{name}\n")


def with_index(**fields: Any) -> Callable[[Path], object]:
    """The newest checkpoint's index says something else."""

    def doctor(run: Path) -> None:
        path = newest(run) / "checkpoint.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return doctor


def as_folder(path: Callable[[Path], Path]) -> Callable[[Path], object]:
    def doctor(run: Path) -> None:
        found = path(run)
        found.unlink()
        found.mkdir()

    return doctor


def put(place: slice, data: bytes) -> Callable[[bytearray], object]:
    return lambda whole: whole.__setitem__(place, data)


def flip(data: bytearray) -> None:
    data[40] ^= 4


LIES: dict[str, dict[str, Callable[[Path], object]]] = {
    "record_damaged": {
        "the record is a folder": as_folder(database),
        "the record is a link to itself": linked_to_itself,
        "the record is gone": lambda run: (run / RECORD).unlink(),
        "the record is empty": with_bytes(database, bytearray.clear),
        "the record is cut short": with_bytes(database, lambda d: d.__delitem__(slice(len(d) // 2, None))),
        "a page of the record is blank": with_bytes(database, put(slice(4096, 8192), bytes(4096))),
        "the head of the record is blank": with_bytes(database, put(slice(0, 4096), bytes(4096))),
        "arrays are gone": lambda run: arrays(run).unlink(),
        "arrays are a folder": as_folder(arrays),
        "arrays are cut": with_bytes(arrays, bytearray.pop),
        "a trainer of too many ranks": sql("UPDATE lineage SET ranks = 1 << 40"),
        "a half-life of zero": sql("UPDATE batch SET half_life = 0.0"),
        "a lineage begins with itself": sql("UPDATE lineage SET from_lineage = number WHERE number = 1"),
        "a lineage takes over its own batches": sql("UPDATE lineage SET origin = number WHERE number = 1"),
        "a column is no JSON": sql("UPDATE rollout_row SET spans = '[' WHERE row = 3"),
        "a batch is empty": sql("UPDATE batch SET members = '[]' WHERE step = 0"),
    },
    "missing_in_ledger": {
        "a file is blank": lambda run: ledger(run).write_bytes(bytes(900)),
        "the last line of a reported step is torn": with_lines(lambda x: [*x[:-1], x[-1][:30]], 1),
        "a version was published without a step":
            sql("INSERT INTO version VALUES (999, 1, 30, 'delta', 1, 2, 0.1)"),
    },
    "unknown_version": {
        "a version of no lineage was evaluated":
            sql("INSERT INTO evaluation VALUES (999, 5, 1, 0.1, NULL, NULL, '{}')"),
        "a lineage that nobody opened was trained": forged(lambda x: x, lineage=7),
    },
    "ledger_damaged": {
        "a checksum was altered": with_lines(lambda x: [x[0], x[1].replace(b"bits", b"bats"), *x[2:]]),
        "a step was taken out and the chain forged": forged(lambda x: [x[0], *x[2:]]),
        "a line names no rollouts and the chain is forged": forged(lambda x: [{**x[0], "ids": 7}, *x[1:]]),
        "a file is another lineage's": lambda run: shutil.copy(ledger(run, 0), ledger(run)),
        "a file is another rank's": lambda run: shutil.copy(ledger(run), ledger(run, rank=1)),
        "a rank too many": forged(lambda x: x, rank=9),
        "a lineage of other parents": forged(lambda x: x, parent=Version(0, 2)),
    },
    "checkpoint_missing": {
        "a file of it is cut": lambda run: (newest(run) / "weights.pt").write_bytes(b"we"),
        "`latest` is gone": lambda run: (run / "checkpoints/latest").unlink(),
        "`latest` names an older one": latest_names(str(Version(0, 4))),
        "`latest` is a folder": as_folder(lambda run: run / "checkpoints/latest"),
        "an index is a folder": as_folder(lambda run: newest(run) / "checkpoint.json"),
        "an older one is in its place": with_index(version=str(Version(0, 4))),
        "another run saved it": with_index(run_id="other"),
        "its index names no files": with_index(files={}),
        "its index names what no file can be":
            with_index(files={name: {"size": 1, "blake3": ""} for name in ("x" * 5000, "\0")}),
    },
}  # fmt: skip


def test_a_run_that_was_resumed_on_other_ranks_and_killed_twice_passes(sound: Path) -> None:
    report = audit(sound)
    assert report.ok, report.violations
    assert (report.prompts, report.trained, report.oldest) == (65, 8 * 6 + 2, 3)
    assert report.late > 0
    assert report.tokens_by_teacher > 0
    assert report.tokens == 2 * report.scored, "of an episode, two of its three tokens"
    assert len(list((sound / "arrays").iterdir())) > 3


async def test_a_trainer_may_begin_from_an_older_checkpoint_and_gets_its_batches_again(tmp_path) -> None:
    first = Run(tmp_path)
    await first.train(ranks=2, checkpoint=None, steps=5)
    await first.record.tidy(2)
    first.record.store.close()
    shutil.rmtree(newest(tmp_path))
    latest_names(str(Version(0, 2)))(tmp_path)
    second = Run(tmp_path)
    opened = await second.record.open_lineage(Version(0, 2), "model", None, 2)
    second.record.store.close()
    assert (opened.start, opened.branch) == (2, 6)
    assert audit(tmp_path).ok


@pytest.mark.parametrize(("violation", "what"), [(name, what) for name in LIES for what in LIES[name]])
def test_a_doctored_run_is_refused_by_name(violation: str, what: str, run: Path) -> None:
    LIES[violation][what](run)
    found = audit(run).violations
    assert violation in found, found
    assert all(found[violation])


def test_what_is_damaged_is_named_with_file_and_place(run: Path) -> None:
    with_bytes(arrays, flip)(run)
    with_lines(lambda lines: [lines[0], *lines[2:]])(run)
    found = audit(run).violations
    assert re.search(r"arrays/\d{8}\.bin is damaged in the \d+ bytes from 0 on", *found["record_damaged"])
    assert re.search(r"L001-rank0.jsonl line 2 is not what was written", *found["ledger_damaged"])


def test_where_the_record_cannot_be_asked_nothing_else_is_claimed(run: Path) -> None:
    (run / RECORD).write_bytes(bytes(8192))
    ledger(run, rank=2).unlink()
    assert audit(run).violations.keys() == {"record_damaged"}


def test_the_command_says_what_a_violation_means_and_where_it_is(run: Path, capsys) -> None:
    shutil.rmtree(run / "ledger")
    with pytest.raises(DistillError, match=r"breaks a guarantee: missing_in_ledger"):
        app(["audit", str(run), "--json", str(run / "audit.json")], standalone_mode=False)
    said = capsys.readouterr().out
    assert f"missing_in_ledger: {VIOLATIONS['missing_in_ledger']}" in said
    assert "L000-v00000001 to L000-v00000005 of rank 0" in said
    assert json.loads((run / "audit.json").read_text())["ok"] is False


def files_of(run: Path) -> Iterator[Path]:
    return (path for path in sorted(run.rglob("*")) if path.is_file() and path.stat().st_size)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_becomes_of_any_file_the_audit_ends_with_a_report(sound: Path, tmp_path, seed: int) -> None:
    rng = random.Random(seed)
    for number in range(40):
        run = Path(shutil.copytree(sound, tmp_path / str(number)))
        path = rng.choice(list(files_of(run)))
        data = bytearray(path.read_bytes())
        begin = rng.randrange(len(data))
        end = min(len(data), begin + rng.choice([1, 30, 4096]))
        match rng.randrange(4):
            case 0:
                data[begin] ^= 1 << rng.randrange(8)
            case 1:
                data[begin:end] = bytes(end - begin)
            case 2:
                del data[begin:end]
            case _:
                data[begin:begin] = rng.randbytes(end - begin)
        path.write_bytes(data)
        report = audit(run)
        assert report.ok == (not report.violations)
        if report.ok:  # nothing that was lost matters: a mark, a tail that no fsync covers, no index
            assert report.trained in (48, 50)
        shutil.rmtree(run)


VALUES = {
    "INTEGER": [-(2**63), -1, 0, 1, 7, 2**31, 2**62],
    "TEXT": ["", "x", "[]", "{}", "7", "null", "0:0:0", "a" * 1000, "[[99, 3, 0]]"],
    "REAL": [math.inf, -1.0, 0.0],
    "BLOB": [b"", b"x", b"\x94\x01\xa1k\x03\xc4\x01d"],
}


@pytest.mark.parametrize("seed", range(2))
def test_whatever_a_row_says_the_audit_ends_with_a_report(sound: Path, tmp_path: Path, seed: int) -> None:
    """One value of one row is another of its type; a resume refuses it with a message or goes on."""
    rng, refused = random.Random(seed), 0
    with closing(sqlite3.connect(sound / RECORD)) as tables:
        columns = [
            (table, column, kind)
            for (table,) in tables.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
            for _, column, kind, *_ in tables.execute(f"PRAGMA table_info({table})").fetchall()
        ]
    for number in range(60):
        run = Path(shutil.copytree(sound, tmp_path / str(number)))
        table, column, kind = rng.choice(columns)
        with closing(sqlite3.connect(run / RECORD, isolation_level=None)) as tables:
            tables.execute("PRAGMA ignore_check_constraints = ON")
            with suppress(sqlite3.IntegrityError):
                key = "key" if table == "fact" else "rowid"
                row = rng.choice(tables.execute(f"SELECT {key} FROM {table}").fetchall() or [(None,)])
                value = rng.choice(VALUES[kind])
                tables.execute(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (value, *row))
        report = audit(run)
        assert report.ok == (not report.violations)
        refused += "record_damaged" in report.violations
        try:
            store = Store(run, "batch", ARRAYS)
            try:
                begun(store, PromptStream(MemoryPrompts(), 0), RULES)
            finally:
                store.close()
        except DistillError as error:
            assert str(error)  # noqa: PT017
        shutil.rmtree(run)
    assert refused


def test_a_run_that_goes_on_has_no_violation(tmp_path: Path) -> None:
    """At every moment between two of its writes, whatever has happened meanwhile."""
    audited: list[int] = []

    def look(version: Version, what: str) -> None:
        found = audit(tmp_path)
        assert found.ok, found.violations
        audited.append(found.trained)

    asyncio.run(Run(tmp_path, look).live())
    assert len(audited) > 15
    assert audited[-1] >= audited[0]


@pytest.mark.parametrize(
    ("before", "after", "violation"),
    [(0, 2, None), (0, 0, "missing_in_ledger"), (2, 2, "not_as_batched")],
)
def test_a_run_may_take_steps_while_the_audit_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int, violation: str | None
) -> None:
    """The record is read at moment 1, the ledger at the moments `before` and `after`."""
    moments = [tmp_path / str(number) for number in range(3)]

    def copy(version: Version, what: str) -> None:
        if what == "version" and version.step <= len(moments):
            shutil.copytree(tmp_path / "run", moments[version.step - 1])

    asyncio.run(Run(tmp_path / "run", copy).live())
    reads = iter([before, after])
    monkeypatch.setattr("distill.record.audit.read", lambda _: read(moments[next(reads)] / "ledger"))
    found = audit(moments[1]).violations
    assert violation in found if violation else not found


def test_a_run_that_has_only_begun_passes_and_a_folder_of_something_else_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds neither run\.db nor ledger: name the folder of a run"):
        audit(tmp_path)
    Store(tmp_path).close()  # its servers start and are checked, and nothing is committed yet
    assert audit(tmp_path).ok


# --- of eight rollouts, every violation


def audited(folder: Path, change: str = "", trained: dict[int, dict[int, list[str]]] = LEDGER) -> AuditReport:
    db = record(folder)
    db.executescript(f"PRAGMA foreign_keys = OFF; {change}")
    ledgers(folder, trained)
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    report = audit(folder)
    assert before == {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    return report


def test_a_sound_run_passes(tmp_path: Path) -> None:
    report = audited(tmp_path)
    assert report.violations == {}
    assert (report.prompts, report.scored, report.trained, report.tokens) == (8, 7, 6, 14)
    assert (report.open_prompts, report.dropped, report.oldest) == (["h"], {"too_old": 1}, 1)
    assert (report.again, report.differing) == (1, [])


def third_step(*ids: str) -> dict[int, dict[int, list[str]]]:
    return {**LEDGER, 1: {2: ["c", "d"], 3: [*ids]}}


OTHERWISE = {"not_as_batched": ["L001-v00000003"]}


HALF = {**LEDGER, 0: {1: ["a", "b"], 2: ["c"]}}
"""As after a crash, which may cut a step off unless it was reported."""
LEDGERS: list[tuple[str, dict[int, dict[int, list[str]]], dict[str, list[str]]]] = [
    ("", {**LEDGER, 1: {2: ["c", "d"]}}, {"missing_in_ledger": ["L001-v00000003 of rank 0"]}),
    ("", {0: LEDGER[0]}, {"missing_in_ledger": ["L001-v00000002 to L001-v00000003 of rank 0"]}),
    ("", third_step("a", "e"), {"trained_twice": ["a"], **OTHERWISE, "too_old": ["a"]}),
    ("", third_step("e"), OTHERWISE),
    ("", third_step("e", "f", "g"), OTHERWISE),
    ("", third_step("e", "zz"), {**OTHERWISE, "not_on_record": ["zz"]}),
    ("", HALF, {"not_as_batched": ["L000-v00000002"]}),
    ("DELETE FROM step WHERE lineage = 0 AND step = 2", HALF, {}),
]


@pytest.mark.parametrize(
    ("weight", "violations"), [(2**-0.5, {}), (0.5, {"wrong_weight": ["c", "d", "e", "f"]})]
)
def test_late_rollouts_up_to_the_hard_limit_pass_with_the_weight_of_their_age(
    tmp_path: Path, weight: float, violations: dict[str, list[str]]
) -> None:
    late = f"UPDATE batch SET max_staleness = 0, half_life = 2.0; {WEIGHTED} WHERE (lineage, step) <> (0, 0)"
    report = audited(tmp_path, late.format(weight))
    assert (report.late, report.violations) == (4, violations)


OTHER_RUN = """UPDATE rollout_row SET spans = '[[0, 120, 0]]' WHERE id = 'e'"""
CHANGES: dict[str, dict[str, list[str]]] = {
    "DELETE FROM rollout_row WHERE id = 'h'": {},  # the newest of all may not be on disk yet
    "DELETE FROM rollout_row WHERE id = 'g'": {"record_damaged": ["rollouts 6 to 6"]},
    "DELETE FROM rollout_row WHERE id IN ('c', 'd')": {
        "record_damaged": [
            "the rows of the run contradict each other (KeyError(2)): restore run.db from a copy, or start a "
            "new run",
            *("rollouts 2 to 3", "rollout row 2 of the batch of L000-v00000001"),
            "rollout row 3 of the batch of L000-v00000001",
        ],
        "not_as_batched": ["L000-v00000002", "L001-v00000002"],
        "not_on_record": ["c", "d", "c", "d"],
    },
    "UPDATE batch SET members = '[[5, 1]]' WHERE lineage = 1": {"lost": ["e"], **OTHERWISE},
    "INSERT INTO lineage VALUES (2, 70, NULL, NULL, 0, 1, 0, 1, 'm')": {
        "lost": ["a", "b", "c", "d", "e", "f"]
    },
    "DELETE FROM opening": {"record_damaged": ["no start of a controller"]},
    "UPDATE batch SET hard_limit = 0 WHERE lineage = 1": {"too_old": ["f", "e"]},
    "UPDATE batch SET members = '[[4, 1], [5, 1, 0.5]]' WHERE lineage = 1": {"wrong_weight": ["f"]},
    OTHER_RUN: {"impossible_version": ["e"]},
    OTHER_RUN.replace("0, 120", "3, 1"): {"impossible_version": ["e"], "too_old": ["e"]},
    "UPDATE rollout_row SET by_teacher = 1, spans = NULL WHERE id = 'e'": {"wrong_generator": ["e"]},
    "UPDATE rollout_row SET for_teacher = 1 WHERE id = 'e'": {"wrong_generator": ["e"]},
    "UPDATE rollout_row SET own_tokens = 3 WHERE id = 'e'": OTHERWISE,
    "INSERT INTO version VALUES (50, 7, 3, 'full', 1, 1, 0.0)": {"unknown_version": ["lineage 7"]},
    "INSERT INTO step (lineage, step) VALUES (1, 1000000000000)": {
        "missing_in_ledger": ["L001-v00000004 to L001-v1000000000000 of rank 0"]
    },
    """INSERT INTO conclusion VALUES (60, 1, 3, '{"r0": null}', '["away"]')""": {"unproven": ["away"]},
    """INSERT INTO conclusion VALUES (60, 0, 2, '{"r0": false}', '["other"]'),
        (61, NULL, NULL, '{"r0": null}', '["away"]'), (62, 1, 3, '{"r0": true}', '[]')""": {
        "unproven": ["other"]  # of earlier ends only weights that differed count
    },
    "UPDATE rollout_row SET id = 'h' WHERE id = 'g'": {"issued_twice": ["h"], "impossible_version": ["h"]},
    "UPDATE lineage SET ranks = 2 WHERE number = 0": {
        "missing_in_ledger": ["L000-v00000001 to L000-v00000002 of rank 1"]
    },
    "UPDATE lineage SET start = 0 WHERE number = 1": {
        "ledger_damaged": [
            "ledger of lineage 1 begins at step 1 from L000-v00000001; "
            "on record is step 0 from L000-v00000001"
        ],
        "missing_in_ledger": ["L001-v00000001 of rank 0"],
    },
}


@pytest.mark.parametrize(
    ("change", "trained", "violations"),
    [*LEDGERS, *((change, LEDGER, violations) for change, violations in CHANGES.items())],
)
def test_what_the_ranks_or_the_record_say_otherwise_is_found(
    tmp_path: Path, change: str, trained: dict[int, dict[int, list[str]]], violations: dict[str, list[str]]
) -> None:
    assert audited(tmp_path, change, trained).violations == violations


def test_every_guarantee_of_the_document_names_violations_that_are_found_here() -> None:
    page = (Path(__file__).parents[3] / "docs/recovery.md").read_text()
    rows = page.split("| guarantee |")[1].split("\n\n")[0].splitlines()[2:]
    told = [re.findall(r"`(\w+)`", row.rsplit("| ", 1)[1]) for row in rows]
    assert all(told)
    cases = [LIES, *(violations for *_, violations in LEDGERS), *CHANGES.values()]
    assert {name for names in told for name in names} == {name for case in cases for name in case}
    assert {name for case in cases for name in case} == VIOLATIONS.keys()
