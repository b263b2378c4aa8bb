"""A run's configuration and parts in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from in_memory import HELD_OUT_SET, MemoryPrompts, MemoryReplica, MemoryRewards, MemoryTeacher
from small_config import make_config
from started import controlled

from distill.config import RunConfig
from distill.controller import Controller
from distill.interfaces import Components, Hooks
from distill.prompts.stream import PromptStream
from distill.record.store import Store
from sync.wire import Want


@pytest.fixture
def config() -> Callable[..., RunConfig]:
    """Builds a small RunConfig; keyword arguments are sections laid over it."""
    return make_config


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Callable[..., Controller]]:
    """Builds a Controller over in-memory parts and the record in tmp_path (again: resumes)."""
    made: list[Controller] = []

    def build(
        config: RunConfig | None = None, hooks: Hooks | None = None, token: str | None = None, **parts: Any
    ) -> Controller:
        config = (config or make_config()).with_(run={"folder": tmp_path})
        if reward_fn := parts.pop("reward_fn", None):
            parts["rewards"] = MemoryRewards(reward_fn)
        given: dict[str, Any] = {
            "replicas": {"r0": MemoryReplica()},
            "teachers": {"t": MemoryTeacher()},
            "route": lambda source: "t",
            "prompts": PromptStream(MemoryPrompts(), seed=0),
            "store": Store(tmp_path, "never", file_bytes=4000, retry_seconds=0.01),
            "want": Want(entropy=True),
            "sets": {"held_out": HELD_OUT_SET},
        }
        made.append(controlled(config, Components(**{**given, **parts}), hooks or Hooks(), token))
        return made[-1]

    yield build
    for run in made:
        run.close()


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Folder of a student and a teacher that are small enough to enumerate."""
    from evaluated_models import save

    return save(tmp_path)


@pytest.fixture
async def ends_workers() -> AsyncIterator[None]:
    """Those of controllers that `evaluated_models` made."""
    yield
    from evaluated_models import close

    await close()
