"""The checksum of weights: its definition in plain integers, and what it must tell apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from student_trainer import weights as module
from student_trainer.weights import BLOCK, checksum, device_sums, odd_numbers

LENGTHS = [0, 1, 5, BLOCK - 1, BLOCK, 3 * BLOCK + 7]


def weights(dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=draw).to(dtype) for length in LENGTHS]


def defined(shards: list[torch.Tensor]) -> str:
    """The docstring's two sums, with Python's integers."""
    k = [int(number) for number in odd_numbers(BLOCK, 0)]
    total, block = 0, 0
    for shard in shards:
        numbers = shard.view(torch.int16 if shard.itemsize == 2 else torch.int32).tolist()
        for start in range(0, len(numbers), BLOCK):
            part = sum(key * x for key, x in zip(k, numbers[start : start + BLOCK], strict=False))
            total += int(odd_numbers(1, (1 << 32) + block)[0]) * part
            block += 1
    return f"{total % (1 << 64):016x}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_checksum_is_its_definition(dtype: torch.dtype) -> None:
    assert checksum(weights(dtype)) == defined(weights(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("blocks", [1, 2, 256])
def test_the_gpu_path_gives_the_same_for_every_split(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, blocks: int
) -> None:
    monkeypatch.setattr(module, "_BLOCKS_AT_ONCE", blocks)
    monkeypatch.setattr(module, "_host_sums", device_sums)
    assert checksum(weights(dtype)) == defined(weights(dtype))


def test_shards_may_begin_anywhere_in_memory() -> None:
    """DeepSpeed's lie behind one another in one buffer."""
    for shard in weights(torch.bfloat16):
        moved = torch.cat([torch.zeros(1, dtype=torch.bfloat16), shard])[1:]
        assert checksum([moved]) == checksum([shard])


def test_the_checksum_of_fixed_weights_is_fixed() -> None:
    """Ledgers of different days are compared."""
    assert checksum([]) == "0" * 16
    assert checksum([torch.arange(40000.0)]) == "91402e566d9ef200"


def changed(position: int, bit: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shards = weights(dtype)
    shards[-1].view(torch.int16 if dtype is torch.bfloat16 else torch.int32)[position] ^= 1 << bit
    return shards


@given(position=st.integers(0, LENGTHS[-1] - 1), bit=st.integers(0, 14))
def test_every_single_bit_counts(position: int, bit: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        assert checksum(changed(position, bit, dtype)) != checksum(weights(dtype))


@given(st.data())
def test_swapped_elements_change_the_checksum(data: Any) -> None:
    shards, last = weights(torch.bfloat16), LENGTHS[-1] - 1
    one, other = (data.draw(st.integers(0, last)) for _ in range(2))
    before, kept = checksum(shards), shards[-1].clone()
    shards[-1][[one, other]] = shards[-1][[other, one]]
    assert (checksum(shards) == before) is torch.equal(shards[-1], kept)


def test_signed_zeros_and_nan_payloads_count() -> None:
    assert checksum([torch.tensor([0.0])]) != checksum([torch.tensor([-0.0])])
    nans = [torch.tensor([0x7FC00000 + i], dtype=torch.int32).view(torch.float32) for i in (0, 1)]
    assert checksum(nans[:1]) != checksum(nans[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_opposite_steps_of_two_elements_do_not_cancel(dtype: torch.dtype) -> None:
    """What an update without a gradient looks like: one element up by a unit, another down."""
    shards = weights(dtype)
    before, bits = checksum(shards), shards[-1].view(torch.int16 if dtype is torch.bfloat16 else torch.int32)
    for other in (1, 2, BLOCK, 2 * BLOCK):
        bits[0] += 1
        bits[other] -= 1
        assert checksum(shards) != before
        bits[0] -= 1
        bits[other] += 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_finds_what_a_cpu_finds(dtype: torch.dtype) -> None:
    assert checksum([shard.cuda() for shard in weights(dtype)]) == checksum(weights(dtype))
