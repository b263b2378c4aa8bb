"""The benchmark of packed rows against padded ones."""

from __future__ import annotations

import pytest

from distill.bench.packing import run, table
from sync.base.errors import ConfigError


def test_both_ways_train_on_the_same_rows_and_only_one_pads() -> None:
    found = run(12, 8, 40, 64, 2)
    padded, packed = found["ways"]["padded"], found["ways"]["varlen"]
    assert padded["loss_per_token"] == pytest.approx(packed["loss_per_token"], rel=1e-5)
    assert padded["tokens_per_slot"] < packed["tokens_per_slot"] == 1
    assert padded["micro_batches"] > packed["micro_batches"] == -(-found["tokens"] // 64)
    assert min(padded["microseconds_per_token"], packed["microseconds_per_token"], found["speed_ratio"]) > 0
    assert f"| `varlen` | {packed['micro_batches']} | 1.000 | " in table(found)


def test_sizes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one row, round and token"):
        run(12, 8, 40, 64, 0)
