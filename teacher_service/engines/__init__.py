"""Engines: what computes a teacher's marks. `build` makes the one that a TeacherConfig asks for."""

from __future__ import annotations

from sync.errors import ConfigError
from teacher_service.config import TeacherConfig
from teacher_service.engines.base import Engine


def build(config: TeacherConfig, vocab_size: int) -> Engine:
    """Load the engine; heavy libraries are imported here. Raises ConfigError when it cannot serve."""
    if config.engine == "transformers":
        from teacher_service.engines.resting import RestingEngine
        from teacher_service.engines.transformers import load

        if config.idle_unload_seconds is None:
            return load(config, vocab_size)
        return RestingEngine(lambda: load(config, vocab_size), config.idle_unload_seconds)
    if config.idle_unload_seconds is not None:
        raise ConfigError(
            f'idle_unload_seconds needs engine = "transformers", not {config.engine!r}: remove it'
        )
    if config.engine == "vllm":
        from teacher_service.engines.vllm import connect

        return connect(config, vocab_size)
    from teacher_service.engines.openai import connect as connect_openai

    return connect_openai(config, vocab_size)
