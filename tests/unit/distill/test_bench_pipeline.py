"""What the benches of whole runs make of a finished run's files."""

import json
from pathlib import Path

import pytest

from distill.bench import pipeline, runs
from distill.bench import vs_trl as peers
from distill.bench.runner import TrialCache, cores, ratios
from distill.bench.runs import CpuProfile
from distill.config import RunConfig
from distill.loading import load

SETTLED = runs.SETTLED


def trial(way: str, seed: int, step_ms: float, reverse_kl: float | None = 0.2) -> runs.RunFigures:
    return runs.RunFigures(
        way=way,
        seed=seed,
        settings=[],
        steps=240,
        step_ms=step_ms,
        mean_step_ms=step_ms,
        cpu_ms_per_step={"controller": 30.0, "trainer": 100.0 + seed},
        cpu_share=0.9,
        others_share=0.01,
        generated_tokens_per_second=5000.0,
        trained_tokens_per_second=4900.0,
        idle_seconds={"trainer": 3.0},
        age=1.0,
        seconds_to_target=None if reverse_kl is None else step_ms / 10,
        reverse_kl=reverse_kl,
        pass_rate=0.8,
        curve=[],
    )


def test_a_run_is_measured_from_its_files_without_its_first_steps(tmp_path: Path) -> None:
    steps = SETTLED + 11
    lines = [
        {"step": s, "time": 100.0 + (5.0 if s <= SETTLED else 0.25 * (s - SETTLED)), "loss": 1.0}
        | {"tokens/generated": 1000.0 * s, "tokens/trained": 900.0 * s}
        for s in range(1, steps + 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    summary = {"idle_seconds": {"trainer": 1.5}, "staleness": {"mean": 1.9}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    profile = CpuProfile(
        [90.0, 100.25, 102.75, 110.0], {"trainer": [0.0, 4.0, 6.0, 20.0]}, [0.0, 8.0, 12.0, 20.0]
    )
    found = runs.measure(tmp_path, "asynchronous", 3, ["a=1"], profile, evaluate=False)
    assert found["step_ms"] == pytest.approx(250.0)
    assert found["trained_tokens_per_second"] == pytest.approx(900.0 / 0.25)
    assert found["generated_tokens_per_second"] == pytest.approx(1000.0 / 0.25)
    assert found["cpu_ms_per_step"] == {"trainer": pytest.approx(1000 * 2.0 / 10)}
    assert found["cpu_share"] == pytest.approx(2.0 / 2.5 / cores())
    assert found["others_share"] == pytest.approx(2.0 / 2.5 / cores())
    assert (found["age"], found["reverse_kl"], found["steps"]) == (1.9, None, steps)


def test_the_threads_of_a_layout_reach_the_engine(tmp_path: Path) -> None:
    from distill.loading import merge, parse_override

    merged: dict = {}
    for one in runs.arguments(tmp_path, "a", 0, 60, pipeline.TWO_THREADS)[4::2]:
        merged = merge(merged, parse_override(one))
    assert merged["student"]["env"] == {"OMP_NUM_THREADS": "2"}
    assert merged["run"]["steps"] == 60


def test_a_trial_is_kept_and_one_of_other_settings_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[object] = []
    monkeypatch.setattr(pipeline, "run_quickstart", lambda *of: ran.append(of) or CpuProfile())
    monkeypatch.setattr(pipeline, "measure", lambda *_: trial("asynchronous", 0, 250.0))
    for settings in (["a=1"], ["a=1"], ["a=2"]):
        cache = TrialCache(tmp_path / "trials.jsonl")
        assert pipeline.trial(cache, tmp_path, "asynchronous", 0, 240, settings)["step_ms"] == 250.0
    assert len(ran) == 2


def test_ways_are_compared_by_their_medians_and_only_where_every_seed_has_a_figure() -> None:
    slow = pipeline.summary([trial("synchronous", s, ms) for s, ms in enumerate((290.0, 300.0, 900.0))])
    fast = pipeline.summary([trial("asynchronous", s, ms) for s, ms in enumerate((140.0, 150.0, 160.0))])
    assert slow["cpu_ms_per_step"]["trainer"] == 101.0
    found = ratios(slow, fast, pipeline.NUMBERS)
    assert found["step_ms"] == found["mean_step_ms"] == found["seconds_to_target"] == 2.0
    assert found["trained_tokens_per_second"] == 1.0
    fast = pipeline.summary([trial("asynchronous", 0, 150.0), trial("asynchronous", 1, 150.0, None)])
    assert "seconds_to_target" not in ratios(slow, fast, pipeline.NUMBERS)
    report = {
        "target_kl": 0.25,
        "steps": 240,
        "seeds": [0, 1],
        "cores": 2,
        "synchronous": "one thread a stage",
        "medians": {"synchronous": slow, "asynchronous": fast},
        "ratios": {"step_ms": 2.0},
    }
    lines = pipeline.table(report).splitlines()
    assert "| ms a step, median | 300 | 150 | 2.00 |" in lines
    assert "| seconds to the target KL | 30.0 | – |  |" in lines
    assert "| CPU-ms a step: trainer | 101.0 | 100.5 |  |" in lines


def test_the_table_of_peers_says_how_much_better_ours_is_in_each_direction() -> None:
    names = ("who", "size", "step_ms", "tokens_per_second", "seconds_to_target", "reverse_kl", "pass_rate")
    trials = [
        dict(zip(names, values, strict=True))
        for values in (
            ("ours", "toy", 150.0, 7000.0, 20.0, 0.19, 0.88),
            ("trl", "toy", 300.0, 3500.0, 40.0, 0.18, 0.89),
            ("ours", "large", 1000.0, 1500.0, None, None, None),
            ("trl", "large", 1500.0, 1000.0, None, None, None),
        )
    ]
    found = {size.name: peers.summary(trials, size) for size in (peers.TOY, peers.LARGE)}
    report = {
        "trl": "trl==1.16.0",
        "cores": 2,
        "target_kl": 0.25,
        "parameters": {size: {"student": 200_000, "teacher": 600_000} for size in found},
        "trl_precision": {"toy": "fp32", "large": "bf16"},
        "medians": found,
        "ratios": {size: ratios(of["trl"], of["ours"], peers.NUMBERS) for size, of in found.items()},
    }
    lines = peers.table(report).splitlines()
    assert "| ms a step | 150 | 300 | 2.00 |" in lines
    assert "| tokens generated and trained on a second | 7,000 | 3,500 | 2.00 |" in lines
    assert "| tokens generated and trained on a second | 1,500 | 1,000 | 1.50 |" in lines
    assert sum("reverse KL" in line for line in lines) == 1, "large models are not evaluated"


def test_a_finished_trial_beside_trl_is_made_again_when_its_settings_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate, ran = 0.1, []

    def config_of(size: peers.Size, seed: int) -> RunConfig:
        overrides = [f"trainer.lr={rate}", f"run.seed={seed}", "run.folder=/r"]
        return load(Path("configs/quickstart.toml"), [*size.settings, *overrides])

    monkeypatch.chdir(Path(__file__).parents[3])
    monkeypatch.setattr(peers, "config_of", config_of)
    monkeypatch.setattr(runs, "run_quickstart", lambda *of: ran.append(of) or CpuProfile())
    monkeypatch.setattr(runs, "measure", lambda *_: trial("ours", 0, 100.0 * len(ran)))
    cache, longer = TrialCache(tmp_path / "trials.jsonl"), peers.TOY._replace(steps=300)
    steps = [peers.ours(cache, tmp_path, size, 0)["step_ms"] for size in (peers.TOY, peers.TOY, longer)]
    assert steps == [100, 100, 200]
    rate = 0.2
    assert [peers.ours(cache, tmp_path, longer, 0)["step_ms"] for _ in range(2)] == [300, 300]


def test_trl_is_run_again_when_its_job_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    job = {"steps": 24, "prompts": ["a"]}

    def train(python: Path, output: Path, told: dict) -> list[dict[str, float]]:
        ran.append(output.name)
        return [{"time": float(step), "generated": 10.0 * step} for step in range(30)]

    monkeypatch.setattr(peers, "config_of", lambda size, seed: None)
    monkeypatch.setattr(peers, "job", lambda _, steps, precision: {**job, "bf16": precision == "bf16"})
    monkeypatch.setattr(peers, "train", train)
    cache, python = TrialCache(tmp_path / "trials.jsonl"), Path("python")
    for prompts in (["a"], ["a"], ["b"]):
        job["prompts"] = prompts
        assert peers.theirs(cache, python, tmp_path, peers.LARGE, 0, "fp32")["step_ms"] == 1000.0
        assert peers.faster_precision(cache, python, tmp_path, peers.LARGE) == "fp32"
    assert ran == 2 * ["large-trl-fp32-0", "large-trl-try-fp32", "large-trl-try-bf16"]
