"""The append-only journal of a run: what a restart of the controller is rebuilt from.

Order of use: `replay()` to its end, then any number of `append()`; nothing is on disk before the `commit()`
that follows it has returned. Records are encoded, written and forced to disk by one thread of the journal's
own, in the order of `append`. When the disk is full, `commit()` waits for room, and with it everybody who
needs the record to be safe; the file always ends behind a whole record.
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

from distill.run_log.archive import Archive
from distill.run_log.records import AnyRecord, Location, Snapshot, compacted
from distill.run_log.segments import (
    SEGMENT_MAGIC,
    encode_entry,
    encode_mark,
    ends_in_old_format,
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
        """Appended and not yet written; the writer takes a record out once it is in the file."""
        self._writer = ThreadPoolExecutor(1, "journal")
        self._archive = Archive(folder)
        self._segment = 0
        """Newest segment; records are appended to it."""
        self._file = -1
        self._written = 0
        """Sound bytes of the newest segment."""
        self._unsynced = False
        """Something was written that no mark on disk says to be durable."""

    def replay(self) -> Iterator[tuple[Location, AnyRecord]]:
        """Every record that a restart needs, oldest first; cuts an unsynced tail. Raises DataError on damage.

        The first one is a Snapshot when the journal holds one.
        """
        numbers = replay_from(self.folder)
        for number in numbers:
            path = segment_path(self.folder, number)
            for offset, record in scan(path, last=number == numbers[-1]):
                yield Location(number, offset), record
        if numbers:
            self._segment = numbers[-1]
            path = segment_path(self.folder, self._segment)
            force(path)  # the cut, too, before anything is written behind it
            self._segment += ends_in_old_format(path)

    def append(self, record: AnyRecord) -> Location:
        """Queue a record for the next commit; returns where it will stand."""
        location = Location()
        self._pending.append((record, location))
        return location

    async def commit(self, *, durable: bool = False) -> None:
        """Write what was appended. `durable`: also forced to the disk under fsync "batch".

        A commit that is cancelled may still write; what it leaves is written by the next one.
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
                    logger.error("disk full: the journal in %s waits for room, the run pauses", self.folder)
                waiting = True
                await asyncio.sleep(self._retry_seconds)
        if waiting:
            logger.warning("the journal in %s has room again, the run goes on", self.folder)

    # --- in the writer's thread ---------------------------------------------------------------------------

    def _flush(self, forced: bool) -> None:
        while self._pending:
            record, location = self._pending[0]
            location.segment, location.offset = self._write_record(record)
            self._pending.popleft()
        if forced and self._unsynced:
            self._mark_durable()

    def _write_record(self, record: AnyRecord) -> tuple[int, int]:
        """Where the record stands now; a snapshot begins a segment."""
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
        """The record as it stands at the segment's end; the segment begins now if it is new."""
        if not self._written:
            self._write_all(SEGMENT_MAGIC)
        return encode_entry(record, self._segment, self._written)

    def _mark_durable(self) -> None:
        """Force to the disk what was written, then a mark that says so."""
        os.fsync(self._file)
        self._write_all(encode_mark(self._written, self._segment))
        os.fsync(self._file)
        self._unsynced = False

    def _write_all(self, data: bytes | bytearray) -> None:
        """Write to the segment's end, all or nothing: what a full disk took of it is cut off again."""
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
        """Go on with another segment; the one before is forced to disk first, whatever `fsync` says."""
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

        Locations in them are void afterwards. A full disk leaves the rest for another time.
        """
        count = 0
        for number in segment_numbers(self.folder):
            if number < before and number not in needed:
                if not await asyncio.to_thread(self._archive_one, number):
                    logger.error("disk full: journal segment %d cannot be archived now", number)
                    break
                count += 1
        return count

    def _archive_one(self, number: int) -> bool:
        path = segment_path(self.folder, number)
        records = [compacted(record) for _, record in scan(path, last=False)]
        done = self._archive.add(number, [one for one in records if not isinstance(one, Snapshot)])
        if done:
            path.unlink()
        return done

    def close(self) -> None:
        """Force to the disk what was written, and mark it so; nothing pending is written."""
        self._writer.shutdown()
        if self._unsynced and not self._pending:
            try:
                self._mark_durable()
            except OSError as error:  # without room for a mark the records stand as unsynced ones
                if error.errno not in FULL:
                    raise
        self._close_file()

    def _close_file(self) -> None:
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            self._file, self._unsynced = -1, False
