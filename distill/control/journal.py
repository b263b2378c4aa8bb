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
    SEGMENT_MAGIC,
    compact,
    encode_entry,
    read_entry,
    scan,
    segment_numbers,
    segment_path,
)
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
        folder.mkdir(parents=True, exist_ok=True)
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
        """Something was written since the last fsync."""

    def replay(self) -> Iterator[tuple[Location, AnyRecord]]:
        """Every record, oldest first; cuts a torn tail. Raises DataError on damage."""
        numbers = segment_numbers(self.folder)
        for number in numbers:
            path = segment_path(self.folder, number)
            for offset, record in scan(path, last=number == numbers[-1]):
                yield Location(number, offset), record
        if numbers:
            self._segment = numbers[-1]
            self._size = segment_path(self.folder, self._segment).stat().st_size

    def append(self, record: AnyRecord) -> Location:
        """Queue a record for the next commit; returns where it will stand."""
        entry = encode_entry(record)
        if self._segment < 0 or self._size + len(entry) > max(self._segment_bytes, len(entry)):
            self._segment, self._size = self._segment + 1, 0
        if not self._pending or self._pending[-1].segment != self._segment:
            self._pending.append(_Pending(self._segment))
        if self._size == 0:
            self._pending[-1].data += SEGMENT_MAGIC
            self._size = len(SEGMENT_MAGIC)
        location = Location(self._segment, self._size)
        self._pending[-1].data += entry
        self._size += len(entry)
        return location

    async def commit(self, *, durable: bool = False) -> None:
        """Write what was appended. `durable`: also forced to the disk under fsync "batch"."""
        async with self._lock:
            while self._pending or self._writing:
                self._writing = self._writing or self._pending.popleft()
                await self._commit_one(self._writing)
                self._writing = None
            forced = self._fsync == "always" or (durable and self._fsync == "batch")
            if self._unsynced and forced:
                await asyncio.to_thread(os.fsync, self._file)
                self._unsynced = False

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
        self.close()
        path = segment_path(self.folder, segment)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._file_segment, self._written = segment, os.fstat(self._file).st_size
        if self._fsync != "never":
            folder = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

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
        """Force to the disk what was written and close; nothing pending is written."""
        if self._file >= 0:
            if self._fsync != "never":
                os.fsync(self._file)
            os.close(self._file)
            self._file = self._file_segment = -1
