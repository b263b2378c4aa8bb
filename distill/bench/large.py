"""A distillation on which the models, not the serving of requests, take the time: 14 M taught by 25 M."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from distill import quickstart
from distill.tasks import Models
from distill.tasks.sort_letters import letter_tokenizer, untaught
from distill.tasks.teaching import Recipe, made_once, recipe_hash, save_pair

STEPS, SETTLED = 24, 8
"""Of a trial, and of those left out of step times and rates."""
_SETTINGS: Final = (
    "rollout.batch=64",
    "rollout.max_tokens=48",
    "rollout.request_size=16",
    "rollout.max_in_flight=64",
    "buffer.score_batch=32",
    "teachers.sorter.dtype=bfloat16",
    "trainer.lr=1e-4",
)


def settings(seed: int) -> list[str]:
    """Over the quickstart's."""
    pair = _pair(quickstart.CACHE, seed)
    return [*_SETTINGS, f"student.path={pair.student}", f"teachers.sorter.path={pair.teacher}"]


def _pair(cache: Path, seed: int) -> Models:
    """Random weights, made once in `cache`."""
    shape = {"layers": 8, "steps": 0, "rows": 0, "rate": 0.0, "muon": False, "both_choices": False}
    student = Recipe(width=384, heads=12, kv_heads=6, feed_forward=1152, **shape)  # type: ignore[arg-type]
    teacher = Recipe(width=512, heads=16, kv_heads=8, feed_forward=1536, **shape)  # type: ignore[arg-type]

    def make(unfinished: Path) -> None:
        torch.manual_seed(seed)
        save_pair(unfinished, letter_tokenizer(), teacher=untaught(teacher), student=untaught(student))

    return made_once(cache.absolute() / f"large-{recipe_hash((teacher, student), seed, (__file__,))}", make)
