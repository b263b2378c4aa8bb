"""File formats of the journal: segments of checksummed entries, and archives of old segments.

    segment  "DJL2" | entry*        journal-00000000.log, journal-00000001.log, …
    entry    "DJ" | u32 length | u32 crc32 | msgpack of one record
             "DS" | u32 length | u32 crc32 | u64 offset: a sync marker; this segment was durable up to there
    archive  "DA" | u32 length | u32 crc32 | zlib of msgpack: the segment's compacted records
                                    archive-00000000.log, one per archived segment

Every crc32 also covers the place (segment, offset; a marker's or an archive's segment), so that an entry that
was moved, repeated or removed is detected.

A sync marker follows an fsync. A crash or power cut may tear or blank whatever was not yet synced: an
invalid entry in the last segment that no marker covers is truncated, with all that follows it. An invalid
entry that a marker covers is damage, and so is any in an older segment (synced before the next one was
created): both are refused.

An archive appears by one rename; its segment is removed afterwards. If a crash leaves both, the segment wins.
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

from distill.run_log.records import AnyRecord, Snapshot, compacted
from sync import durable
from sync.durable import is_full
from sync.errors import DataError

SEGMENT_MAGIC: Final = b"DJL2"
_RECORD: Final = b"DJ"
_MARKER: Final = b"DS"
_ARCHIVE: Final = b"DA"
_HEAD: Final = struct.Struct("<2sII")
_PLACE: Final = struct.Struct("<2sIQQ")
_OFFSET: Final = struct.Struct("<Q")
_NAME: Final = re.compile(r"(?:journal|archive)-(\d{8,})\.log")
MARKER_BYTES: Final = _HEAD.size + _OFFSET.size
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyRecord)
_archive_decoder = msgspec.msgpack.Decoder(list[AnyRecord])
logger = logging.getLogger(__name__)


def segment_path(folder: Path, number: int) -> Path:
    """File of a segment."""
    return folder / f"journal-{number:08d}.log"


def archive_path(folder: Path, number: int) -> Path:
    """File of an archived segment."""
    return folder / f"archive-{number:08d}.log"


def _number(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def segment_numbers(folder: Path, kind: str = "journal") -> list[int]:
    """Segments in `folder`, oldest first. `kind` "archive": the archived ones instead."""
    return sorted(_number(path) for path in folder.glob(f"{kind}-*.log") if _NAME.fullmatch(path.name))


def replay_from(folder: Path) -> list[int]:
    """Segments that a restart replays, oldest first. Raises DataError when one of them is missing."""
    numbers = segment_numbers(folder)
    base = next((found for number in reversed(numbers) if (found := _base(folder, number)) is not None), 0)
    numbers = [number for number in numbers if number >= base]
    _check_whole(folder, numbers, base)
    return numbers


def _base(folder: Path, number: int) -> int | None:
    """First segment to replay, from the snapshot that heads segment `number`; None: it has none."""
    path = segment_path(folder, number)
    with path.open("rb") as file:
        head = file.read(len(SEGMENT_MAGIC) + _HEAD.size + 16)
    if b"Snapshot" not in head:
        return None
    try:
        record = read_entry(path, len(SEGMENT_MAGIC))
    except DataError:  # torn by a crash, or damaged: `scan` tells which
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


def encode_sync_marker(durable: int, segment: int) -> bytes:
    """Marker that the first `durable` bytes of the segment are on disk."""
    return _entry(_MARKER, _OFFSET.pack(durable), segment, 0)


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
    begin: int = 0

    def payload(self, offset: int, kind: bytes = _RECORD) -> memoryview | None:
        """Payload of a whole and valid entry at `offset`; None: there is none."""
        body = offset - self.begin + _HEAD.size
        if body > len(self.data):
            return None
        found, length, crc = _HEAD.unpack_from(self.data, body - _HEAD.size)
        payload = self.data[body : body + length]
        if found != kind or len(payload) != length:
            return None
        return payload if _crc(kind, payload, _number(self.path), offset) == crc else None

    def decode(self, payload: memoryview, offset: int) -> AnyRecord:
        try:
            return _decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise DataError(
                f"{self.path} holds a record at byte {offset} that this release cannot read ({error}): "
                "resume the run with the release that wrote it"
            ) from None

    def was_durable(self, offset: int) -> bool:
        """Whether a later sync marker covers the byte at `offset`."""
        for found in re.finditer(re.escape(_MARKER), self.data[offset + 1 :]):
            payload = self.payload(offset + 1 + found.start(), _MARKER)
            if payload is not None and _OFFSET.unpack(payload)[0] > offset:
                return True
        return False


def scan(path: Path, *, last: bool, mend: bool = True) -> Iterator[tuple[int, AnyRecord]]:
    """(offset, record) of every entry of a segment; truncates the unsynced tail of the `last` one.

    `mend` False: the tail is skipped and the file left unchanged. Raises DataError when the segment is
    damaged anywhere else.
    """
    data = memoryview(path.read_bytes())
    magic = bytes(data[: len(SEGMENT_MAGIC)])
    if not SEGMENT_MAGIC.startswith(magic.rstrip(b"\0")):
        raise DataError(f"{path} does not begin with {SEGMENT_MAGIC!r}: it is no journal segment, or damaged")
    segment = _Segment(path, data)
    offset = len(magic) if magic == SEGMENT_MAGIC else 0
    while 0 < offset < len(data):
        payload = segment.payload(offset)
        if payload is not None:
            yield offset, segment.decode(payload, offset)
        elif (payload := segment.payload(offset, _MARKER)) is None:
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
        logger.warning("%s: the last %d bytes were never synced; truncating", path, len(data) - offset)
        os.truncate(path, offset)


def read_all(folder: Path) -> Iterator[tuple[int, int, AnyRecord]]:
    """(segment, offset, record) of a whole journal, archived segments included (their offset is 0).

    Read-only, so safe on another process's journal. Raises DataError when a segment is neither there nor
    archived.
    """
    numbers = sorted({*segment_numbers(folder), *segment_numbers(folder, "archive")})
    _check_whole(folder, numbers, 0)
    for number in numbers:
        path = segment_path(folder, number)
        if path.exists():
            for offset, record in scan(path, last=number == numbers[-1], mend=False):
                yield number, offset, record
        else:  # archived, perhaps while the segments before it were read
            for record in read_archive(folder, number):
                yield number, 0, record


def read_entry(path: Path, offset: int) -> AnyRecord:
    """The record at `offset`. Raises DataError when it is not valid."""
    with path.open("rb") as file:
        file.seek(offset)
        head = file.read(_HEAD.size)
        length = _HEAD.unpack(head)[1] if len(head) == _HEAD.size else 0
        segment = _Segment(path, memoryview(head + file.read(length)), offset)
    payload = segment.payload(offset)
    if payload is None:
        raise DataError(
            f"{path} is damaged at byte {offset}: restore the file from a copy, or start a new run"
        )
    return segment.decode(payload, offset)


def archive(folder: Path, number: int) -> bool:
    """Replace a segment by its compacted records, without snapshots; False: the disk is full."""
    path = segment_path(folder, number)
    records = [compacted(one) for _, one in scan(path, last=False) if not isinstance(one, Snapshot)]
    data = zlib.compress(_encoder.encode(records))
    try:
        durable.write(archive_path(folder, number), _entry(_ARCHIVE, data, number, 0))
    except OSError as error:
        if not is_full(error):
            raise
        return False
    path.unlink()
    return True


def read_archive(folder: Path, number: int) -> list[AnyRecord]:
    """Records of an archived segment, in order. Raises DataError when damaged or of another release."""
    path = archive_path(folder, number)
    data = _Segment(path, memoryview(path.read_bytes())).payload(0, _ARCHIVE)
    if data is None:
        raise DataError(f"{path} is damaged: restore the file from a copy; only the audit needs it")
    try:
        return _archive_decoder.decode(zlib.decompress(data))
    except msgspec.DecodeError as error:
        raise DataError(
            f"{path} holds records that this release cannot read ({error}): audit the run with the release "
            "that wrote it"
        ) from None
