"""A run's folder that lies is refused by the name of what it breaks; one that is sound or goes on is not."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import zstandard
from blake3 import blake3
from in_memory import MemoryPrompts

from distill.buffer import Bound, Rules
from distill.cli.main import app
from distill.prompts.stream import PromptStream
from distill.record.audit import VIOLATIONS, audit
from distill.run_log import entries
from distill.run_log.entries import BLOCK, encode_entry
from distill.run_log.journal import Journal, read_all, segment_numbers, segment_path
from distill.run_log.records import (
    BatchFormed,
    Checkpointed,
    Concluded,
    Evaluated,
    Issued,
    LineageOpened,
    Opened,
    Record,
    Rollout,
    Stepped,
    VersionPublished,
    compacted,
)
from distill.run_log.run_log import RunLog, is_teacher_turn
from distill.run_log.state import Batch
from student_trainer.ledger import Ledger, read
from sync.base.errors import DataError, DistillError
from sync.wire import Array, EvalReport, Scored, Version, VersionSpan, pack

RULES = Rules(6, Bound(1, 3, 2.0), on_policy=0.8)
SEGMENT = 1000


class Run:
    """A run that is resumed on another number of ranks, with everything that the audit looks at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        journal = Journal(folder / "journal", "batch", SEGMENT)
        prompts = PromptStream(MemoryPrompts(), seed=0)
        self.run_log = RunLog(journal, prompts, run="r", seed=0, rules=RULES)

    async def live(self) -> None:
        await self.train(ranks=2, checkpoint=None, steps=5)
        await self.train(ranks=3, checkpoint=Version(0, 4), steps=4)
        self.run_log.issue(2)
        await self.run_log.journal.commit()
        self.run_log.journal.close()

    async def train(self, ranks: int, checkpoint: Version | None, steps: int) -> None:
        opened = await self.run_log.open_lineage(checkpoint, "model", None, ranks)
        start = Version(opened.lineage, opened.start)
        ledgers = [Ledger(self.folder / "ledger", start, checkpoint, rank) for rank in range(ranks)]
        for step in range(opened.start, opened.start + steps):
            batch = self.run_log.state.batch_of(step) or await self.compose(Version(opened.lineage, step))
            for rank, ledger in enumerate(ledgers):
                share = batch.rollouts[rank::ranks]
                tokens = sum(one.own_length for one in share)
                ledger.record(step + 1, [one.id for one in share], f"bits {step + 1} of {rank}", tokens)
            await self.report(Version(opened.lineage, step + 1))
        batch = await self.compose(Version(opened.lineage, opened.start + steps))
        ids = [one.id for one in batch.rollouts][0::ranks]
        ledgers[0].record(batch.version.step + 1, ids, "killed before the others")

    async def compose(self, version: Version) -> Batch:
        for number, asked in enumerate(self.run_log.issue(RULES.batch + 1)):
            self.run_log.admit(
                [generated(asked, Version(version.lineage, max(0, version.step - number % 3)))]
            )
        batch = await self.run_log.form_batch()
        assert batch is not None
        return batch

    async def report(self, version: Version) -> None:
        self.run_log.write(VersionPublished(version, "delta", 1, 2, 0.1))
        if version.step % 2 == 0:
            path = self.folder / "checkpoints" / str(version)
            path.mkdir(parents=True)
            (path / "weights.pt").write_bytes(b"weights")
            files = {"weights.pt": {"size": 7, "blake3": blake3(b"weights").hexdigest()}}
            index = {"version": str(version), "world_size": 1, "fingerprint": "model", "files": files}
            (path / "checkpoint.json").write_text(json.dumps(index))
            (path.parent / "latest").write_text(f"{version}\n")
            self.run_log.write(Checkpointed(version, str(path)))
        self.run_log.write(Stepped(version))
        await self.run_log.journal.commit()


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


# --- what a liar does to a journal ------------------------------------------------------------------------


def segment(run: Path, place: int) -> Path:
    return segment_path(run / "journal", segment_numbers(run / "journal")[place])


def records(run: Path) -> list[Record]:
    return [record for _, record in read_all(run / "journal")]


def rewritten(run: Path, found: list[Record]) -> None:
    """A journal of these records, sound byte by byte."""
    shutil.rmtree(run / "journal")

    async def write() -> None:
        journal = Journal(run / "journal", "batch", SEGMENT)
        for record in found:
            journal.append(record)
        await journal.commit(durable=True)
        journal.close()

    asyncio.run(write())


def entries_of(path: Path) -> list[bytes]:
    """A segment's magic and its entries, as bytes."""
    data, found, offset = path.read_bytes(), [path.read_bytes()[:4]], 4
    while offset < len(data):
        size = 10 + int.from_bytes(data[offset + 2 : offset + 6], "little")
        found.append(data[offset : offset + size])
        offset += size
    return found


def with_bytes(place: int, change: Callable[[bytearray], object]) -> Callable[[Path], None]:
    def doctor(run: Path) -> None:
        data = bytearray(segment(run, place).read_bytes())
        change(data)
        segment(run, place).write_bytes(data)

    return doctor


def with_entries(place: int, change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], None]:
    return lambda run: segment(run, place).write_bytes(b"".join(change(entries_of(segment(run, place)))))  # type: ignore[func-returns-value, return-value]


def with_records(change: Callable[[list[Record]], list[Record]]) -> Callable[[Path], None]:
    return lambda run: rewritten(run, change(records(run)))


def changed(kind: type, change: Callable[[Any], Any], which: int = -1) -> Callable[[Path], None]:
    """The first or last record of a kind is another one."""

    def doctor(found: list[Record]) -> list[Record]:
        place = [n for n, record in enumerate(found) if isinstance(record, kind)][which]
        return [*found[:place], *change(found[place]), *found[place + 1 :]]

    return with_records(doctor)


def replaced(record: Any, **fields: Any) -> list[Any]:
    return [msgspec.structs.replace(record, **fields)]


def swapped_segments(run: Path) -> None:
    one, two = segment(run, 0), segment(run, 1)
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


def other_rollout(found: list[Record]) -> list[Record]:
    """The last batch on record names a buffered rollout in the place of one that was trained."""
    formed = [record for record in found if isinstance(record, BatchFormed)]
    batched = {i for record in formed for i in record.ids}
    spare = next(r.id for r in found if isinstance(r, Rollout) and r.id not in batched)
    ids = [spare, *formed[-2].ids[1:]]
    return [msgspec.structs.replace(r, ids=ids) if r is formed[-2] else r for r in found]


def generated_by(version: Version) -> Callable[[list[Record]], list[Record]]:
    """A rollout of the last trained batch was generated by other weights."""

    def doctor(found: list[Record]) -> list[Record]:
        batch = [record for record in found if isinstance(record, BatchFormed)][-2]
        spans = [VersionSpan(version, 0, 2)]
        student = next(
            i for i in batch.ids if not is_teacher_turn(int(i.split(":")[1]), 0, RULES.batch, RULES.on_policy)
        )
        return [
            msgspec.structs.replace(r, spans=spans) if getattr(r, "id", "") == student else r for r in found
        ]

    return doctor


def longer_turns(found: list[Record]) -> list[Record]:
    """An episode of the last trained batch has its environment's tokens as the student's."""
    ids = [record for record in found if isinstance(record, BatchFormed)][-2].ids
    episode = next(r for r in found if isinstance(r, Rollout) and r.own and r.id in ids)
    return [msgspec.structs.replace(r, own=((0, 3),)) if r is episode else r for r in found]


def abandoned(found: list[Record]) -> list[Record]:
    """All arrays were given up, and then a trainer began anew that takes no batch over."""
    return [*map(compacted, found), LineageOpened(2, None, 0, 1, 0, "model", ranks=1)]


def unreadable(run: Path) -> None:
    path = segment(run, -1)
    begin, other = path.read_bytes()[:4], zstandard.compress(b"\x92\x91\x91\xa5Other\x80")
    path.write_bytes(begin + encode_entry(BLOCK, other, int(path.stem[-8:]), 4))


def linked_to_itself(run: Path) -> None:
    path = segment(run, 1)
    path.unlink()
    path.symlink_to(path.name)


def with_block(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """The last block with arrays of the last segment but one is another one."""

    def doctor(run: Path) -> None:
        path = segment(run, -2)
        found = entries_of(path)
        for place in reversed(range(1, len(found))):
            if found[place][10:14] != zstandard.FRAME_HEADER:
                continue
            block = entries._decoder.decode(zstandard.decompress(found[place][10:]))
            if block.columns:
                break
        change(block)
        other = zstandard.compress(msgspec.msgpack.encode(block))
        begin = b"".join(found[:place])
        path.write_bytes(begin + encode_entry(BLOCK, other, int(path.stem[-8:]), len(begin)))

    return doctor


def cut_column(block: Any) -> None:
    column = next(iter(block.columns.values()))
    column.planes = column.planes[:-4]


def a_bomb(run: Path) -> None:
    """Its frame states a petabyte."""
    path = segment(run, -1)
    frame = zstandard.FRAME_HEADER + b"\xe0" + (1 << 50).to_bytes(8, "little") + bytes(9)
    path.write_bytes(path.read_bytes()[:4] + encode_entry(BLOCK, frame, int(path.stem[-8:]), 4))


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


def trained_on(*ids: str) -> Callable[[list[dict]], list[dict]]:
    """The last but one line names these."""
    return with_ids(lambda _: list(ids))


def with_ids(change: Callable[[list[str]], list[str]]) -> Callable[[list[dict]], list[dict]]:
    """The last but one line names others."""
    return lambda lines: [*lines[:-2], {**lines[-2], "ids": change(lines[-2]["ids"])}, lines[-1]]


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


class Lie(NamedTuple):
    guarantee: str
    """As docs/recovery.md says it."""
    what: str
    doctor: Callable[[Path], object]
    violation: str


ANSWERED = "every prompt is accounted for"
KEPT = "no scored rollout is lost"
ONCE = "none is trained twice within one lineage's ancestry"
FRESH = "none is trained beyond the staleness bound"
OWN_RUN = "no token comes from another run"
CONCLUDED = "the final weights are proven"
WEIGHED = "every loss weight below 1 is recorded"
WHOLE = "files are intact or refused"
SHOWN = "every step is in every rank's ledger"
AS_BATCHED = "every step trained its batch, completely and exclusively"
RESUMABLE = "`latest` names an existing checkpoint"

LIES = [
    Lie(WHOLE, "a segment is a folder", as_folder(lambda run: segment(run, 1)), "journal_damaged"),
    Lie(WHOLE, "a segment is a link to itself", linked_to_itself, "journal_damaged"),
    Lie(
        WHOLE,
        "a segment is far ahead",
        lambda run: segment_path(run / "journal", 99_999_999).write_bytes(b""),
        "journal_damaged",
    ),
    Lie(
        WHOLE,
        "a trainer of too many ranks",
        changed(LineageOpened, lambda r: replaced(r, ranks=10**9)),
        "journal_damaged",
    ),
    Lie(
        WHOLE,
        "a half-life of zero",
        changed(Opened, lambda r: replaced(r, half_life=0.0), 0),
        "journal_damaged",
    ),
    Lie(WHOLE, "a column is missing", with_block(lambda block: block.columns.popitem()), "journal_damaged"),
    Lie(WHOLE, "a column is cut", with_block(cut_column), "journal_damaged"),
    Lie(WHOLE, "a block of more bytes than there is memory", a_bomb, "journal_damaged"),
    Lie(WHOLE, "the journal is gone", lambda run: shutil.rmtree(run / "journal"), "journal_damaged"),
    Lie(WHOLE, "a segment is missing", lambda run: segment(run, 1).unlink(), "journal_damaged"),
    Lie(WHOLE, "the first segment is missing", lambda run: segment(run, 0).unlink(), "journal_damaged"),
    Lie(
        WHOLE,
        "a segment is cut short",
        with_bytes(1, lambda d: d.__delitem__(slice(-40, None))),
        "journal_damaged",
    ),
    Lie(WHOLE, "a segment is empty", with_bytes(1, bytearray.clear), "journal_damaged"),
    Lie(
        WHOLE, "a bit is flipped", with_bytes(1, lambda d: d.__setitem__(300, d[300] ^ 4)), "journal_damaged"
    ),
    Lie(
        WHOLE,
        "a bit of the last segment is flipped",
        with_bytes(-1, lambda d: d.__setitem__(40, d[40] ^ 4)),
        "journal_damaged",
    ),
    Lie(
        WHOLE,
        "a page of the last segment is blank",
        with_bytes(-1, lambda d: d.__setitem__(slice(0, 99), bytes(99))),
        "journal_damaged",
    ),
    Lie(
        WHOLE,
        "two entries changed places",
        with_entries(1, lambda e: [*e[:3], e[4], e[3], *e[5:]]),
        "journal_damaged",
    ),
    Lie(WHOLE, "an entry stands twice", with_entries(0, lambda e: [*e[:3], *e[2:]]), "journal_damaged"),
    Lie(WHOLE, "an entry was taken out", with_entries(-1, lambda e: [*e[:2], *e[3:]]), "journal_damaged"),
    Lie(WHOLE, "two segments changed places", swapped_segments, "journal_damaged"),
    Lie(WHOLE, "a record is of no known kind", unreadable, "journal_damaged"),
    Lie(WHOLE, "records changed places", with_records(lambda r: [r[0], *r[:0:-1]]), "journal_damaged"),
    Lie(WHOLE, "the opening is missing", with_records(lambda r: r[1:]), "journal_damaged"),
    Lie(WHOLE, "a rollout is on record twice", changed(Rollout, lambda r: [r, r], 0), "journal_damaged"),
    Lie(
        WHOLE,
        "a batch names what was never scored",
        changed(BatchFormed, lambda r: replaced(r, ids=["?", *r.ids[1:]])),
        "journal_damaged",
    ),
    Lie(WHOLE, "a batch is missing before others", changed(BatchFormed, lambda r: [], 0), "journal_damaged"),
    Lie(
        WHOLE,
        "a lineage begins with itself",
        changed(LineageOpened, lambda r: replaced(r, checkpoint=Version(1, 4))),
        "journal_damaged",
    ),
    Lie(ANSWERED, "prompts were issued twice", changed(Issued, lambda r: [r, r]), "issued_twice"),
    Lie(
        ANSWERED,
        "the teacher generated what the student was to",
        changed(Issued, lambda r: replaced(r, by_teacher=[]), 0),
        "wrong_generator",
    ),
    Lie(KEPT, "a left batch is forgotten", with_records(abandoned), "lost"),
    Lie(FRESH, "the tokens are older", with_records(generated_by(Version(0, 0))), "too_old"),
    Lie(
        OWN_RUN,
        "the tokens are of a version of another run",
        with_records(generated_by(Version(0, 999))),
        "impossible_version",
    ),
    Lie(
        CONCLUDED,
        "a replica ended with other weights",
        with_records(lambda r: [*r, Concluded(Version(1, 8), {"student-0": False}, ["student-0 differs"])]),
        "unproven",
    ),
    Lie(
        WEIGHED,
        "a late rollout counts in full",
        changed(BatchFormed, lambda r: replaced(r, weights=[])),
        "wrong_weight",
    ),
    Lie(
        WEIGHED,
        "a weight is another",
        changed(BatchFormed, lambda r: replaced(r, weights=[0.25] * 6)),
        "wrong_weight",
    ),
    Lie(
        AS_BATCHED,
        "the last segments are blank",
        with_bytes(-1, lambda d: d.__setitem__(slice(0, None), bytes(len(d)))),
        "not_as_batched",
    ),
    Lie(AS_BATCHED, "the journal ends early", lambda run: segment(run, -1).unlink(), "not_as_batched"),
    Lie(AS_BATCHED, "the batch was another", with_records(other_rollout), "not_as_batched"),
    Lie(AS_BATCHED, "an environment's tokens count", with_records(longer_turns), "not_as_batched"),
    Lie(
        AS_BATCHED,
        "the ledger counts another number of tokens",
        forged(lambda x: [{**x[0], "tokens": x[0]["tokens"] + 1}, *x[1:]]),
        "not_as_batched",
    ),
    Lie(
        AS_BATCHED,
        "the ledger names another rollout",
        forged(trained_on("0:0:0", "0:1:0")),
        "not_as_batched",
    ),
    Lie(AS_BATCHED, "the ledger leaves a rollout out", forged(with_ids(lambda x: x[1:])), "not_as_batched"),
    Lie(AS_BATCHED, "the ledger has one more", forged(with_ids(lambda x: [*x, "9:9:9"])), "not_as_batched"),
    Lie(AS_BATCHED, "a rollout that is not on record", forged(trained_on("9:9:9")), "not_in_journal"),
    Lie(ONCE, "a rollout of an earlier step again", forged(trained_on("0:0:0")), "trained_twice"),
    Lie(SHOWN, "the ledger is gone", lambda run: shutil.rmtree(run / "ledger"), "missing_in_ledger"),
    Lie(SHOWN, "a rank's file is gone", lambda run: ledger(run, rank=2).unlink(), "missing_in_ledger"),
    Lie(SHOWN, "a left lineage's file is gone", lambda run: ledger(run, 0, 1).unlink(), "missing_in_ledger"),
    Lie(SHOWN, "a file is blank", lambda run: ledger(run).write_bytes(bytes(900)), "missing_in_ledger"),
    Lie(SHOWN, "a file is empty", lambda run: ledger(run).write_bytes(b""), "missing_in_ledger"),
    Lie(
        SHOWN,
        "the last line of a reported step is torn",
        with_lines(lambda x: [*x[:-1], x[-1][:30]], 1),
        "missing_in_ledger",
    ),
    Lie(SHOWN, "the last lines are gone", with_lines(lambda x: x[:2]), "missing_in_ledger"),
    Lie(
        SHOWN,
        "a version was published without a step",
        with_records(lambda r: [*r, VersionPublished(Version(1, 30), "delta", 1, 2, 0.1)]),
        "missing_in_ledger",
    ),
    Lie(
        SHOWN,
        "a step was reported and not trained",
        with_records(lambda r: [*r, Stepped(Version(1, 10**12))]),
        "missing_in_ledger",
    ),
    Lie(
        SHOWN,
        "a version of no lineage was published",
        with_records(lambda r: [*r, VersionPublished(Version(7, 3), "full", 2, 2, 0.1)]),
        "unknown_version",
    ),
    Lie(
        SHOWN,
        "a version of no lineage was evaluated",
        with_records(
            lambda r: [
                *r,
                Evaluated(
                    EvalReport(
                        version=Version(5, 1),
                        reverse_kl=0.1,
                        pass_rate=None,
                        completions=1,
                        tokens=1,
                        truncated=0.0,
                        seconds=1.0,
                    )
                ),
            ]
        ),
        "unknown_version",
    ),
    Lie(SHOWN, "a lineage that nobody opened was trained", forged(lambda x: x, lineage=7), "unknown_version"),
    Lie(WHOLE, "a line stands twice", with_lines(lambda x: [*x[:2], *x[1:]]), "ledger_damaged"),
    Lie(WHOLE, "a line was taken out", with_lines(lambda x: [x[0], *x[2:]]), "ledger_damaged"),
    Lie(
        WHOLE,
        "a line was altered",
        with_lines(lambda x: [x[0], x[1].replace(b"0:", b"1:"), *x[2:]]),
        "ledger_damaged",
    ),
    Lie(
        WHOLE,
        "a line is blank",
        with_lines(lambda x: [x[0], bytes(len(x[1]) - 1) + b"\n", *x[2:]]),
        "ledger_damaged",
    ),
    Lie(WHOLE, "the first line is missing", with_lines(lambda x: x[1:]), "ledger_damaged"),
    Lie(
        WHOLE, "a step was taken out and the chain forged", forged(lambda x: [x[0], *x[2:]]), "ledger_damaged"
    ),
    Lie(
        WHOLE,
        "a line names no rollouts and the chain is forged",
        forged(lambda x: [{**x[0], "ids": 7}, *x[1:]]),
        "ledger_damaged",
    ),
    Lie(
        WHOLE,
        "a file is another lineage's",
        lambda run: shutil.copy(ledger(run, 0), ledger(run)),
        "ledger_damaged",
    ),
    Lie(
        WHOLE,
        "a file is another rank's",
        lambda run: shutil.copy(ledger(run), ledger(run, rank=1)),
        "ledger_damaged",
    ),
    Lie(WHOLE, "a rank too many", forged(lambda x: x, rank=9), "ledger_damaged"),
    Lie(WHOLE, "a lineage of other parents", forged(lambda x: x, parent=Version(0, 2)), "ledger_damaged"),
    Lie(RESUMABLE, "the checkpoint is gone", lambda run: shutil.rmtree(newest(run)), "checkpoint_missing"),
    Lie(
        RESUMABLE,
        "a file of it is cut",
        lambda run: (newest(run) / "weights.pt").write_bytes(b"we"),
        "checkpoint_missing",
    ),
    Lie(
        RESUMABLE,
        "its index is damaged",
        lambda run: (newest(run) / "checkpoint.json").write_bytes(b"\xff"),
        "checkpoint_missing",
    ),
    Lie(
        RESUMABLE, "`latest` is gone", lambda run: (run / "checkpoints/latest").unlink(), "checkpoint_missing"
    ),
    Lie(RESUMABLE, "`latest` names an older one", latest_names(str(Version(0, 4))), "checkpoint_missing"),
    Lie(RESUMABLE, "`latest` names no version", latest_names("../ledger"), "checkpoint_missing"),
    Lie(RESUMABLE, "`latest` names what no file can be", latest_names("L" * 5000), "checkpoint_missing"),
    Lie(
        RESUMABLE,
        "`latest` is a folder",
        as_folder(lambda run: run / "checkpoints/latest"),
        "checkpoint_missing",
    ),
    Lie(
        RESUMABLE,
        "an index is a folder",
        as_folder(lambda run: newest(run) / "checkpoint.json"),
        "checkpoint_missing",
    ),
    Lie(
        RESUMABLE,
        "an older one is in its place",
        with_index(version=str(Version(0, 4))),
        "checkpoint_missing",
    ),
    Lie(RESUMABLE, "another run saved it", with_index(run_id="other"), "checkpoint_missing"),
    Lie(RESUMABLE, "its index names no files", with_index(files={}), "checkpoint_missing"),
    Lie(
        RESUMABLE,
        "its index names what no file can be",
        with_index(files={"x" * 5000: {"size": 1, "blake3": ""}, "\0": {"size": 1, "blake3": ""}}),
        "checkpoint_missing",
    ),
]


def test_a_run_that_was_resumed_on_other_ranks_and_killed_twice_passes(sound: Path) -> None:
    report = audit(sound)
    assert report.ok, report.violations
    assert (report.prompts, report.trained, report.oldest) == (65, 8 * 6 + 2, 3)
    assert report.late > 0
    assert report.tokens_by_teacher > 0
    assert report.tokens == 2 * report.scored, "of an episode, two of its three tokens"
    assert len(segment_numbers(sound / "journal")) > 3


async def test_a_trainer_may_begin_from_an_older_checkpoint_and_gets_its_batches_again(
    tmp_path: Path,
) -> None:
    first = Run(tmp_path)
    await first.train(ranks=2, checkpoint=None, steps=5)
    await first.run_log.tidy(2)
    first.run_log.journal.close()
    shutil.rmtree(newest(tmp_path))
    latest_names(str(Version(0, 2)))(tmp_path)
    second = Run(tmp_path)
    opened = await second.run_log.open_lineage(Version(0, 2), "model", None, 2)
    second.run_log.journal.close()
    assert (opened.start, opened.branch) == (2, 6)
    assert audit(tmp_path).ok


@pytest.mark.parametrize("lie", LIES, ids=[lie.what for lie in LIES])
def test_a_doctored_run_is_refused_by_name(lie: Lie, run: Path) -> None:
    lie.doctor(run)
    found = audit(run).violations
    assert lie.violation in found, found
    assert all(found[lie.violation])


def test_what_is_damaged_is_named_with_file_and_place(run: Path) -> None:
    with_bytes(1, lambda data: data.__setitem__(300, data[300] ^ 4))(run)
    with_lines(lambda lines: [lines[0], *lines[2:]])(run)
    ledger(run, rank=2).unlink()
    found = audit(run).violations
    assert re.search(r"journal-00000001.log is damaged at byte \d+", *found["journal_damaged"])
    assert re.search(r"L001-rank0.jsonl line 2 is not what was written", *found["ledger_damaged"])
    assert "missing_in_ledger" not in found, "without the journal nothing else is claimed"


def test_missing_steps_are_named_as_ranges_with_their_rank(run: Path) -> None:
    ledger(run, rank=2).unlink()
    assert audit(run).violations["missing_in_ledger"] == ["L001-v00000005 to L001-v00000008 of rank 2"]


def test_every_guarantee_of_the_document_has_a_lie_and_every_violation_is_named() -> None:
    page = (Path(__file__).parents[3] / "docs/recovery.md").read_text()
    table = page.split("| guarantee |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| ([^|]+?)(?:: [^|]*)? \|", table, re.M)) - {"---"} == {
        lie.guarantee for lie in LIES
    }
    assert set(re.findall(r"`(\w+)`(?=[^|]*\|\n)", table + "\n")) <= VIOLATIONS.keys()
    assert {lie.violation for lie in LIES} == VIOLATIONS.keys()


def test_the_command_says_what_a_violation_means_and_where_it_is(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "ledger")
    with pytest.raises(DistillError, match=r"breaks a guarantee: missing_in_ledger"):
        app(["audit", str(run), "--json", str(run / "audit.json")], standalone_mode=False)
    said = capsys.readouterr().out
    assert f"missing_in_ledger: {VIOLATIONS['missing_in_ledger']}" in said
    assert "L000-v00000001 to L000-v00000005 of rank 0" in said
    assert json.loads((run / "audit.json").read_text())["ok"] is False


def files_of(run: Path) -> Iterator[Path]:
    return (path for path in sorted(run.rglob("*")) if path.is_file())


@pytest.mark.parametrize("seed", range(4))
def test_whatever_becomes_of_any_file_the_audit_ends_with_a_report(
    sound: Path, tmp_path: Path, seed: int
) -> None:
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


INTEGERS = [-(2**63), -1, 0, 1, 7, 2**31, 2**62]
TEXTS = ["", "x", "0:0:0", "9:9:9", "+", "a" * 1000]
REALS = [math.nan, math.inf, -1.0, 0.0]


def altered(value: Any, rng: random.Random) -> Any:
    """Another value of the same type, at one place below it."""
    if isinstance(value, Array):
        return msgspec.structs.replace(value, shape=rng.choice([(), (7,), (1 << 40, 2), (-1,)]))
    if isinstance(value, msgspec.Struct):
        name = rng.choice(value.__struct_fields__)
        return msgspec.structs.replace(value, **{name: altered(getattr(value, name), rng)})
    if isinstance(value, list) and value:
        place = rng.randrange(len(value))
        made = [*value[:place], *value[place + 1 :]], [*value, value[place]], value[::-1]
        inside = [*value[:place], altered(value[place], rng), *value[place + 1 :]]
        return rng.choice([*made, inside, inside])
    if isinstance(value, Version):
        return rng.choice([Version(0, 0), Version(0, 4), Version(99, 3), Version(value.lineage, 2**62)])
    made_of: dict[type, Any] = {
        bool: [not value],
        int: INTEGERS,
        float: REALS,
        str: TEXTS,
        bytes: [b"", b"x"],
    }
    return rng.choice(made_of.get(type(value), [value]))


@pytest.mark.parametrize("seed", range(2))
def test_whatever_a_record_says_the_audit_ends_with_a_report(sound: Path, tmp_path: Path, seed: int) -> None:
    """Records whose bytes are whole; the run log that would resume refuses them with a message or goes on."""
    rng, found, refused = random.Random(seed), records(sound), 0
    run = Path(shutil.copytree(sound, tmp_path / "run"))
    for _ in range(60):
        place = rng.randrange(len(found))
        rewritten(run, [*found[:place], altered(found[place], rng), *found[place + 1 :]])
        report = audit(run)
        assert report.ok == (not report.violations)
        refused += "journal_damaged" in report.violations
        journal = Journal(run / "journal", "batch", SEGMENT)
        try:
            RunLog(journal, PromptStream(MemoryPrompts(), 0), run="r", seed=0, rules=RULES)
        except DistillError as error:
            assert str(error)  # noqa: PT017
        finally:
            journal.close()
    assert refused


def test_a_run_that_goes_on_has_no_violation(tmp_path: Path) -> None:
    """At every moment between two of its writes, whatever has happened meanwhile."""
    audited: list[int] = []

    class Watched(Run):
        async def report(self, version: Version) -> None:
            await super().report(version)
            self.look()

        async def compose(self, version: Version) -> Batch:
            batch = await super().compose(version)
            self.look()
            return batch

        def look(self) -> None:
            found = audit(self.folder)
            assert found.ok, found.violations
            audited.append(found.trained)

    asyncio.run(Watched(tmp_path).live())
    assert len(audited) > 15
    assert audited[-1] >= audited[0]


@pytest.mark.parametrize(
    ("before", "after", "violation"),
    [(0, 2, None), (0, 0, "missing_in_ledger"), (2, 2, "not_as_batched")],
)
def test_a_run_may_take_steps_while_the_audit_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int, violation: str | None
) -> None:
    """The journal is read at moment 1, the ledger at the moments `before` and `after`."""
    moments = [tmp_path / str(number) for number in range(3)]

    class Copied(Run):
        async def report(self, version: Version) -> None:
            await super().report(version)
            if version.step <= len(moments):
                shutil.copytree(self.folder, moments[version.step - 1])

    asyncio.run(Copied(tmp_path / "run").live())
    reads = iter([before, after])
    monkeypatch.setattr("distill.record.audit.read", lambda _: read(moments[next(reads)] / "ledger"))
    found = audit(moments[1]).violations
    assert violation in found if violation else not found


def test_a_folder_of_something_else_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds neither journal nor ledger: name the folder of a run"):
        audit(tmp_path)
