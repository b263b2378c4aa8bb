"""The benchmark of a controller's cost for a token."""

from __future__ import annotations

from pathlib import Path

from distill.bench.controller import fetch_cost, load, one_run, table
from distill.bench.soak import Size


async def test_by_reference_the_journal_shrinks_by_the_hidden_states_and_grows_by_a_reference(
    tmp_path: Path,
) -> None:
    shape = Size(rollouts=8, batch=4, tokens=16, width=64, checkpoint_every=0)
    ways = [await one_run(tmp_path / "run", shape, "full", way) for way in ("inline", "reference")]
    inline, kept = (one["journal_bytes"] for one in ways)
    assert kept < 32
    assert 0.7 * 2 * 64 < inline - kept < 2 * 64, "of a hidden state the exponents compress"
    assert all(one["tokens"] >= 2 * 4 * 16 and one["ns"] > 0 for one in ways)
    rows = [{"shape": "small", "objective": "full", "scores": "inline", "ns": 1500.0, "journal_bytes": 140.0}]
    assert "| small | `full` | inline | 1.50 | 140.0 |" in table({"rows": rows, "fetch_ms": {}})


def test_the_load_reports_rate_blocks_and_memory_of_all_roles(tmp_path: Path) -> None:
    size = Size(rollouts=80, batch=8, tokens=16, width=0, checkpoint_every=2)
    found = load(tmp_path / "load", size, replicas=5, teachers=3, ranks=4)
    assert found["audit_ok"]
    assert found["usage"][-1]["rollouts"] == size.rollouts
    assert min(found["tokens_per_cpu_second"], found["tokens_per_second"]) > 0
    assert "5 replicas, 3 teachers, 4 ranks: " in table({"rows": [], "fetch_ms": {}, "load": found})


async def test_a_row_is_fetched_over_http() -> None:
    assert await fetch_cost(tokens=5, width=8, rows=3) > 0
