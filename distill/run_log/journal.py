"""The append-only journal of a run: a restarted controller rebuilds its state from it.

Order of use: exhaust `replay()`, then call `append()` any number of times; nothing is on disk until the
following `commit()` returns. One writer thread encodes, writes and syncs records in the order of `append`.
When the disk is full, `commit()` blocks until there is space, and with it everybody who needs the record to
be safe; the file always ends after a whole record.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from distill.run_log.records import AnyRecord, Location, Snapshot
from distill.run_log.segments import (
    SEGMENT_MAGIC,
    archive,
    encode_entry,
    encode_sync_marker,
    read_entry,
    replay_from,
    scan,
    segment_numbers,
    segment_path,
)
from sync.durable import FULL, force, make_folder

Fsync = Literal["always", "batch", "never"]
logger = logging.getLogger(__name__)


class Journal:
    """Records in `folder`; one writer."""

    def __init__(
        self,
        folder: Path,
        fsync: Fsync = "batch",
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
        self._pending: deque[tuple[AnyRecord, Location]] = deque()
        """Appended and not yet written; the writer removes a record once it is in the file."""
        self._writer = ThreadPoolExecutor(1, "journal")
        self._segment = 0
        """Newest segment; records are appended to it."""
        self._file = -1
        self._written = 0
        """Valid bytes of the newest segment."""
        self._unsynced = False
        """Something was written that no sync marker on disk covers."""

    def replay(self) -> Iterator[tuple[Location, AnyRecord]]:
        """Every record that a restart needs, oldest first; truncates an unsynced tail.

        The first one is a Snapshot when the journal holds one. Raises DataError on damage.
        """
        numbers = replay_from(self.folder)
        for number in numbers:
            path = segment_path(self.folder, number)
            for offset, record in scan(path, last=number == numbers[-1]):
                yield Location(number, offset), record
        if numbers:
            self._segment = numbers[-1]
            force(segment_path(self.folder, self._segment))  # a truncation, too, before anything is appended

    def append(self, record: AnyRecord) -> Location:
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
        while self._pending:
            record, location = self._pending[0]
            location.segment, location.offset = self._write_record(record)
            self._pending.popleft()
        if forced and self._unsynced:
            self._write_sync_marker()

    def _write_record(self, record: AnyRecord) -> tuple[int, int]:
        """(segment, offset) of the record; a snapshot starts a segment."""
        if self._file < 0:
            self._open(self._segment)
        if isinstance(record, Snapshot) and self._written > len(SEGMENT_MAGIC):
            self._open(self._segment + 1)
        entry = self._entry(record)
        if len(SEGMENT_MAGIC) < self._written and self._written + len(entry) > self._segment_bytes:
            self._open(self._segment + 1)
            entry = self._entry(record)
        place = self._segment, self._written
        self._write_all(entry)
        return place

    def _entry(self, record: AnyRecord) -> bytearray:
        """The record encoded for the segment's end; writes the magic of a new segment first."""
        if not self._written:
            self._write_all(SEGMENT_MAGIC)
        return encode_entry(record, self._segment, self._written)

    def _write_sync_marker(self) -> None:
        """Sync what was written, then append a sync marker."""
        os.fsync(self._file)
        self._write_all(encode_sync_marker(self._written, self._segment))
        os.fsync(self._file)
        self._unsynced = False

    def _write_all(self, data: bytes | bytearray) -> None:
        """Append to the segment, all or nothing: a partial write is truncated again."""
        view, done = memoryview(data), 0
        self._unsynced = True
        try:
            while done < len(view):
                done += self._write(self._file, view[done:])
        except OSError:
            os.ftruncate(self._file, self._written)
            raise
        finally:
            view.release()
        self._written += done

    def _open(self, segment: int) -> None:
        """Switch to another segment; the one before is synced first, whatever `fsync` says."""
        self._close_file()
        path = segment_path(self.folder, segment)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._segment, self._written = segment, os.fstat(self._file).st_size
        force(self.folder)

    # --- what was written ---------------------------------------------------------------------------------

    def read(self, location: Location) -> AnyRecord:
        """A committed record."""
        return read_entry(segment_path(self.folder, location.segment), location.offset)

    async def archive(self, before: int, needed: set[int]) -> int:
        """Archive the segments below `before` that are not `needed`; how many.

        Locations in them are void afterwards. A full disk leaves the rest for the next call.
        """
        count = 0
        for number in segment_numbers(self.folder):
            if number < before and number not in needed:
                if not await asyncio.to_thread(archive, self.folder, number):
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
