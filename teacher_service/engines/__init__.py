"""Engines: what computes a teacher's marks. `build` makes the one that a TeacherConfig asks for."""

from __future__ import annotations

from teacher_service.config import TeacherConfig
from teacher_service.engines.base import Engine


def build(config: TeacherConfig, vocab_size: int) -> Engine:
    """Load the engine; heavy libraries are imported here. Raises ConfigError when it cannot serve."""
    if config.engine == "transformers":
        from teacher_service.engines.transformers import load

        return load(config, vocab_size)
    if config.engine == "vllm":
        from teacher_service.engines.vllm import connect

        return connect(config, vocab_size)
    from teacher_service.engines.openai import connect as connect_openai

    return connect_openai(config, vocab_size)
