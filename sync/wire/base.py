"""What every message is made of: arrays, versions, the run's identity, tags, and their encoding."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from sync.base.decoding import msgpack_decoder
from sync.base.errors import WireError

SCHEMA: Final = 3
CONTENT_TYPE: Final = "application/x-msgpack"
DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "u1": np.dtype("u1"),
    "i4": np.dtype("<i4"),
    "i8": np.dtype("<i8"),
    "f2": np.dtype("<f2"),
    "f4": np.dtype("<f4"),
    "bf16": np.dtype("<u2"),  # numpy has no bfloat16: its bits travel and live as uint16
}


Count = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e300)]
"""Finite and at least 0; a decoder refuses NaN too."""
Number = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
"""Finite."""
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Array(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An n-dimensional array; `data` is row-major, little-endian, exactly prod(shape) elements."""

    dtype: Literal["u1", "i4", "i8", "f2", "f4", "bf16"]
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def joined(cls, arrays: Sequence[Array]) -> Array:
        """Concatenated along the first axis; floats of unlike precision become f4. There must be one array.
        Raises WireError for arrays whose other sizes differ."""
        if len({array.shape[1:] for array in arrays}) > 1:
            shapes = sorted({str(list(array.shape)) for array in arrays})
            raise WireError(
                f"arrays of shapes {', '.join(shapes[:4])} cannot be joined: only the first size may vary"
            )
        if len({array.dtype for array in arrays}) > 1:
            numbers = ((unpack(array), array.dtype == "bf16") for array in arrays)
            arrays = [
                pack((bits.astype("<u4") << 16).view(DTYPES["f4"]) if is_bf16 else bits, "f4")
                for bits, is_bf16 in numbers
            ]
        like, count = arrays[0], sum(array.shape[0] for array in arrays)
        return cls(like.dtype, (count, *like.shape[1:]), b"".join(array.data for array in arrays))

    def none(self, count: int) -> Array:
        """`count` elements along the first axis that say nothing: 0, as ids -1."""
        value = -1 if self.dtype == "i4" else 0
        return pack(np.full((count, *self.shape[1:]), value, DTYPES[self.dtype]), self.dtype)

    def cut(self, count: int) -> Array:
        """The first `count` elements along the first axis; itself where it has no more."""
        if self.shape[0] <= count:
            return self
        row = len(self.data) // self.shape[0]
        return Array(self.dtype, (count, *self.shape[1:]), self.data[: row * count])


def pack(array: np.ndarray, dtype: str | None = None) -> Array:
    """Array message of a numpy array. `dtype` names a wire type to convert to; "bf16" expects uint16 bits."""
    name = dtype or f"{array.dtype.kind}{array.dtype.itemsize}"
    if name not in DTYPES:
        raise WireError(f"array dtype {array.dtype} cannot be sent: use one of {', '.join(DTYPES)}")
    return Array(name, array.shape, np.ascontiguousarray(array, DTYPES[name]).tobytes())  # type: ignore[arg-type]


def unpack(array: Array) -> np.ndarray:
    """Read-only numpy view of an Array message; "bf16" comes back as uint16 bits. Raises WireError when the
    bytes do not fill the shape."""
    dtype = DTYPES[array.dtype]
    expected = math.prod(array.shape) * dtype.itemsize
    if min(array.shape, default=0) < 0 or expected != len(array.data):
        raise WireError(
            f"array of dtype {array.dtype} and shape {array.shape} needs {expected} bytes, "
            f"got {len(array.data)}: the message was cut or built wrongly"
        )
    try:
        return np.frombuffer(array.data, dtype).reshape(array.shape)
    except (ValueError, OverflowError) as error:  # an empty array with a dimension beyond any machine
        raise WireError(f"array shape {array.shape} cannot be: {error}") from None


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of everything that is a whole body or frame."""

    schema: int = SCHEMA


class Version(NamedTuple):
    """Name of one state of the student's weights within a run. `step` is the optimizer step whose weights it
    holds (0: before training). `lineage` counts the trainer's starts in this run: resuming or rolling back
    opens a new lineage, so no name is ever published twice."""

    lineage: Count
    step: Count

    def __str__(self) -> str:
        return f"L{self.lineage:03d}-v{self.step:08d}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """Inverse of str(). Raises WireError on anything else."""
        match = re.fullmatch(r"L(\d{3,19})-v(\d{8,19})", text, re.ASCII)
        version = cls(int(match[1]), int(match[2])) if match else None
        if version is None or str(version) != text:
            raise WireError(f"{text[:100]!r} is not a version: expected the form L000-v00000012")
        return version


class RunIdentity(msgspec.Struct, frozen=True):
    """Which run a request is made for, and which one a server serves. Travels as a header of both."""

    name: str
    id: str | None = None
    """Random, made when the run's record is begun, the same after every resume. None: of a request, the run
    has not begun; of a server, no run has claimed it."""
    model: str | None = None
    """Fingerprint of the student (`sync.weights.snapshots.checkpoint`); None: not yet reported."""

    def __str__(self) -> str:
        model = "" if self.model is None else f", model {self.model[:12]}"
        return f"run {self.name!r} ({f'id {self.id}' if self.id else 'no id'}{model})"

    def refuses(self, asking: RunIdentity) -> bool:
        """Whether a server of this identity must refuse a request of that one."""
        other_run = self.name != asking.name or self.id not in (None, asking.id)
        return other_run or (None not in (self.model, asking.model) and self.model != asking.model)


class VersionSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Completion tokens [start, end) were sampled from `version`'s weights."""

    version: Version
    start: int
    end: int


M = TypeVar("M", bound=Message)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Body of a message."""
    return _encoder.encode(message)


def decode(body: bytes | memoryview, kind: type[M]) -> M:
    """The message in `body`, validated; `kind` may be a union of message types. Raises WireError when it is
    another message, another schema, or no message."""
    try:
        message = msgpack_decoder(kind).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        name = getattr(kind, "__name__", str(kind))
        raise WireError(f"body of {len(body)} bytes is not a {name}: {error}{_found(body, error)}") from None
    if message.schema != SCHEMA:
        raise WireError(
            f"message has schema {message.schema}, this side speaks {SCHEMA}: run the same release everywhere"
        )
    return message


def _found(body: bytes | memoryview, error: Exception) -> str:
    """The number that `error` refuses, for its message; "" where it refuses something else."""
    path = re.search(r"at `\$((?:\.\w+|\[\d+\])+)`", str(error))
    if path is None:
        return ""
    try:
        value = msgspec.msgpack.decode(body)
        for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path[1]):
            value = value[name] if name else value[int(index)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return ""  # what follows the number is no message either
    return f", which is {value}" if isinstance(value, int | float) else ""


def frame(message: Message) -> bytes:
    """One frame of a streamed body: 4-byte little-endian length, then the message."""
    body = encode(message)
    return len(body).to_bytes(4, "little") + body


def frames(body: bytes | memoryview, kind: type[M]) -> Iterator[M]:
    """The messages of a whole body of frames. Raises WireError where one is cut."""
    rest = memoryview(body)
    while rest:
        length = int.from_bytes(rest[:4], "little")
        if len(rest) < 4 + length:
            raise WireError(f"a frame of {length} bytes ends after {len(rest) - 4}: the body was cut")
        yield decode(rest[4 : 4 + length], kind)
        rest = rest[4 + length :]
