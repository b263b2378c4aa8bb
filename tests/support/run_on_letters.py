"""A whole run of two tiny random models, as a command that can be started, killed and resumed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from whole_run import over, written

from distill.tasks.sort_letters import STUDENT, TEACHER, letter_tokenizer
from distill.tasks.teaching import new_model

NAME, BATCH, CHECKPOINT_EVERY = "survivor", 8, 4
ENGINE_ARGS = {"max-model-len": 64, "max-num-seqs": 32, "num-gpu-blocks-override": 64, "enforce-eager": True}


def command(folder: Path, steps: int, *settings: str) -> list[str]:
    """`distill run` of a configuration in `folder`, its models beside it; `settings`: KEY=VALUE over it."""
    torch.manual_seed(0)
    for name, recipe in {"student": STUDENT, "teacher": TEACHER}.items():
        new_model(recipe, letter_tokenizer()).to(torch.bfloat16).save_pretrained(folder / name)
        letter_tokenizer().save_pretrained(folder / name)
    sections: dict[str, dict[str, Any]] = {
        "run": {"grace_seconds": 30},
        "student": {"engine_args": ENGINE_ARGS},
        "teachers": {"only": {"path": str(folder / "teacher")}},
        "prompts": {"type": "task", "task": "sort_letters"},
        "rollout": {"batch": BATCH, "max_tokens": 12, "max_in_flight": 32},
        "buffer": {"max_staleness": 2},
        "trainer": {"ranks": 2, "lr": 2e-3, "checkpoint_every": CHECKPOINT_EVERY},
    }
    path = written(folder / f"{NAME}.toml", steps, sections)
    words = over("evaluation=false", *settings)
    return [sys.executable, "-m", "distill.cli.main", "run", str(path), *words]
