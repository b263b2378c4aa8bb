"""Lossless deltas between two arrays of integer bits, never longer than the new array and a few bytes.

    blob = mode (1 byte), then
    SAME                              nothing changed
    GAPS     changed, 4 streams       distances between changed elements and their ULP differences
    BITMAP   changed, 3 streams       one bit per element instead of distances
    CLASSES  the rest of the blob     entropy coded by what the old exponents foretell (effort "small")
    WHOLE    1 stream                 the new bits themselves
    stream = length, stored length, then bytes: zstd level 1, or as they are when both lengths are equal

Numbers are LEB128. Bits are compared, never values: NaN payloads, signed zeros and subnormals are patterns
like any other. A difference needs the very bits it was taken from: callers prove that with digests.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, Union

import numpy as np
import zstandard

from sync.base.errors import SnapshotError

if TYPE_CHECKING:
    from torch import Tensor

Bits: TypeAlias = Union[np.ndarray, "Tensor"]
"""Flat bits of one tensor: unsigned integers in host memory, or integers of the same width on a device."""
Effort = Literal["small", "fast"]
MANTISSA: Final = {"bf16": 7, "f2": 10, "f4": 23}
"""Bits below the exponent of the kinds that are coded by difference; all others are sent whole."""
_GAP_SHARE: Final = 0.2  # changed share above which a bitmap is smaller than gaps
_WHOLE_SHARE: Final = 0.5
"""Changed share of 4-byte numbers above which "fast" sends all as they are: a difference has half the bytes,
but all stores except slow ones take these in less time than coding and applying it (docs/weight-sync.md)."""
_local = threading.local()


class Mode(IntEnum):
    """How one range of a tensor is coded."""

    SAME = 0
    GAPS = 1
    BITMAP = 2
    CLASSES = 3
    WHOLE = 4


def encode(old: Bits, new: Bits, kind: str, effort: Effort = "fast") -> bytes:
    """Blob that turns `old` into `new`: equally long 1-D contiguous arrays of the bits of `kind`. numpy
    arrays of unsigned integers are read by the compiled loops. torch tensors of integers as wide are compared
    where they lie, on a GPU; the blob is the same."""
    assert (old.dtype, old.shape, old.ndim) == (new.dtype, new.shape, 1), "flat arrays of the same bits"
    blob = None
    if kind in MANTISSA and new.itemsize in (2, 4) and len(new) > 0:
        wide = effort == "fast" and new.itemsize == 4
        if wide and sum(int(differ.sum()) for differ in _differing(old, new)) > _WHOLE_SHARE * len(new):
            return bytes([Mode.WHOLE]) + _pack([on_host(new)], compress=False)
        blob = _differences(old, new, MANTISSA[kind], effort)
    elif np.array_equal(old, new) if isinstance(new, np.ndarray) else new.equal(old):  # type: ignore[arg-type]
        return bytes([Mode.SAME])
    if blob is None or len(blob) > new.nbytes:
        return bytes([Mode.WHOLE]) + _pack([on_host(new)])
    return blob


def apply(bits: np.ndarray, blob: bytes | memoryview, kind: str) -> None:
    """Turn `bits` (1-D, writable) in place into what `blob` was made for. Raises SnapshotError when the blob
    does not fit `bits`, which are then undefined; never writes elsewhere."""
    reader = _Reader(blob)
    mode = reader.byte()
    if mode == Mode.WHOLE:
        bits.view(np.uint8)[:] = reader.stream(bits.nbytes, bits.nbytes)
    elif mode == Mode.CLASSES and kind in MANTISSA:
        from sync.weights.delta import entropy

        _fits(entropy.apply_changes(bits, MANTISSA[kind], reader.number(bits.size), reader.rest()))
    elif mode in (Mode.GAPS, Mode.BITMAP) and kind in MANTISSA:
        _apply_positions(reader, bits, Mode(mode))
    elif mode != Mode.SAME:
        raise SnapshotError(f"a range of kind {kind!r} has mode {mode}: the delta was altered or is newer")
    reader.end()


def on_host(bits: Bits) -> np.ndarray:
    """The bits in host memory: the array itself, or a copy of a tensor as unsigned integers."""
    return bits if isinstance(bits, np.ndarray) else bits.cpu().numpy().view(f"u{bits.itemsize}")


# --- modes ------------------------------------------------------------------------------------------------


def _differing(old: Any, new: Any) -> Iterator[Any]:
    """Which elements differ, of `_CHUNK` at a time, where they lie."""
    return (old[i : i + _CHUNK] != new[i : i + _CHUNK] for i in range(0, len(new), _CHUNK))


def _differences(old: Any, new: Any, mantissa: int, effort: Effort) -> bytes | None:
    """The blob of the differences; None: it would be longer than `new`."""
    if effort == "small":
        from sync.weights.delta import entropy

        count, stream = entropy.encode_changes(on_host(old), on_host(new), mantissa)
        if count == 0:
            return bytes([Mode.SAME])
        return None if stream is None else bytes([Mode.CLASSES]) + _number(count) + stream
    if isinstance(new, np.ndarray):
        from sync.weights.delta import kernels

        gaps, wide_gaps, steps, wide_steps = kernels.scan(old, new)
    else:
        gaps, wide_gaps, steps, wide_steps = _scan_tensors(old, new)
    if len(gaps) == 0:
        return bytes([Mode.SAME])
    by_bytes = wide_steps.view(np.uint8).reshape(-1, new.itemsize).T.ravel()
    head, places = Mode.GAPS, [gaps, wide_gaps]
    if len(gaps) > _GAP_SHARE * len(new) + 64:
        differ = np.concatenate([on_host(chunk) for chunk in _differing(old, new)])
        head, places = Mode.BITMAP, [np.packbits(differ, bitorder="little")]
    return bytes([head]) + _number(len(gaps)) + _pack([*places, steps, by_bytes])


def _apply_positions(reader: _Reader, bits: np.ndarray, mode: Mode) -> None:
    from sync.weights.delta import kernels

    changed = reader.number(bits.size)
    if mode == Mode.GAPS:
        places = [reader.stream(changed, changed), reader.stream(0, changed, np.dtype("<u8"))]
    else:
        places = [reader.stream(-(-bits.size // 8), -(-bits.size // 8))]
    steps = reader.stream(changed, changed)
    by_bytes = reader.stream(0, changed, bits.dtype).view(np.uint8).reshape(bits.itemsize, -1)
    wide_steps = np.ascontiguousarray(by_bytes.T).ravel().view(bits.dtype)
    work = kernels.apply_gaps if mode == Mode.GAPS else kernels.apply_bitmap
    _fits(work(bits, bits.itemsize * 8, *places, steps, wide_steps))


def _fits(result: int) -> None:
    if result != 0:
        raise SnapshotError(
            "a delta's streams do not fit its tensor: it was altered, or made for another one"
        )


# --- tensors on a device ----------------------------------------------------------------------------------

_CHUNK: Final = 1 << 24
"""Elements compared at once, to bound the device memory that it takes."""


def _scan_tensors(old: Tensor, new: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """`kernels.scan` by operations on the device; c: changed elements."""
    places, codes = [], []
    for start in range(0, len(new), _CHUNK):
        a, b = old[start : start + _CHUNK], new[start : start + _CHUNK]
        at_c = (a != b).nonzero().flatten()
        places.append(at_c.cpu().numpy() + start)
        codes.append(_zigzag(a[at_c], b[at_c]).cpu().numpy())
    distance_c = np.diff(np.concatenate(places), prepend=-1) - 1
    return *_escaped(distance_c, "u8"), *_escaped(np.concatenate(codes) - 1, f"u{new.itemsize}")


def _zigzag(old: Tensor, new: Tensor) -> Tensor:
    """`kernels.zigzag` of every element, int64."""
    width = 8 * new.itemsize
    top, mask = 1 << (width - 1), (1 << width) - 1
    step = ((_ordered(new, top, mask) - _ordered(old, top, mask) + top) & mask) - top
    return (step << 1) ^ (step >> 63)


def _ordered(bits: Tensor, top: int, mask: int) -> Tensor:
    wide = bits.long() & mask
    return (~wide & mask).where(wide & top != 0, wide | top)


def _escaped(value_c: np.ndarray, wide: str) -> tuple[np.ndarray, np.ndarray]:
    from sync.weights.delta.kernels import ESCAPE

    return np.minimum(value_c, ESCAPE).astype(np.uint8), value_c[value_c >= ESCAPE].astype(wide)


# --- streams ----------------------------------------------------------------------------------------------


def _number(value: int) -> bytes:
    """LEB128."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _pack(streams: Sequence[np.ndarray], compress: bool = True) -> bytes:
    """Each stream with its lengths, compressed when that makes it shorter."""
    parts: list[bytes | memoryview] = []
    for stream in streams:
        raw = stream.view(np.uint8).data
        stored = _compressor().compress(raw) if compress and len(raw) > 16 else raw
        if len(stored) >= len(raw):
            stored = raw
        parts += [_number(len(raw)), _number(len(stored)), stored]
    return b"".join(parts)


def _compressor() -> Any:
    """This thread's zstd compressor: making one costs more than compressing a small stream."""
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=1)
    return _local.compressor


def _decompress(stored: memoryview, length: int) -> bytes:
    """zstd frame of exactly `length` bytes; no more memory than that is taken."""
    try:
        if zstandard.frame_content_size(stored) != length:
            raise SnapshotError(f"a delta's stream does not hold the {length} bytes that it states: altered")
        return zstandard.ZstdDecompressor().decompress(stored)
    except zstandard.ZstdError as error:
        raise SnapshotError(f"a delta's stream cannot be decompressed: {error}; it was altered") from None


class _Reader:
    """Bounded reading of a blob; everything that does not fit raises SnapshotError."""

    def __init__(self, blob: bytes | memoryview) -> None:
        self._data = memoryview(blob)
        self._at = 0

    def byte(self) -> int:
        return self._bytes(1)[0]

    def number(self, limit: int) -> int:
        """A LEB128 number that is at most `limit`."""
        value, shift = 0, 0
        while shift < 64:
            byte = self.byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        if value > limit:
            raise SnapshotError(
                f"a delta states a length of {value} where {limit} is the most: it was altered"
            )
        return value

    def stream(self, least: int, limit: int, dtype: np.dtype = np.dtype("u1")) -> np.ndarray:
        """The next stream, of `least` to `limit` elements of `dtype`."""
        length = self.number(limit * dtype.itemsize)
        stored = self._bytes(self.number(length))
        if length < least * dtype.itemsize or length % dtype.itemsize:
            raise SnapshotError(f"a delta's stream has {length} bytes instead of {least}: it was altered")
        raw = stored if len(stored) == length else _decompress(stored, length)
        return np.require(np.frombuffer(raw, dtype), requirements="A")

    def rest(self) -> memoryview:
        return self._bytes(len(self._data) - self._at)

    def end(self) -> None:
        if self._at != len(self._data):
            raise SnapshotError(f"a delta has {len(self._data) - self._at} bytes too many: it was altered")

    def _bytes(self, count: int) -> memoryview:
        if count > len(self._data) - self._at:
            raise SnapshotError("a delta ends too early: it was cut")
        self._at += count
        return self._data[self._at - count : self._at]
