"""A self-teacher: an engine that is refreshed from the student's published versions.

serving v ──(v + every is published)──▶ stage and load beside it ──▶ swap between two batches ──▶ serving v'

What cannot be staged or loaded is said, and tried again; meanwhile the old weights go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol, TypeVar

from sync.errors import DistillError
from sync.wire import Head, Version
from teacher_service.engines.base import (
    Engine,
    EngineCompletion,
    EnginePrompt,
    EngineScores,
    GenerationParams,
    Item,
    ScoreOptions,
    each_step,
    writer,
)

log = logging.getLogger(__name__)
R = TypeVar("R")
POLL_SECONDS: Final = 1.0
"""Between two looks at the newest version."""
JOIN_SECONDS: Final = 0.5
"""At the end: what the follower is doing by then is given up."""


class Versions(Protocol):
    """Where the student's weights come from."""

    def newest(self) -> Version | None:
        """The version published last; None: none yet. Raises StoreError."""
        ...

    def folder(self, version: Version) -> Path:
        """A model folder that holds exactly `version`. Raises SnapshotError or StoreError."""
        ...


class FollowingEngine:
    """Serves what `load(None)` gives, and `load(folder)` of a version `every` steps after the one it holds.

    A version of another lineage is taken at once: the trainer went back. Two models are in memory while one
    takes the other's place. No head is shown: callers keep it, and it would no longer be this teacher's.
    """

    def __init__(
        self,
        load: Callable[[Path | None], Engine],
        versions: Versions,
        every: int,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self._load, self._versions, self._every = load, versions, every
        self._engine, self._lock = load(None), threading.Lock()
        engine_info = self._engine.engine_info
        self.engine_info = replace(
            engine_info,
            can=tuple(score_hidden for score_hidden in engine_info.can if score_hidden != "hidden"),
        )
        self.version: Version | None = None
        """What it serves; None: the folder of its configuration."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, args=(poll_seconds,), daemon=True)
        self._thread.start()

    def score(self, items: Sequence[Item], options: ScoreOptions) -> EngineScores:
        """See `Engine.score`; a whole batch is marked by one version."""
        with self._lock:
            return self._engine.score(items, options)

    def write(
        self, engine_prompts: Sequence[EnginePrompt], generation: GenerationParams
    ) -> Iterator[list[EngineCompletion] | None]:
        """See `Writer.write`; a text is begun and ended by one version."""
        with self._lock:
            steps = writer(self._engine).write(engine_prompts, generation)
        yield from each_step(steps, self._undisturbed)

    def _undisturbed(self, step: Callable[[], R]) -> R:
        with self._lock:
            return step()

    def head(self) -> Head | None:
        """See `Engine.head`."""
        return None

    def close(self) -> None:
        """See `Engine.close`; a version that is being read or loaded is not waited for."""
        self._over.set()
        self._thread.join(JOIN_SECONDS)
        with self._lock:
            self._engine.close()

    def due(self, newest: Version | None) -> bool:
        """Whether `newest` is to take the place of what is served."""
        if newest is None:
            return False
        if self.version is None:
            return newest.step >= self._every
        return newest.lineage != self.version.lineage or newest.step >= self.version.step + self._every

    def _follow(self, poll_seconds: float) -> None:
        while not self._over.wait(poll_seconds):
            try:
                newest = self._versions.newest()
                if newest is not None and self.due(newest):
                    self._refresh(newest)
            except Exception as error:  # edge of a thread: it must go on, whatever a loader raises
                unknown = not isinstance(error, DistillError)
                log.warning(
                    "still serving %s: %s", self.version or "the configured folder", error, exc_info=unknown
                )

    def _refresh(self, version: Version) -> None:
        started = time.monotonic()
        fresh = self._load(self._versions.folder(version))
        with self._lock:
            if self._over.is_set():
                return
            old, self._engine, self.version = self._engine, fresh, version
        old.close()
        log.info("serving %s after %.1f s", version, time.monotonic() - started)
