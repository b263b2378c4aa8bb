"""A Hugging Face checkpoint folder as flat, memory-mapped arrays of bits, in checkpoint coordinates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np
from blake3 import blake3

from sync.errors import SnapshotError

_KINDS: Final = {
    "BF16": ("bf16", "<u2"),
    "F16": ("f2", "<u2"),
    "F32": ("f4", "<u4"),
    "F64": ("f8", "<u8"),
    "F8_E4M3": ("e4m3", "u1"),
    "F8_E5M2": ("e5m2", "u1"),
    "I64": ("i8", "<u8"),
    "I32": ("i4", "<u4"),
    "I16": ("i2", "<u2"),
    "I8": ("i1", "u1"),
    "U8": ("u1", "u1"),
    "BOOL": ("bool", "u1"),
}
BITS: Final[dict[str, np.dtype]] = {kind: np.dtype(bits) for kind, bits in _KINDS.values()}
"""Kind of element → numpy type that holds its bits."""
_MOST_HEADER: Final = 1 << 24
"""Bytes; a hundred thousand tensors' names and places."""
_Count = Annotated[int, msgspec.Meta(ge=0)]


class TensorAt(NamedTuple):
    """Where a tensor lies."""

    file: Path
    kind: str
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""
    nbytes: int


class _Entry(msgspec.Struct):
    dtype: str
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=64)]
    data_offsets: tuple[_Count, _Count]


def tensors(folder: Path) -> dict[str, TensorAt]:
    """Every tensor of every *.safetensors file in `folder`, by name.

    Raises SnapshotError when there is none, when a file is damaged, or when a name appears twice.
    """
    found: dict[str, TensorAt] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in _read_header(file):
            if name in found:
                raise SnapshotError(
                    f"{name!r} is in {found[name].file} and in {file}: the checkpoint is damaged"
                )
            found[name] = tensor
    if not found:
        raise SnapshotError(f"{folder} has no tensor in *.safetensors files: it is no checkpoint folder")
    return found


def let_others_read(folder: Path) -> None:
    """Give the weights in a folder that `save_pretrained` wrote the permissions of its config.

    safetensors writes files that their owner alone may read.
    """
    mode = next(folder.glob("*config.json")).stat().st_mode
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)


def _read_header(file: Path) -> Iterator[tuple[str, TensorAt]]:
    """Names and places of the tensors in one safetensors file, checked against its size."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(size - 8, _MOST_HEADER):
            raise SnapshotError(f"{file} of {size} bytes states a header of {length}: it was cut or altered")
        text = stream.read(length)
    try:
        entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        decoded = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in entries.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SnapshotError(f"{file} has no safetensors header: {error}") from None
    end = 8 + length
    for name, entry in sorted(decoded.items(), key=lambda item: item[1].data_offsets):
        place = _locate(file, size, 8 + length, name, entry)
        if place.offset != end:
            raise SnapshotError(
                f"tensor {name!r} of {file} begins at byte {place.offset}, the one before it ends at {end}: "
                "tensors must neither overlap nor leave room, the file was altered"
            )
        end += place.nbytes
        yield name, place
    if end != size:
        raise SnapshotError(f"{file} of {size} bytes has tensors up to byte {end}: it was cut or altered")


def _locate(file: Path, size: int, base: int, name: str, entry: _Entry) -> TensorAt:
    if entry.dtype not in _KINDS:
        raise SnapshotError(
            f"tensor {name!r} of {file} has dtype {entry.dtype}: use one of {', '.join(_KINDS)}"
        )
    kind, bits = _KINDS[entry.dtype]
    start, end = entry.data_offsets
    nbytes = math.prod(entry.shape) * np.dtype(bits).itemsize
    if end - start != nbytes or base + end > size:
        raise SnapshotError(
            f"tensor {name!r} of {file} lies at [{start}, {end}) where {nbytes} bytes of a file of {size} "
            "were expected: the file was cut or altered"
        )
    return TensorAt(file, kind, entry.shape, base + start, nbytes)


def bits(places: Mapping[str, TensorAt], writable: bool = False) -> dict[str, np.ndarray]:
    """Flat memory-mapped bits of each tensor; with `writable`, changes go to the files."""
    maps: dict[Path, np.ndarray] = {}
    out = {}
    for name, place in places.items():
        if place.file not in maps:
            maps[place.file] = np.memmap(place.file, np.uint8, "r+" if writable else "r")
        raw = maps[place.file][place.offset : place.offset + place.nbytes]
        out[name] = np.asarray(raw).view(BITS[place.kind])
    return out


def digest(array: np.ndarray) -> str:
    """BLAKE3 hex of an array's bytes (1-D, contiguous)."""
    return blake3(array.view(np.uint8).data).hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """BLAKE3 hex of each tensor's bytes in a checkpoint folder, by name."""
    return {name: digest(array) for name, array in bits(tensors(folder)).items()}


def model_fingerprint(shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> str:
    """BLAKE3 hex over the names, shapes and kinds (such as "bf16") of a model's checkpoint tensors."""
    lines = (
        f"{name}\0{','.join(map(str, shape))}\0{kind}\n" for name, (shape, kind) in sorted(shapes.items())
    )
    return blake3("".join(lines).encode()).hexdigest()


def fingerprint(folder: Path) -> str:
    """`model_fingerprint` of a checkpoint folder."""
    return fingerprint_of(tensors(folder))


def fingerprint_of(places: Mapping[str, TensorAt]) -> str:
    """`model_fingerprint` of a checkpoint's tensors."""
    return model_fingerprint({name: (place.shape, place.kind) for name, place in places.items()})
