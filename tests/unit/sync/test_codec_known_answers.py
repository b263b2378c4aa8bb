"""The codec's known answers, compiled and interpreted.

Interpreted loops (`njit` does nothing) raise IndexError for an index
out of bounds instead of reading what lies there; that both pass proves that both write the same bytes.
"""

from __future__ import annotations

import importlib
import re
import struct
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from blake3 import blake3
from safetensors.numpy import save_file

import sync.weights.delta
from sync.base.errors import SnapshotError
from sync.weights.delta import codec, entropy, file, kernels
from sync.weights.snapshots.checkpoint import TensorAt
from sync.wire import Version

MODULES = ("kernels", "entropy", "codec", "file")
NONE = np.empty(0, "u2")
HEADER_BYTES = 1 << 20


def plain(*_: object, **__: object) -> Any:
    return lambda function: function


@pytest.fixture
def interpreted() -> Iterator[types.SimpleNamespace]:
    """The codec's modules, imported anew with a numba that compiles nothing. Compiled loops hold the
    constants that they were compiled with, on disk too: tests that change one take this alone."""
    names = [f"sync.weights.delta.{name}" for name in MODULES]
    saved = {name: sys.modules.pop(name) for name in ["numba", "numba.extending", *names]}
    numba: Any = types.ModuleType("numba")
    numba.njit, numba.types = plain, types
    extending: Any = types.ModuleType("numba.extending")
    extending.intrinsic = lambda _: lambda *_: None  # hints to the processor alone
    sys.modules |= {"numba": numba, "numba.extending": extending}
    try:
        with np.errstate(over="ignore"):
            yield library([importlib.import_module(name) for name in names])
    finally:
        sys.modules |= saved
        for name in names:
            setattr(sync.weights.delta, name.rpartition(".")[2], saved[name])


def library(modules: list[types.ModuleType]) -> types.SimpleNamespace:
    return types.SimpleNamespace(**dict(zip(MODULES, modules, strict=True)))


@pytest.fixture(params=["compiled", "interpreted"])
def lib(request: pytest.FixtureRequest) -> Any:
    if request.param == "compiled":
        return library([kernels, entropy, codec, file])
    return request.getfixturevalue("interpreted")


# --- inputs -----------------------------------------------------------------------------------------------


def mixed(size: int, seed: int) -> np.ndarray:
    """A fixed pseudo-random uint32 of every index."""
    x = np.arange(1 + seed * size, 1 + seed * size + size, dtype="u8") * np.uint64(0x9E3779B97F4A7C15)
    return ((x ^ x >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9) >> np.uint64(32)).astype("u4")


def bf16(size: int) -> np.ndarray:
    """Seven neighbouring exponents, both signs."""
    noise = mixed(size, 1)
    return (0x3B00 + (noise % 7 << 7) + (noise >> 5 & 127) + (noise >> 16 & 0x8000)).astype("u2")


def nudged(old: np.ndarray, one_in: int) -> np.ndarray:
    noise = mixed(old.size, 2)
    step = np.where(noise >> 31, 1, -1).astype(old.dtype)
    return np.where(noise % one_in == 0, old + step, old).astype(old.dtype)


def survives(lib: Any, old: np.ndarray, new: np.ndarray, kind: str, effort: Any) -> bytes:
    blob = lib.codec.encode(old, new, kind, effort)
    bits = old.copy()
    lib.codec.apply(bits, blob, kind)
    assert bits.tolist() == new.tolist()
    assert len(blob) <= new.nbytes + 1 + 4
    return blob


def raises(call: Any, why: str) -> None:
    with pytest.raises(SnapshotError, match=re.escape(why)):
        call()


def refused(lib: Any, blob: bytes, bits: np.ndarray, kind: str = "bf16", why: str = "") -> None:
    raises(lambda: lib.codec.apply(bits, blob, kind), why)


def stream(*values: int) -> bytes:
    """A short stream as it is: length, stored length, bytes."""
    return bytes([len(values), len(values), *values])


# --- kernels ----------------------------------------------------------------------------------------------


def test_steps_are_counted_in_units_of_the_last_place(lib: Any) -> None:
    zigzag = [lib.kernels.zigzag(0x3F80, 0x3F80 + d, 16) for d in (0, -1, 1, -2, 2)]
    assert zigzag == [0, 1, 2, 3, 4]
    pairs = [(0x0000, 0x8000, 16, 1), (0x8000, 0x0000, 16, 2), (0x8001, 0x0001, 16, 6)]
    pairs += [(0x80000000, 1, 32, 4), (0x7FFF, 0xFFFF, 16, 2), (0xFFFF, 0x7FFF, 16, 1)]
    for old, new, width, code in pairs:
        assert lib.kernels.zigzag(old, new, width) == code
        assert lib.kernels.moved(old, code, width) == new
    codes = [lib.kernels.zigzag(0xBF80, new, 16) for new in range(65536)]
    assert sorted(codes) == [*range(65536)]
    assert [lib.kernels.moved(0xBF80, code, 16) for code in codes] == [*range(65536)]


def test_gaps_are_written_as_this(lib: Any) -> None:
    """Element 3 one up, element 258 one down, element 514 from +0 to -0, element 515 by 300 ULPs."""
    old = np.full(1027, 0x3C00, "u2")
    old[514] = 0
    new = old.copy()
    new[[3, 258, 514, 515, 1026]] = 0x3C01, 0x3BFF, 0x8000, 0x3C00 + 300, 0x3C00 + 128
    gaps = stream(3, 254, 255, 0, 255)
    wide = b"\x10\x10" + struct.pack("<2Q", 255, 510)
    steps = stream(1, 0, 0, 255, 255)
    wide_steps = stream(599 & 255, 255, 599 >> 8, 0)
    blob = b"\x01\x05" + gaps + wide + steps + wide_steps
    assert survives(lib, old, new, "bf16", "fast") == blob
    old[[7, 8]] = 0, 0x8000
    assert survives(lib, old[:9], np.where(old[:9] == 0, 0x8000, old[:9]).astype("u2"), "bf16", "fast") == (
        b"\x01\x01" + stream(7) + b"\0\0" + stream(0) + b"\0\0"
    )
    single = np.arange(1, 6, dtype="u4")
    turned = single ^ np.array([0, 0x80000000, 0, 0, 1], "u4")
    blob = b"\x01\x02" + stream(1, 2) + b"\0\0" + stream(8, 0) + b"\0\0"
    assert survives(lib, single, turned, "f4", "fast") == blob


def test_gaps_that_lead_out_of_the_array_are_refused(lib: Any) -> None:
    def apply(size: int, *streams: list) -> int:
        """Gaps, wide gaps, steps, wide steps."""
        arrays = map(np.array, streams, ("u1", "u8", "u1", "u2"))
        return lib.kernels.apply_gaps(np.zeros(size, "u2"), 16, *arrays)

    assert apply(4, [3], [], [0], []) == 0
    assert apply(4, [1, 1], [], [0, 0], []) == 0
    assert apply(300, [255], [299], [255], [700]) == 0
    assert apply(4, [4], [], [0], []) == -1
    assert apply(4, [1, 2], [], [0, 0], []) == -1
    assert apply(300, [255], [300], [0], []) == -1
    assert apply(300, [9, 255], [2**64 - 5], [0, 0], []) == -1
    assert apply(300, [255], [], [0], []) == -1
    assert apply(300, [0], [], [255], []) == -1
    assert apply(300, [0], [7], [0], []) == -1
    assert apply(300, [0], [], [0], [7]) == -1


def test_a_bitmap_is_written_as_this(lib: Any) -> None:
    old = np.full(10, 0x3C00, "u2")
    new = old.copy()
    new[[0, 2, 9]] = 0x3C01, 0x3BFF, 0x3C00 + 128
    bitmap, steps, wide = np.array([5, 2], "u1"), np.array([1, 0, 255], "u1"), np.array([255], "u2")
    bits = old.copy()
    assert lib.kernels.apply_bitmap(bits, 16, bitmap, steps, wide) == 0
    assert bits.tolist() == new.tolist()
    for k, w, fits in ((3, 1, 0), (2, 1, -1), (3, 0, -1), (4, 1, -1), (3, 2, -1)):
        more, wider = np.append(steps, 0).astype("u1")[:k], np.append(wide, 0).astype("u2")[:w]
        assert lib.kernels.apply_bitmap(old.copy(), 16, bitmap, more, wider) == fits
    half = np.full(403, 0x3C00, "u2")
    assert survives(lib, half, half ^ (mixed(403, 3) % 2).astype("u2"), "bf16", "fast")[0] == 2


def test_wide_steps_are_written_byte_by_byte(lib: Any) -> None:
    old = np.array([0x3C00, 5, 0x80000001, 1, 1, 1], "u4")
    new = np.array([0x3C00 + 0x12345678, 5, 0x00000001, 1, 1, 1], "u4")
    by_bytes = [((0x12345678 * 2 - 1) >> shift) & 255 for shift in (0, 8, 16, 24)]
    blob = b"\x01\x02" + stream(0, 1) + b"\0\0" + stream(255, 5) + stream(*by_bytes)
    assert survives(lib, old, new, "f4", "fast") == blob
    old = np.full(400, 0x3C003C00, "u4")
    new = np.where(np.arange(400) % 2, old, old + 300 + mixed(400, 4) % 1000).astype("u4")
    assert len(survives(lib, old, new, "f4", "fast")) < 1000


def test_fp32_of_which_more_than_half_changed_is_sent_as_it_is(lib: Any) -> None:
    old = np.full(5, 0x3C003C00, "u4")
    new = old + np.array([1, 0, 1, 0, 1], "u4")
    assert survives(lib, old, new, "f4", "fast") == b"\4" + stream(*new.tobytes())
    new[4] = old[4]
    assert survives(lib, old, new, "f4", "fast")[0] == 1


# --- range coder and hazards ------------------------------------------------------------------------------


def test_carries_ripple(lib: Any) -> None:
    out, full = np.array([7, 0xFFFFFFFF, 0], "u4"), 2**32 - 1
    low, size, pos = lib.entropy.put(np.uint64(2**64 - 5), 2, out, np.uint64(5 + (3 << 32)), np.uint64(full))
    assert (int(low), int(size), pos, out.tolist()) == (0, full << 32, 3, [8, 0, 3])
    models = lib.entropy.fresh(3)
    out[0] = 7
    lib.entropy.put_bit(np.uint64(2**64 - 5), np.uint64(1 << 48), 1, out, models, 0, 0)
    assert out[0] == 8


def test_a_bit_at_the_bound_is_a_zero(lib: Any) -> None:
    bound = ((2**64 - 1) >> 16) * 2**15
    for code, bit in ((bound, 0), (bound - 1, 1)):
        models, none = lib.entropy.fresh(3), np.zeros(1, "u4")
        assert lib.entropy.take_bit(np.uint64(code), lib.entropy.FULL, 0, none, models, 0)[3] == bit


def test_probabilities_follow_what_was_seen(lib: Any) -> None:
    """After n ones, P(1) = 1 - 1/2 · Π (1 - 2 / (2i + 3)) of 2**16 to rounding, and never 0 or 1."""
    models = np.array([[1 << 15, 0], [1 << 15, 0]], np.int64)
    zero = 0.5
    for n in range(400):
        lib.entropy._learn(models, 0, 1)
        lib.entropy._learn(models, 1, 0)
        zero *= 1 - 2 / (2 * min(n, 119) + 3)
        assert abs(models[0, 0] / 65536 - (1 - zero)) < 0.002
        assert abs(models[1, 0] / 65536 - zero) < 0.002
        assert 0 < models[1, 0] < models[0, 0] < 65536
    assert models[0, 1] == 119


def test_numbers_of_every_size_survive(lib: Any) -> None:
    """Of three kinds in turn, so that a model of one that another one used would be noticed."""
    values = [int(v) >> (int(v) % 33) for v in mixed(300, 5)] + [0, 2**32 - 2, 1, 2**31, 2**31 - 1, 0]
    out, models = np.zeros(900, "u4"), lib.entropy.fresh(3)
    low, span, pos = np.uint64(0), lib.entropy.FULL, 0
    for n, value in enumerate(values):
        low, span, pos = lib.entropy.put_number(
            np.uint64(low), np.uint64(span), pos, out, models, 64 * (n % 3), value
        )
    out[pos : pos + 2] = int(low) >> 32, int(low) & 0xFFFFFFFF
    models, span, at = lib.entropy.fresh(3), lib.entropy.FULL, 2
    code = np.uint64(out[0]) << np.uint64(32) | np.uint64(out[1])
    for n, value in enumerate(values):
        code, span, at, got = lib.entropy.take_number(
            np.uint64(code), np.uint64(span), at, out[: pos + 2], models, 64 * (n % 3)
        )
        assert got == value
    assert at == pos + 2


def test_chances_halve_with_every_unit(lib: Any) -> None:
    """Parts of 2**28, to within one; every step of hazard has an interval of three parts."""
    unit, cell = 1 << lib.entropy.UNIT, lib.entropy.CELL
    pinned = {0: 0, 1: 710, unit // 2: 2**28 - 189812531, unit: 2**27, 3 * unit: 7 << 25, cell: 127 << 21}
    for hazard, parts in pinned.items():
        assert abs(int(lib.entropy.chance(hazard)) - parts) <= 1
    for hazard in [*range(0, cell, 9973), *range(cell - 50, cell)]:
        here, above = lib.entropy.chance(hazard), lib.entropy.chance(hazard + 1)
        assert above >= here + np.uint64(4)
        for share in (here, above - np.uint64(1)):
            assert max(0, hazard - 2) <= lib.entropy.hazard_below(share) <= hazard


def test_an_interval_is_up_down_and_further(lib: Any) -> None:
    """Its parts tile it, none is empty, and the last one's share is that of further steps."""
    unit, cell = 1 << lib.entropy.UNIT, lib.entropy.CELL
    cases = [(0, 1, 65532), (5, 1, 4), (unit, unit, 16384), (cell - 1, 7, 65532), (7, unit, 4)]
    for gap, own, share in cases:
        start, one, further = map(int, lib.entropy._parts(np.uint32(share), gap, own))
        whole = int(lib.entropy.chance(min(gap + own, cell))) - start
        assert start == int(lib.entropy.chance(gap))
        assert one > 0 < further
        assert 2 * one + further == whole
        assert abs(further - whole * share / 65536) <= 4


def test_levels_are_measured_in_half_octaves_and_halve_where_none_is_known(lib: Any) -> None:
    found = np.zeros((3, 256), np.int64)
    found[0, [118, 119, 121, 122]] = 10**6
    found[1, [118, 119, 121]] = 10**6, 5 * 10**5, 10**3  # all, hazards of 1 and of 0.00144 units; none of 122
    found[2, [118, 119]] = 5 * 10**5, 10**5  # as often as one unit, and a quarter as often
    first, levels = lib.entropy._levels(found)
    assert first == 118
    assert levels.tolist() == [[41, 36, 34, 17, 0], [28, 24, 22, 1, 0]]
    weights, fours, further = lib.entropy._tables(7, 0x7F80, first, levels)[4:]
    assert weights[:6].tolist() == [1482910, 262144, 131072, 362, 1, 0]
    assert further[:4].tolist() == [32768, 13107, 7282, 6]
    assert fours[1 + 16 * 3 + 256 * 2 + 4096 * 1] == 262144 + 362 + 131072 + 262144
    found[0, 3], found[1, 3] = 8 * 10**6, 10**6  # a class below the sixteenth counts with that
    first, levels = lib.entropy._levels(found)
    assert (first, levels.shape, levels[0, 0]) == (107, (2, 16), 31)


def test_levels_are_told_by_their_distance_from_two_below(lib: Any) -> None:
    levels = np.array([[41, 39, 40, 12], [0, 0, 41, 39]])
    told = lib.entropy._told(levels)
    assert told.tolist() == [[85, 0, 5, 52], [3, 3, 85, 0]]
    assert lib.entropy._levels_of(told).tolist() == levels.tolist()


def test_small_blobs_are_these(lib: Any) -> None:
    """Digests, so that no change of the format goes unnoticed."""
    for kind, old, one_in, wanted in PINNED:
        blob = survives(lib, old, nudged(old, one_in), kind, "small")
        assert blob[0] == lib.codec.Mode.CLASSES
        assert (len(blob), blake3(blob).hexdigest(8)) == wanted
    for special in (0, 0x7F80, 0x7FC1, 0x0001):
        old = np.array([special, special | 0x8000], "u2").repeat(40)
        survives(lib, old, old[::-1].copy(), "bf16", "small")
        survives(lib, old, old ^ 0x8000, "bf16", "small")


PINNED = [
    ("bf16", bf16(900), 9, (83, "62e774e3ff160a20")),
    ("bf16", bf16(903), 9, (84, "84d07bbef44e5fe8")),
    ("f2", bf16(500), 3, (90, "2e127e9cbaada961")),
    ("f4", mixed(700, 7) >> 6 | 0x3C000000, 40, (39, "49a52f40894b23a7")),
]


def test_blocks_follow_one_another_and_exponents_not_sampled_count_with_the_nearest(interpreted: Any) -> None:
    interpreted.entropy.BLOCK = interpreted.kernels.BLOCK = 64
    old = bf16(300)
    assert survives(interpreted, old, nudged(old, 3), "bf16", "small")[0] == 3
    survives(interpreted, old, np.concatenate([old[:250], nudged(old, 1)[250:]]), "bf16", "small")
    survives(interpreted, old, nudged(old, 3), "bf16", "fast")
    interpreted.entropy._SAMPLED = 1
    old = bf16(320)
    old[130:134] = 0x7F7F, 0, 0xFFFF, 0x8001
    survives(interpreted, old, nudged(old, 2), "bf16", "small")


def test_class_streams_of_another_array_or_cut_ones_are_refused(lib: Any) -> None:
    old = np.full(64, 0x3C00, "u2")
    old[32:] = 0x3D00
    new = old + (mixed(64, 3) % 2 * 2 - 1).astype("u2")
    blob = _classes(lib, old, new)
    fits = old.copy()
    lib.codec.apply(fits, blob, "bf16")
    assert fits.tolist() == new.tolist()
    refused(lib, blob, old[:63].copy(), why="64 where 63 is the most")
    few = _classes(lib, old, np.where(np.arange(64) % 4 == 3, new, old).astype("u2"))
    refused(lib, few, old[:63].copy(), why="do not fit")
    refused(lib, few, old[::2].copy(), why="do not fit")
    wild = np.full(600, 0x3C00, "u2")
    whole = _classes(lib, wild, (wild + mixed(600, 4) % 128).astype("u2"))
    refused(lib, whole[: len(whole) // 4], wild.copy(), why="do not fit")
    refused(lib, whole[:3] + bytes([255] * 40), wild.copy(), why="do not fit")
    refused(lib, b"\3", np.full(1 << 8, 0x3C00, "u8"), "i8", why="altered or is newer")


def test_heads_that_no_array_has_are_refused(lib: Any) -> None:
    """More changes than elements, classes that there are not, levels that no class has."""
    old, genuine, top = np.full(64, 0x3C00, "u2"), lib.entropy._told, lib.entropy._TOP
    blob = _classes(lib, old, nudged(old, 4))
    refused(lib, bytes([3, 65]) + blob[2:], old.copy(), why="65 where 64 is the most")
    heads: list[tuple[int, int, list[int]]] = [
        (120, 0, []),
        (120, 17, [36] * 34),
        (250, 7, [36] * 14),
        (257, 1, [36, 0]),
        (120, 1, [top + 1, 0]),
        (120, 1, [36, top + 1]),
        (120, 2, [1, -1, 0, 0]),
    ]
    for first, length, levels in heads:
        numbers = genuine(np.array(levels, np.int64).reshape(2, length)).ravel() if length else []
        out, models = np.zeros(99, "u4"), lib.entropy.fresh(17)
        low, span, pos = np.uint64(0), lib.entropy.FULL, 0
        for number in (first, length, *numbers):
            low, span, pos = lib.entropy.put_number(
                np.uint64(low), np.uint64(span), pos, out, models, lib.entropy._LEVELS, int(number)
            )
        out[pos : pos + 2] = int(low) >> 32, int(low) & 0xFFFFFFFF
        refused(lib, bytes([3, 9]) + out[: pos + 2].astype(">u4").tobytes(), old.copy(), why="do not fit")


def _classes(lib: Any, old: np.ndarray, new: np.ndarray) -> bytes:
    blob = lib.codec.encode(old, new, "bf16", "small")
    assert blob[0] == lib.codec.Mode.CLASSES
    return bytes(blob)


# --- codec ------------------------------------------------------------------------------------------------


def test_modes_are_chosen_by_size(lib: Any) -> None:
    old = bf16(2000)
    cases: list[tuple[int, int]] = [(3, 2), (4, 2), (6, 1), (20, 1)]
    for one_in, mode in cases:
        assert lib.codec.encode(old, nudged(old, one_in), "bf16", "fast")[0] == mode
    for effort in ("fast", "small"):
        assert survives(lib, old, old.copy(), "bf16", effort) == b"\0"
        assert survives(lib, old, mixed(2000, 9).astype("u2"), "bf16", effort)[:1] == b"\4"
        survives(lib, NONE, NONE, "bf16", effort)
    assert survives(lib, np.arange(3, dtype="u8"), np.arange(3, dtype="u8"), "i8", "fast") == b"\0"
    one, two = np.arange(3, dtype="u2"), np.arange(1, 4, dtype="u2")
    assert survives(lib, one, two, "i2", "small") == b"\4" + stream(1, 0, 2, 0, 3, 0)
    whole = survives(lib, np.zeros(3, "u1"), np.array([1, 2, 3], "u1"), "u1", "small")
    assert whole == b"\4" + stream(1, 2, 3)


def test_arrays_of_other_bits_are_refused(lib: Any) -> None:
    two = np.zeros(2, "u2")
    for other in (np.zeros(3, "u2"), np.zeros(2, "u4")):
        with pytest.raises(AssertionError, match="flat arrays"):
            lib.codec.encode(two, other, "bf16")


def test_streams_of_other_lengths_are_refused(lib: Any) -> None:
    bits = np.full(16, 0x3C00, "u2")
    good = [b"\1\2", stream(1, 1), b"\0\0", stream(0, 0), b"\0\0"]
    lib.codec.apply(bits, b"".join(good), "bf16")
    assert bits.tolist() == [0x3C00, 0x3BFF, 0x3C00, 0x3BFF] + [0x3C00] * 12
    for place, bad in ((1, stream(1)), (3, stream(0)), (1, stream(1, 1, 1)), (3, stream(0, 0, 0))):
        refused(lib, b"".join([*good[:place], bad, *good[place + 1 :]]), bits.copy(), why="altered")
    refused(lib, b"".join([*good[:2], stream(*range(9)), *good[3:]]), bits.copy(), why="instead of")
    refused(lib, b"".join([*good, b"\0"]), bits.copy(), why="1 bytes too many")
    refused(lib, b"".join(good)[:-1], bits.copy(), why="ends too early")
    refused(lib, b"\1\x11" + stream(*[0] * 17) + b"\0\0" + stream(*[0] * 17) + b"\0\0", bits.copy(), why="17")
    for bitmap in (stream(1), stream(1, 0, 0)):
        refused(lib, b"\2\1" + bitmap + stream(0) + b"\0\0", bits.copy(), why="altered")
    refused(lib, b"\4" + stream(1, 2, 3), bits[:2].copy(), why="3 bytes instead of 4")
    refused(lib, b"\1\0" + b"\0" * 8, bits.copy().astype("u8"), "i8", why="altered or is newer")
    refused(lib, b"\5", bits.copy(), why="altered or is newer")
    refused(lib, b"", bits.copy(), why="ends too early")
    for length in (1 << 20, 100):  # a bomb, and too short
        held = zstandard.ZstdCompressor(level=1).compress(bytes(length))
        blob = b"\4\x7f" + bytes([len(held)]) + held
        refused(lib, blob, np.zeros(127, "u1"), "u1", why="does not hold the 127")


def test_numbers_are_leb128(lib: Any) -> None:
    table = {0: "00", 127: "7f", 128: "8001", 300: "ac02", 2**35: "808080808001"}
    for value, text in table.items():
        assert lib.codec._number(value).hex() == text
        assert lib.codec._Reader(bytes.fromhex(text)).number(value) == value


def test_a_stream_that_compression_does_not_shorten_goes_as_it_is(lib: Any) -> None:
    """One byte shorter is compressed; equally long would be read as it is, and so must be written so."""
    noise = mixed(40, 10).astype("u1")
    for saved in (-1, 0, 1):
        lib.codec._local.compressor = types.SimpleNamespace(compress=lambda raw, s=saved: bytes(len(raw) - s))
        packed = lib.codec._pack([noise])
        assert packed == (b"\x28\x27" + bytes(39) if saved == 1 else b"\x28\x28" + noise.tobytes())
    del lib.codec._local.compressor


# --- files ------------------------------------------------------------------------------------------------


def small_file(lib: Any) -> tuple[dict, dict, bytes]:
    old = {"a": bf16(40), "b": bf16(30)}
    new = {"a": nudged(old["a"], 4), "b": nudged(old["b"], 2)}
    slices = [lib.file.Slice(n, (99,), "bf16", s, old[n].size) for n, s in (("a", 0), ("b", 5))]
    head = lib.file.Header("run", "f", Version(0, 2), Version(0, 1), 0, 1, [])
    return old, new, lib.file.build(head, slices, old, new, "fast")


def test_a_file_holds_these_ranges(lib: Any) -> None:
    old, new, data = small_file(lib)
    header, blobs = lib.file.parse(data, HEADER_BYTES)
    assert (header.run, header.version, header.base) == ("run", Version(0, 2), Version(0, 1))
    ranges = [(part.name, part.start, part.count, part.dtype) for part in header.ranges]
    assert ranges == [("a", 0, 40, "bf16"), ("b", 5, 30, "bf16")]
    first, second = header.ranges
    assert (first.offset, second.offset, first.length + second.length) == (0, first.length, len(blobs))
    for part in header.ranges:
        assert part.digest == blake3(new[part.name].tobytes()).digest()
        assert part.mode == blobs[part.offset]
    arrays = {"a": old["a"].copy(), "b": np.concatenate([old["a"][:5], old["b"], old["a"][:3]])}
    lib.file.apply(header, blobs, arrays)
    assert arrays["a"].tolist() == new["a"].tolist()
    assert arrays["b"].tolist() == [*old["a"][:5], *new["b"], *old["a"][:3]]
    lib.file.verify(header, arrays)
    odd = np.frombuffer(b"\0" + old["b"].tobytes(), "u1").copy()[1:].view("u2")
    part = lib.file.Range("b", 0, 30, "bf16", second.mode, second.offset, second.length, second.digest)
    alone = lib.file.Header("run", "f", Version(0, 2), Version(0, 1), 0, 1, [part])
    lib.file.apply(alone, blobs, {"b": odd})
    assert odd.tolist() == new["b"].tolist()


def test_one_wrong_bit_is_found_by_its_digest(lib: Any) -> None:
    _, new, data = small_file(lib)
    header, _ = lib.file.parse(data, HEADER_BYTES)
    for name, at in (("a", 0), ("a", 39), ("b", 5 + 29)):
        arrays = {"a": new["a"].copy(), "b": np.append(np.zeros(5, "u2"), new["b"])}
        lib.file.verify(header, arrays)
        arrays[name][at] ^= 0x8000
        raises(lambda a=arrays: lib.file.verify(header, a), f"'{name}' from element")
    whole = header.ranges[0]
    for digest in (whole.digest[:-1], whole.digest[:-1] + bytes([whole.digest[-1] ^ 1]), b""):
        parts = [msgspec.structs.replace(whole, digest=digest)]
        wrong = msgspec.structs.replace(header, ranges=parts)
        raises(lambda w=wrong: lib.file.verify(w, {"a": new["a"]}), "'a' from element")


def test_files_that_were_cut_or_altered_do_not_parse(lib: Any) -> None:
    _, _, data = small_file(lib)
    for magic in (b"X" + data[1:8], b"ODDELTA1", b"ODDELTA2"):
        raises(
            lambda m=magic: lib.file.parse(m + data[8:], HEADER_BYTES),
            "another release wrote it; resume the run",
        )
    for length in (12, 20, len(data) - 1):
        raises(lambda n=length: lib.file.parse(data[:n], HEADER_BYTES), "was cut or altered")
    header, blobs = lib.file.parse(data, HEADER_BYTES)
    good = header.ranges[0]
    beyond = len(blobs) + 1
    for field, odd in {"offset": beyond, "length": beyond, "start": -(2**40), "count": 0}.items():
        for value in (-1, odd):
            bad = msgspec.structs.replace(good, **{field: value})
            altered = msgspec.msgpack.encode(msgspec.structs.replace(header, ranges=[bad]))
            head = zstandard.ZstdCompressor().compress(altered)
            file = b"ODDELTA3" + len(head).to_bytes(4, "little") + head + bytes(blobs)
            raises(lambda f=file: lib.file.parse(f, HEADER_BYTES), "lies outside of it")
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))
    file = b"ODDELTA3" + len(unsized).to_bytes(4, "little") + unsized
    raises(lambda: lib.file.parse(file, HEADER_BYTES), "impossible length")


def test_ranges_tile_every_tensor_once(lib: Any) -> None:
    places = {"w": TensorAt(Path("m.safetensors"), "bf16", (2, 2), 0, 8)}

    def cover(*ranges: tuple[int, int], name: str = "w", kind: str = "bf16") -> None:
        parts = [lib.file.Range(name, s, n, kind, 0, 0, 1, b"") for s, n in ranges]
        head = [lib.file.Header("", "", Version(0, 1), Version(0, 0), 0, 1, [part]) for part in parts]
        lib.file.check_cover(head, places)

    cover((3, 1), (0, 3))
    for ranges, why in {
        ((0, 3), (1, 1)): "meet at 3 and 1",
        ((0, 2), (3, 1)): "meet at 2 and 3",
        ((0, 3),): "covers 3 of 4",
        ((0, 3), (3, 2)): "covers 5 of 4",
        (): "covers 0 of 4",
    }.items():
        raises(lambda r=ranges: cover(*r), why)
    raises(lambda: cover((0, 4), kind="f2"), "another model")
    raises(lambda: cover((0, 4), name="v"), "another model")


def test_a_chain_is_covered_and_verified(lib: Any, tmp_path: Path) -> None:
    versions = [bf16(40), nudged(bf16(40), 4), nudged(bf16(40), 2)]

    def link(old: np.ndarray, new: np.ndarray, count: int = 40) -> list:
        head = lib.file.Header("run", "f", Version(0, 2), Version(0, 1), 0, 1, [])
        part = lib.file.Slice("w", (40,), "f2", 0, count)
        return [lib.file.parse(lib.file.build(head, [part], {"w": old}, {"w": new}, "small"), HEADER_BYTES)]

    def after(*links: list) -> list:
        save_file({"w": versions[0].view("f2")}, tmp_path / "model.safetensors")
        lib.file.apply_chain(tmp_path, links)
        return np.frombuffer((tmp_path / "model.safetensors").read_bytes()[-80:], "u2").tolist()

    assert after(link(*versions[:2]), link(*versions[1:])) == versions[2].tolist()
    raises(lambda: after(link(versions[1], versions[2])), "the base was not")
    raises(lambda: after(link(versions[0][:30], versions[1][:30], 30)), "covers 30 of 40")
