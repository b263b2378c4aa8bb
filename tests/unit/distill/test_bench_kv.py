"""The bench of running completions at a swap: the mismatch of known probabilities, and its tables."""

from __future__ import annotations

import math

import numpy as np
import pytest

from distill.bench import kv
from distill.bench.sync_transports import qwen3
from distill.bench.trajectory import trajectory
from sync.wire import Generated, Version, VersionSpan, pack


def test_the_mismatch_of_a_token_is_taken_under_the_version_that_sampled_it() -> None:
    model = qwen3(8, 64, 1, 192)
    first, second = Version(0, 0), Version(0, 1)
    size = kv.SIZE._replace(hidden=64, layers=1, vocabulary=8, tokens=64, sequence=32, warm_up=20)
    *_, drawn = next(trajectory(size, [1e-3], [1]))
    uniform = {name: np.zeros_like(bits) for name, bits in drawn.items()}
    half = np.full(kv.TOKENS, math.log(1 / 8), np.float32)
    half[:32] = math.log(1 / 4)  # twice what the uniform model gives
    spans = [VersionSpan(first, 0, 96), VersionSpan(second, 96, kv.TOKENS)]
    answer = Generated("0", pack(np.arange(kv.TOKENS, dtype=np.int32) % 8), pack(half), spans, "length")
    near, middle, far = kv.kl_by_place(model, {first: uniform, second: drawn}, [([1, 2], answer)])
    assert near == pytest.approx(0.5 - 1 + math.log(2))
    assert middle == pytest.approx(0, abs=1e-6)
    assert far > 1e-3, "the second version is not uniform"


def test_the_rates_go_through_the_same_start_with_versions_that_count_on() -> None:
    size = kv.SIZE._replace(hidden=64, layers=1, vocabulary=32, tokens=64, sequence=32, warm_up=2)
    found = kv.versions_by_rate(size, 2)
    assert [version.step for own in found.values() for version in own] == list(range(3 * len(kv.LRS)))
    (one, *_), (other, *_) = (list(own.values()) for own in list(found.values())[:2])
    assert all(np.array_equal(one[name], other[name]) for name in one)
    small, large = (list(found[rate].values()) for rate in (kv.LRS[0], kv.LRS[-1]))
    moved = [sum(int((a[name] != b[name]).sum()) for name in a) for a, _, b in (small, large)]
    assert 0 < moved[0] < moved[1]


def test_both_parts_are_printed_side_by_side() -> None:
    one = {"kl": [1e-4, 2e-4, 3e-4], "swap_seconds": 0.05}
    run = {"reverse_kl": 0.2, "pass_rate": 0.9, "step_ms": 200, "mean_step_ms": 210, "age": 2.0}
    run |= {"generated_per_second": 4000}
    lines = kv.table(
        {
            "mismatch": {"1e-06": {"recompute": one, "keep": one | {"swap_seconds": 0.01}}},
            "learned": {"0.002": {"recompute": [run], "keep": [run | {"step_ms": 100}]}},
        }
    )
    assert "| 1e-06 | 1.0e-04, 1.0e-04 | 2.0e-04, 2.0e-04 | 3.0e-04, 3.0e-04 | 50, 10 |" in lines
    assert "| ms per step, median | 200 | 100 | 2.00 |" in lines
