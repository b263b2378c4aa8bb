"""Blocks of rollouts: zstd of msgpack of Entries; without zstd beyond BULK_BYTES.

A block holds its entries without the data of their arrays, and this data by field and dtype: of all entries
together, first every element's lowest byte, then every next one. Token ids and the exponents of
log-probabilities are runs then, which compress. One of bulk scores, which hardly do, is its entries alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec
import numpy as np
import zstandard

from distill.record.rollout import Rollout
from sync.base.decoding import msgpack_decoder
from sync.base.errors import DataError
from sync.wire import DTYPES, Array

BULK_BYTES: Final = 1 << 20
"""Of the arrays of a block: with so many a rollout has a teacher's wide scores in it."""
_encoder = msgspec.msgpack.Encoder()


class Column(msgspec.Struct, array_like=True):
    """The data of all arrays of one field and dtype."""

    sizes: list[int]  # bytes of each array, in the order of the entries
    planes: bytes


class Entries(msgspec.Struct, array_like=True):
    """What a block is when it is not packed."""

    entries: list[Rollout]  # without the data of their arrays
    columns: dict[str, Column]  # by field and dtype; empty: the entries are whole


_decoder = msgpack_decoder(Entries)


def pack_block(
    entries: Iterable[Rollout], limit: int, compressor: zstandard.ZstdCompressor
) -> tuple[bytes, int]:
    """A block of the first of `entries`, and how many they are: as many as begin within `limit` bytes."""
    packed, heads, in_heads = list[Rollout](), list[msgspec.Raw](), 0
    fields, in_arrays = dict[str, list[bytes]](), 0

    def take(field: str, array: Array) -> Array:
        nonlocal in_arrays
        fields.setdefault(field, []).append(array.data)
        in_arrays += len(array.data)
        return Array(array.dtype, array.shape, b"")

    for entry in entries:
        if packed and in_arrays + in_heads >= limit:
            break
        packed.append(entry)
        head = entry if entry.issued else _with_arrays(entry, take)  # a prompt has no arrays
        heads.append(msgspec.Raw(_encoder.encode(head)))
        in_heads += len(heads[-1])
    if in_arrays > BULK_BYTES:
        return _encoder.encode((packed, {})), len(packed)
    columns = {}
    for field, arrays in fields.items():
        planes = np.frombuffer(b"".join(arrays), "u1").reshape(-1, _width(field)).T.tobytes()
        columns[field] = Column([*map(len, arrays)], planes)
    return bytes(compressor.compress(_encoder.encode((heads, columns)))), len(heads)


def unpack_block(payload: bytes | memoryview, where: str) -> list[Rollout]:
    """The entries of the block that stands at `where`. Raises DataError for what this release cannot read."""
    try:
        is_zstd = payload[: len(zstandard.FRAME_HEADER)] == zstandard.FRAME_HEADER
        block = _decoder.decode(zstandard.ZstdDecompressor().decompress(payload) if is_zstd else payload)
        return filled(block)
    except (msgspec.MsgspecError, zstandard.ZstdError, LookupError, ValueError, MemoryError) as error:
        told = f"{where} holds what this release cannot read ({error})"
        raise DataError(f"{told}: go on with the release that wrote it") from None


def filled(block: Entries) -> list[Rollout]:
    """Its entries with the data of their arrays."""
    data = {field: [*_arrays(field, column)] for field, column in block.columns.items()}
    for arrays in data.values():
        arrays.reverse()

    def give(field: str, array: Array) -> Array:
        return Array(array.dtype, array.shape, data[field].pop())

    return [entry if entry.issued or not data else _with_arrays(entry, give) for entry in block.entries]


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


def _arrays(field: str, column: Column) -> Iterator[bytes]:
    if sum(column.sizes) != len(column.planes):
        raise ValueError(f"{field} of {sum(column.sizes)} bytes holds {len(column.planes)}")
    data, end = np.frombuffer(column.planes, "u1").reshape(_width(field), -1).T.tobytes(), 0
    for size in column.sizes:
        end += size
        yield data[end - size : end]
