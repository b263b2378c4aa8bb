"""Bytes and speed of the codec beside other formats, on one real training trajectory.

Speeds are of one thread; both modes, the other formats and a plain comparison take turns (`timing`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from distill.bench.sync import trajectory
from distill.bench.sync.formats import FORMATS, entropy_given_exponent
from distill.bench.sync.timing import Rate, Timed, interleaved, plain
from distill.bench.sync.trajectory import Pair, Weights
from sync.delta import codec
from sync.delta.codec import Effort

LRS: Final = (1e-6, 3e-6, 1e-5, 5e-5)
STEPS: Final = (1, 8)
DENSITIES: Final = (0.01, 0.1, 0.3)
LARGE: Final = (16 << 20, 64 << 20)
"""Elements of the tensor that speeds are taken on: small run, full run."""
ROUNDS: Final = (5, 1)
"""Of the formats on the trajectory: small run, full run."""
SPEED_ROUNDS: Final = (7, 3)
"""Of our modes on the large tensor."""
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
    encode: dict[str, Rate]
    """Format → speed; "compare" is a plain comparison of the same arrays."""
    decode: dict[str, Rate]
    """Our modes alone."""


@dataclass(frozen=True)
class Speed:
    """Our codec on one large tensor whose elements change by one ULP, whatever their exponent."""

    density: float
    encode: dict[str, Rate]
    """"compare" is a plain comparison."""
    decode: dict[str, Rate]


def run(full: bool, rounds: int | None = None) -> dict[str, Any]:
    """The figures; `full`: a model of 101 M parameters instead of 3 M.

    `rounds` of the large tensor; None: what the size can afford.
    """
    size = trajectory.FULL if full else trajectory.SMALL
    rows, parameters = [], 0
    for pair in trajectory.pairs(size, LRS, STEPS):
        rows.append(asdict(measure(pair, ROUNDS[full])))
        parameters = sum(bits.size for bits in pair.old.values())
    speeds = [asdict(speed(density, LARGE[full], rounds or SPEED_ROUNDS[full])) for density in DENSITIES]
    return {"parameters": parameters, "rows": rows, "speeds": speeds}


def measure(pair: Pair, rounds: int) -> Row:
    """Bytes and speeds of every format on one pair."""
    old, new = (np.concatenate([bits.ravel() for bits in side.values()]) for side in (pair.old, pair.new))
    differ = old != new
    step = np.abs(old.astype(np.int32) - new.astype(np.int32))[differ]
    blobs = {effort: _encode(pair, effort) for effort in EFFORTS}
    sizes: dict[str, float] = {
        name: sum(len(encoder(pair.old[tensor], pair.new[tensor])) for tensor in pair.old)
        for name, encoder in FORMATS.items()
    }
    sizes |= {effort: sum(map(len, blob.values())) for effort, blob in blobs.items()}
    sizes["entropy"] = entropy_given_exponent(old, new) / 8
    others = {name: plain(_over_tensors(encoder, pair)) for name, encoder in FORMATS.items()}
    encode, decode = _rates(pair, old, new, blobs, others, rounds)
    return Row(
        pair.lr,
        pair.steps,
        float(differ.mean()),
        float((step == 1).mean()) if step.size else 0.0,
        {name: size / old.size for name, size in sizes.items()},
        encode,
        decode,
    )


def speed(density: float, size: int, rounds: int) -> Speed:
    """Our codec on random weights of which `density` change."""
    random = np.random.default_rng(0)
    old = ((random.standard_normal(size, np.float32) * 0.02).view(np.uint32) >> 16).astype(np.uint16)
    sign = random.choice(np.array([1, 65535], np.uint16), size)
    new = np.where(random.random(size, np.float32) < density, old + sign, old)
    pair = Pair(0.0, 1, {"w": old}, {"w": new})
    blobs = {effort: _encode(pair, effort) for effort in EFFORTS}
    return Speed(density, *_rates(pair, old, new, blobs, {}, rounds))


def _rates(
    pair: Pair,
    old: np.ndarray,
    new: np.ndarray,
    blobs: dict[Effort, dict[str, bytes]],
    others: dict[str, Timed],
    rounds: int,
) -> tuple[dict[str, Rate], dict[str, Rate]]:
    """(encode, decode); what is decoded is checked first. Everything has run once before it is timed."""
    out = np.ones(old.size, bool)
    encoders = others | {effort: plain(partial(_encode, pair, effort)) for effort in EFFORTS}
    encoders["compare"] = plain(lambda: np.not_equal(old, new, out=out))
    decoders: dict[str, Timed] = {}
    for effort, blob in blobs.items():
        target = _copy(pair.old)
        _apply(blob, target)
        assert all(np.array_equal(target[name], pair.new[name].ravel()) for name in target)
        decoders[effort] = (partial(_copy, pair.old), partial(_apply, blob))
    return interleaved(encoders, rounds, old.nbytes), interleaved(decoders, rounds, old.nbytes)


def _encode(pair: Pair, effort: Effort) -> dict[str, bytes]:
    return {
        name: codec.encode(bits.ravel(), pair.new[name].ravel(), "bf16", effort)
        for name, bits in pair.old.items()
    }


def _over_tensors(encoder: Callable[[np.ndarray, np.ndarray], bytes], pair: Pair) -> Callable[[], object]:
    return lambda: [encoder(pair.old[name], pair.new[name]) for name in pair.old]


def _copy(weights: Weights) -> Weights:
    return {name: bits.ravel().copy() for name, bits in weights.items()}


def _apply(blobs: dict[str, bytes], target: Weights) -> None:
    for name, blob in blobs.items():
        codec.apply(target[name], blob, "bf16")
