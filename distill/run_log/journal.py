"""The append-only journal of a run: a restarted controller rebuilds its state from it.

    segment  "DJL3" | entry*        journal-00000000.log, journal-00000001.log, …
    entry    "DJ" | u32 length | u32 crc32 | block: some of the records of one commit
             "DS" | u32 length | u32 crc32 | u64 offset: a sync marker; this segment was durable up to there
    archive  "DA" | u32 length | u32 crc32 | block: the segment's compacted records
                                    archive-00000000.log, one per archived segment

Every crc32 also covers the place (segment, offset; a marker's or an archive's segment), so that an entry that
was moved, repeated or removed is detected. Module `entries` compresses records into blocks.

A sync marker follows an fsync. A crash or power cut may tear or blank whatever was not yet synced: an
invalid entry in the last segment that no marker covers is truncated, with all that follows it. An invalid
entry that a marker covers is damage, and so is any in an older segment (synced before the next one was
created): both are refused.

An archive appears by one rename; its segment is removed afterwards. If a crash leaves both, the segment wins.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

from distill.run_log.entries import (
    ARCHIVE,
    BLOCK,
    HEAD,
    MARKER,
    OFFSET,
    Segment,
    encode_entry,
    pack_block,
    unpack_block,
)
from distill.run_log.records import Location, Record, Snapshot, compacted
from sync.base.durable import FULL, force, is_full, make_folder
from sync.base.durable import write as replace_file
from sync.base.errors import DataError

SEGMENT_MAGIC: Final = b"DJL3"
_BLOCK_BYTES: Final = 256 << 10  # of a block's records: what is decompressed to read one of them
_NAME: Final = re.compile(r"(?:journal|archive)-(\d{8,})\.log")
logger = logging.getLogger(__name__)


class Journal:
    """Records in `folder`; one writer.

    Exhaust `replay()`, then call `append()` any number of times; nothing is on disk until the following
    `commit()` returns. One writer thread compresses, writes and syncs records in the order of `append`. When
    the disk is full, `commit()` blocks until there is space, and with it everybody who needs the record to be
    safe; the file always ends after a whole block.
    """

    def __init__(
        self,
        folder: Path,
        fsync: Literal["always", "batch", "never"] = "batch",
        segment_bytes: int = 64 << 20,
        retry_seconds: float = 5.0,
        write: Callable[[int, memoryview], int] = os.write,
    ) -> None:
        make_folder(folder)
        self.folder = folder
        self._fsync = fsync
        self._segment_bytes = segment_bytes
        self._retry_seconds = retry_seconds
        self._write = write
        self._pending: deque[tuple[Record, Location]] = deque()  # the writer removes what is in the file
        self._writer = ThreadPoolExecutor(1, "journal")
        self._file, self._segment = -1, 0  # the newest segment
        self._written = 0  # its valid bytes
        self._unsynced = False  # something was written that no sync marker on disk covers
        self._read_block = lru_cache(maxsize=4)(_read_block)

    def replay(self) -> Iterator[tuple[Location, Record]]:
        """Every record that a restart needs, oldest first; truncates an unsynced tail.

        The first one is a Snapshot when the journal holds one. Raises DataError on damage.
        """
        numbers = _replayed(self.folder)
        for number in numbers:
            path = segment_path(self.folder, number)
            yield from scan(path, last=number == numbers[-1])
        if numbers:
            self._segment = numbers[-1]  # a truncation is forced, too, before anything is appended
            force(segment_path(self.folder, self._segment))

    def append(self, record: Record) -> Location:
        """Queue a record for the next commit; returns where it will stand."""
        location = Location()
        self._pending.append((record, location))
        return location

    async def commit(self, *, durable: bool = False) -> None:
        """Write what was appended. `durable`: also sync it under fsync "batch".

        A cancelled commit may still write; the next one writes what it left.
        """
        forced = self._fsync == "always" or (durable and self._fsync == "batch")
        waiting = False
        while self._pending or (forced and self._unsynced):
            try:
                await asyncio.get_running_loop().run_in_executor(self._writer, self._flush, forced)
                break
            except OSError as error:
                if error.errno not in FULL:
                    raise
                if not waiting:
                    logger.error("disk full: the journal in %s waits for space, the run pauses", self.folder)
                waiting = True
                await asyncio.sleep(self._retry_seconds)
        if waiting:
            logger.warning("the journal in %s has space again, the run continues", self.folder)

    # --- in the writer's thread ---------------------------------------------------------------------------

    def _flush(self, forced: bool) -> None:
        limit = min(_BLOCK_BYTES, self._segment_bytes)
        while self._pending:
            now = range(len(self._pending))  # more may be appended meanwhile
            payload, count = pack_block((self._pending[place][0] for place in now), limit)
            place = self._write_block(payload, isinstance(self._pending[0][0], Snapshot))
            for index in range(count):
                _, location = self._pending.popleft()
                location.segment, location.offset, location.index = *place, index
        if forced and self._unsynced:
            self._write_sync_marker()

    def _write_block(self, payload: bytes, is_snapshot: bool) -> tuple[int, int]:
        """(segment, offset) of the block; a snapshot's starts a segment."""
        if self._file < 0:
            self._open(self._segment)
        full = self._written + HEAD.size + len(payload) > self._segment_bytes
        if (is_snapshot or full) and self._written > len(SEGMENT_MAGIC):
            self._open(self._segment + 1)
        if not self._written:
            self._write_all(SEGMENT_MAGIC)
        place = self._segment, self._written
        self._write_all(encode_entry(BLOCK, payload, *place))
        return place

    def _write_sync_marker(self) -> None:
        os.fsync(self._file)
        self._write_all(encode_entry(MARKER, OFFSET.pack(self._written), self._segment, 0))
        os.fsync(self._file)
        self._unsynced = False

    def _write_all(self, data: bytes) -> None:
        """Append to the segment, all or nothing: a partial write is truncated again."""
        rest = memoryview(data)
        self._unsynced = True
        try:
            while rest:
                rest = rest[self._write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, self._written)
            raise
        self._written += len(data)

    def _open(self, segment: int) -> None:
        """Switch to another segment; the one before is synced first, whatever `fsync` is."""
        self._close_file()
        path = segment_path(self.folder, segment)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._segment, self._written = segment, os.fstat(self._file).st_size
        force(self.folder)

    # --- what was written ---------------------------------------------------------------------------------

    def read(self, location: Location) -> Record:
        """A committed record."""
        return self._read_block(segment_path(self.folder, location.segment), location.offset)[location.index]

    async def archive(self, before: int, needed: set[int]) -> int:
        """Archive the segments below `before` that are not `needed`; how many.

        Locations in them are void afterwards. A full disk leaves the rest for the next call.
        """
        count = 0
        for number in segment_numbers(self.folder):
            if number < before and number not in needed:
                if not await asyncio.to_thread(_archive, self.folder, number):
                    logger.error("disk full: journal segment %d cannot be archived now", number)
                    break
                count += 1
        return count

    def close(self) -> None:
        """Sync what was written; nothing pending is written."""
        self._writer.shutdown()
        if self._unsynced and not self._pending:
            try:
                self._write_sync_marker()
            except OSError as error:  # no space for a marker: the records count as unsynced
                if error.errno not in FULL:
                    raise
        self._close_file()

    def _close_file(self) -> None:
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            self._file, self._unsynced = -1, False


# --- files ------------------------------------------------------------------------------------------------


def segment_path(folder: Path, number: int, kind: str = "journal") -> Path:
    """File of a segment. `kind` "archive": of an archived one."""
    return folder / f"{kind}-{number:08d}.log"


def segment_numbers(folder: Path, kind: str = "journal") -> list[int]:
    """Segments in `folder`, oldest first. `kind` "archive": the archived ones instead."""
    named = [(path, _NAME.fullmatch(path.name)) for path in folder.glob(f"{kind}-*.log")]
    numbers = [(path, int(name[1])) for path, name in named if name]
    return sorted(number for path, number in numbers if path == segment_path(folder, number, kind))


def _replayed(folder: Path) -> list[int]:
    """Segments that a restart replays, oldest first. Raises DataError when one of them is missing."""
    numbers = segment_numbers(folder)
    base = next((start for number in reversed(numbers) if (start := _base(folder, number)) is not None), 0)
    numbers = [number for number in numbers if number >= base]
    _check_whole(folder, numbers, base)
    return numbers


def _base(folder: Path, number: int) -> int | None:
    """First segment to replay, from the snapshot that heads segment `number`; None: it has none."""
    try:
        record = _read_block(segment_path(folder, number), len(SEGMENT_MAGIC))[0]
    except DataError:  # torn by a crash, or damaged: `scan` decides
        return None
    if not isinstance(record, Snapshot):
        return None
    return number if record.base is None else record.base


def _check_whole(folder: Path, numbers: Collection[int], first: int) -> None:
    """Raise DataError unless `numbers` are all from `first` to the greatest."""
    for expected, number in zip(itertools.count(first), sorted(numbers), strict=False):
        if number != expected:
            gap = segment_path(folder, expected)
            raise DataError(f"{gap} is missing between other segments: restore it, or start a new run")


def read_all(folder: Path) -> Iterator[tuple[Location, Record]]:
    """A whole journal, archived segments included (their offset is 0); changes nothing.

    Raises DataError when a segment is neither there nor archived.
    """
    numbers = sorted({*segment_numbers(folder), *segment_numbers(folder, "archive")})
    _check_whole(folder, numbers, 0)
    for number in numbers:
        path = segment_path(folder, number)
        if path.exists():
            yield from scan(path, last=number == numbers[-1], mend=False)
        else:  # archived, perhaps while the segments before it were read
            for record in _read_archive(segment_path(folder, number, "archive")):
                yield Location(number, 0), record


def _archive(folder: Path, number: int) -> bool:
    """Replace a segment by its compacted records, without snapshots; False: the disk is full."""
    path = segment_path(folder, number)
    records = [compacted(record) for _, record in scan(path, last=False) if not isinstance(record, Snapshot)]
    payload, _ = pack_block(records, sys.maxsize)
    try:
        replace_file(segment_path(folder, number, "archive"), encode_entry(ARCHIVE, payload, number, 0))
    except OSError as error:
        if is_full(error):
            return False
        raise
    path.unlink()
    return True


def _read_archive(path: Path) -> list[Record]:
    payload = Segment(path, memoryview(_bytes(path))).payload(0, ARCHIVE)
    if payload is None:
        raise DataError(f"{path} is damaged: restore the file from a copy; only the audit needs it")
    return unpack_block(payload, str(path))


def scan(path: Path, *, last: bool, mend: bool = True) -> Iterator[tuple[Location, Record]]:
    """Every record of a segment and its place; truncates the unsynced tail of the `last` one, if `mend`.

    Raises DataError when the segment is damaged anywhere else.
    """
    data = memoryview(_bytes(path))
    magic = bytes(data[: len(SEGMENT_MAGIC)])
    if not SEGMENT_MAGIC.startswith(magic.rstrip(b"\0")):
        raise DataError(
            f"{path} does not begin with {SEGMENT_MAGIC!r}, but with {magic!r}: it is of another release, no "
            "journal segment, or damaged; go on with the release that wrote it, or start a new run"
        )
    segment = Segment(path, data)
    offset = len(magic) if magic == SEGMENT_MAGIC else 0
    while 0 < offset < len(data):
        payload = segment.payload(offset)
        if payload is not None:
            for index, record in enumerate(unpack_block(payload, f"{path} at byte {offset}")):
                yield Location(segment.number, offset, index), record
        elif (payload := segment.payload(offset, MARKER)) is None:
            break
        offset += HEAD.size + len(payload)
    if offset == len(data) > 0:
        return
    if not last or segment.was_durable(offset):
        raise DataError(
            f"{path} is damaged at byte {offset}, which was on disk before a later part was written: a crash "
            "does not do that; restore the file from a copy, or start a new run"
        )
    if mend and len(data):
        logger.warning("%s: the last %d bytes were never synced; truncating", path, len(data) - offset)
        os.truncate(path, offset)


def _bytes(path: Path) -> bytes:
    with _readable(path):
        return path.read_bytes()


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}): restore the file from a copy, or start a new run"
        ) from None


def _read_block(path: Path, offset: int) -> list[Record]:
    with _readable(path), path.open("rb") as file:
        file.seek(offset)
        head = file.read(HEAD.size)
        length = HEAD.unpack(head)[1] if len(head) == HEAD.size else 0
        segment = Segment(path, memoryview(head + file.read(length)), offset)
    payload = segment.payload(offset)
    if payload is None:
        damage = f"{path} is damaged at byte {offset}"
        raise DataError(f"{damage}: restore the file from a copy, or start a new run")
    return unpack_block(payload, f"{path} at byte {offset}")
