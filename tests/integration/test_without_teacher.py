"""A run that learns from rewards alone, every engine real, whose replica and launcher are killed −9."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from kill_target import KillTarget
from run_on_letters import BATCH, NAME, command

from distill.metrics.results import read_run
from distill.record.audit import audit
from distill.record.reader import ask

pytestmark = [pytest.mark.engine, pytest.mark.run, pytest.mark.faults, pytest.mark.filterwarnings("ignore")]
STEPS = 6
SETTINGS = (
    "teachers=false",
    'objective={type="rewards", task={baseline="group", scale="std", average="rollouts"}}',
    "objective.task.clip=[0.2, 0.3]",
    "rollout.per_prompt=4",
    "run.restarts=20",
    "evaluation={prompts=8}",
)


def test_every_rollout_has_a_reward_and_no_score_and_figures_are_of_the_reward(tmp_path: Path) -> None:
    rng = random.Random(0)
    with KillTarget(command(tmp_path, 100_000, *SETTINGS), tmp_path / NAME) as target:
        target.start()
        target.wait(lambda: target.step() >= 2, "step 2")
        target.kill("student-0", rng)
        target.wait_at_work(["student-0"])
        target.kill_launcher()
        target.resume(STEPS)
        target.end()
        report, summary = audit(target.run_dir), target.summary()
    assert report.ok, report.violations
    _, (counts,) = ask(target.run_dir, "SELECT count(reward), count(reverse_kl) FROM rollout WHERE scored")
    assert counts[0] >= STEPS * BATCH
    assert counts[1] == 0
    assert summary["steps"] >= STEPS
    assert summary["weights_identical"]
    assert summary["after"]["reward"] is not None
    assert summary["after"]["reverse_kl"] is None
    steps = [line for line in read_run(target.run_dir).metrics if "train/loss" in line]
    assert all({"train/reward_mean", "train/reward_std"} <= line.keys() for line in steps)
    names = {name for line in steps for name in line}
    assert not [name for name in names if "reverse_kl" in name or name.startswith("teacher/")]
