"""The journal's files: segments of checked entries.

    segment  "DJL2" | entry*        journal-00000000.log, journal-00000001.log, …
    entry    "DJ" | u32 length | u32 crc32 | msgpack of one record
             "DS" | u32 length | u32 crc32 | u64 offset: before it all of this segment was on disk

The crc32 covers the entry and its place (segment, offset; a mark's segment): an entry that was moved,
repeated or left out shows.

A "DS" mark is written after an fsync. A crash or a power cut may tear or blank whatever was not yet forced to
disk, so a bad entry in the last segment that no mark covers is cut off with all that follows it. A bad entry
that a mark covers is damage, and so is any in an older segment (it was forced to disk before the next one was
made): that is refused.

Segments "DJL1", of earlier releases, have neither marks nor places: a bad entry with sound ones after it is
refused.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from distill.run_log.archive import archived, read_chunk
from distill.run_log.records import AnyRecord, Snapshot
from sync.errors import DataError

SEGMENT_MAGIC: Final = b"DJL2"
_OLD_MAGIC: Final = b"DJL1"
_RECORD: Final = b"DJ"
_MARK: Final = b"DS"
_HEAD: Final = struct.Struct("<2sII")
_PLACE: Final = struct.Struct("<2sIQQ")
_OFFSET: Final = struct.Struct("<Q")
_NAME: Final = re.compile(r"journal-(\d{8,})\.log")
MARK_BYTES: Final = _HEAD.size + _OFFSET.size
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyRecord)
logger = logging.getLogger(__name__)


def segment_path(folder: Path, number: int) -> Path:
    """File of a segment."""
    return folder / f"journal-{number:08d}.log"


def _number(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def segment_numbers(folder: Path) -> list[int]:
    """Segments in `folder`, oldest first; archived ones are not among them."""
    found = (_NAME.fullmatch(path.name) for path in folder.glob("journal-*.log"))
    return sorted(int(name[1]) for name in found if name)


def replay_from(folder: Path) -> list[int]:
    """Segments that a restart replays, oldest first. Raises DataError when one of them is missing."""
    numbers = segment_numbers(folder)
    base = next((found for number in reversed(numbers) if (found := _base(folder, number)) is not None), 0)
    numbers = [number for number in numbers if number >= base]
    _check_whole(folder, numbers, base)
    return numbers


def _base(folder: Path, number: int) -> int | None:
    """Where a restart replays from, as the snapshot that a segment begins with says; None: it has none."""
    path = segment_path(folder, number)
    with path.open("rb") as file:
        head = file.read(len(SEGMENT_MAGIC) + _HEAD.size + 16)
    if b"Snapshot" not in head:
        return None
    try:
        record = read_entry(path, len(SEGMENT_MAGIC))
    except DataError:  # torn by a crash, or damaged: `scan` tells the two apart
        return None
    assert isinstance(record, Snapshot), "a tag stands at the head of its record"
    return number if record.base is None else record.base


def _check_whole(folder: Path, numbers: Collection[int], first: int) -> None:
    """Raise DataError unless `numbers` are all from `first` to the greatest."""
    gap = next((n for n in range(first, max(numbers, default=-1)) if n not in numbers), None)
    if gap is not None:
        raise DataError(
            f"{segment_path(folder, gap)} is missing between other segments: restore it, or start a new run"
        )


def encode_entry(record: AnyRecord, segment: int, offset: int) -> bytearray:
    """One entry as it stands at that place; arrays are copied once."""
    entry = bytearray()
    _encoder.encode_into(record, entry, _HEAD.size)
    with memoryview(entry)[_HEAD.size :] as payload:
        crc = _crc(_RECORD, payload, segment, offset)
        _HEAD.pack_into(entry, 0, _RECORD, len(payload), crc)
    return entry


def encode_mark(durable: int, segment: int) -> bytes:
    """The mark that the first `durable` bytes of the segment are on disk."""
    return _entry(_MARK, _OFFSET.pack(durable), segment, 0)


def _entry(kind: bytes, payload: bytes, segment: int, offset: int) -> bytes:
    return _HEAD.pack(kind, len(payload), _crc(kind, payload, segment, offset)) + payload


def _crc(kind: bytes, payload: bytes | memoryview, segment: int, offset: int) -> int:
    place = offset if kind == _RECORD else 0
    return zlib.crc32(payload, zlib.crc32(_PLACE.pack(kind, len(payload), segment, place)))


@dataclass(frozen=True)
class _Segment:
    """A segment's bytes, or those of it from `begin` on."""

    path: Path
    data: memoryview
    number: int
    old: bool
    """Of an earlier release."""
    begin: int = 0

    def payload(self, offset: int, kind: bytes = _RECORD) -> memoryview | None:
        """Payload of a whole and sound entry at `offset`; None: there is none."""
        body = offset - self.begin + _HEAD.size
        if body > len(self.data):
            return None
        found, length, crc = _HEAD.unpack_from(self.data, body - _HEAD.size)
        payload = self.data[body : body + length]
        if found != kind or len(payload) != length:
            return None
        sound = zlib.crc32(payload) if self.old else _crc(kind, payload, self.number, offset)
        return payload if sound == crc else None

    def decode(self, payload: memoryview, offset: int) -> AnyRecord:
        try:
            return _decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise DataError(
                f"{self.path} holds a record at byte {offset} that this release cannot read ({error}): "
                "resume the run with the release that wrote it"
            ) from None

    def was_durable(self, offset: int) -> bool:
        """Whether what follows proves that the byte at `offset` was on disk."""
        kind, whole = _RECORD if self.old else _MARK, bytes(self.data)
        found = whole.find(kind, offset + 1)
        while found >= 0:
            payload = self.payload(found, kind)
            if payload is not None and (self.old or _OFFSET.unpack(payload)[0] > offset):
                return True
            found = whole.find(kind, found + 1)
        return False


def scan(path: Path, *, last: bool, mend: bool = True) -> Iterator[tuple[int, AnyRecord]]:
    """(offset, record) of every entry of a segment; the unsynced tail of the `last` one is cut off the file.

    `mend` False: the tail is left out and the file as it is. Raises DataError when the segment is damaged
    anywhere else.
    """
    data = memoryview(path.read_bytes())
    magic = bytes(data[: len(SEGMENT_MAGIC)])
    if not (magic in (SEGMENT_MAGIC, _OLD_MAGIC) or SEGMENT_MAGIC.startswith(magic.rstrip(b"\0"))):
        raise DataError(
            f"{path} does not begin with {SEGMENT_MAGIC!r}: it is no journal segment, or is damaged"
        )
    segment = _Segment(path, data, _number(path), old=magic == _OLD_MAGIC)
    offset = len(magic) if magic in (SEGMENT_MAGIC, _OLD_MAGIC) else 0
    while 0 < offset < len(data):
        payload = segment.payload(offset)
        if payload is not None:
            yield offset, segment.decode(payload, offset)
        elif (payload := segment.payload(offset, _MARK)) is None:
            break
        offset += _HEAD.size + len(payload)
    if offset == len(data) > 0:
        return
    if not last or segment.was_durable(offset):
        raise DataError(
            f"{path} is damaged at byte {offset}, which was on disk before a later part was written: a crash "
            "does not do that; restore the file from a copy, or start a new run"
        )
    if mend and len(data):
        _cut(path, offset, len(data))


def ends_in_old_format(path: Path) -> bool:
    """Whether a segment is of an earlier release: nothing is appended to such a one."""
    with path.open("rb") as file:
        return file.read(len(_OLD_MAGIC)) == _OLD_MAGIC


def read_all(folder: Path) -> Iterator[tuple[int, int, AnyRecord]]:
    """(segment, offset, record) of a whole journal, of archived segments too (their offset is 0).

    Changes nothing, so it may be another process's. Raises DataError when a segment is neither there nor
    archived.
    """
    segments, chunks = segment_numbers(folder), archived(folder)
    numbers = sorted({*segments, *chunks})
    _check_whole(folder, numbers, 0)
    for number in numbers:
        path = segment_path(folder, number)
        if path.exists():
            for offset, record in scan(path, last=number == numbers[-1], mend=False):
                yield number, offset, record
        else:  # archived, perhaps while the segments before it were read
            for record in read_chunk(chunks.get(number) or archived(folder)[number]):
                yield number, 0, record


def _cut(path: Path, offset: int, size: int) -> None:
    logger.warning(
        "%s ends in %d bytes that never were forced to disk; they are cut off", path, size - offset
    )
    os.truncate(path, offset)


def read_entry(path: Path, offset: int) -> AnyRecord:
    """The record at `offset`. Raises DataError when it is not sound."""
    with path.open("rb") as file:
        old = file.read(len(_OLD_MAGIC)) == _OLD_MAGIC
        file.seek(offset)
        head = file.read(_HEAD.size)
        length = _HEAD.unpack(head)[1] if len(head) == _HEAD.size else 0
        segment = _Segment(path, memoryview(head + file.read(length)), _number(path), old, offset)
    payload = segment.payload(offset)
    if payload is None:
        raise DataError(
            f"{path} is damaged at byte {offset}: restore the file from a copy, or start a new run"
        )
    return segment.decode(payload, offset)
