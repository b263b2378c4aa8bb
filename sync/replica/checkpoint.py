"""Checkpoints as streams of named tensors, and the digest of what was streamed."""

from __future__ import annotations

import json
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
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


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
    """Memory-mapped tensors of a Hugging Face safetensors folder, file by file, in file order.

    Raises SnapshotError when the folder is no such checkpoint or a file is cut.
    """
    for path, names in _files(folder):
        try:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                for name in names or file.offset_keys():
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise SnapshotError(f"{path} cannot be read as safetensors: {error}") from None


def _files(folder: Path) -> list[tuple[Path, list[str] | None]]:
    """Files of a checkpoint with the names to read from each; None: all of them."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [(folder / "model.safetensors", None)]
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise SnapshotError(f"{index} is not a checkpoint index: {error!r}") from None
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(file, []).append(name)
    return [(folder / file, names) for file, names in sorted(by_file.items())]
