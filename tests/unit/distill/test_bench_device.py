"""The table of a device's paths; the runs themselves are `distill bench device`."""

from __future__ import annotations

from pathlib import Path

import pytest

from distill.bench import device
from distill.config.loading import load

SUMMARY = {
    "before": {"reverse_kl": 1.25},
    "after": {"reverse_kl": 0.5},
    "sync": {"pause_seconds": 0.04},
    "weights_identical": True,
}
LINES = [
    {"train/mismatch_kl": 7.9e-5, "perf/train_seconds": 9.0},
    {"perf/train_seconds": 0.2},
    {"perf/train_seconds": 0.4},
]


def test_a_line_has_the_first_steps_mismatch_and_the_median_of_the_others() -> None:
    found = device.figures(SUMMARY, LINES, 61.2)
    line = device.table({"device": "CPU", "steps": 3, "paths": {"LoRA": found}}).splitlines()[-1]
    assert line == "| LoRA | 61 | 1.250 | 0.500 | 7.9e-05 | 300 | 40 | yes |"


def test_a_path_that_fails_costs_its_own_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trial(folder: Path, settings: tuple[str, ...]) -> dict[str, object]:
        if "weights.transport=broadcast" in settings:
            raise device.DistillError("gloo is missing")
        return device.figures(SUMMARY, LINES, 1.0)

    monkeypatch.setattr(device, "_trial", trial)
    report = device.run(tmp_path, ["broadcast", "LoRA"])
    assert report["paths"]["broadcast"] == {"error": "gloo is missing"}
    assert "| broadcast | **failed** |" in device.table(report)
    assert "| LoRA | 1 |" in device.table(report)


@pytest.mark.parametrize("path", device.PATHS)
def test_every_path_is_a_configuration(path: str) -> None:
    words = [*device.COMMON, *device.PATHS[path]]
    load(Path(__file__).parents[3] / "configs" / "quickstart.toml", words)
