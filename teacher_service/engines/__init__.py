"""Engines: what computes a teacher's marks. `build` makes the one that a TeacherConfig asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sync.claims import Claim
from sync.errors import ConfigError
from teacher_service.config import TeacherConfig
from teacher_service.engines.base import Engine


def build(config: TeacherConfig, vocab_size: int, claim: Claim | None = None) -> Engine:
    """Load the engine; heavy libraries are imported here. Raises ConfigError when it cannot serve.

    `claim`: of a teacher that follows the student: the run to follow.
    """
    if config.follow_student_every is not None:
        return _following(config, vocab_size, config.follow_student_every, claim or Claim())
    if config.engine == "transformers":
        from teacher_service.engines.gpu_slots import GpuSlot, GpuSlotsConfig
        from teacher_service.engines.idle_unload import IdleUnloadEngine
        from teacher_service.engines.transformers import load

        if config.idle_unload_seconds is None:
            return load(config, vocab_size)
        slots = GpuSlotsConfig.from_environment()
        slot = None if slots is None else GpuSlot(slots)
        return IdleUnloadEngine(lambda: load(config, vocab_size), config.idle_unload_seconds, slot)
    if config.idle_unload_seconds is not None:
        raise ConfigError(
            f'idle_unload_seconds needs engine = "transformers", not {config.engine!r}: remove it'
        )
    if config.engine == "vllm":
        from teacher_service.engines.vllm import connect

        return connect(config, vocab_size)
    if config.engine == "sglang":
        from teacher_service.engines.sglang import connect as connect_sglang

        return connect_sglang(config, vocab_size)
    from teacher_service.engines.openai import connect as connect_openai

    return connect_openai(config, vocab_size)


def _following(config: TeacherConfig, vocab_size: int, every: int, claim: Claim) -> Engine:
    """An engine that follows the run named in this process's environment."""
    if config.engine != "transformers" or config.idle_unload_seconds is not None:
        raise ConfigError(
            f'follow_student_every needs engine = "transformers" without idle_unload_seconds, this is '
            f"{config.engine!r} with {config.idle_unload_seconds}: change or remove one of them"
        )
    from sync.settings import ReplicaConfig
    from sync.subscribe import Subscriber
    from teacher_service.engines.following import FollowingEngine
    from teacher_service.engines.transformers import load

    def load_folder(folder: Path | None) -> Engine:
        placed: dict[str, Any] = {}
        if folder is not None:
            placed = {"path": str(folder), "revision": None, "trust_remote_code": False}
        # the mirror writes into the folder when it makes room for a later version
        return load(config.model_copy(update=placed), vocab_size, leave_files=True)

    return FollowingEngine(load_folder, Subscriber(ReplicaConfig.from_environment(), claim), every)
