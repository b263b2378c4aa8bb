"""One rank's delta file: a header that says which range of which tensor each blob is for, then the blobs.

"ODDELTA3" · header length (4 bytes, little-endian) · zstd(msgpack(Header)) · blobs
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import zstandard
from blake3 import blake3

from sync.base.decoding import msgpack_decoder
from sync.base.errors import SnapshotError
from sync.weights.delta import codec
from sync.weights.snapshots import checkpoint
from sync.weights.snapshots.checkpoint import TensorAt
from sync.wire import Version

_MAGIC: Final = b"ODDELTA3"
_RANGE_BYTES: Final = 96
"""A header's entry for one range, without its name, is no longer."""
_BLOB_BYTES: Final = 64
"""A blob is no longer than the range's new bits and its own lengths."""


@dataclass(frozen=True)
class Slice:
    """The flat range [start, start + count) of one checkpoint tensor that a rank holds."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    """Kind of element: "bf16", "f2", "f4", … (`sync.weights.snapshots.checkpoint.BITS`)."""
    start: int
    count: int
    """Elements; 0: this rank holds nothing of it."""


class Range(msgspec.Struct, frozen=True, array_like=True):
    """One blob: it brings elements [start, start + count) of a tensor from the base to the version."""

    name: str
    start: int
    count: int
    dtype: str
    mode: int
    """`codec.Mode`"""
    offset: int
    """Where the blob begins, from the end of the header."""
    length: int
    """Bytes of the blob."""
    digest: bytes
    """BLAKE3 of the range's bytes afterwards."""


class Header(msgspec.Struct, frozen=True):
    """What a file is part of, and its blobs; `ranges` in the order of the blobs."""

    run: str
    fingerprint: str
    version: Version
    base: Version
    rank: int
    world_size: int
    ranges: list[Range]


def build(
    header: Header,
    slices: Sequence[Slice],
    old: Mapping[str, codec.Bits],
    new: Mapping[str, codec.Bits],
    effort: codec.Effort,
    host: Mapping[str, np.ndarray] = {},
) -> bytes:
    """File of one rank's `slices`, none of them empty; `header` comes without ranges, `old` and `new` hold
    their flat bits by name. `host` holds the old bits of tensors on a device in host memory, and the new ones
    after this: digests cover exactly what a reader reconstructs."""
    ranges, blobs, offset = list[Range](), list[bytes](), 0
    for part in slices:
        bits = new[part.name]
        blob = codec.encode(old[part.name], bits, part.dtype, effort)
        if not isinstance(bits, np.ndarray):
            bits = host[part.name]
            codec.apply(bits, blob, part.dtype)
        where = part.name, part.start, part.count, part.dtype
        ranges.append(Range(*where, blob[0], offset, len(blob), _digest(bits)))
        blobs.append(blob)
        offset += len(blob)
    head = msgspec.msgpack.encode(msgspec.structs.replace(header, ranges=ranges))
    packed = zstandard.ZstdCompressor(level=1).compress(head)
    return b"".join([_MAGIC, len(packed).to_bytes(4, "little"), packed, *blobs])


def most_header(places: Mapping[str, TensorAt]) -> int:
    """Bytes that the header of one rank's file may decompress to: a range of every tensor."""
    return 4096 + sum(len(name.encode()) + _RANGE_BYTES for name in places)


def most_bytes(places: Mapping[str, TensorAt], ranks: int) -> int:
    """Bytes of all files of a delta of this checkpoint: every tensor whole, and what each rank says of it."""
    model = sum(place.nbytes for place in places.values())
    return model + ranks * (most_header(places) + _BLOB_BYTES * len(places))


def parse(data: bytes | memoryview, limit: int) -> tuple[Header, memoryview]:
    """(header, blobs) of a file; every range lies within the blobs. Raises SnapshotError on anything else.
    `limit`: bytes that its header may decompress to (`most_header`); no more is taken."""
    view = memoryview(data)
    if bytes(view[:8]) != _MAGIC:
        raise SnapshotError(
            f"a delta file begins with {bytes(view[:8])!r}, not {_MAGIC!r}: it is another file, or another "
            "release wrote it; resume the run with this one, which publishes a full snapshot first"
        )
    end = 12 + int.from_bytes(view[8:12], "little")
    packed = view[12:end]
    try:
        if end > len(view) or not 0 <= zstandard.frame_content_size(packed) <= limit:
            raise SnapshotError(
                f"a delta file's header states an impossible length (at most {limit} bytes name the ranges "
                "of this model): it was cut or altered"
            )
        head = zstandard.ZstdDecompressor().decompress(packed)
        header = msgpack_decoder(Header).decode(head)
    except (zstandard.ZstdError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SnapshotError(f"a delta file's header cannot be read: {error}; it was altered") from None
    blobs = view[end:]
    for part in header.ranges:
        outside = part.offset < 0 or part.length < 0 or part.offset + part.length > len(blobs)
        if outside or part.start < 0 or part.count < 1:
            raise SnapshotError(
                f"a delta file's range of {part.name!r} is empty or lies outside of it: it was cut or altered"
            )
    return header, blobs


def check_cover(headers: Iterable[Header], places: Mapping[str, TensorAt]) -> None:
    """Raises SnapshotError unless the ranges tile every tensor of the checkpoint exactly once."""
    ranges = sorted(
        (part.name, part.start, part.count, part.dtype) for head in headers for part in head.ranges
    )
    done = dict.fromkeys(places, 0)
    for name, start, count, dtype in ranges:
        if name not in places or places[name].kind != dtype:
            raise SnapshotError(
                f"the delta has {name!r} of kind {dtype}, the checkpoint does not: another model"
            )
        if start != done[name]:
            raise SnapshotError(
                f"the delta's ranges of {name!r} meet at {done[name]} and {start}: wrong sharding"
            )
        done[name] += count
    for name, place in places.items():
        if done[name] != math.prod(place.shape):
            raise SnapshotError(
                f"the delta covers {done[name]} of {math.prod(place.shape)} elements of {name!r}: "
                "a rank's file is missing or cut"
            )


def apply(header: Header, blobs: memoryview, arrays: Mapping[str, np.ndarray]) -> None:
    """Apply a file in place to the flat tensors of a checkpoint that holds its base (`check_cover` first)."""
    for part in header.ranges:
        target = arrays[part.name][part.start : part.start + part.count]
        bits = np.require(target, requirements="A")
        codec.apply(bits, blobs[part.offset : part.offset + part.length], part.dtype)
        if bits is not target:
            target[:] = bits


def verify(header: Header, arrays: Mapping[str, np.ndarray]) -> None:
    """Raises SnapshotError, naming the tensor, unless the arrays hold what the trainer had."""
    for part in header.ranges:
        if _digest(arrays[part.name][part.start : part.start + part.count]) != part.digest:
            raise SnapshotError(
                f"{part.name!r} from element {part.start} on is not what {header.version} holds: "
                f"the base was not {header.base}"
            )


def apply_chain(folder: Path, links: Iterable[Sequence[tuple[Header, memoryview]]]) -> None:
    """Apply versions' files one after the other to a checkpoint folder that holds the first one's base. Each
    of `links` holds every rank's file of one version and is read when its turn comes. The result is verified.
    Raises SnapshotError when a version does not cover the model, or the result differs."""
    places = checkpoint.tensors(folder)
    arrays = checkpoint.bits(places, writable=True)
    files: Sequence[tuple[Header, memoryview]] = ()
    for files in links:
        check_cover((header for header, _ in files), places)
        for header, blobs in files:
            apply(header, blobs, arrays)
    for header, _ in files:
        verify(header, arrays)


def _digest(array: np.ndarray) -> bytes:
    return blake3(array.view(np.uint8).data).digest()
