"""Trials are run once, summarised and compared; the objective and loss benchmarks built on that."""

import json
import math
from pathlib import Path

import pytest
import torch

from distill.bench import loss_cost, objective, runner
from distill.bench.loss_cost import TOKENS, Case, Cost, continued
from distill.bench.objective import best_rung, spread
from distill.bench.runner import Figures, TrialCache, Work, crossing, interleaved
from distill.bench.toy import OBJECTIVES, Trial, configured
from sync.base.errors import ConfigError, DataError


def result(final_kl: float = 0.25) -> Figures:
    """Of 10 steps of 0.4 s that made 1,000 tokens."""
    points = [{"tokens": 0, "reverse_kl": 1.0, "pass_rate": 0.2}]
    points.append({"tokens": 1000, "reverse_kl": final_kl, "pass_rate": 0.5})
    seconds = {"train": 0.1, "generate": 0.3}
    return {"points": points, "steps": 10, "cpu_seconds": seconds, "teacher_bytes": 8.0, "age": 0.0}


# --- summaries --------------------------------------------------------------------------------------------


def test_works_take_turns_and_each_has_its_own_seconds() -> None:
    clock, order = [0.0], []

    def work(name: str, seconds: float) -> None:
        order.append(name)
        clock[0] += seconds

    left = [1.0, 8.0]
    works = {"a": Work(lambda s: work("a", s), lambda: left.pop(0)), "b": Work(lambda: work("b", 2.0))}
    found = interleaved(works, 2, lambda: clock[0])
    assert order == ["a", "b", "a", "b"]
    assert found == {"a": [1.0, 8.0], "b": [2.0, 2.0]}


def test_a_curve_meets_its_target_between_two_points() -> None:
    curve = [(0.0, 1.2), (10.0, 0.6), (20.0, 0.2)]
    assert crossing(curve, 0.4) == pytest.approx(15.0)
    assert crossing(curve, 0.2) == pytest.approx(20.0)
    assert crossing(curve, 1.2) == 0.0
    assert crossing(curve, 0.1) is None
    assert crossing([], 0.1) is None


def test_spread_is_mean_and_sample_deviation_and_none_when_a_value_is_missing() -> None:
    found = spread([1.0, 2.0, 6.0])
    assert found == {"mean": 3.0, "deviation": pytest.approx(math.sqrt(7.0)), "values": [1.0, 2.0, 6.0]}
    assert spread([4.0]) == {"mean": 4.0, "deviation": 0.0, "values": [4.0]}
    assert spread([4.0, None]) is None


@pytest.mark.parametrize("best", [-3, -1, 0, 2, 3])
def test_the_ladder_is_climbed_to_the_rung_between_two_worse_ones(best: int) -> None:
    assert best_rung(lambda rung: (rung - best) ** 2) == best


def test_the_ladder_ends_at_its_reach_and_nan_is_the_worst_rung() -> None:
    assert best_rung(lambda rung: -rung) == 3
    assert best_rung(lambda rung: math.nan if rung > 0 else -rung) == 0


# --- trials -----------------------------------------------------------------------------------------------


def test_a_finished_trial_is_read_back_and_not_run_again(tmp_path: Path) -> None:
    ran: list[dict] = []
    first = TrialCache(tmp_path / "t.jsonl").get({"a": 1}, lambda: ran.append({}) or {"x": (1, 2)})
    again = TrialCache(tmp_path / "t.jsonl").get({"a": 1}, lambda: ran.append({}) or {})
    assert first == again == {"x": [1, 2]}
    assert len(ran) == 1


def test_a_trial_of_other_settings_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    assert TrialCache(path).get({"a": 1}, lambda: {"x": 1}) == {"x": 1}
    assert TrialCache(path).get({"a": 2}, lambda: {"x": 2}) == {"x": 2}


def test_a_trial_of_other_code_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.jsonl"
    assert TrialCache(path).get({"a": 1}, lambda: {"x": 1}) == {"x": 1}
    monkeypatch.setattr(runner, "sources", lambda: "after a change")
    assert TrialCache(path).get({"a": 1}, lambda: {"x": 2}) == {"x": 2}


def test_a_line_that_a_crash_cut_off_runs_again_and_spoils_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for seed in (0, 1):
        TrialCache(path).get({"seed": seed}, lambda: {"x": 0})
    path.write_text(path.read_text()[:-20])
    found = [TrialCache(path).get({"seed": seed}, lambda: {"x": 1}) for seed in (0, 1)]
    assert found == [{"x": 0}, {"x": 1}]
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 2


def test_a_file_that_is_broken_in_the_middle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    path.write_text('{"cut\n{}\n')
    with pytest.raises(DataError, match=r"trials.jsonl:1"):
        TrialCache(path)


# --- objectives -------------------------------------------------------------------------------------------


def test_every_objective_of_the_trainer_is_compared_with_its_own_defaults() -> None:
    assert [configured(name, 8).type for name in OBJECTIVES] == list(OBJECTIVES)
    assert configured("topk", 8).k == 8  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="full, jsd"):
        configured("best", 8)


def test_each_objective_is_run_at_the_rate_that_seed_0_finds_best() -> None:
    ran: set[Trial] = set()

    def run(trial: Trial) -> Figures:
        ran.add(trial)
        return result(final_kl=0.25 * (1 + abs(math.log2(trial.rate / 1e-3))))

    (row,) = objective.compare("topk", 3, (0,), run)
    assert row["rate"] == pytest.approx(1e-3)
    assert sorted({trial.rate for trial in ran}) == pytest.approx([2.5e-4, 5e-4, 1e-3, 2e-3])
    assert {trial for trial in ran if trial.seed} == {Trial("topk", 1e-3, seed) for seed in (1, 2)}


def test_every_lag_has_a_row_but_samples_of_the_teacher_have_no_lag() -> None:
    rows = objective.compare("sampled", 1, (0, 4, 16), lambda _: result())
    assert [row["lag"] for row in rows] == [0, 4, 16]
    assert [row["lag"] for row in objective.compare("sft", 1, (0, 4), lambda _: result())] == [0]


def test_seconds_to_the_target_are_tokens_to_it_at_the_pace_of_the_median_step() -> None:
    """10 steps of 0.4 s made 1,000 tokens; log KL falls in a line and crosses the target half way."""
    found = objective.summary([result(final_kl=objective.TARGET_KL**2)])
    assert found["tokens_to_target"]["mean"] == pytest.approx(500)
    assert found["cpu_seconds_to_target"]["mean"] == pytest.approx(2.0)
    assert found["cpu_ms_per_step"]["mean"] == pytest.approx(400)


def test_a_target_that_a_seed_misses_has_no_mean() -> None:
    results = [result(final_kl) for final_kl in (0.25, 0.75)]
    found = objective.summary(results)
    assert found["tokens_to_target"] is None
    assert found["cpu_seconds_to_target"] is None


def test_the_stored_trials_give_the_documented_table(tmp_path: Path) -> None:
    docs = Path(__file__).parents[3] / "docs"
    lines = (docs / "data" / "objective.trials.jsonl").read_text().splitlines()
    names = ("objective", "rate", "seed", "lag")
    stored = {
        tuple(line["settings"][name] for name in names): line["result"] for line in map(json.loads, lines)
    }
    found = [
        row
        for name in OBJECTIVES
        for row in objective.compare(name, 3, (0,), lambda trial: {"age": 0.0} | stored[tuple(trial)])
    ]
    text = (docs / "benchmarks.md").read_text()
    for row in found:
        assert "{mean:.3f} ± {deviation:.3f}".format(**row["reverse_kl"]) in text
        if row["tokens_to_target"]:
            assert "{mean:,.0f} ± {deviation:,.0f}".format(**row["tokens_to_target"]) in text


# --- memory -----------------------------------------------------------------------------------------------


def test_a_line_through_points_gives_the_value_beyond_them_and_its_error() -> None:
    assert continued([1, 2, 4], [5.0, 7.0, 11.0]) == pytest.approx((3.0 + 2 * TOKENS, 0.0))
    assert continued([1, 2, 3], [1.0, 3.0, 2.0])[1] == pytest.approx(0.5)
    assert continued([TOKENS], [3.0]) == (3.0, 0.0)


def test_full_logits_are_measured_where_they_fit_and_continued_along_a_line() -> None:
    cases: list[Case] = []

    def measure(case: Case) -> Cost:
        cases.append(case)
        return Cost(100 + (case.chunk or 2 * case.tokens), case.tokens / 100)

    needed = loss_cost.FULL_ARRAYS * 4 * loss_cost.VOCABULARY * TOKENS / loss_cost.FREE_SHARE
    rows = loss_cost.compare("topk", round(0.6 * needed), measure)
    assert [case.tokens for case in cases] == [TOKENS // 8, TOKENS // 4, TOKENS // 2, TOKENS, TOKENS]
    assert [row["chunk"] for row in rows] == [512, 256]
    assert rows[0]["full_bytes"] == pytest.approx(100 + 2 * TOKENS)
    assert rows[0]["memory_ratio"] == pytest.approx(612 / (100 + 2 * TOKENS))
    assert rows[0]["time_ratio"] == pytest.approx(1.0)
    report = {"tokens": TOKENS, "vocabulary": 9, "hidden": 9, "rows": rows}
    assert f"{TOKENS // 2:,} | 0.0% |" in loss_cost.table(report)
    cases.clear()
    loss_cost.compare("topk", round(2 * needed), measure)
    assert [case.tokens for case in cases] == [TOKENS] * 3, "what fits is measured as it is"


@pytest.mark.parametrize("name", ["full", "topk", "sampled"])
def test_both_ways_compute_the_same_loss(name: str) -> None:
    torch.manual_seed(0)
    given = loss_cost._inputs(Case(name, 0, tokens=32, vocabulary=128))
    assert loss_cost.loss(8, *given).item() == pytest.approx(loss_cost.loss(0, *given).item(), rel=1e-4)
