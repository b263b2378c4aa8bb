"""Configuration files of whole runs on this machine's processor, and `distill` in a process of its own."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import tomli_w
from forked import start

from distill.record.audit import audit

ROOT = Path(__file__).parents[2]
DISTILL = [sys.executable, "-P", "-m", "distill.cli.main"]


def over(*settings: str) -> list[str]:
    """The arguments that lay KEY=VALUE over a configuration."""
    return [word for setting in settings for word in ("--set", setting)]


def written(path: Path, steps: int, *layers: dict[str, dict[str, Any]]) -> Path:
    """The file of a run that is called as it, in the folder where it lies unless `layers` say another one.

    `layers`: sections, each laid over those before it, key by key.
    """
    config: dict[str, dict[str, Any]] = {
        "run": {"name": path.stem, "folder": path.parent, "steps": steps, "start_seconds": 1200},
        "student": {"path": path.parent / "student"},
        "trainer": {"ranks": 1, "deepspeed": ROOT / "configs/deepspeed/zero3_cpu.json"},
        "tracking": {"wandb": "disabled"},
    }
    for layer in layers:
        for name, fields in layer.items():
            config[name] = config.get(name, {}) | fields
    for fields in config.values():
        fields |= {key: str(value) for key, value in fields.items() if isinstance(value, Path)}
    path.write_text(tomli_w.dumps(config))
    return path


def steps_of(run_dir: Path) -> int:
    """Optimizer steps whose figures are written."""
    path = run_dir / "metrics.jsonl"
    return path.read_text().count('"train/loss"') if path.is_file() else 0


def ended_well(run_dir: Path, steps: int) -> dict[str, Any]:
    """The summary of a run that made its steps, with equal weights everywhere and no audit's objection."""
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["completed"], summary["steps"], summary["weights_identical"]) == (True, steps, True)
    report = audit(run_dir)
    assert report.ok, report
    return dict(summary)


def called(*words: str) -> str:
    """What `distill WORDS` prints until it ends well, on both streams."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+") as log:
        status = start([*DISTILL, *words], environment, log).wait(1500.0)
        log.seek(0)
        said = log.read()
    assert status == 0, said[-8000:]
    return said
