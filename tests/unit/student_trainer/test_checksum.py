"""The checksum of weights: what it must tell apart, in host memory and, by block sums, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from student_trainer import weights as module
from student_trainer.weights import BLOCK, block_sums, checksum

LENGTHS = [0, 1, 5, BLOCK - 1, BLOCK, 3 * BLOCK + 7]
INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
Sum = Callable[[list[torch.Tensor]], str]


def of_blocks(shards: list[torch.Tensor]) -> str:
    """What a GPU's shards are represented by."""
    return str([block_sums(shard.view(INTEGERS[shard.dtype])).tolist() for shard in shards])


BOTH = pytest.mark.parametrize("summed", [checksum, of_blocks])


@cache
def drawn(dtype: torch.dtype) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(length, generator=draw).to(dtype) for length in LENGTHS]


def weights(dtype: torch.dtype) -> list[torch.Tensor]:
    """Of which the last may be altered."""
    *others, last = drawn(dtype)
    return [*others, last.clone()]


@cache
def unaltered(summed: Sum, dtype: torch.dtype) -> str:
    return summed(weights(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("blocks", [1, 2, 256])
def test_block_sums_are_their_definition(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, blocks: int
) -> None:
    monkeypatch.setattr(module, "_BLOCKS_AT_ONCE", blocks)
    keys = module._keys(torch.device("cpu")).tolist()
    assert all(key % 2 for key in keys)
    for shard in weights(dtype):
        numbers = shard.view(INTEGERS[dtype])
        parts = [numbers[start : start + BLOCK].tolist() for start in range(0, len(numbers), BLOCK)]
        expected = [sum(k * x for k, x in zip(keys, part, strict=False)) % (1 << 64) for part in parts]
        assert [int(one) % (1 << 64) for one in block_sums(numbers)] == expected


@BOTH
def test_shards_may_begin_anywhere_in_memory(summed: Sum) -> None:
    """DeepSpeed's lie behind one another in one buffer."""
    for shard in weights(torch.bfloat16):
        moved = torch.cat([torch.zeros(1, dtype=torch.bfloat16), shard])[1:]
        assert summed([moved]) == summed([shard])


def test_the_checksum_of_fixed_weights_is_fixed() -> None:
    """Ledgers of different days are compared."""
    assert checksum([torch.arange(40000.0)]) == "23597cfb2b1d886c"
    assert block_sums(torch.arange(3, dtype=torch.int32)).tolist() == [6298312645221868911]


@BOTH
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, LENGTHS[-1] - 1), bit=st.integers(0, 14))
def test_every_single_bit_counts(summed: Sum, position: int, bit: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        shards = weights(dtype)
        shards[-1].view(INTEGERS[dtype])[position] ^= 1 << bit
        assert summed(shards) != unaltered(summed, dtype)


@BOTH
@given(data=st.data())
def test_swapped_elements_change_the_checksum(summed: Sum, data: Any) -> None:
    shards, last = weights(torch.bfloat16), LENGTHS[-1] - 1
    one, other = (data.draw(st.integers(0, last)) for _ in range(2))
    kept = shards[-1].clone()
    shards[-1][[one, other]] = kept[[other, one]]
    same = summed(shards) == unaltered(summed, torch.bfloat16)
    assert same is torch.equal(shards[-1], kept)


@BOTH
def test_signed_zeros_and_nan_payloads_count(summed: Sum) -> None:
    assert summed([torch.tensor([0.0])]) != summed([torch.tensor([-0.0])])
    nans = [torch.tensor([0x7FC00000 + i], dtype=torch.int32).view(torch.float32) for i in (0, 1)]
    assert summed(nans[:1]) != summed(nans[1:])


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_opposite_steps_of_two_elements_do_not_cancel(summed: Sum, dtype: torch.dtype) -> None:
    """What an update without a gradient looks like: one element up by a unit, another down."""
    shards = weights(dtype)
    before, bits = summed(shards), shards[-1].view(INTEGERS[dtype])
    for other in (1, 2, BLOCK, 2 * BLOCK):
        bits[0] += 1
        bits[other] -= 1
        assert summed(shards) != before
        bits[0] -= 1
        bits[other] += 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_finds_the_same_block_sums(dtype: torch.dtype) -> None:
    for shard in weights(dtype):
        numbers = shard.view(INTEGERS[dtype])
        assert torch.equal(block_sums(numbers.cuda()).cpu(), block_sums(numbers))
