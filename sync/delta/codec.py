"""Lossless deltas between two arrays of integer bits, never longer than the new array and a few bytes.

    blob = mode (1 byte), then
    SAME                              nothing changed
    GAPS     changed, 4 streams       distances between changed elements and their ULP differences
    BITMAP   changed, 3 streams       one bit per element instead of distances
    PLANES   a stream per byte        ULP differences of all elements, byte by byte
    CLASSES  the rest of the blob     ordered by the old exponent and entropy coded (effort "small")
    WHOLE    1 stream                 the new bits themselves
    stream = length, stored length, then bytes: zstd level 1, or as they are when both lengths are equal

Numbers are LEB128. Bits are compared, never values: NaN payloads, signed zeros and subnormals are patterns
like any other. A difference needs the very bits it was taken from: callers prove that with digests.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, Union

import numpy as np
import zstandard

from sync.errors import SnapshotError

if TYPE_CHECKING:
    from torch import Tensor

Bits: TypeAlias = Union[np.ndarray, "Tensor"]
"""Flat bits of one tensor: unsigned integers in host memory, or integers of the same width on a device."""
Effort = Literal["small", "fast"]
MANTISSA: Final = {"bf16": 7, "f2": 10, "f4": 23}
"""Bits below the exponent of the kinds that are coded by difference; all others are sent whole."""
_GAP_SHARE: Final = 0.2  # changed share above which a bitmap is smaller than gaps
_PLANE_SHARE: Final = 0.25  # share of wide differences above which planes are smaller
_BYTES: Final = np.dtype("u1")
_WIDE_GAP: Final = np.dtype("<u8")
_local = threading.local()


class Mode(IntEnum):
    """How one range of a tensor is coded."""

    SAME = 0
    GAPS = 1
    BITMAP = 2
    PLANES = 3
    CLASSES = 4
    WHOLE = 5


class Scanner(Protocol):
    """Compares old with new where they lie: `diff` in host memory, `diff_torch` on a device.

    What it returns is in host memory, and the same bytes from either.
    """

    def same(self, old: Any, new: Any) -> bool:
        """Whether not one bit differs."""

    def gaps(self, old: Any, new: Any, room: int) -> list[np.ndarray] | None:
        """[distances, wide distances, steps, wide steps] as `kernels.scan_gaps` writes them.

        None: more elements changed than `room` holds, to within the elements of one word of 64 bits.
        """

    def bitmap(self, old: Any, new: Any) -> list[np.ndarray]:
        """[one bit per element, steps, wide steps] as `kernels.scan_bitmap` writes them."""

    def planes(self, old: Any, new: Any) -> list[np.ndarray]:
        """Differences of all elements, byte by byte, as `kernels.to_planes` writes them."""

    def classes(self, old: Any, new: Any, mantissa: int) -> np.ndarray | None:
        """Stream of `entropy.encode_classes`; None: it is longer than `new` and 512 bytes."""

    def host(self, bits: Any) -> np.ndarray:
        """The bits themselves."""


def encode(old: Bits, new: Bits, kind: str, effort: Effort = "fast") -> bytes:
    """Blob that turns `old` into `new`: equally long 1-D contiguous arrays of the bits of `kind`.

    numpy arrays of unsigned integers are read by the compiled loops. torch tensors of integers as wide are
    read where they lie, on a GPU: only the streams of the blob leave the device, and the blob is the same.
    """
    if old.dtype != new.dtype or old.shape != new.shape or old.ndim != 1:
        raise SnapshotError(
            f"cannot take the difference of {old.dtype}{old.shape} and {new.dtype}{new.shape}: "
            "both must be flat arrays of the same bits"
        )
    look = scanner(new)
    if kind not in MANTISSA or new.itemsize not in (2, 4):
        return bytes([Mode.SAME]) if look.same(old, new) else _whole(look.host(new))
    small = effort == "small"
    blob = _by_class(look, old, new, MANTISSA[kind]) if small else _by_position(look, old, new)
    return blob if len(blob) <= new.nbytes else _whole(look.host(new))


def scanner(bits: Bits) -> Scanner:
    """What compares arrays like `bits` where they lie."""
    if isinstance(bits, np.ndarray):
        from sync.delta import diff

        return diff
    from sync.delta import diff_torch

    return diff_torch


def apply(bits: np.ndarray, blob: bytes | memoryview, kind: str) -> None:
    """Turn `bits` (1-D, writable) in place into what `blob` was made for.

    Raises SnapshotError when the blob does not fit `bits`, which are then undefined; never writes elsewhere.
    """
    reader = _Reader(blob)
    mode = reader.byte()
    width = bits.itemsize * 8
    if mode == Mode.WHOLE:
        bits.view(np.uint8)[:] = reader.stream(bits.nbytes, bits.nbytes)
    elif mode == Mode.CLASSES and kind in MANTISSA:
        from sync.delta import entropy

        data = np.frombuffer(reader.rest(), np.uint8).copy()
        _fits(entropy.apply_classes(bits, width, MANTISSA[kind], *entropy.fresh(), data))
    elif mode in (Mode.GAPS, Mode.BITMAP, Mode.PLANES) and kind in MANTISSA:
        _APPLY[Mode(mode)](reader, bits, width)
    elif mode != Mode.SAME:
        raise SnapshotError(f"a range of kind {kind!r} has mode {mode}: the delta was altered or is newer")
    reader.end()


def mode_of(blob: bytes | memoryview) -> Mode:
    """The mode that a blob was coded in."""
    return Mode(blob[0])


# --- one function per mode --------------------------------------------------------------------------------


def _whole(new: np.ndarray) -> bytes:
    return bytes([Mode.WHOLE]) + _pack([new])


def _by_class(look: Scanner, old: Bits, new: Bits, mantissa: int) -> bytes:
    if look.same(old, new):
        return bytes([Mode.SAME])
    stream = look.classes(old, new, mantissa)
    return _by_position(look, old, new) if stream is None else bytes([Mode.CLASSES]) + stream.tobytes()


def _by_position(look: Scanner, old: Bits, new: Bits) -> bytes:
    streams = look.gaps(old, new, int(len(old) * _GAP_SHARE) + 64)
    if streams is None:
        return _by_bitmap(look, old, new)
    changed = len(streams[0])
    return bytes([Mode.GAPS]) + _number(changed) + _pack(streams) if changed else bytes([Mode.SAME])


def _by_bitmap(look: Scanner, old: Bits, new: Bits) -> bytes:
    bitmap, steps, wide = look.bitmap(old, new)
    if len(wide) > _PLANE_SHARE * len(steps):
        return bytes([Mode.PLANES]) + _pack(look.planes(old, new))
    return bytes([Mode.BITMAP]) + _number(len(steps)) + _pack([bitmap, steps, wide])


def _apply_gaps(reader: _Reader, bits: np.ndarray, width: int) -> None:
    from sync.delta import kernels

    changed = reader.number(bits.size)
    gaps = reader.stream(changed, changed)
    wide_gaps = reader.stream(0, changed, _WIDE_GAP)
    steps = reader.stream(changed, changed)
    wide_steps = reader.stream(0, changed, bits.dtype)
    _fits(kernels.apply_gaps(bits, width, gaps, wide_gaps, steps, wide_steps))


def _apply_bitmap(reader: _Reader, bits: np.ndarray, width: int) -> None:
    from sync.delta import kernels

    changed = reader.number(bits.size)
    bitmap = reader.stream(-(-bits.size // 8), -(-bits.size // 8))
    steps = reader.stream(changed, changed)
    wide = reader.stream(0, changed, bits.dtype)
    _fits(kernels.apply_bitmap(bits, width, bitmap, steps, wide))


def _apply_planes(reader: _Reader, bits: np.ndarray, width: int) -> None:
    from sync.delta import kernels

    planes = np.stack([reader.stream(bits.size, bits.size) for _ in range(bits.itemsize)])
    kernels.apply_planes(bits, width, planes)


_APPLY: Final = {Mode.GAPS: _apply_gaps, Mode.BITMAP: _apply_bitmap, Mode.PLANES: _apply_planes}


def _fits(result: int) -> None:
    if result != 0:
        raise SnapshotError(
            "a delta's streams do not fit its tensor: it was altered, or made for another one"
        )


# --- streams ----------------------------------------------------------------------------------------------


def _number(value: int) -> bytes:
    """LEB128."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _pack(streams: Sequence[np.ndarray]) -> bytes:
    """Each stream with its lengths, compressed when that makes it shorter."""
    parts: list[bytes | memoryview] = []
    for stream in streams:
        raw = stream.view(np.uint8).data
        stored = _compressor().compress(raw) if len(raw) > 16 else raw
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

    def number(self, most: int) -> int:
        """A LEB128 number that is at most `most`."""
        value, shift = 0, 0
        while shift < 64:
            byte = self.byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        if value > most:
            raise SnapshotError(
                f"a delta states a length of {value} where {most} is the most: it was altered"
            )
        return value

    def stream(self, least: int, most: int, dtype: np.dtype = _BYTES) -> np.ndarray:
        """The next stream, of `least` to `most` elements of `dtype`."""
        length = self.number(most * dtype.itemsize)
        stored = self._bytes(self.number(length))
        if length < least * dtype.itemsize or length % dtype.itemsize:
            raise SnapshotError(f"a delta's stream has {length} bytes instead of {least}: it was altered")
        raw = stored if len(stored) == length else _decompress(stored, length)
        return np.require(np.frombuffer(raw, np.uint8).view(dtype), requirements="A")

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
