"""Engines: what computes a teacher's scores. `build` makes the one that a TeacherConfig names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sync.claims import Claim
from sync.errors import ConfigError
from teacher_service.config import TeacherConfig
from teacher_service.engines.base import Engine


def build(config: TeacherConfig, vocab_size: int, claim: Claim | None = None) -> Engine:
    """Load the engine; heavy libraries are imported here. Raises ConfigError when it cannot serve.

    `claim`: the run whose versions a teacher with `follow_student_every` loads.
    """
    every, idle = config.follow_student_every, config.idle_unload_seconds
    if every is not None and (config.engine != "transformers" or idle is not None):
        raise ConfigError(
            f'follow_student_every needs engine = "transformers" without idle_unload_seconds, this is '
            f"{config.engine!r} with {idle}: change or remove one of them"
        )
    if idle is not None and config.engine != "transformers":
        raise ConfigError(
            f'idle_unload_seconds needs engine = "transformers", not {config.engine!r}: remove it'
        )
    if every is not None:
        return _following(config, vocab_size, every, claim or Claim())
    if config.engine == "transformers":
        return _transformers(config, vocab_size)
    if config.engine == "vllm":
        from teacher_service.engines import vllm

        return vllm.connect(config, vocab_size)
    if config.engine_url is None:
        raise ConfigError(f"engine = {config.engine!r} needs engine_url: the address of a server that runs")
    from teacher_service.engines import http_engine

    if config.engine == "sglang":
        return http_engine.SGLangServer(config, vocab_size)
    return http_engine.CompletionsServer(config, vocab_size)


def _transformers(config: TeacherConfig, vocab_size: int) -> Engine:
    from teacher_service.engines.gpu_slots import GpuSlot, GpuSlotsConfig
    from teacher_service.engines.idle_unload import IdleUnloadEngine
    from teacher_service.engines.transformers import load

    if config.idle_unload_seconds is None:
        return load(config, vocab_size)
    slots = GpuSlotsConfig.from_environment()
    slot = None if slots is None else GpuSlot(slots)
    return IdleUnloadEngine(lambda: load(config, vocab_size), config.idle_unload_seconds, slot)


def _following(config: TeacherConfig, vocab_size: int, every: int, claim: Claim) -> Engine:
    """An engine that follows the run named in this process's environment."""
    from sync.settings import ReplicaConfig
    from sync.subscribe import Subscriber
    from teacher_service.engines.following import FollowingEngine
    from teacher_service.engines.transformers import load

    def load_folder(folder: Path | None) -> Engine:
        placed: dict[str, Any] = {}
        if folder is not None:
            placed = {"path": str(folder), "revision": None, "trust_remote_code": False}
        # the mirror overwrites the folder with a later version
        return load(config.model_copy(update=placed), vocab_size, leave_files=True)

    return FollowingEngine(load_folder, Subscriber(ReplicaConfig.from_environment(), claim), every)
