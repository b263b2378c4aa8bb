"""Torch operations on a shard give the very bytes of the compiled loops, for every pattern and density."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from memory_store import MemoryStore

from sync.base.settings import WeightsConfig
from sync.weights.delta import codec
from sync.weights.delta.codec import Effort, Mode
from sync.weights.publish import Publisher, Slice
from sync.weights.snapshots import checkpoint
from sync.weights.snapshots.manifest import version_key
from sync.wire import RunIdentity, Version

KINDS = {"bf16": "u2", "f2": "u2", "f4": "u4", "f8": "u8", "u1": "u1"}
EFFORTS: tuple[Effort, ...] = ("fast", "small")
SPECIAL = [0, 1, 0x7F, 0x80, 0x3F80, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF]
"""bf16: +0, two subnormals, smallest normal, 1, max, inf, NaNs with payloads; and their negatives."""
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


def on(device: str, bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(f"i{bits.itemsize}" if bits.itemsize > 1 else "u1")).to(device)


def both(old: np.ndarray, new: np.ndarray, kind: str, effort: Effort, device: str = "cpu") -> bytes:
    """The blob of the compiled loops, after checking that torch's is the same."""
    expected = codec.encode(old, new, kind, effort)
    assert codec.encode(on(device, old), on(device, new), kind, effort) == expected
    return expected


def noise(random: np.random.Generator, size: int, kind: str) -> np.ndarray:
    return random.integers(0, 2 ** (8 * np.dtype(KINDS[kind]).itemsize), size, KINDS[kind], endpoint=False)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.1, 0.3, 0.8, 1.0])
def test_random_bits_at_any_density_give_the_same_bytes(
    kind: str, share: float, effort: Effort, device: str
) -> None:
    random = np.random.default_rng(5)
    old = noise(random, 20_011, kind)
    new = np.where(random.random(old.size) < share, noise(random, old.size, kind), old)
    both(old, new, kind, effort, device)


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("kind", ["bf16", "f2", "f4"])
@pytest.mark.parametrize(("share", "mode"), [(0.01, Mode.GAPS), (0.1, Mode.GAPS), (0.5, Mode.BITMAP)])
def test_steps_of_training_give_the_same_bytes(
    kind: str, share: float, mode: Mode, effort: Effort, device: str
) -> None:
    random = np.random.default_rng(6)
    values = (random.standard_normal(30_005) * 0.02).astype("f4")
    old = (values.view("u4") >> 16).astype("u2") if kind == "bf16" else values.astype(kind).view(KINDS[kind])
    step = random.choice(np.array([1, -1]), old.size).astype(old.dtype)
    new = np.where(random.random(old.size) < share, old + step, old).astype(old.dtype)
    blob = both(old, new, kind, effort, device)
    assert codec.mode_of(blob) == (Mode.CLASSES if effort == "small" else mode)


@pytest.mark.parametrize("effort", EFFORTS)
def test_nans_zeros_of_both_signs_and_subnormals_are_patterns(effort: Effort, device: str) -> None:
    special = np.array([p | sign for p in SPECIAL for sign in (0, 0x8000)], "u2")
    old, new = (grid.ravel().copy() for grid in np.meshgrid(special, special))
    both(old, new, "bf16", effort, device)
    wide = np.concatenate([special.astype("u4") << 16 | low for low in (0, 1, 0xFFFF)])
    old, new = (grid.ravel().copy() for grid in np.meshgrid(wide, wide))
    both(old, new, "f4", effort, device)
    zeros = np.zeros(64, "u2")
    assert codec.mode_of(both(zeros, zeros | 0x8000, "bf16", effort, device)) != Mode.SAME


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 8, 9, 65])
@pytest.mark.parametrize("kind", ["bf16", "f4"])
def test_short_tensors_give_the_same_bytes(kind: str, size: int, effort: Effort, device: str) -> None:
    random = np.random.default_rng(size)
    old = noise(random, size, kind)
    both(old, old.copy(), kind, effort, device)
    both(old, noise(random, size, kind), kind, effort, device)
    if size:
        last = old.copy()
        last[-1] ^= 1
        both(old, last, kind, effort, device)


@pytest.mark.parametrize("effort", EFFORTS)
def test_chunks_leave_no_trace(effort: Effort, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(7)
    size = (3 << 20) + 77
    old = ((random.standard_normal(size) * 0.02).astype("f4").view("u4") >> 16).astype("u2")
    monkeypatch.setattr(codec, "_CHUNK", 1 << 20)
    for share in (0.0001, 0.5):
        new = np.where(random.random(size) < share, old + 1, old).astype("u2")
        both(old, new, "bf16", effort)
    both(old, noise(random, size, "bf16"), "bf16", "fast")


@pytest.mark.parametrize("effort", EFFORTS)
def test_a_publisher_of_device_shards_writes_what_one_of_arrays_writes(effort: Effort, device: str) -> None:
    """Files, digests and bases included, over three deltas of one element kind each."""
    random = np.random.default_rng(8)
    slices = [Slice("a", (40, 50), "bf16", 0, 2000), Slice("b", (900,), "f4", 100, 300)]
    shards: dict[str, Any] = {"a": noise(random, 2000, "bf16"), "b": noise(random, 300, "f4")}
    stores = MemoryStore(), MemoryStore()
    publishers = [
        Publisher(
            s,
            RunIdentity("run", model="f"),
            slices,
            rank=1,
            world_size=2,
            weights=WeightsConfig(codec=effort),
        )
        for s in stores
    ]
    for step in range(4):
        tensors = {name: on(device, bits) for name, bits in shards.items()}
        for publisher, held in zip(publishers, (shards, tensors), strict=True):
            if step == 0:
                publisher.anchor(Version(0, 0), None, None, held)
            else:
                publisher.delta(Version(0, step), held)
        keys = [version_key("run", Version(0, step), f"{kind}-00001.{end}") for kind, end in PARTS if step]
        assert all(stores[0].read(key) == stores[1].read(key) for key in keys)
        for name, bits in shards.items():
            moved = random.random(bits.size) < (0.02, 0.5, 1.0, 0.0)[step]
            shards[name] = np.where(moved, bits + 1, bits).astype(bits.dtype)


PARTS = (("delta", "bin"), ("part", "json"))


def test_an_anchor_of_device_shards_is_compared_with_its_folder(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    from sync.base.errors import SnapshotError

    tensor = torch.arange(64, dtype=torch.bfloat16)
    save_file({"w": tensor}, tmp_path / "model.safetensors")
    slices = [Slice("w", (64,), "bf16", 0, 64)]
    publisher = Publisher(MemoryStore(), RunIdentity("run", model=checkpoint.fingerprint(tmp_path)), slices)
    report = publisher.anchor(Version(0, 0), None, tmp_path, {"w": tensor.view(torch.int16)})
    assert report.kind == "full"
    with pytest.raises(SnapshotError, match="other bits"):
        publisher.anchor(Version(0, 1), None, tmp_path, {"w": (tensor + 1).view(torch.int16)})
    with pytest.raises(SnapshotError, match="pass flat"):
        publisher.anchor(Version(0, 2), None, tmp_path, {"w": tensor})
