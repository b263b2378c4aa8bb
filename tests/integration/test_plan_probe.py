"""`distill plan --probe` with real engines: a plan whose step takes what the steps of its probe took."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from run_on_words import prepare

import distill
from distill.launch import probe

pytestmark = [pytest.mark.engine, pytest.mark.run, pytest.mark.filterwarnings("ignore")]
STEPS = 1000
"""More than the probe waits for."""


def test_a_plan_after_a_probe_has_its_speeds_and_nothing_of_it_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "SECONDS", 2.0)
    config = distill.load_config(prepare(tmp_path, "probed", STEPS))
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
