"""The benchmark of a controller's cost for a token."""

from __future__ import annotations

from pathlib import Path

from distill.bench.controller import Shape, fetch_cost, one_run, table


async def test_by_reference_the_journal_shrinks_by_the_hidden_states_and_grows_by_a_reference(
    tmp_path: Path,
) -> None:
    shape = Shape(batch=4, tokens=16, width=64, steps=2)
    ways = [await one_run(tmp_path / "run", shape, "full", way) for way in ("inline", "reference")]
    inline, kept = (one["journal_bytes"] for one in ways)
    assert 2 * 64 - 8 < inline - kept < 2 * 64, "a reference takes less than 8 bytes for each of 16 tokens"
    assert all(one["tokens"] >= 2 * 4 * 16 and one["ns"] > 0 for one in ways)
    rows = [{"shape": "small", "objective": "full", "scores": "inline", "ns": 1500.0, "journal_bytes": 140.0}]
    assert "| small | `full` | inline | 1.50 | 140.0 |" in table({"rows": rows, "fetch_ms": {}})


async def test_a_row_is_fetched_over_http() -> None:
    assert await fetch_cost(tokens=5, width=8, rows=3) > 0
