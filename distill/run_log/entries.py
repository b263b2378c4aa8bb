"""Entries of a journal's files, and the blocks of records that they hold.

    entry    kind, 2 bytes | u32 length | u32 crc32 | payload
    block    zstd of msgpack of a Block; without zstd beyond BULK_BYTES

A block holds its records without the data of their arrays, and this data by field and dtype: of all records
together, first every element's lowest byte, then every next one. Token ids and the exponents of
log-probabilities are runs then, which compress. One of bulk scores, which hardly do, is its records alone.
"""

from __future__ import annotations

import re
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Union

import msgspec
import numpy as np
import zstandard

from distill.run_log.records import Record, Snapshot
from sync.base.decoding import msgpack_decoder
from sync.base.errors import DataError
from sync.wire import DTYPES, Array

BLOCK: Final = b"DJ"
MARKER: Final = b"DS"
ARCHIVE: Final = b"DA"
HEAD: Final = struct.Struct("<2sII")
OFFSET: Final = struct.Struct("<Q")
BULK_BYTES: Final = 1 << 20
"""Of the arrays of a block: with so many a rollout has a teacher's wide scores in it."""
_PLACE: Final = struct.Struct("<2sIQQ")
_AnyRecord: Any = Union[tuple(Record.__subclasses__())]  # noqa: UP007
_encoder = msgspec.msgpack.Encoder()
_local = threading.local()


def encode_entry(kind: bytes, payload: bytes, segment: int, offset: int) -> bytes:
    """An entry as it stands at that place."""
    return HEAD.pack(kind, len(payload), _crc(kind, payload, segment, offset)) + payload


def _crc(kind: bytes, payload: bytes | memoryview, segment: int, offset: int) -> int:
    place = offset if kind == BLOCK else 0
    return zlib.crc32(payload, zlib.crc32(_PLACE.pack(kind, len(payload), segment, place)))


@dataclass(frozen=True)
class Segment:
    """The bytes of a segment's file, or those of it from `begin` on."""

    path: Path
    data: memoryview
    begin: int = 0

    @property
    def number(self) -> int:
        return int(self.path.stem.partition("-")[2])

    def payload(self, offset: int, kind: bytes = BLOCK) -> memoryview | None:
        """Payload of a whole and valid entry at `offset`; None: there is none."""
        body = offset - self.begin + HEAD.size
        if body > len(self.data):
            return None
        magic, length, crc = HEAD.unpack_from(self.data, body - HEAD.size)
        payload = self.data[body : body + length]
        if magic != kind or len(payload) != length:
            return None
        return payload if _crc(kind, payload, self.number, offset) == crc else None

    def was_durable(self, offset: int) -> bool:
        """Whether a later sync marker covers the byte at `offset`."""
        for match in re.finditer(re.escape(MARKER), self.data[offset + 1 :]):
            payload = self.payload(offset + 1 + match.start(), MARKER)
            if payload is not None and OFFSET.unpack(payload)[0] > offset:
                return True
        return False


# --- blocks -----------------------------------------------------------------------------------------------


class _Column(msgspec.Struct, array_like=True):
    sizes: list[int]  # bytes of each array, in the order of the records
    planes: bytes


class _Block(msgspec.Struct, array_like=True):
    records: list[_AnyRecord]  # without the data of their arrays
    columns: dict[str, _Column]  # by field and dtype; empty: the records are whole


_decoder = msgpack_decoder(_Block)


def pack_block(records: Iterable[Record], limit: int) -> tuple[bytes, int]:
    """A block of the first of `records`, and how many they are: as many as begin within `most` bytes.

    A snapshot has a block of its own.
    """
    packed, heads, in_heads = list[Record](), list[msgspec.Raw](), 0
    fields, in_arrays = dict[str, list[bytes]](), 0

    def take(field: str, array: Array) -> Array:
        nonlocal in_arrays
        fields.setdefault(field, []).append(array.data)
        in_arrays += len(array.data)
        return Array(array.dtype, array.shape, b"")

    for record in records:
        alone = isinstance(record, Snapshot)
        if packed and (alone or in_arrays + in_heads >= limit):
            break
        packed.append(record)
        heads.append(msgspec.Raw(_encoder.encode(_with_arrays(record, take))))
        in_heads += len(heads[-1])
        if alone:
            break
    if in_arrays > BULK_BYTES:
        return _encoder.encode((packed, {})), len(packed)
    columns = {}
    for field, arrays in fields.items():
        planes = np.frombuffer(b"".join(arrays), "u1").reshape(-1, _width(field)).T.tobytes()
        columns[field] = _Column([*map(len, arrays)], planes)
    return _compressed(_encoder.encode((heads, columns))), len(heads)


def unpack_block(payload: bytes | memoryview, where: str) -> list[Record]:
    """The records of the block that stands at `where`. Raises DataError for what this release cannot read."""
    try:
        is_zstd = payload[: len(zstandard.FRAME_HEADER)] == zstandard.FRAME_HEADER
        block = _decoder.decode(zstandard.ZstdDecompressor().decompress(payload) if is_zstd else payload)
        return _filled(block)
    except (msgspec.MsgspecError, zstandard.ZstdError, LookupError, ValueError, MemoryError) as error:
        told = f"{where} holds a record that this release cannot read ({error})"
        raise DataError(f"{told}: go on with the release that wrote it") from None


def _filled(block: _Block) -> list[Record]:
    """Its records with the data of their arrays."""
    data = {field: [*_arrays(field, column)] for field, column in block.columns.items()}
    for arrays in data.values():
        arrays.reverse()

    def give(field: str, array: Array) -> Array:
        return Array(array.dtype, array.shape, data[field].pop())

    return [_with_arrays(record, give) for record in block.records] if data else block.records


def _with_arrays(value: Any, change: Callable[[str, Array], Array], name: str = "") -> Any:
    """`value`, each array in whose fields is `change(field and dtype, array)` now."""
    if isinstance(value, Array):
        return change(f"{name}.{value.dtype}", value)
    inner = [(field, getattr(value, field)) for field in value.__struct_fields__]
    changed = {
        field: _with_arrays(inner_value, change, f"{name}.{field}")
        for field, inner_value in inner
        if isinstance(inner_value, msgspec.Struct)
    }
    return msgspec.structs.replace(value, **changed) if changed else value


def _width(field: str) -> int:
    return DTYPES[field.rpartition(".")[2]].itemsize


def _arrays(field: str, column: _Column) -> Iterator[bytes]:
    if sum(column.sizes) != len(column.planes):
        raise ValueError(f"{field} of {sum(column.sizes)} bytes holds {len(column.planes)}")
    data, end = np.frombuffer(column.planes, "u1").reshape(_width(field), -1).T.tobytes(), 0
    for size in column.sizes:
        end += size
        yield data[end - size : end]


def _compressed(data: bytes) -> bytes:
    """With this thread's compressor: making one costs more than compressing a small block."""
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=1)
    return bytes(_local.compressor.compress(data))
