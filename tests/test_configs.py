"""Every configuration in the tree can be loaded, and opens with the command that runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distill.loading import load

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_configuration_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load(path)
    assert config.trainer.deepspeed.is_file()
    assert json.loads(config.trainer.deepspeed.read_text())["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_configuration_opens_with_its_command(path: Path) -> None:
    opening = [line for line in path.read_text().splitlines()[:8] if line.startswith("#")]
    assert any("distill " in line or "make " in line for line in opening)


def test_there_are_configurations() -> None:
    assert len(CONFIGS) >= 6
