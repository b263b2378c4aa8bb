"""Engines: what computes a teacher's scores. `build` makes the one that a TeacherConfig names."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import cast

from sync.base.errors import ConfigError
from sync.base.own_code import is_own, make_own
from sync.wire.claims import Claim
from teacher_service.config import TeacherConfig
from teacher_service.engines.base import Engine, EngineInfo


def build(config: TeacherConfig, vocab_size: int, claim: Claim | None = None) -> Engine:
    """Load the engine; heavy libraries are imported here. Raises ConfigError when it cannot serve.

    `claim`: the run whose versions a teacher with `follow_student_every` loads.
    """
    every, idle = config.follow_student_every, config.idle_unload_seconds
    if (every or idle) and (config.kind.computes != "layers" or (every and idle)):
        raise ConfigError(
            f'follow_student_every = {every} and idle_unload_seconds = {idle} need engine = "transformers", '
            f"this is {config.engine!r}, and exclude each other: remove one or both"
        )
    if is_own(config.engine):
        expected = "an Engine of teacher_service.engines.base, with its `engine_info`"
        return cast(Engine, make_own(config.engine, "engine", _is_engine, expected, config, vocab_size))
    load: Callable[..., Engine] = import_module(f"teacher_service.engines.{config.engine}").load
    if idle is not None:
        from teacher_service.engines.reload import GpuSlot, IdleUnloadEngine

        return IdleUnloadEngine(lambda: load(config, vocab_size), idle, GpuSlot.from_environment())
    if every is None:
        return load(config, vocab_size)
    from sync.base.settings import ReplicaConfig
    from sync.weights.subscribe import Subscriber
    from teacher_service.engines.reload import FollowingEngine

    def load_version(folder: Path | None) -> Engine:
        placed = {} if folder is None else {"path": str(folder), "revision": None, "trust_remote_code": False}
        # the mirror overwrites the folder with a later version
        return load(config.model_copy(update=placed), vocab_size, leave_files=True)

    versions = Subscriber(ReplicaConfig.from_environment(), claim or Claim())
    return FollowingEngine(load_version, versions, every)


def _is_engine(made: object) -> bool:
    return isinstance(getattr(made, "engine_info", None), EngineInfo)
