"""What is left of journal segments that no restart needs: traces for the audit, compressed.

    archive  "DJA1" | chunk*        archive-00000000.log, archive-00000001.log, …
    chunk    u32 segment | u32 length | u32 crc32 | zlib of the segment's records (msgpack)

A segment is removed once its chunk is forced to disk; after a crash between the two both are there, and the
segment counts. A chunk that is torn or damaged ends its file: whoever reads finds its segment missing.
Nothing is ever cut, or appended behind a tail that may be torn: every start of the controller begins a file.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from distill.run_log.records import AnyRecord
from sync.durable import append, force
from sync.errors import DataError

_MAGIC: Final = b"DJA1"
_HEAD: Final = struct.Struct("<III")
_FILE_BYTES: Final = 64 << 20
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[AnyRecord])


class Chunk(NamedTuple):
    """Where the records of an archived segment stand."""

    path: Path
    offset: int
    """Of the compressed bytes."""
    length: int


def _paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("archive-*.log"))


def _crc(segment: int, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(struct.pack("<II", segment, len(data))))


class Archive:
    """Appends to files of its own in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None

    def add(self, segment: int, records: list[AnyRecord]) -> bool:
        """Archive the records of a segment, on disk when this returns; False: the disk is full."""
        if self._path is None or self._path.stat().st_size > _FILE_BYTES:
            path = self._folder / f"archive-{len(_paths(self._folder)):08d}.log"
            if not append(path, _MAGIC):
                return False
            self._path = path
        data = zlib.compress(_encoder.encode(records))
        if not append(self._path, _HEAD.pack(segment, len(data), _crc(segment, data)) + data):
            return False
        force(self._path)
        force(self._folder)
        return True


def archived(folder: Path) -> dict[int, Chunk]:
    """Every sound chunk, by the number of its segment."""
    return {segment: chunk for path in _paths(folder) for segment, chunk in _chunks(path)}


def _chunks(path: Path) -> Iterator[tuple[int, Chunk]]:
    with path.open("rb") as file:
        sound = file.read(len(_MAGIC)) == _MAGIC
        while sound and len(head := file.read(_HEAD.size)) == _HEAD.size:
            segment, length, crc = _HEAD.unpack(head)
            chunk, data = Chunk(path, file.tell(), length), file.read(length)
            if sound := len(data) == length and _crc(segment, data) == crc:
                yield segment, chunk


def read_chunk(chunk: Chunk) -> list[AnyRecord]:
    """Its records, in order. Raises DataError when this release cannot read them."""
    with chunk.path.open("rb") as file:
        file.seek(chunk.offset)
        data = file.read(chunk.length)
    try:
        return _decoder.decode(zlib.decompress(data))
    except (zlib.error, msgspec.DecodeError) as error:
        raise DataError(
            f"{chunk.path} holds records at byte {chunk.offset} that this release cannot read ({error}): "
            "audit the run with the release that wrote it"
        ) from None
