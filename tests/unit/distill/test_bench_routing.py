"""The benchmark of routing replay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distill.bench import routing
from student_trainer.routing import routers


def test_the_students_layers_all_have_experts() -> None:
    found = routers(routing.mixture(routing.MIXTURE))
    assert [(one.experts, one.chosen) for one in found] == [(routing.EXPERTS, routing.CHOSEN)] * 4


def test_figures_are_of_the_first_step_of_all_steps_and_of_the_end(tmp_path: Path) -> None:
    steps = [(1e-3, 1.5, 0.9), (None, 4.0, 0.7), (None, 2.0, 0.8)]
    lines = [
        {"time": 10.0 + i, "train/loss": 0.0, "train/rho_max": rho, "train/effective_sample_size": size}
        | ({} if kl is None else {"train/mismatch_kl": kl})
        for i, (kl, rho, size) in enumerate(steps)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "summary.json").write_text(json.dumps({"after": {"reverse_kl": 0.25, "pass_rate": 0.5}}))
    found = routing.figures(tmp_path)
    assert found.pop("effective_sample_size") == pytest.approx(0.8)
    assert found == {
        "mismatch_kl": 1e-3,
        "rho_max": 1.5,
        "dearest": 4.0,
        "reverse_kl": 0.25,
        "pass_rate": 0.5,
        "step_ms": 1000.0,
    }


def test_a_ratio_above_one_means_that_replay_is_better() -> None:
    live = dict.fromkeys(routing.ROWS, 2.0)
    medians = {routing.LIVE: live, routing.REPLAYED: dict.fromkeys(routing.ROWS, 1.0)}
    lines = dict(
        line.strip("| ").split(" | ", 1) for line in routing.table({"medians": medians}).splitlines()
    )
    assert lines["KL(μ‖p) at version 0, nats per token"] == "2.00e+00 | 1.00e+00 | 2.00"
    assert lines["pass rate at the end"] == "200.0% | 100.0% | 0.50"
