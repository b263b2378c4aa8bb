"""The arithmetic of the objective benchmark, and that a finished trial is never run again."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from distill.bench import memory, objective
from distill.bench.curves import best_rung, fitted, spread, tokens_to
from distill.bench.loss_cost import Case, Cost
from distill.bench.objectives import OBJECTIVES, configured
from distill.bench.trials import Point, Result, Setup, Trial, TrialFile
from sync.errors import ConfigError, DataError

SETUP = Setup("models-of-a-test")


def result(trial: Trial, final_kl: float = 0.25) -> Result:
    points = [Point(0, 1.0, 0.2), Point(1000, final_kl, 0.5)]
    return Result(trial, points, 10, {"train": 0.2}, {"train": 0.1, "generate": 0.3}, 8.0, 1.0, None)


# --- curves -----------------------------------------------------------------------------------------------


def test_tokens_to_a_target_are_read_off_a_line_in_log_kl() -> None:
    points = [Point(0, 1.6, 0.1), Point(1000, 0.8, 0.2), Point(2000, 0.2, 0.3)]
    assert tokens_to(points, 0.4) == pytest.approx(1500)
    assert tokens_to(points, 0.8) == pytest.approx(1000)
    assert tokens_to(points, 1.6) == 0
    assert tokens_to(points, 0.1) is None


def test_the_first_crossing_counts_even_when_the_curve_comes_back() -> None:
    points = [Point(0, 2.0, 0.1), Point(100, 1.0, 0.2), Point(200, 3.0, 0.1), Point(300, 0.5, 0.4)]
    assert tokens_to(points, 1.5) == pytest.approx(100 * math.log(2 / 1.5) / math.log(2))


def test_spread_is_mean_and_sample_deviation() -> None:
    found = spread([1.0, 2.0, 6.0])
    assert (found.mean, found.deviation) == (pytest.approx(3.0), pytest.approx(math.sqrt(7.0)))
    assert spread([4.0]) == (4.0, 0.0, [4.0])


@pytest.mark.parametrize("best", [-3, -1, 0, 2, 3])
def test_the_ladder_is_climbed_to_the_rung_between_two_worse_ones(best: int) -> None:
    assert best_rung(lambda rung: (rung - best) ** 2, 0, 3) == best


def test_the_ladder_ends_at_its_reach_and_nan_is_the_worst_rung() -> None:
    assert best_rung(lambda rung: -rung, 0, 3) == 3
    assert best_rung(lambda rung: math.nan if rung > 0 else -rung, 0, 3) == 0


def test_a_line_through_points_gives_offset_slope_and_error() -> None:
    line = fitted([(1.0, 5.0), (2.0, 7.0), (4.0, 11.0)])
    assert (line.at_zero, line.slope, line.at(8.0)) == pytest.approx((3.0, 2.0, 19.0))
    assert line.worst == pytest.approx(0.0)
    assert fitted([(0.0, 1.0), (1.0, 3.0), (2.0, 2.0)]).worst == pytest.approx(0.5)


# --- trials -----------------------------------------------------------------------------------------------


def test_a_finished_trial_is_read_back_and_not_run_again(tmp_path: Path) -> None:
    path, trial, ran = tmp_path / "trials.jsonl", Trial("topk", 1e-3, 2, 4), []

    def run(trial: Trial) -> Result:
        ran.append(trial)
        return result(trial)

    first = TrialFile(path, SETUP).get(trial, run)
    again = TrialFile(path, SETUP).get(trial, run)
    assert ran == [trial]
    assert again == first


def test_a_trial_of_another_set_up_does_not_count(tmp_path: Path) -> None:
    path, trial = tmp_path / "trials.jsonl", Trial("topk", 1e-3, 0)
    TrialFile(path, SETUP).get(trial, result)
    other = TrialFile(path, replace(SETUP, tokens=1)).get(trial, lambda t: result(t, final_kl=0.125))
    assert other.points[-1].reverse_kl == 0.125
    assert TrialFile(path, SETUP).get(trial, result).points[-1].reverse_kl == 0.25


def test_a_line_that_a_crash_cut_off_runs_again_and_spoils_nothing(tmp_path: Path) -> None:
    path, done, cut = tmp_path / "trials.jsonl", Trial("full", 1e-3, 0), Trial("full", 1e-3, 1)
    file = TrialFile(path, SETUP)
    for trial in (done, cut):
        file.get(trial, result)
    path.write_text(path.read_text()[:-20])
    ran = []
    file = TrialFile(path, SETUP)
    for trial in (done, cut):
        file.get(trial, lambda trial: ran.append(trial) or result(trial))
    assert ran == [cut]
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 2


def test_a_file_that_is_broken_in_the_middle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    path.write_text('{"cut\n{}\n')
    with pytest.raises(DataError, match=r"trials.jsonl:1"):
        TrialFile(path, SETUP)


# --- objectives -------------------------------------------------------------------------------------------


def test_every_objective_of_the_trainer_is_compared_with_its_own_defaults() -> None:
    assert [configured(name, 8).type for name in OBJECTIVES] == list(OBJECTIVES)
    assert configured("topk", 8).k == 8  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="full, jsd"):
        configured("best", 8)


def test_each_objective_is_run_at_the_rate_that_seed_0_finds_best() -> None:
    ran: set[Trial] = set()

    def run(trial: Trial) -> Result:
        ran.add(trial)
        return result(trial, final_kl=0.25 * (1 + abs(math.log2(trial.rate / 1e-3))))

    (row,) = objective.compare("topk", 3, (0,), 0.5, run)
    assert row["rate"] == pytest.approx(1e-3)
    assert list(row["rates_tried"]) == ["0.00025", "0.0005", "0.001", "0.002"]
    assert {trial for trial in ran if trial.seed} == {Trial("topk", 1e-3, seed) for seed in (1, 2)}


def test_every_lag_has_a_row_but_samples_of_the_teacher_have_no_lag() -> None:
    rows = objective.compare("sampled", 1, (0, 4, 16), 0.5, result)
    assert [row["lag"] for row in rows] == [0, 4, 16]
    assert [row["lag"] for row in objective.compare("sft", 1, (0, 4), 0.5, result)] == [0]


def test_seconds_to_the_target_are_tokens_to_it_at_the_pace_of_the_median_step() -> None:
    """10 steps of 0.4 s made 1,000 tokens; KL 1 → 0.25 crosses 0.5 half way."""
    found = objective.summary([result(Trial("topk", 1e-3, 0))], target_kl=0.5)
    assert found["tokens_to_target"]["mean"] == pytest.approx(500)
    assert found["cpu_seconds_to_target"]["mean"] == pytest.approx(2.0)
    assert found["cpu_seconds_per_step"]["mean"] == pytest.approx(0.4)
    assert found["wall_seconds_per_step"]["mean"] == pytest.approx(0.2)


def test_a_target_that_a_seed_misses_has_no_mean() -> None:
    results = [result(Trial("topk", 1e-3, seed), final_kl) for seed, final_kl in enumerate((0.25, 0.75))]
    found = objective.summary(results, target_kl=0.5)
    assert found["tokens_to_target"] is None
    assert found["cpu_seconds_to_target"] is None


# --- memory -----------------------------------------------------------------------------------------------


def test_full_logits_are_measured_where_they_fit_and_continued_along_a_line(tmp_path: Path) -> None:
    options: list[Case] = []

    def measure(case: Case) -> Cost:
        options.append(case)
        if case.way == "chunked":
            return Cost(100 + case.chunk, 8.0, 0.0)
        return Cost(100 + 2 * case.tokens, case.tokens / 100, 0.0)

    report = memory.run(
        tmp_path, ["topk"], tokens=800, vocabulary=1000, chunks=[64], measure=measure, free=30_000_000
    )
    assert [case.tokens for case in options] == [100, 200, 400, 800]
    (row,) = report["rows"]
    assert row["full_bytes"] == 1700
    assert row["memory_ratio"] == pytest.approx(164 / 1700)
    assert row["time_ratio"] == pytest.approx(1.0)
    assert row["full_is_continued"]
    assert json.loads((tmp_path / "memory.json").read_text())["rows"] == json.loads(json.dumps([row]))
    assert "continued" in memory.table(report)


def test_full_logits_that_fit_are_measured_as_they_are(tmp_path: Path) -> None:
    report = memory.run(
        tmp_path,
        ["topk"],
        tokens=800,
        vocabulary=1000,
        chunks=[64],
        measure=lambda case: Cost(case.tokens, 1.0, 0.0),
        free=1 << 30,
    )
    assert report["full_measured_up_to_tokens"] == 800
    assert not report["rows"][0]["full_is_continued"]
