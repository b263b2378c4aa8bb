"""How few bytes and how little time a new version takes: our codec, other formats and the stores in one run.

`run` trains a small model (see `trajectory`) and measures on its weights; speeds are megabytes of dense bf16
a second of one thread, the best of `repeats`, beside a plain comparison of the same arrays.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from distill.bench import trajectory
from distill.bench.formats import FORMATS, entropy_given_exponent
from distill.bench.trajectory import Pair, Weights
from sync.stores import Store
from sync.stores.directory import DirectoryStore
from sync.stores.xet import XetStore
from sync.weights import checkpoint, codec
from sync.weights.codec import Effort
from sync.weights.mirror import Mirror
from sync.weights.publish import Publisher, PublishReport, Slice
from sync.wire import Version

LRS: Final = (1e-6, 3e-6, 1e-5, 5e-5)
STEPS: Final = (1, 8)
LARGE: Final = (16 << 20, 64 << 20)
"""Elements of the tensor that speeds are taken on: small run, full run."""
_STORES: Final[dict[str, Callable[[Path], Store]]] = {"directory": DirectoryStore, "xet": XetStore}
EFFORTS: Final[tuple[Effort, ...]] = ("fast", "small")


@dataclass(frozen=True)
class Row:
    """One learning rate and number of steps between two versions."""

    lr: float
    steps: int
    changed: float
    """Share of elements."""
    by_one: float
    """Share of the changed elements that moved by one unit in the last place."""
    bytes_per_parameter: dict[str, float]
    """Format → bytes; "entropy" is the bound given the old exponent over the whole model."""
    encode: dict[str, float]
    """Format → MB/s."""
    decode: dict[str, float]
    compare: float
    """MB/s of a plain comparison."""


@dataclass(frozen=True)
class Speed:
    """Our codec on one large tensor whose elements change by one ULP, whatever their exponent."""

    density: float
    encode: dict[str, float]
    decode: dict[str, float]
    compare: float


@dataclass(frozen=True)
class Road:
    """One store: a full snapshot and then a delta, published by one rank and staged by one mirror."""

    store: str
    kind: str
    bytes: int
    publish_seconds: float
    stage_seconds: float


def run(json_path: Path | None = None, *, full: bool = False, repeats: int = 3) -> dict[str, Any]:
    """Measure, write the figures to `json_path` when given, and return them.

    `full` trains a model of 100 M parameters (tens of minutes on two cores) instead of 3 M (a minute).
    """
    size = trajectory.FULL if full else trajectory.SMALL
    rows: list[Row] = []
    roads: list[Road] = []
    parameters = 0
    for pair in trajectory.pairs(size, LRS, STEPS):
        rows.append(measure(pair, repeats))
        if not roads:
            roads = [road for name in _STORES for road in _road(name, pair)]
        parameters = sum(bits.size for bits in pair.old.values())
    speeds = [_speed(density, LARGE[full], repeats) for density in (0.01, 0.1, 0.3)]
    results = {
        "parameters": parameters,
        "rows": [asdict(row) for row in rows],
        "speeds": [asdict(speed) for speed in speeds],
        "roads": [asdict(road) for road in roads],
    }
    if json_path is not None:
        json_path.write_text(json.dumps(results, indent=1) + "\n")
    return results


def measure(pair: Pair, repeats: int) -> Row:
    """Bytes and speeds of every format on one pair."""
    old, new = (np.concatenate([bits.ravel() for bits in side.values()]) for side in (pair.old, pair.new))
    differ = old != new
    step = np.abs(old.astype(np.int32) - new.astype(np.int32))[differ]
    sizes: dict[str, float] = {}
    encode: dict[str, float] = {}
    decode: dict[str, float] = {}
    for name, encoder in FORMATS.items():
        sizes[name] = sum(len(encoder(pair.old[tensor], pair.new[tensor])) for tensor in pair.old)
        encode[name] = _rate(old.nbytes, repeats, _over_tensors(encoder, pair))
    for effort in EFFORTS:
        blobs = _encode(pair.old, pair.new, effort)
        sizes[effort] = sum(map(len, blobs.values()))
        encode[effort] = _rate(old.nbytes, repeats, partial(_encode, pair.old, pair.new, effort))
        decode[effort] = _decode_rate(pair, blobs, repeats)
    sizes["entropy"] = entropy_given_exponent(old, new) / 8
    return Row(
        pair.lr,
        pair.steps,
        float(differ.mean()),
        float((step == 1).mean()) if step.size else 0.0,
        {name: size / old.size for name, size in sizes.items()},
        encode,
        decode,
        _compare_rate(old, new, repeats),
    )


def table(results: dict[str, Any]) -> str:
    """The figures as text."""
    names = [*FORMATS, *EFFORTS, "entropy"]
    head = " ".join(f"{name:>11}" for name in names)
    lines = [
        f"bytes per parameter, {results['parameters']:,} parameters (dense bf16: 2)",
        f"lr     steps changed {head}  small/PULSE small/entropy",
        *map(_size_line, results["rows"]),
        "",
        "MB/s of dense bf16, one thread",
        f"{'changed':>7} {'compare':>9} " + " ".join(f"{e:>6} encode decode" for e in EFFORTS),
        *map(_speed_line, results["speeds"]),
        "",
        f"{'store':10} {'kind':5} {'bytes':>11} {'publish s':>10} {'stage s':>8}",
        *map(_road_line, results["roads"]),
    ]
    return "\n".join(lines)


def _size_line(row: dict[str, Any]) -> str:
    size = row["bytes_per_parameter"]
    cells = " ".join(f"{size[name]:11.5f}" for name in [*FORMATS, *EFFORTS, "entropy"])
    to_pulse, to_bound = size["small"] / size["PULSE-style"], size["small"] / size["entropy"]
    return (
        f"{row['lr']:.0e} {row['steps']:5d} {row['changed']:7.2%} {cells} {to_pulse:12.2f} {to_bound:13.2f}"
    )


def _speed_line(row: dict[str, Any]) -> str:
    cells = (f"{'':6} {row['encode'][effort]:6.0f} {row['decode'][effort]:6.0f}" for effort in EFFORTS)
    return f"{row['density']:7.0%} {row['compare']:9.0f} " + " ".join(cells)


def _road_line(road: dict[str, Any]) -> str:
    seconds = f"{road['publish_seconds']:10.3f} {road['stage_seconds']:8.3f}"
    return f"{road['store']:10} {road['kind']:5} {road['bytes']:11,} {seconds}"


# --- codec ------------------------------------------------------------------------------------------------


def _encode(old: Weights, new: Weights, effort: Effort) -> dict[str, bytes]:
    return {name: codec.encode(old[name].ravel(), new[name].ravel(), "bf16", effort) for name in old}


def _over_tensors(encoder: Callable[[np.ndarray, np.ndarray], bytes], pair: Pair) -> Callable[[], object]:
    return lambda: [encoder(pair.old[name], pair.new[name]) for name in pair.old]


def _decode_rate(pair: Pair, blobs: dict[str, bytes], repeats: int) -> float:
    best = 0.0
    for _ in range(repeats):
        target = {name: bits.ravel().copy() for name, bits in pair.old.items()}
        best = max(best, _rate(_nbytes(target.values()), 1, partial(_apply, target, blobs)))
        assert all(np.array_equal(target[name], pair.new[name].ravel()) for name in target)
    return best


def _apply(target: Weights, blobs: dict[str, bytes]) -> None:
    for name, blob in blobs.items():
        codec.apply(target[name], blob, "bf16")


def _speed(density: float, size: int, repeats: int) -> Speed:
    random = np.random.default_rng(0)
    old = ((random.standard_normal(size, np.float32) * 0.02).view(np.uint32) >> 16).astype(np.uint16)
    sign = random.choice(np.array([1, 65535], np.uint16), size)
    new = np.where(random.random(size, np.float32) < density, old + sign, old)
    pair = Pair(0.0, 1, {"w": old}, {"w": new})
    encode: dict[str, float] = {}
    decode: dict[str, float] = {}
    for effort in EFFORTS:
        blobs = _encode(pair.old, pair.new, effort)
        encode[effort] = _rate(old.nbytes, repeats, partial(_encode, pair.old, pair.new, effort))
        decode[effort] = _decode_rate(pair, blobs, repeats)
    return Speed(density, encode, decode, _compare_rate(old, new, repeats))


def _compare_rate(old: np.ndarray, new: np.ndarray, repeats: int) -> float:
    out = np.empty(old.size, bool)
    return _rate(old.nbytes, repeats + 2, lambda: np.not_equal(old, new, out=out))


def _rate(nbytes: int, repeats: int, work: Callable[[], object]) -> float:
    """MB/s of the fastest of `repeats` runs."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return nbytes / best / 1e6


def _nbytes(arrays: Iterable[np.ndarray]) -> int:
    return sum(array.nbytes for array in arrays)


# --- stores -----------------------------------------------------------------------------------------------


def _road(name: str, pair: Pair) -> list[Road]:
    """Seconds of a full snapshot and of a delta through one store in a temporary folder."""
    shapes = {tensor: (bits.shape, "bf16") for tensor, bits in pair.old.items()}
    slices = [Slice(tensor, bits.shape, "bf16", 0, bits.size) for tensor, bits in pair.old.items()]
    old, new = ({tensor: bits.ravel() for tensor, bits in side.items()} for side in (pair.old, pair.new))
    with tempfile.TemporaryDirectory() as folder:
        store = _STORES[name](Path(folder) / "store")
        publisher = Publisher(store, "bench", checkpoint.model_fingerprint(shapes), slices)
        with Mirror(Path(folder) / "mirror", store, "bench") as mirror:
            saved = _save(Path(folder) / "model", pair.old)
            reports = [publisher.anchor(Version(0, 0), None, saved, old), publisher.delta(Version(0, 1), new)]
            return [_stage(name, mirror, report) for report in reports]


def _stage(name: str, mirror: Mirror, report: PublishReport) -> Road:
    staged = mirror.stage(report.version)
    mirror.promote(staged)
    return Road(name, report.kind, report.bytes, report.seconds, staged.seconds)


def _save(folder: Path, weights: Weights) -> Path:
    """A checkpoint folder of the weights."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    tensors = {name: torch.from_numpy(bits.view(np.int16)) for name, bits in weights.items()}
    as_bf16 = {name: bits.view(torch.bfloat16) for name, bits in tensors.items()}
    save_file(as_bf16, folder / "model.safetensors")
    return folder
