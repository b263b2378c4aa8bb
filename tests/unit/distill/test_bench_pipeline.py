"""What the pipeline bench makes of a finished run's files."""

import json
from pathlib import Path

import pytest

from distill.bench.pipeline import SETTLED, crossing, measure


def test_a_curve_meets_its_target_between_two_evaluations() -> None:
    curve = [(0.0, 1.2), (10.0, 0.6), (20.0, 0.2)]
    assert crossing(curve, 0.4) == pytest.approx(15.0)
    assert crossing(curve, 0.2) == pytest.approx(20.0)
    assert crossing(curve, 0.1) is None


def test_a_run_is_measured_from_its_files(tmp_path: Path) -> None:
    steps = SETTLED + 11
    lines = [{"step": 0, "time": 99.0, "eval/reverse_kl": 1.0}]
    lines += [{"step": s, "time": 100.0 + 0.25 * s, "loss": 1.0} for s in range(1, steps + 1)]
    lines += [{"step": steps, "time": 130.0, "eval/reverse_kl": 0.2}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    summary = {
        "after": {"reverse_kl": 0.2, "pass_rate": 0.9},
        "tokens": {"trained": 3000},
        "idle_seconds": {"trainer": 1.5},
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    seconds = 0.25 * (steps - 1)
    trial = measure(tmp_path, "asynchronous", 3, [(50.0, 0.1), (101.0, 0.8), (102.0, 0.9), (103.0, 1.0)])
    assert trial.step_ms == pytest.approx(250.0)
    assert trial.trained_tokens_per_second == pytest.approx(3000 / seconds)
    assert trial.cpu_share == 0.9
    assert trial.seconds_to_target == pytest.approx(0.75 * seconds)
