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

from distill.control.archive import Archive
from distill.control.records import AnyRecord, Location, Snapshot, compacted
from distill.control.segments import (
    SEGMENT_MAGIC,
    encode_entry,
    read_entry,
    replay_from,
    scan,
    segment_numbers,
    segment_path,
)
from sync.room import FULL

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
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._fsync = fsync
        self._segment_bytes = segment_bytes
        self._retry_seconds = retry_seconds
        self._write = write
        self._pending: deque[tuple[AnyRecord, Location]] = deque()
        """Appended and not yet written; the writer takes a record out once it is in the file."""
        self._writer = ThreadPoolExecutor(1, "journal")
        self._archive = Archive(folder)
        self._segment = -1
        """Newest segment; records are appended to it."""
        self._file = -1
        self._written = 0
        """Sound bytes of the newest segment."""
        self._unsynced = False
        """Something was written since the last fsync."""

    def replay(self) -> Iterator[tuple[Location, AnyRecord]]:
        """Every record that a restart needs, oldest first; cuts a torn tail. Raises DataError on damage.

        The first one is a Snapshot when the journal holds one.
        """
        numbers = replay_from(self.folder)
        for number in numbers:
            path = segment_path(self.folder, number)
            for offset, record in scan(path, last=number == numbers[-1]):
                yield Location(number, offset), record
        if numbers:
            self._segment = numbers[-1]
            self._written = segment_path(self.folder, self._segment).stat().st_size

    def append(self, record: AnyRecord) -> Location:
        """Queue a record for the next commit; returns where it will stand."""
        location = Location()
        self._pending.append((record, location))
        return location

    async def commit(self, *, durable: bool = False) -> None:
        """Write what was appended. `durable`: also forced to the disk under fsync "batch".

        A commit that is cancelled may still write; what it leaves is written by the next one.
        """
        force = self._fsync == "always" or (durable and self._fsync == "batch")
        waiting = False
        while self._pending or (force and self._unsynced):
            try:
                await asyncio.get_running_loop().run_in_executor(self._writer, self._flush, force)
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

    def _flush(self, force: bool) -> None:
        while self._pending:
            record, location = self._pending[0]
            location.segment, location.offset = self._write_record(record)
            self._pending.popleft()
        if force and self._unsynced:
            os.fsync(self._file)
            self._unsynced = False

    def _write_record(self, record: AnyRecord) -> tuple[int, int]:
        """Where the record stands now; a snapshot begins a segment."""
        entry = encode_entry(record)
        fits = self._written + len(entry) <= self._segment_bytes or self._written <= len(SEGMENT_MAGIC)
        if self._segment < 0 or (self._written and (isinstance(record, Snapshot) or not fits)):
            self._open(self._segment + 1)
        elif self._file < 0:
            self._open(self._segment)
        if not self._written:
            self._write_all(SEGMENT_MAGIC)
        place = self._segment, self._written
        self._write_all(entry)
        return place

    def _write_all(self, data: bytes) -> None:
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
        self._close_file()
        path = segment_path(self.folder, segment)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._segment, self._written = segment, os.fstat(self._file).st_size
        if self._fsync != "never":
            folder = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

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
        """Force to the disk what was written and close; nothing pending is written."""
        self._writer.shutdown()
        self._close_file()

    def _close_file(self) -> None:
        if self._file >= 0:
            if self._fsync != "never":
                os.fsync(self._file)
            os.close(self._file)
            self._file = -1
