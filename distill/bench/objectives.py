"""The objectives that are compared, by name."""

from __future__ import annotations

from typing import Final

from pydantic import TypeAdapter

from student_trainer.objectives.config import ForwardTopK, ObjectiveConfig, StudentTopK, TopK
from sync.errors import ConfigError

OBJECTIVES: Final = ("sampled", "topk", "student_topk", "forward_topk", "full", "jsd", "skew", "sft")


def configured(name: str, k: int) -> ObjectiveConfig:
    """The objective called `name` with its defaults, and `k` where it has one. Raises ConfigError."""
    if name not in OBJECTIVES:
        raise ConfigError(f"objective {name!r} is not known: choose from {', '.join(OBJECTIVES)}")
    config: ObjectiveConfig = TypeAdapter(ObjectiveConfig).validate_python({"type": name})
    return (
        config.model_copy(update={"k": k}) if isinstance(config, TopK | StudentTopK | ForwardTopK) else config
    )
