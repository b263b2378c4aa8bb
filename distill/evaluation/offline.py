"""Evaluation of a model folder without a run: what `distill evaluate` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from distill.config import EvaluationConfig, RunConfig
from distill.evaluation.service import build
from sync.errors import ConfigError
from sync.wire import Version


class _OneFolder:
    """Any version is this folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def folder(self, version: Version) -> Path:
        return self._path


def evaluate_folder(config: RunConfig, model: Path | None, tails: int = 0) -> dict[str, Any]:
    """Figures of `model` (None: the configuration's student) against the configuration's teachers.

    `tails`: the teacher's mass outside its own top-k for k = 1 … tails is among them. Raises ConfigError when
    `model` is no model folder.
    """
    if model is not None and not (model / "config.json").is_file():
        raise ConfigError(f"--model {model} holds no config.json: name a folder that save_pretrained wrote")
    if config.evaluation is None:
        config = config.model_copy(update={"evaluation": EvaluationConfig()})
    folder = model or Path(config.student.path)
    found = build(config, _OneFolder(folder), tails).evaluate(Version(0, 0 if model is None else 1))
    figures = msgspec.to_builtins(found.report) | {
        "student_entropy": found.student_entropy,
        "teacher_entropy": found.teacher_entropy,
    }
    for name in ("schema", "type", "version"):
        figures.pop(name, None)
    return {"model": str(folder)} | figures | {f"tail_{k}": mass for k, mass in enumerate(found.tails, 1)}
