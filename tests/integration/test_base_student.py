"""Runs on words: a base student with its instruct teacher's tokens, which have other special ids, another end
and more ids, resumed; and the run of a probe."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from run_on_words import prepare
from tiny_models import save_words
from vllm_replica import VOCABULARY, save_model
from whole_run import called, ended_well, over

import distill
from distill.launch import probe
from sync.base.jsonl import read_lines

pytestmark = [pytest.mark.engine, pytest.mark.run, pytest.mark.filterwarnings("ignore")]
MORE, STUDENT_END, TEACHER_END = 8, 62, 1
SECTIONS = {"tracking": {"samples_every": 1, "samples": 16}, "evaluation": {"every": 1, "prompts": 8}}


def test_a_base_student_learns_its_teachers_end_and_never_samples_ids_of_its_own(tmp_path: Path) -> None:
    config = prepare(tmp_path, "base", 2, **SECTIONS)
    save_model("Qwen3", 0, tmp_path / "student", padding=MORE)
    own = {"eos_token": f"w{STUDENT_END}", "pad_token": f"w{STUDENT_END}", "bos_token": "w63"}
    save_words(tmp_path / "student", (f"w{i}" for i in range(VOCABULARY + MORE)), **own)
    for more in ([], [*over("run.steps=4"), "--resume"]):
        said = called("run", str(config), *more)
        assert "are the student's alone" in said
        assert "1 is learnt (rollout.stop_token_ids)" in said
    run = tmp_path / "runs/base"
    sampled = [sample["tokens"] for sample in read_lines(run / "samples.jsonl")]
    assert max(max(ids) for ids in sampled) < VOCABULARY, "else an eighth of all tokens would be beyond"
    ends = {ids[-1] for ids in sampled if len(ids) < 16}
    assert ends == {TEACHER_END, STUDENT_END}
    assert not any({TEACHER_END, STUDENT_END} & {*ids[:-1]} for ids in sampled)
    ended_well(run, 4)
    steps = read_lines(run / "metrics.jsonl")
    assert all(0 <= step["train/reverse_kl"] < 20 for step in steps if "train/reverse_kl" in step)


def test_a_plan_after_a_probe_has_its_speeds_and_nothing_of_it_is_left(tmp_path, monkeypatch) -> None:
    """`distill plan --probe`: a step of the plan takes what the steps of its probe took."""
    monkeypatch.setattr(probe, "SECONDS", 2.0)
    config = distill.load_config(prepare(tmp_path, "probed", 1000))  # more steps than the probe waits for
    said: list[str] = []
    before = psutil.Process().children(recursive=True)
    found = distill.plan(config, probe=True, say=said.append)
    assert said[-1].endswith(" s")
    assert found.measured is not None
    run, assumed = found.measured
    assert found.plan.step_seconds == pytest.approx(run.step_seconds)
    assert found.plan.longest == pytest.approx(run.seconds)
    assert found.plan.lengths == run.lengths
    assert run.lengths.source == "measured in probe"
    assert assumed.step_seconds != found.plan.step_seconds
    assert [*config.run.folder.iterdir()] == []
    assert psutil.Process().children(recursive=True) == before
