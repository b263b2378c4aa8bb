"""Deltas are exact for every bit pattern, short, and refuse bytes that were tampered with. Torch's operations
on a shard give the very bytes of the compiled loops."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hostile_store import mutated_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_store import MemoryStore
from torch.utils._python_dispatch import TorchDispatchMode

from sync.base.errors import SnapshotError
from sync.base.settings import WeightsConfig
from sync.weights.delta import codec, kernels
from sync.weights.delta import file as delta_file
from sync.weights.delta.codec import Effort, Mode
from sync.weights.publish import Publisher
from sync.weights.snapshots.manifest import version_key
from sync.wire import RunIdentity, Version

KINDS = {"bf16": "u2", "f2": "u2", "f4": "u4", "f8": "u8", "i8": "u8", "u1": "u1"}
EFFORTS: tuple[Effort, ...] = ("fast", "small")


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def on(device: str, bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(f"i{bits.itemsize}" if bits.itemsize > 1 else "u1")).to(device)


def round_trip(old: np.ndarray, new: np.ndarray, kind: str, effort: Effort, device: str = "cpu") -> bytes:
    """The blob, after checking that it turns old into new, is not longer than new and 22 bytes, and comes of
    torch tensors too."""
    blob = codec.encode(old, new, kind, effort)
    assert codec.encode(on(device, old), on(device, new), kind, effort) == blob
    np.testing.assert_array_equal(codec.on_host(on(device, new)), new)
    bits = old.copy()
    codec.apply(bits, blob, kind)
    np.testing.assert_array_equal(bits, new)
    assert len(blob) <= new.nbytes + 22
    return blob


def noise(random: np.random.Generator, size: int, kind: str) -> np.ndarray:
    return random.integers(0, 2 ** (8 * np.dtype(KINDS[kind]).itemsize), size, KINDS[kind], endpoint=False)


def weights(random: np.random.Generator, size: int, kind: str) -> np.ndarray:
    """Bits of normally distributed weights."""
    values = (random.standard_normal(size) * 0.02).astype("f4")
    if kind == "bf16":
        return (values.view("u4") >> 16).astype("u2")
    return values.astype(kind).view(KINDS[kind])


def nudged(random: np.random.Generator, old: np.ndarray, share: float) -> np.ndarray:
    """`share` of the elements one ULP away."""
    step = random.choice(np.array([1, -1]), old.size).astype(old.dtype)
    return np.where(random.random(old.size) < share, old + step, old).astype(old.dtype)


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("kind", ["bf16", "f2"])
def test_every_pattern_becomes_every_other_class_of_pattern(kind: str, effort: Effort, device: str) -> None:
    every = np.arange(65536, dtype="u2")
    for new in (every[::-1].copy(), np.roll(every, 1), every ^ 0x8000, np.roll(every, 12345), every * 0):
        round_trip(every, new, kind, effort, device)


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("density", [0.0, 1e-4, 0.01, 0.1, 0.3, 0.8, 1.0])
def test_random_bits_at_any_density_survive(kind: str, density: float, effort: Effort, device: str) -> None:
    random = np.random.default_rng(3)
    old = noise(random, 20_011, kind)
    new = np.where(random.random(old.size) < density, noise(random, old.size, kind), old)
    blob = round_trip(old, new, kind, effort, device)
    if density == 0:
        assert blob == bytes([Mode.SAME])


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 7, 8, 9, 63, 65, 255, 256, 257, 4099])
def test_any_length_and_alignment_survives(size: int, effort: Effort, device: str) -> None:
    random = np.random.default_rng(size)
    for kind in ("bf16", "f4"):
        base = weights(random, size + 3, kind)
        for shift in range(3):
            old = base[shift : shift + size]
            for new in (nudged(random, old, 1.0), nudged(random, old, 0.1), old.copy()):
                blob = round_trip(old, new, kind, effort, device)
                room = np.zeros(size + 3, old.dtype)
                room[shift : shift + size] = old
                codec.apply(room[shift : shift + size], blob, kind)
                np.testing.assert_array_equal(room[shift : shift + size], new)
                assert not room[:shift].any()
                assert not room[shift + size :].any()


@pytest.mark.parametrize("effort", EFFORTS)
def test_distances_and_steps_on_both_sides_of_the_escape_survive(effort: Effort, device: str) -> None:
    positions = np.cumsum([0, 1, 2, 254, 255, 256, 257, 65535, 65536, 65537])
    old = np.full(200_000, 0x3C00, "u2")
    for step in (1, 126, 127, 128, 129, 130, 0x4000):
        for sign in (1, -1):
            new = old.copy()
            new[positions] += np.array(sign * step).astype("u2")
            round_trip(old, new, "bf16", effort, device)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.3])
def test_the_small_mode_comes_within_a_fiftieth_of_the_entropy_given_the_exponent(share: float) -> None:
    """Changes of ±1 ULP whose probability halves with each exponent: H = Σ_c N_c·h(p_c) + changes · 1 bit."""
    random = np.random.default_rng(7)
    old = weights(random, 400_000, "bf16")
    exponent = (old >> 7 & 255).astype(int)
    chance = np.minimum(0.9, share * 2.0 ** (120 - exponent))
    hit = random.random(old.size) < chance
    new = np.where(hit, old + random.choice(np.array([1, 65535]), old.size), old).astype("u2")
    count, changed = np.bincount(exponent, minlength=256), np.bincount(exponent, hit, 256)
    p = np.divide(changed, count, out=np.zeros(256), where=count > 0)
    inside = (p > 0) & (p < 1)
    p, count = p[inside], count[inside]
    entropy_bits = -(count * (p * np.log2(p) + (1 - p) * np.log2(1 - p))).sum()
    bound = (entropy_bits + hit.sum()) / 8
    blob = round_trip(old, new, "bf16", "small")
    assert bound < len(blob) < 1.02 * bound


def test_offsets_beyond_two_to_the_31_are_computed_without_overflow(tmp_path: Path) -> None:
    """A sparse file stands for a tensor of 2**31 + 100 elements; only two of its pages are touched."""
    size = 2**31 + 100
    bits = np.memmap(tmp_path / "sparse", np.uint16, "w+", shape=(size,))
    streams = [np.array([255, 255], "u1"), np.array([2**31 - 10, 98], "<u8"), np.array([0, 1], "u1")]
    narrow_second = np.array([255, 98], "u1")
    for gaps, wide in ((narrow_second, streams[1][:1]), (streams[0], streams[1])):
        bits[2**31 - 10], bits[2**31 + 89] = 0, 0
        assert kernels.apply_gaps(bits, 16, gaps, wide, streams[2], np.empty(0, "u2")) == 0
        assert (bits[2**31 - 10], bits[2**31 + 89]) == (0x8000, 1)
    beyond = np.array([2**31 + 100], "<u8")
    for gap in (beyond, np.array([2**63], "<u8"), np.array([2**64 - 1], "<u8")):
        assert kernels.apply_gaps(bits, 16, streams[0][:1], gap, streams[2][:1], np.empty(0, "u2")) == -1


# --- shards on a device -------------------------------------------------------------------------------------


class Compared(TorchDispatchMode):
    """Notes how many elements torch compares at once, which takes memory of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = set[int]()

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        if function is torch.ops.aten.ne.Tensor:
            self.sizes.add(result.numel())
        return result


def test_chunks_leave_no_trace_and_no_more_is_compared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(7)
    monkeypatch.setattr(codec, "_CHUNK", 1000)
    for kind in ("bf16", "f4"):
        old = weights(random, 3077, kind)
        for share in (0.02, 0.5):
            with Compared() as compared:
                round_trip(old, nudged(random, old, share), kind, "fast")
            assert compared.sizes == {1000, 77}


@pytest.mark.parametrize("effort", EFFORTS)
def test_a_publisher_of_device_shards_writes_what_one_of_arrays_writes(effort: Effort, device: str) -> None:
    """Files, digests and bases included, over three deltas of one element kind each."""
    random = np.random.default_rng(8)
    slices = [delta_file.Slice("a", (40, 50), "bf16", 0, 2000), delta_file.Slice("b", (900,), "f4", 100, 300)]
    shards: dict[str, Any] = {"a": noise(random, 2000, "bf16"), "b": noise(random, 300, "f4")}
    stores = MemoryStore(), MemoryStore()
    run, config = RunIdentity("run", model="f"), WeightsConfig(codec=effort)
    publishers = [Publisher(s, run, slices, rank=1, world_size=2, weights=config) for s in stores]
    for step in range(4):
        tensors = {name: on(device, bits) for name, bits in shards.items()}
        for publisher, held in zip(publishers, (shards, tensors), strict=True):
            if step == 0:
                publisher.anchor(Version(0, 0), None, None, held)
            else:
                publisher.delta(Version(0, step), held)
        names = ("delta-00001.bin", "part-00001.json") if step else ()
        keys = [version_key("run", Version(0, step), name) for name in names]
        assert all(stores[0].read(key) == stores[1].read(key) for key in keys)
        for name, bits in shards.items():
            moved = random.random(bits.size) < (0.02, 0.5, 1.0, 0.0)[step]
            shards[name] = np.where(moved, bits + 1, bits).astype(bits.dtype)


# --- damage -----------------------------------------------------------------------------------------------


@cache
def samples() -> list[tuple[str, np.ndarray, bytes]]:
    """A blob of every mode, with the array and kind it belongs to."""
    random = np.random.default_rng(9)
    out = []
    for kind in ("bf16", "f4"):
        old = weights(random, 3000, kind)
        for share in (0.02, 0.6, 1.0):
            for effort in EFFORTS:
                out.append((kind, old, codec.encode(old, nudged(random, old, share), kind, effort)))
        out.append((kind, old, codec.encode(old, noise(random, old.size, kind), kind)))
        out.append((kind, old, codec.encode(old, old + np.array(3000, old.dtype), kind)))
    assert {Mode(blob[0]) for _, _, blob in out} == set(Mode) - {Mode.SAME}
    return out


@settings(max_examples=700)
@given(st.randoms(use_true_random=True))
def test_a_damaged_blob_is_refused_or_stays_within_its_array(rng: Random) -> None:
    """Without any digest: an error, or other bits inside of the array, never a crash or a byte outside."""
    kind, old, blob = rng.choice(samples())
    guarded = np.concatenate([old[:100], old, old[:100]])
    with suppress(SnapshotError):
        codec.apply(guarded[100:-100], mutated_bytes(blob, rng), kind)
    assert (guarded[:100] == old[:100]).all()
    assert (guarded[-100:] == old[:100]).all()


def test_loops_compile_where_neither_the_package_nor_a_cache_can_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **options: object) -> object:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(kernels, "njit", refuse)
    assert kernels.compiled(len)([1, 2]) == 2
