"""The journal under crashes, damage and full disks."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
from faults import fill, free
from hypothesis import given, settings
from hypothesis import strategies as st
from tmpfs import mounted
from virtual_time import LONG

from distill.prompts.stream import Prompt
from distill.run_log.entries import HEAD, OFFSET
from distill.run_log.journal import Journal, read_all, segment_numbers, segment_path
from distill.run_log.records import BatchFormed, Dropped, Issued, Location, Record, Rollout, Snapshot
from sync.base.errors import DataError
from sync.wire import SamplingMask, Scored, Version, VersionSpan, pack

pytestmark = pytest.mark.virtual_time
MARKER_BYTES = HEAD.size + OFFSET.size


def rollout(name: str, tokens: int = 3) -> Rollout:
    values = pack(np.random.default_rng(tokens).standard_normal(tokens, "f4"))
    ids = pack(np.arange(tokens, dtype="i4"))
    spans = (VersionSpan(Version(0, 1), 0, tokens),)
    return Rollout(name, 0, ids, ids, values, spans, False, "t", Scored(name, values))


def records(count: int) -> list[Record]:
    issued = [Issued([Prompt(f"p{i}", [1, 2, 3])], 0, i + 1) for i in range(count)]
    return [record for i in range(count) for record in (issued[i], rollout(f"p{i}"))]


async def written(folder: Path, *entries: Record, segment_bytes: int = 1 << 20) -> list[Location]:
    journal = Journal(folder, "batch", segment_bytes)
    assert list(journal.replay()) == []
    places = []
    for entry in entries:  # each a block of its own
        places.append(journal.append(entry))
        await journal.commit()
    await journal.commit(durable=True)
    journal.close()
    return places


def replayed(folder: Path) -> list[Record]:
    return [record for _, record in Journal(folder).replay()]


async def test_records_come_back_in_order_and_from_their_places(tmp_path: Path) -> None:
    entries = records(5)
    places = await written(tmp_path, *entries)
    assert replayed(tmp_path) == entries
    journal = Journal(tmp_path)
    assert [location for location, _ in journal.replay()] == places
    assert [journal.read(place) for place in places] == entries


def whole(name: str, tokens: int) -> Rollout:
    """With an array of every dtype, some of them empty."""
    rng, one = np.random.default_rng(tokens), rollout(name, tokens)
    scored = Scored(
        name,
        one.logprob,
        topk_logprob=pack(rng.standard_normal((tokens, 3)), "f2"),
        hidden=pack(rng.integers(0, 1 << 16, (tokens, 5)), "bf16"),
    )
    mask = SamplingMask(pack(np.full(tokens, 2, "i4")), pack(np.arange(2 * tokens, dtype="i4")))
    routes = pack(rng.integers(0, 99, (tokens, 2, 4)), "i4" if tokens % 2 else "u1")
    return msgspec.structs.replace(one, scored=scored, mask=mask, routes=routes)


async def test_records_of_one_commit_share_blocks_and_come_back_from_their_places(tmp_path: Path) -> None:
    snapshot = Snapshot(Version(0, 1), None, b"state", {"p": Location(0, 4, 1)})
    first = [whole("a", 3), whole("b", 0), whole("c", 600).released(), whole("d", 8), *records(2)]
    entries = [*first, snapshot, *(whole(f"e{i}", 500 + i) for i in range(40)), whole("bulk", 40_000)]
    journal = Journal(tmp_path)
    list(journal.replay())
    places = [journal.append(entry) for entry in entries]
    await journal.commit()
    journal.close()
    assert [record for _, record in read_all(tmp_path)] == entries
    assert [journal.read(place) for place in reversed(places)] == entries[::-1]
    assert {place.offset for place in places[: len(first)]} == {4}
    assert [place.index for place in places[: len(first)]] == [*range(len(first))]
    assert places[len(first)] == Location(1, 4, 0), "a snapshot begins a segment, and has a block of its own"
    assert places[len(first) + 1].offset > 4
    assert 1 < len({place.offset for place in places[len(first) + 1 :]}) < 40, "blocks are bounded"
    assert journal.read(places[-1]) == entries[-1], "too large to be compressed"


async def test_a_block_costs_little_more_than_the_values_of_its_rollouts(tmp_path: Path) -> None:
    """Beside two random f4, a token of 12 takes a byte of its id, and its share of what names the rollout."""
    await committed_at_once(tmp_path, [rollout(f"0:{i}:0", 12) for i in range(100)])
    assert size_of(tmp_path) / (100 * 12) < 2 * 4 + 1 + 1


async def committed_at_once(folder: Path, entries: list[Record]) -> None:
    journal = Journal(folder)
    list(journal.replay())
    for entry in entries:
        journal.append(entry)
    await journal.commit()
    journal.close()


async def test_segments_rotate_and_a_second_run_appends(tmp_path: Path) -> None:
    await written(tmp_path, *records(6), segment_bytes=300)
    assert len(segment_numbers(tmp_path)) > 3
    journal = Journal(tmp_path, segment_bytes=300)
    assert len(list(journal.replay())) == 12
    place = journal.append(Dropped(["x"], "empty", 0))
    await journal.commit()
    assert journal.read(place) == Dropped(["x"], "empty", 0)
    journal.close()
    assert replayed(tmp_path) == [*records(6), Dropped(["x"], "empty", 0)]


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 10_000))
def test_a_kill_at_any_byte_leaves_a_prefix(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("journal")
    entries = records(4)
    places = asyncio.run(written(folder, *entries))
    path = segment_path(folder, 0)
    size = path.stat().st_size
    os.truncate(path, cut % (size + 1))
    found = replayed(folder)
    assert found == entries[: len(found)]
    ends = [*(place.offset for place in places[1:]), size - MARKER_BYTES]
    assert len(found) == sum(end <= cut % (size + 1) for end in ends)

    async def go_on() -> None:
        journal = Journal(folder)
        list(journal.replay())
        journal.append(Dropped(["x"], "empty", 0))
        await journal.commit()
        journal.close()

    asyncio.run(go_on())
    assert replayed(folder) == [*found, Dropped(["x"], "empty", 0)]


async def test_the_torn_tail_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await written(tmp_path, *records(2))
    path = segment_path(tmp_path, 0)
    os.truncate(path, path.stat().st_size - MARKER_BYTES - 5)
    with caplog.at_level(logging.WARNING):
        assert len(replayed(tmp_path)) == 3
    assert "were never synced" in caplog.text


@pytest.mark.parametrize("where", [6, 10, 14, 40])
async def test_a_flipped_byte_in_the_middle_is_refused(tmp_path: Path, where: int) -> None:
    await written(tmp_path, *records(3))
    path = segment_path(tmp_path, 0)
    data = bytearray(path.read_bytes())
    data[where] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"is damaged at byte 4, which was on disk before"):
        replayed(tmp_path)
    assert path.read_bytes() == data


async def test_a_torn_tail_in_an_older_segment_is_refused(tmp_path: Path) -> None:
    await written(tmp_path, *records(6), segment_bytes=300)
    path = segment_path(tmp_path, 0)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(DataError, match=r"journal-00000000\.log is damaged"):
        replayed(tmp_path)


async def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    await written(tmp_path, *records(6), segment_bytes=300)
    segment_path(tmp_path, 1).unlink()
    with pytest.raises(DataError, match=r"journal-00000001\.log is missing"):
        replayed(tmp_path)


@pytest.mark.parametrize("content", [b"hello, world", b"DJL2DJ\x08\0\0\0\x12\x34\x56\x78\x92\xa7Stepped"])
async def test_a_strange_file_or_one_of_another_release_is_refused(tmp_path: Path, content: bytes) -> None:
    segment_path(tmp_path, 0).write_bytes(content)
    with pytest.raises(DataError, match="of another release, no journal segment, or damaged; go on with"):
        replayed(tmp_path)


async def test_reading_anothers_journal_changes_nothing(tmp_path: Path) -> None:
    await written(tmp_path, *records(2))
    path = segment_path(tmp_path, 0)
    os.truncate(path, path.stat().st_size - MARKER_BYTES - 5)
    before = path.read_bytes()
    assert [record for _, record in read_all(tmp_path)] == records(2)[:3]
    assert path.read_bytes() == before


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.log"))


class FullDisk:
    """Writes until `room` bytes are used up; a full disk takes part of what it is given."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __call__(self, file: int, data: memoryview) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = os.write(file, data[: self.room])
        self.room -= count
        return count


async def test_a_full_disk_pauses_and_nothing_is_torn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk(150)
    journal = Journal(tmp_path, "never", retry_seconds=0.005, write=disk)
    list(journal.replay())
    for record in records(3):
        journal.append(record)
    commit = asyncio.create_task(journal.commit())
    with caplog.at_level(logging.WARNING):
        await asyncio.sleep(LONG)
        assert not commit.done()
        whole = [record for _, record in read_all(tmp_path)]
        assert whole == records(3)[: len(whole)]
        journal.append(BatchFormed(Version(0, 0), ["p0"]))
        disk.room = 1 << 20
        await commit
    await journal.commit()
    journal.close()
    assert replayed(tmp_path) == [*records(3), BatchFormed(Version(0, 0), ["p0"])]
    assert caplog.text.count("disk full") == 1
    assert "has space again" in caplog.text


async def test_a_disk_that_is_really_full_pauses_commits_and_shrinking(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 128) as disk:
        first = [*records(40), rollout("p0", 2000)]
        await written(disk, *first, segment_bytes=8000)
        journal = Journal(disk, "batch", 8000, retry_seconds=0.005)
        list(journal.replay())
        journal.append(BatchFormed(Version(0, 0), ["p0"]))
        await journal.commit(durable=True)
        fill(disk)
        journal.append(rollout("p1", 2000))
        commit = asyncio.create_task(journal.commit(durable=True))
        await asyncio.sleep(LONG)
        assert not commit.done()
        assert [record for _, record in read_all(disk)] == [*first, BatchFormed(Version(0, 0), ["p0"])]
        segments = segment_numbers(disk)
        assert await journal.archive(before=99, needed=set()) == 0, "there is no room for the traces"
        assert segment_numbers(disk) == segments
        free(disk)
        await commit
        assert await journal.archive(before=segments[-1], needed=set())
        journal.close()
        assert len(list(read_all(disk))) == len(first) + 2


async def test_a_commit_cancelled_on_a_full_disk_is_made_up_for(tmp_path: Path) -> None:
    disk = FullDisk(0)
    journal = Journal(tmp_path, "never", retry_seconds=0.005, write=disk)
    list(journal.replay())
    journal.append(records(1)[0])
    commit = asyncio.create_task(journal.commit())
    await asyncio.sleep(LONG)
    commit.cancel()
    await asyncio.gather(commit, return_exceptions=True)
    disk.room = 1 << 20
    await journal.commit()
    journal.close()
    assert replayed(tmp_path) == records(1)[:1]


async def test_another_error_of_the_disk_is_raised(tmp_path: Path) -> None:
    def broken(_: int, data: memoryview) -> int:
        raise OSError(errno.EIO, "Input/output error")

    journal = Journal(tmp_path, "never", write=broken)
    list(journal.replay())
    journal.append(records(1)[0])
    with pytest.raises(OSError, match="Input/output"):
        await journal.commit()
    journal.close()


async def archived_but(folder: Path, needed: set[int]) -> list[int]:
    """Archive a journal of 13 records but for some segments; the numbers that it had."""
    await written(folder, *records(6), Dropped(["x"], "empty", 0), segment_bytes=300)
    numbers = segment_numbers(folder)
    journal = Journal(folder, segment_bytes=300)
    assert await journal.archive(before=numbers[-1], needed=needed) == len(numbers) - 1 - len(needed)
    journal.close()
    return numbers


async def test_archived_segments_keep_what_an_audit_needs(tmp_path: Path) -> None:
    numbers = await archived_but(tmp_path, needed={1})
    assert segment_numbers(tmp_path) == [1, numbers[-1]]
    found = [record for _, record in read_all(tmp_path)]
    assert len(found) == 13
    assert rollout("p0").released() in found
    assert any(isinstance(record, Rollout) and not record.is_released for record in found), (
        "what is needed stays whole"
    )
    assert [record.id for record in found if isinstance(record, Rollout)] == [f"p{i}" for i in range(6)]


async def test_a_segment_that_was_archived_and_not_removed_counts_once(tmp_path: Path) -> None:
    await written(tmp_path, *records(6), segment_bytes=300)
    whole = segment_path(tmp_path, 0).read_bytes()
    journal = Journal(tmp_path, segment_bytes=300)
    await journal.archive(before=1, needed=set())
    segment_path(tmp_path, 0).write_bytes(whole)  # killed between the two
    assert [record for _, record in read_all(tmp_path)] == records(6)
    assert await journal.archive(before=1, needed=set()) == 1
    journal.close()
    assert len([record for _, record in read_all(tmp_path)]) == 12


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "swapped"])
async def test_a_damaged_archive_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    await archived_but(tmp_path, needed=set())
    path = segment_path(tmp_path, 1, "archive")
    data = path.read_bytes()
    other = segment_path(tmp_path, 0, "archive").read_bytes()
    damaged = {"cut": data[:-1], "flipped": data[:30] + b"?" + data[31:], "gone": b"", "swapped": other}
    path.write_bytes(damaged[damage])
    with pytest.raises(DataError, match=r"archive-00000001\.log is damaged"):
        list(read_all(tmp_path))


async def test_an_archive_that_a_crash_left_unfinished_is_written_anew(tmp_path: Path) -> None:
    await written(tmp_path, *records(6), segment_bytes=300)
    pending = segment_path(tmp_path, 0, "archive").with_name(".archive-00000000.log.new")
    pending.write_bytes(b"DA torn")
    assert len(list(read_all(tmp_path))) == 12
    journal = Journal(tmp_path, segment_bytes=300)
    assert await journal.archive(before=2, needed=set()) == 2
    journal.close()
    assert not pending.exists()
    assert len(list(read_all(tmp_path))) == 12


async def test_nothing_of_a_commit_runs_in_the_event_loop(tmp_path: Path) -> None:
    here, threads = threading.get_ident(), set[int]()

    def write(file: int, data: memoryview) -> int:
        threads.add(threading.get_ident())
        return os.write(file, data)

    journal = Journal(tmp_path, "always", segment_bytes=300, write=write)
    list(journal.replay())
    places = [journal.append(record) for record in records(3)]
    assert {(place.segment, place.offset) for place in places} == {(-1, -1)}, "nothing is encoded yet"
    await journal.commit(durable=True)
    assert len(threads) == 1
    assert here not in threads
    assert [journal.read(place) for place in places] == records(3)


async def test_holes_after_the_last_sync_marker_are_cut_though_valid_records_follow(tmp_path: Path) -> None:
    await written(tmp_path, *records(2))
    journal = Journal(tmp_path)
    list(journal.replay())
    first = journal.append(records(1)[0])
    await journal.commit()
    second = journal.append(records(1)[1])
    await journal.commit()
    data = bytearray(segment_path(tmp_path, 0).read_bytes())
    data[first.offset : second.offset] = bytes(second.offset - first.offset)
    segment_path(tmp_path, 0).write_bytes(data)
    assert replayed(tmp_path) == records(2)
    assert segment_path(tmp_path, 0).stat().st_size == first.offset


async def test_a_sync_marker_covers_what_is_on_disk_also_after_a_normal_end(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    list(journal.replay())
    for entry in records(2):
        journal.append(entry)
    await journal.commit()
    journal.close()
    journal.close()
    data = bytearray(segment_path(tmp_path, 0).read_bytes())
    data[-MARKER_BYTES - 1] ^= 1
    segment_path(tmp_path, 0).write_bytes(data)
    with pytest.raises(DataError, match="was on disk before a later part was written"):
        replayed(tmp_path)


async def test_records_that_come_while_a_commit_is_forced_are_proven_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, real = Journal(tmp_path), os.fsync
    list(journal.replay())
    places = [journal.append(records(1)[0])]
    late = iter(records(1)[1:])

    def slow(file: int) -> None:
        real(file)
        if Path(os.readlink(f"/proc/self/fd/{file}")).is_file():
            places.extend(journal.append(record) for record in late)

    monkeypatch.setattr(os, "fsync", slow)
    await journal.commit(durable=True)
    await journal.commit(durable=True)
    monkeypatch.undo()
    path = segment_path(tmp_path, 0)
    data = bytearray(path.read_bytes())
    data[places[1].offset + 12] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=f"damaged at byte {places[1].offset}"):
        replayed(tmp_path)
    journal.close()
