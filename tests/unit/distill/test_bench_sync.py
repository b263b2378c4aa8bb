"""The bench of weight sync: other formats cost what their descriptions say, and every part is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from distill.bench import sync as bench
from distill.bench import sync_transports as transports
from distill.bench.sync import (
    FORMATS,
    entropy_given_exponent,
    gap16_and_value,
    int32_and_value,
    row_gaps_and_values,
    xor_planes,
)
from distill.bench.trajectory import Training


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


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Figures of the codec on a trajectory of one learning rate."""
    monkeypatch.setattr(bench, "LRS", (1e-6,))
    monkeypatch.setattr(bench, "ROUNDS", 1)
    return bench.run_codec(
        bench.Size(Training(64, 1, 64, tokens=64, sequence=64, warm_up=2, settle=1), 1 << 16)
    )


def test_a_tiny_trajectory_is_measured_in_every_format(tiny: dict[str, Any]) -> None:
    assert [(row["lr"], row["steps"]) for row in tiny["rows"]] == [(1e-6, 1), (1e-6, 8)]
    for row in tiny["rows"]:
        size_of = row["bytes_per_parameter"]
        assert size_of.keys() == {*FORMATS, *bench.EFFORTS, "entropy"}
        assert size_of["int32+value"] == pytest.approx(6 * row["changed"])
        assert size_of["small"] < size_of["fast"] < size_of["int32+value"]
    assert [speed["density"] for speed in tiny["speeds"]] == [0.01, 0.1, 0.3]


def test_every_store_takes_every_kind(tmp_path: Path) -> None:
    found = transports.run_stores(transports.SHAPES["toy"]._replace(repeats=1), tmp_path)
    assert [(one["store"], one["kind"]) for one in found] == [
        (store, kind) for store in ("directory", "xet", "bucket", "s3") for kind in ("full", "delta", "lora")
    ]
    sizes = {one["kind"]: one["bytes"] for one in found}
    assert 0 < sizes["delta"] < sizes["lora"] < sizes["full"]


def run_folder(folder: Path) -> Path:
    """Of 6 steps, one every half second; publishing blocks the trainer for 5 ms in each."""
    folder.mkdir()
    lines = [
        {"step": step, "train/loss": 1.0, "time": 100 + step / 2, "perf/publish_seconds": 0.005}
        for step in range(6)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps({"sync": {"pause_seconds": 0.02}}))
    return folder


def test_a_runs_own_figures_say_what_syncing_cost(tmp_path: Path) -> None:
    found = bench.figures_of_run(run_folder(tmp_path / "run"), settled=1)
    assert (found["steps"], found["step_seconds"], found["pause_seconds"]) == (5, 0.5, 0.02)
    assert found["trainer_blocked_share"] == pytest.approx(0.01)


def test_what_a_swap_costs_is_what_is_not_generated_meanwhile() -> None:
    """Ten seconds at 80 instead of 100 tokens a second are two seconds, for four swaps."""
    assert transports.cost_of_a_swap(80.0, 100.0, 10.0, 4) == pytest.approx(0.5)


SWAP = {"pause_seconds": 0.06, "apply_seconds": 0.04}
SWAPS = {
    "in_flight": 16,
    "swaps": {"full": SWAP, "delta": SWAP, "lora": SWAP},
    "vllm_reload_seconds": 0.2,
    "plain_copy_seconds": 0.05,
    "decode_step_seconds": 0.01,
    "engine_seconds_per_swap": 0.015,
}


def test_parts_are_kept_printed_drawn_and_held_against_the_goals(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = {"store": "xet", "kind": "delta", "bytes": 7, "publish_seconds": 0.001, "stage_seconds": 0.001}
    whole = bench.figures_of_run(run_folder(tmp_path / "run"), settled=1)
    made = {"codec": tiny, "transports": {"rows": [one]}, "swaps": SWAPS, "whole_run": whole}
    asked: list[tuple[str, str]] = []
    for name, figures in made.items():
        monkeypatch.setitem(bench.PARTS, name, lambda f, _, n=name, g=figures: asked.append((f, n)) or g)
    bench.run(tmp_path / "out", full=False)
    results = bench.run(tmp_path / "out", full=True)
    toy, large = ([name for of, name in asked if of == size] for size in ("toy", "large"))
    assert toy == list(made), "what is kept is not measured again"
    assert large == ["codec", "transports", "swaps"], "no run trains the large model"
    assert (tmp_path / "out/sync.png").stat().st_size > 10_000
    text = bench.table(results)
    assert "| xet | delta | 7 | 1.0 | 1.0 |" in text
    assert "| pause of a delta, seconds (one decode step + 50 ms) | ≤ 0.06 | 0.06 | yes |" in text
    assert "share of engine time at a version per step | ≤ 0.02 | 0.03 | no |" in text
    assert "| trainer's time lost to publishing, share | ≤ 0.02 | 0.01 | yes |" in text
    assert "(one decode step + 1.2 times a plain copy) | ≤ 0.07 | 0.06 | yes |" in text
    assert "| the same (0.8 of vLLM's own reload) | ≤ 0.16 | 0.06 | yes |" in text
