"""The append-only journal of a run: what a restart of the controller is rebuilt from.

Order of use: `replay()` to its end, then any number of `append()`; nothing is on disk before the `commit()`
that follows it has returned. When the disk is full, `commit()` waits for room, and with it everybody who
needs the record to be safe; the file always ends behind a whole record.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from distill.control.records import AnyRecord
from distill.control.segments import (
    MARK_BYTES,
    SEGMENT_MAGIC,
    compact,
    encode_entry,
    encode_mark,
    ends_in_old_format,
    read_entry,
    scan,
    segment_numbers,
    segment_path,
)
from sync.durable import force, make_folder
from sync.room import FULL

Fsync = Literal["always", "batch", "never"]
logger = logging.getLogger(__name__)


class Location(NamedTuple):
    """Where a record stands."""

    segment: int
    offset: int


@dataclass(slots=True)
class _Pending:
    """Bytes that wait to be written to one segment."""

    segment: int
    data: bytearray = field(default_factory=bytearray)


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
        self._pending: deque[_Pending] = deque()
        self._writing: _Pending | None = None
        """Being written; stays here when a commit is cancelled while the disk is full."""
        self._lock = asyncio.Lock()
        self._segment = -1
        """Newest segment; records are appended to it."""
        self._size = 0
        """Its size with everything pending."""
        self._file = -1
        self._file_segment = -1
        self._written = 0
        """Sound bytes of the open file."""
        self._unsynced = False
        """Records were written that no mark on disk says to be durable."""

    def replay(self) -> Iterator[tuple[Location, AnyRecord]]:
        """Every record, oldest first; cuts an unsynced tail. Raises DataError on damage."""
        numbers = segment_numbers(self.folder)
        for number in numbers:
            path = segment_path(self.folder, number)
            for offset, record in scan(path, last=number == numbers[-1]):
                yield Location(number, offset), record
        if numbers:
            self._segment = numbers[-1]
            path = segment_path(self.folder, self._segment)
            self._size = path.stat().st_size
            force(path)  # the cut, too, before anything is written behind it
            if ends_in_old_format(path):
                self._segment, self._size = self._segment + 1, 0

    def append(self, record: AnyRecord) -> Location:
        """Queue a record for the next commit; returns where it will stand."""
        if self._segment < 0:
            self._segment = 0
        entry = encode_entry(record, self._segment, self._size)
        if self._size + len(entry) > max(self._segment_bytes, len(entry)):
            self._segment, self._size = self._segment + 1, 0
        if self._size == 0:
            self._queue(SEGMENT_MAGIC)
            entry = encode_entry(record, self._segment, self._size)
        location = Location(self._segment, self._size)
        self._queue(entry)
        return location

    def _queue(self, data: bytes) -> None:
        """To be written at the newest segment's end."""
        if not self._pending or self._pending[-1].segment != self._segment:
            self._pending.append(_Pending(self._segment))
        self._pending[-1].data += data
        self._size += len(data)

    async def commit(self, *, durable: bool = False) -> None:
        """Write what was appended. `durable`: also forced to the disk under fsync "batch"."""
        async with self._lock:
            await self._write_pending()
            forced = self._fsync == "always" or (durable and self._fsync == "batch")
            if self._unsynced and forced:
                await asyncio.to_thread(os.fsync, self._file)
                proven = self._file_segment, self._written + MARK_BYTES
                self._mark_durable()
                await self._write_pending()
                await asyncio.to_thread(os.fsync, self._file)
                self._unsynced = (self._file_segment, self._written) != proven

    async def _write_pending(self) -> None:
        while self._pending or self._writing:
            self._writing = self._writing or self._pending.popleft()
            await self._commit_one(self._writing)
            self._writing = None

    def _mark_durable(self) -> None:
        """Queue the mark that all that is written is on disk; a segment that is over needs none."""
        if self._segment == self._file_segment:
            self._queue(encode_mark(self._written, self._segment))

    async def _commit_one(self, pending: _Pending) -> None:
        waiting = False
        while True:
            try:
                self._write_all(pending)
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

    def _write_all(self, pending: _Pending) -> None:
        """Write to the segment's end, all or nothing: what a full disk took of it is cut off again."""
        if self._file_segment != pending.segment:
            self._open(pending.segment)
        view, done = memoryview(pending.data), 0
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
        self._leave()
        path = segment_path(self.folder, segment)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._file_segment, self._written = segment, os.fstat(self._file).st_size
        force(self.folder)

    def _leave(self) -> None:
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            self._file = self._file_segment = -1
            self._unsynced = False

    def read(self, location: Location) -> AnyRecord:
        """A committed record."""
        return read_entry(segment_path(self.folder, location.segment), location.offset)

    async def compact(self, needed: set[int], done: set[int]) -> set[int]:
        """Shrink finished segments that are not `needed` and not yet `done`; returns the ones shrunk now.

        Locations in them are void afterwards. A full disk leaves the rest for another time.
        """
        chosen = {n for n in range(self._file_segment) if n not in needed and n not in done}
        shrunk: set[int] = set()
        for number in sorted(chosen):
            try:
                gained = await asyncio.to_thread(compact, segment_path(self.folder, number))
            except OSError as error:
                if error.errno not in FULL:
                    raise
                logger.error("disk full: journal segment %d cannot be shrunk now", number)
                break
            shrunk.add(number)
            logger.info("journal segment %d is covered by a checkpoint: %d bytes freed", number, gained)
        return shrunk

    def close(self) -> None:
        """Force to the disk what was written, and mark it so; nothing pending is written."""
        if self._unsynced and not (self._pending or self._writing):
            os.fsync(self._file)
            self._mark_durable()
            try:
                self._write_all(self._pending[0])
                self._pending.clear()
            except OSError as error:  # without room for a mark the records stand as unsynced ones
                if error.errno not in FULL:
                    raise
        self._leave()
