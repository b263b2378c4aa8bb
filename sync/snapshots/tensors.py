"""Checkpoints as streams of named torch tensors, and the digest of what was streamed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open

from sync.errors import SnapshotError

NamedTensors = Iterable[tuple[str, torch.Tensor]]
_THREADED: Final = 1 << 20
"""Bytes from which hashing with several threads pays."""


class TensorMeta(NamedTuple):
    """A checkpoint tensor without its bytes; `dtype` is torch's name, such as "bfloat16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def meta_of(name: str, tensor: torch.Tensor) -> TensorMeta:
    """Description of a tensor."""
    return TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The row-major bytes of a tensor on the CPU, without a copy when it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def digest(tensor: torch.Tensor) -> str:
    """BLAKE3 hex of a tensor's bytes."""
    data = tensor_bytes(tensor.cpu())
    threads = blake3.AUTO if data.nbytes >= _THREADED else 1
    return blake3(data, max_threads=threads).hexdigest()


def digesting(tensors: NamedTensors, digests: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass tensors on, noting in `digests` the digest of each just before it is handed over.

    Raises SnapshotError when a name comes twice.
    """
    for name, tensor in tensors:
        if name in digests:
            raise SnapshotError(f"tensor {name!r} comes twice in one checkpoint: publish it again")
        digests[name] = digest(tensor)
        yield name, tensor


def read_folder(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Memory-mapped tensors of every *.safetensors file in a folder, in the order they lie in.

    Raises SnapshotError when there is no such file, or one is cut.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise SnapshotError(f"{folder} has no *.safetensors file: it is no checkpoint folder")
    for path in files:
        try:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                for name in file.offset_keys():
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise SnapshotError(f"{path} cannot be read as safetensors: {error}") from None
