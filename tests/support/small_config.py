"""A configuration of a run in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distill.config import RunConfig

LEAST: dict[str, Any] = {
    "run": {"name": "x", "steps": 3},
    "student": {"path": "s"},
    "teachers": {"t": {"path": "t"}},
    "prompts": {"type": "task", "task": "sort_letters"},
    "rollout": {"max_tokens": 12},
    "trainer": {"deepspeed": "x.json"},
}
"""What has no default, as a file would say it."""


def make_config(**sections: Any) -> RunConfig:
    """Sections given as keywords are laid over a small run's, or replace one of another type."""
    base: dict[str, dict[str, Any]] = {
        "run": {"name": "test", "steps": 6, "grace_seconds": 5.0},
        "student": {"path": "student"},
        "teachers": {"t": {"path": "teacher"}},
        "prompts": {"type": "jsonl", "path": "prompts.jsonl"},
        "rollout": {"batch": 8, "max_tokens": 8, "request_size": 4, "max_in_flight": 16},
        "buffer": {"max_staleness": 2, "score_batch": 4, "fsync": "never"},
        "objective": {"type": "sampled"},
        "preflight": {"mismatch_tolerance": 0.02},
        "trainer": {"deepspeed": "ds.json", "micro_batch_tokens": 32, "keep_checkpoints": 1},
        "evaluation": {"every": 2},
    }
    for name, fields in sections.items():
        before = base.get(name, {})
        alike = isinstance(fields, dict) and fields.get("type") in (None, before.get("type"))
        base[name] = {**before, **fields} if alike else fields
    return RunConfig.model_validate(base)


def run_of_letters(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    """The configuration in a run's folder below `folder`, whose student has the tokenizer of letters."""
    from distill.tasks.sort_letters import letter_tokenizer

    letter_tokenizer().save_pretrained(folder / "student")
    run = {"folder": folder, **sections.pop("run", {})}
    config = make_config(run=run, student={"path": str(folder / "student")}, **sections)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.json").write_text(config.model_dump_json())
    return config
