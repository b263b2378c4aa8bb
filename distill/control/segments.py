"""The journal's files: segments of checked records.

    segment  "DJL1" | entry*            journal-00000000.log, journal-00000001.log, …
    entry    "DJ" | u32 length | u32 crc32 of payload | payload (msgpack of one record)

A SIGKILL leaves a prefix of what was written: the last segment may end inside an entry. That tail is cut. A
bad entry with good ones after it is damage, not a crash, and is refused.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import msgspec

from distill.control.archive import archived, read_chunk
from distill.control.records import AnyRecord, Snapshot
from sync.errors import DataError

SEGMENT_MAGIC: Final = b"DJL1"
_MARK: Final = b"DJ"
_HEAD: Final = struct.Struct("<2sII")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyRecord)
logger = logging.getLogger(__name__)


def segment_path(folder: Path, number: int) -> Path:
    """File of a segment."""
    return folder / f"journal-{number:08d}.log"


def segment_numbers(folder: Path) -> list[int]:
    """Segments in `folder`, oldest first; archived ones are not among them."""
    return sorted(int(path.stem.split("-")[1]) for path in folder.glob("journal-*.log"))


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


def encode_entry(record: AnyRecord) -> bytes:
    """One entry as it stands in the file."""
    payload = _encoder.encode(record)
    return _HEAD.pack(_MARK, len(payload), zlib.crc32(payload)) + payload


def _payload(data: memoryview, offset: int) -> memoryview | None:
    """Payload of a whole and sound entry at `offset`; None: there is none."""
    body = offset + _HEAD.size
    if body > len(data):
        return None
    mark, length, crc = _HEAD.unpack_from(data, offset)
    payload = data[body : body + length]
    if mark != _MARK or len(payload) != length or zlib.crc32(payload) != crc:
        return None
    return payload


def _decode(payload: memoryview, path: Path, offset: int) -> AnyRecord:
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise DataError(
            f"{path} holds a record at byte {offset} that this release cannot read ({error}): "
            "resume the run with the release that wrote it"
        ) from None


def _sound_entry_after(data: memoryview, offset: int) -> bool:
    whole = bytes(data)
    found = whole.find(_MARK, offset + 1)
    while found >= 0:
        if _payload(data, found) is not None:
            return True
        found = whole.find(_MARK, found + 1)
    return False


def scan(path: Path, *, last: bool, mend: bool = True) -> Iterator[tuple[int, AnyRecord]]:
    """(offset, record) of every entry of a segment; the torn tail of the `last` one is cut off the file.

    `mend` False: the tail is left out and the file as it is. Raises DataError when the segment is damaged
    anywhere else.
    """
    data = memoryview(path.read_bytes())
    if bytes(data[: len(SEGMENT_MAGIC)]) != SEGMENT_MAGIC:
        if last and SEGMENT_MAGIC.startswith(bytes(data)):
            if mend:
                _cut(path, 0, len(data))
            return
        raise DataError(
            f"{path} does not begin with {SEGMENT_MAGIC!r}: it is no journal segment, or is damaged"
        )
    offset = len(SEGMENT_MAGIC)
    while offset < len(data):
        payload = _payload(data, offset)
        if payload is None:
            if not last or _sound_entry_after(data, offset):
                raise DataError(
                    f"{path} is damaged at byte {offset}, with sound records after it: a crash "
                    "does not do that; restore the file from a copy, or start a new run"
                )
            if mend:
                _cut(path, offset, len(data))
            return
        yield offset, _decode(payload, path, offset)
        offset += _HEAD.size + len(payload)


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
    logger.warning("%s ends in %d bytes of an unfinished record; they are cut off", path, size - offset)
    os.truncate(path, offset)


def read_entry(path: Path, offset: int) -> AnyRecord:
    """The record at `offset`. Raises DataError when it is not sound."""
    with path.open("rb") as file:
        file.seek(offset)
        head = file.read(_HEAD.size)
        length = _HEAD.unpack(head)[1] if len(head) == _HEAD.size else 0
        data = memoryview(head + file.read(length))
    payload = _payload(data, 0)
    if payload is None:
        raise DataError(
            f"{path} is damaged at byte {offset}: restore the file from a copy, or start a new run"
        )
    return _decode(payload, path, offset)
