"""A run's configuration and parts in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distill.bench.in_memory import MemoryPrompts, MemoryReplica, MemoryTeacher
from distill.config import RunConfig
from distill.controller import Controller
from distill.interfaces import Components, Hooks
from distill.prompts.stream import PromptStream
from distill.run_log.journal import Journal
from sync.wire import Want


def make_config(**sections: dict[str, Any]) -> RunConfig:
    base: dict[str, dict[str, Any]] = {
        "run": {"name": "test", "steps": 6, "grace_seconds": 5.0},
        "student": {"path": "student"},
        "teachers": {"t": {"path": "teacher"}},
        "prompts": {"type": "jsonl", "path": "prompts.jsonl"},
        "rollout": {"batch": 8, "max_tokens": 8, "request_size": 4, "max_in_flight": 16},
        "buffer": {"max_staleness": 2, "score_batch": 4, "fsync": "never"},
        "objective": {"type": "sampled"},
        "trainer": {"deepspeed": "ds.json", "micro_batch_tokens": 32, "keep_checkpoints": 1},
        "evaluation": {"every": 2},
    }
    for name, fields in sections.items():
        base[name] = {**base.get(name, {}), **fields}
    return RunConfig.model_validate(base)


@pytest.fixture
def config() -> Callable[..., RunConfig]:
    """Builds a small RunConfig; keyword arguments are sections laid over it."""
    return make_config


@pytest.fixture
def controller(tmp_path: Path) -> Callable[..., Controller]:
    """Builds a Controller over in-memory parts and the journal in tmp_path (again: resumes)."""

    def build(
        config: RunConfig | None = None, hooks: Hooks | None = None, token: str | None = None, **parts: Any
    ) -> Controller:
        config = config or make_config()
        given: dict[str, Any] = {
            "replicas": {"r0": MemoryReplica()},
            "teachers": {"t": MemoryTeacher()},
            "route": lambda source: "t",
            "prompts": PromptStream(MemoryPrompts(), seed=0),
            "journal": Journal(tmp_path / "journal", "never", segment_bytes=4000, retry_seconds=0.01),
            "want": Want(entropy=True),
        }
        return Controller(config, Components(**{**given, **parts}), hooks or Hooks(), token)

    return build
