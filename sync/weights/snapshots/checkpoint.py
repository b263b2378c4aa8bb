"""A Hugging Face checkpoint folder as flat, memory-mapped arrays of bits, in checkpoint coordinates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
from blake3 import blake3
from safetensors import SafetensorError, safe_open

from sync.base.decoding import json_decoder
from sync.base.errors import SnapshotError, StoreError
from sync.weights.stores import check_key

if TYPE_CHECKING:
    from torch import Tensor

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


class TensorAt(NamedTuple):
    """Where a tensor lies."""

    file: Path
    kind: str
    shape: tuple[int, ...]
    offset: int
    """Place of its first byte in the file."""
    nbytes: int


def weight_files(folder: Path) -> list[Path]:
    """The *.safetensors files that hold a folder's weights: those that its index names, without one all.
    Raises SnapshotError for an index that cannot be read, and when a file that it names is missing."""
    return _indexed(folder, _WHOLE) or sorted(folder.glob("*.safetensors"))


def check_weights(folder: Path) -> str:
    """Find the one set of files that every loader reads of a model folder; says which ones none reads.

    transformers prefers the whole file to an index, vLLM an index to all files, of which it reads every one;
    *.bin are read where no *.safetensors are. Raises SnapshotError where they would load different weights.
    """
    files = {path.name for ending in (_WHOLE, _PICKLED) for path in folder.glob(f"*{Path(ending).suffix}")}
    files -= _NO_WEIGHTS
    pickled = not any(folder.glob("*.safetensors")) and not (folder / f"{_WHOLE}.index.json").is_file()
    whole = _PICKLED if pickled else _WHOLE
    alike = {name for name in files if name.endswith(Path(whole).suffix)}
    indexed = {path.name for path in _indexed(folder, whole)}
    trainer = {whole} if whole in files else indexed
    vllm = alike if pickled or not indexed else indexed
    if files and not trainer:
        raise SnapshotError(
            f"{folder} holds {min(files)}, and neither {whole} nor {whole}.index.json, by which weights are "
            "loaded: name a folder that save_pretrained wrote, with all its files"
        )
    if trainer != vllm:
        sides = (", ".join(sorted(side)[:3]) for side in (trainer, vllm))
        raise SnapshotError(
            "{}: the trainer would load {}, and vLLM {}: move away what is not of this model".format(
                folder, *sides
            )
        )
    stray = ", ".join(sorted(files - trainer)[:3])
    return (
        f"{folder}: {', '.join(sorted(trainer)[:3])} are loaded, and nothing reads {stray}" if stray else ""
    )


_WHOLE: Final = "model.safetensors"
_PICKLED: Final = "pytorch_model.bin"
_NO_WEIGHTS: Final = frozenset(("training_args.bin", "optimizer.bin", "scheduler.bin", "scaler.bin"))


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _indexed(folder: Path, whole: str) -> list[Path]:
    """Files that the index of `whole` names; none: there is no index."""
    index = folder / f"{whole}.index.json"
    if not index.is_file():
        return []
    try:
        names = sorted({*json_decoder(_Index).decode(index.read_bytes()).weight_map.values()})
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SnapshotError(f"{index} cannot be read: {error}; put it back from where it came") from None
    present = {path.name for path in folder.glob(f"*{Path(whole).suffix}")}  # no file elsewhere
    if missing := [name for name in names if name not in present]:
        raise SnapshotError(
            f"{index} names {', '.join(missing[:3])}, and {len(missing)} of its {len(names)} files are "
            "missing: copy or download the rest"
        )
    return [folder / name for name in names]


def vllm_formats(path: str) -> dict[str, str]:
    """Engine arguments by which vLLM goes by a folder's index where `consolidated*` files lie beside it."""
    if not any(Path(path).glob("consolidated*.safetensors")):
        return {}
    return {"load-format": "safetensors", "config-format": "hf", "tokenizer-mode": "hf"}


def tensors(folder: Path) -> dict[str, TensorAt]:
    """Every tensor of `weight_files`, by name. Raises SnapshotError when there is none, when a file is
    damaged, or when a name appears twice."""
    places: dict[str, TensorAt] = {}
    for file in weight_files(folder):
        for name, tensor in _read_header(file):
            if name in places:
                raise SnapshotError(
                    f"{name!r} is in {places[name].file} and in {file}: the checkpoint is damaged"
                )
            places[name] = tensor
    if not places:
        raise SnapshotError(f"{folder} has no tensor in *.safetensors files: it is no checkpoint folder")
    return places


def let_others_read(folder: Path) -> None:
    """Give the weights in a folder that `save_pretrained` wrote the permissions of its config. safetensors
    writes files that their owner alone may read."""
    mode = next(folder.glob("*config.json")).stat().st_mode
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)


def _read_header(file: Path) -> Iterator[tuple[str, TensorAt]]:
    """Names and places of the tensors in one file; safetensors sees to it that they tile it."""
    try:
        with file.open("rb") as raw, safe_open(file, framework="numpy") as opened:
            offset = 8 + int.from_bytes(raw.read(8), "little")  # behind the header and its length
            for name in opened.offset_keys():
                part = opened.get_slice(name)
                dtype, shape = part.get_dtype(), tuple(part.get_shape())
                if dtype not in _KINDS:
                    raise SnapshotError(
                        f"tensor {name!r} of {file} has dtype {dtype}: use one of {', '.join(_KINDS)}"
                    )
                kind, _ = _KINDS[dtype]
                nbytes = math.prod(shape) * BITS[kind].itemsize
                yield name, TensorAt(file, kind, shape, offset, nbytes)
                offset += nbytes
    except (SafetensorError, OSError) as error:
        raise SnapshotError(
            f"{file} cannot be read as safetensors: {error}; it was cut or altered; copy or download it anew"
        ) from None


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


def model_fingerprint(shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> str:
    """BLAKE3 hex over the names, shapes and kinds (such as "bf16") of a model's checkpoint tensors."""
    lines = (
        f"{name}\0{','.join(map(str, shape))}\0{kind}\n" for name, (shape, kind) in sorted(shapes.items())
    )
    return blake3("".join(lines).encode()).hexdigest()


def fingerprint(places: Mapping[str, TensorAt]) -> str:
    """`model_fingerprint` of a checkpoint's tensors."""
    return model_fingerprint({name: (place.shape, place.kind) for name, place in places.items()})


# --- what may travel ------------------------------------------------------------------------------------


# Weights as safetensors, settings and vocabularies: nothing that could run leaves a trainer through a store,
# and nothing that could is taken from one.
_ENDINGS: Final = frozenset(
    (".safetensors", ".json", ".jsonl", ".txt", ".model", ".jinja", ".tiktoken", ".md")
)
_MOST_SETTINGS: Final = 1 << 23
"""Bytes; a tokenizer with thousands of added tokens has one or two million."""
_CODE: Final = ("auto_map", "megatron_config")
"""Settings by which transformers and peft import code that a folder names."""


def refused(key: str) -> str | None:
    """Why no reader takes this file of an anchor; None: they do."""
    if not key.startswith("model/"):
        return "it is outside of model/"
    if PurePosixPath(key).suffix not in _ENDINGS or key.endswith(".bin.index.json"):
        return "a store holds safetensors and settings, never pickles or code"
    try:
        check_key(key)
    except StoreError as error:
        return str(error)
    return None


def without_code(path: Path) -> bytes | Path:
    """A file of a folder as it is published: a config file without the settings that name code."""
    if not path.name.endswith("config.json"):
        return path
    settings = _settings(path)
    kept = {name: value for name, value in settings.items() if name not in _CODE}
    return path if len(kept) == len(settings) else msgspec.json.format(msgspec.json.encode(kept), indent=2)


def check_no_code(folder: Path) -> None:
    """Raises SnapshotError when a config file names code."""
    for path in folder.rglob("*config.json"):
        settings = _settings(path)
        for name in (name for name in _CODE if bytes(settings.get(name, b"null")) != b"null"):
            raise SnapshotError(
                f"{path.name} from a store has {name!r}, by which a loader would run code: model code comes "
                "from student.path alone; the file was altered, or published by an older release"
            )


def _settings(path: Path) -> dict[str, msgspec.Raw]:
    """A config file's settings, undecoded. Raises SnapshotError when it has none."""
    try:
        if (size := path.stat().st_size) > _MOST_SETTINGS:
            raise SnapshotError(f"{path} has {size} bytes, settings take at most {_MOST_SETTINGS}")
        return json_decoder(dict[str, msgspec.Raw]).decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SnapshotError(f"{path} is no file of settings: {error}; it was altered") from None


# --- as torch tensors -----------------------------------------------------------------------------------


NamedTensors: TypeAlias = "Iterable[tuple[str, Tensor]]"
_THREADED: Final = 1 << 20
"""Bytes from which hashing with several threads pays."""


class TensorMeta(NamedTuple):
    """A checkpoint tensor without its bytes; `dtype` is torch's name, such as "bfloat16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The row-major bytes of a tensor on the CPU, without a copy when it is contiguous."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def tensor_digest(tensor: Tensor) -> str:
    """BLAKE3 hex of a tensor's bytes."""
    data = tensor_bytes(tensor.cpu())
    return hasher(data.nbytes).update(data).hexdigest()


def hasher(nbytes: int) -> blake3:
    """A hash for so many bytes, by several threads where that pays."""
    return blake3(max_threads=blake3.AUTO if nbytes >= _THREADED else 1)


def digesting(tensors: NamedTensors, digests: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Pass tensors on, noting in `digests` the digest of each just before it is handed over. Raises
    SnapshotError when a name comes twice."""
    for name, tensor in tensors:
        if name in digests:
            raise SnapshotError(f"tensor {name!r} comes twice in one checkpoint: publish it again")
        digests[name] = tensor_digest(tensor)
        yield name, tensor


def read_folder(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Memory-mapped tensors of `weight_files`, in the order they lie in. Raises SnapshotError when there is
    no such file, or one is cut."""
    files = weight_files(folder)
    if not files:
        raise SnapshotError(f"{folder} has no *.safetensors file: it is no checkpoint folder")
    for path in files:
        try:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                for name in file.offset_keys():
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise SnapshotError(f"{path} cannot be read as safetensors: {error}") from None
