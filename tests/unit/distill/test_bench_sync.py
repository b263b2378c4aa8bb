"""The formats that the codec is measured against cost what their descriptions say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import zstandard

from distill.bench import sync as bench
from distill.bench import trajectory
from distill.bench.formats import (
    entropy_given_exponent,
    gap16_and_value,
    int32_and_value,
    row_gaps_and_values,
    xor_planes,
)


@pytest.fixture
def tensor() -> tuple[np.ndarray, np.ndarray]:
    """Zeros [300, 1000] and the same with five elements changed."""
    old = np.zeros((300, 1000), "u2")
    new = old.copy()
    for row, column, value in ((0, 3, 1), (0, 900, 2), (1, 0, 3), (299, 0, 4), (299, 999, 5)):
        new[row, column] = value
    return old, new


def test_an_index_and_a_value_take_six_bytes(tensor: tuple[np.ndarray, np.ndarray]) -> None:
    data = int32_and_value(*tensor)
    assert np.frombuffer(data, "<i4", 5).tolist() == [3, 900, 1000, 299_000, 299_999]
    assert np.frombuffer(data, "<u2", 5, 20).tolist() == [1, 2, 3, 4, 5]
    assert len(data) == 5 * 6


def test_a_gap_and_a_value_take_four_bytes_and_an_escape_four_more(
    tensor: tuple[np.ndarray, np.ndarray],
) -> None:
    data = gap16_and_value(*tensor)
    assert np.frombuffer(data, "<u2", 5).tolist() == [3, 896, 99, 0xFFFF, 998]
    assert np.frombuffer(data, "<u4", 1, 10).tolist() == [297_999]
    assert len(data) == 5 * 4 + 4


def test_rows_and_columns_are_sent_as_differences_with_absolute_values(
    tensor: tuple[np.ndarray, np.ndarray],
) -> None:
    raw = zstandard.ZstdDecompressor().decompress(row_gaps_and_values(*tensor))
    assert np.frombuffer(raw, "<i4", 5).tolist() == [0, 0, 1, 298, 0]
    assert np.frombuffer(raw, "<u2", 5, 20).tolist() == [3, 897, 0, 0, 999]
    assert np.frombuffer(raw, "<u2", 5, 30).tolist() == [1, 2, 3, 4, 5]


def test_xor_planes_hold_the_difference(tensor: tuple[np.ndarray, np.ndarray]) -> None:
    old, new = tensor
    expected = sum(
        len(zstandard.ZstdCompressor(level=3).compress(plane.astype("u1").tobytes()))
        for plane in ((old ^ new) & 255, (old ^ new) >> 8)
    )
    assert len(xor_planes(old, new)) == expected


def test_the_entropy_given_the_exponent_matches_a_case_counted_by_hand() -> None:
    """Exponent 0: one of four moved up; exponent 1: half moved, one up and one down; exponent 2: none."""
    old = np.array([0x08] * 4 + [0x88] * 4 + [0x108] * 9, "u2")
    new = old.copy()
    new[0] += 1
    new[4] += 1
    new[5] -= 1
    quarter = -(0.25 * np.log2(0.25) + 0.75 * np.log2(0.75))
    assert entropy_given_exponent(old, new) == pytest.approx(4 * quarter + 4 * 1.5)


def test_a_tiny_bench_runs_and_its_table_shows_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = trajectory.Size(hidden=64, layers=1, vocabulary=64, tokens=64, warm_up=2, settle=1)
    monkeypatch.setattr(trajectory, "SMALL", size)
    monkeypatch.setattr(bench, "LRS", (1e-5,))
    monkeypatch.setattr(bench, "LARGE", (1 << 16, 1 << 16))
    results = bench.run(tmp_path / "out.json", repeats=1)
    assert json.loads((tmp_path / "out.json").read_text()) == results
    assert [(row["lr"], row["steps"]) for row in results["rows"]] == [(1e-5, 1), (1e-5, 8)]
    for row in results["rows"]:
        size_of = row["bytes_per_parameter"]
        assert size_of["int32+value"] == pytest.approx(6 * row["changed"])
        assert size_of["small"] < size_of["fast"] < size_of["int32+value"]
    assert [(road["store"], road["kind"]) for road in results["roads"]] == [
        ("directory", "full"),
        ("directory", "delta"),
        ("xet", "full"),
        ("xet", "delta"),
    ]
    assert len(bench.table(results).splitlines()) == 2 + 2 + 3 + 3 + 2 + 4
