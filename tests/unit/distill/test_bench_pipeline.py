"""What the benches of whole runs make of a finished run's files."""

import json
from pathlib import Path

import pytest

from distill.bench import episodes, peers, pipeline
from distill.bench.pipeline import CpuProfile
from distill.bench.runner import Figures, TrialCache, comparison, cores
from distill.config.loading import merge, parse_override

SETTLED = pipeline.SETTLED


def trial(step_ms: float, seed: int = 0, reverse_kl: float | None = 0.2) -> Figures:
    return dict.fromkeys(pipeline.ROWS, 1.0) | {
        "step_ms": step_ms,
        "cpu_ms_per_step": {"controller": 30.0, "trainer": 100.0 + seed},
        "idle_seconds": {"trainer": 3.0},
        "seconds_to_target": None if reverse_kl is None else step_ms / 10,
        "reverse_kl": reverse_kl,
    }


def test_a_run_is_measured_from_its_files_without_its_first_steps(tmp_path: Path) -> None:
    steps = SETTLED + 11
    lines = [
        {"step": s, "time": 100.0 + (5.0 if s <= SETTLED else 0.25 * (s - SETTLED)), "train/loss": 1.0}
        | {"rollout/tokens_total": 1000.0 * s, "train/tokens_total": 900.0 * s}
        for s in range(1, steps + 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    summary = {"perf": {"idle_seconds": {"trainer": 1.5}}, "buffer": {"age_mean": 1.9}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    profile = CpuProfile(
        [
            (90.0, {"machine": 0.0}),
            (100.25, {"trainer": 4.0, "machine": 8.0}),
            (102.75, {"trainer": 6.0, "machine": 12.0}),
            (110.0, {"trainer": 20.0, "machine": 20.0}),
        ]
    )
    found = pipeline.measure(tmp_path, profile)
    assert found["step_ms"] == pytest.approx(250.0)
    assert found["trained_per_second"] == pytest.approx(900.0 / 0.25)
    assert found["generated_per_second"] == pytest.approx(1000.0 / 0.25)
    assert found["cpu_ms_per_step"] == {"trainer": pytest.approx(1000 * 2.0 / 10)}
    assert found["cpu_share"] == pytest.approx(2.0 / 2.5 / cores())
    assert found["others_share"] == pytest.approx(2.0 / 2.5 / cores())
    assert found["age"] == 1.9


def test_a_role_that_was_restarted_keeps_what_it_had_used() -> None:
    profile = CpuProfile([(0.0, {"trainer": 4.0}), (1.0, {}), (2.0, {"trainer": 5.0})])
    assert profile.between(0.0, 2.0) == {"trainer": 1.0}


def test_the_threads_of_a_layout_reach_the_engine() -> None:
    merged: dict = {}
    for one in pipeline.TWO_THREADS:
        merged = merge(merged, parse_override(one))
    assert merged["student"]["env"] == {"OMP_NUM_THREADS": "2"}


def test_a_trial_is_kept_and_one_of_other_settings_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[object] = []
    monkeypatch.setattr(pipeline, "run_quickstart", lambda *of: ran.append(of) or CpuProfile())
    for settings in (["a=1"], ["a=1"], ["a=2"]):
        cache = TrialCache(tmp_path / "trials.jsonl")
        found = pipeline.trial(cache, tmp_path, settings, 0, pipeline.SHORT, lambda *_: trial(250.0))
        assert found["step_ms"] == 250.0
    assert len(ran) == 2


def test_ways_are_compared_by_their_medians_and_only_where_every_seed_has_a_figure() -> None:
    slow = pipeline.summary([trial(ms, seed) for seed, ms in enumerate((290.0, 300.0, 900.0))])
    fast = pipeline.summary([trial(150.0), trial(150.0, 1, None)])
    report = {
        "synchronous": "one thread per stage",
        "synchronous_step_ms": {"one thread per stage": 300.0},
        "limit": {"limit_ms": 120.0, "ms": {"generate": 80.0, "score": 40.0, "train": 120.0}},
        "large": {"limit": {"limit_ms": 900.0, "ms": {"train": 900.0}}, "trial": {"step_ms": 1000.0}},
        "medians": {"synchronous": slow, "asynchronous": fast},
    }
    lines = pipeline.table(report).splitlines()
    assert "| ms per step, median | 300 | 150 | 2.00 |" in lines
    assert f"| seconds to a reverse KL of {pipeline.TARGET_KL} | 30.0 | – |  |" in lines
    assert "| CPU ms per step: trainer | 101.0 | 100.5 |  |" in lines
    assert lines[-2].endswith("120); time, share of it: synchronous 300 ms, 0.40, asynchronous 150 ms, 0.80")
    assert lines[-1].endswith("at least 900 ms (train 900); time, share of it: asynchronous 1000 ms, 0.90")


def test_what_a_turn_costs_is_the_difference_between_both_ways_by_role() -> None:
    rows = dict.fromkeys(episodes.ROWS, 1.0)
    per_step = {"cpu_ms_per_step controller": 48.0, "cpu_ms_per_step trainer": 96.0}
    turns = {
        "cpu_ms_per_step controller": 96.0,
        "cpu_ms_per_step trainer": 48.0,
        "cpu_ms_per_step environment letters[0]": 192.0,
    }
    found = {episodes.ONCE: rows | per_step, episodes.EPISODES: rows | turns, episodes.SLEEPERS: rows | turns}
    lines = episodes.table({"medians": found}).splitlines()
    assert "| CPU ms per step: environment letters[0] | – | 192 | 192 |" in lines
    turns_of_a_step = episodes.BATCH * episodes.TURNS
    assert turns_of_a_step == 96
    assert lines[-1].endswith("controller +0.50, environment letters[0] +2.00, trainer -0.50; together +2.00")


def test_a_ratio_above_one_is_better_in_each_direction() -> None:
    trl = {"step_ms": 300.0, "tokens_per_second": 3500.0, "seconds_to_target": None, "reverse_kl": None}
    ours = {"step_ms": 150.0, "tokens_per_second": 7000.0, "seconds_to_target": None, "reverse_kl": 0.19}
    lines = comparison({"TRL": trl, "ours": ours}, peers.ROWS)
    assert lines[2:] == [
        "| ms per step | 300 | 150 | 2.00 |",
        "| tokens generated and trained per second | 3,500 | 7,000 | 2.00 |",
        "| reverse KL at the end | – | 0.190 |  |",
    ], "rows without any figure are left out"
