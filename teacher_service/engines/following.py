"""A self-teacher: an engine that reloads the student's published versions.

serving v ──(v + every is published)──▶ stage and load beside it ──▶ swap between two batches ──▶ serving v'

A version that cannot be staged or loaded is logged and tried again; until then the old weights serve.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from sync.errors import DistillError
from sync.wire import Head, Version
from teacher_service.engines.base import (
    Engine,
    EnginePrompt,
    EngineScores,
    GenerationParams,
    Item,
    ScoreOptions,
    Steps,
    each_step,
)

log = logging.getLogger(__name__)
POLL_SECONDS: Final = 1.0
"""Between two looks at the newest version."""
JOIN_SECONDS: Final = 0.5
"""How long `close` waits for a version that is being read or loaded."""


class Versions(Protocol):
    """Where the student's weights come from: `sync.subscribe.Subscriber`."""

    def newest(self) -> Version | None:
        """The version published last; None: none yet. Raises StoreError."""
        ...

    def folder(self, version: Version) -> Path:
        """A model folder that holds exactly `version`. Raises SnapshotError or StoreError."""
        ...


class FollowingEngine:
    """Serves `load(None)`, and `load(folder)` of each version `every` steps after the one it holds.

    A version of another lineage is loaded at once: the trainer went back. Two models are in memory during a
    swap. No head is given: callers cache it, and the next version has another.
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
        loaded = self._engine.engine_info
        self.engine_info = replace(loaded, can=tuple(name for name in loaded.can if name != "hidden"))
        self.version: Version | None = None
        """What it serves; None: the folder of its configuration."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, args=(poll_seconds,), daemon=True)
        self._thread.start()

    def score(self, items: Sequence[Item], options: ScoreOptions) -> EngineScores:
        """See `Engine.score`; one version scores a whole batch."""
        with self._lock:
            return self._engine.score(items, options)

    def generate(self, prompts: Sequence[EnginePrompt], params: GenerationParams) -> Steps:
        """See `Engine.generate`; one version generates a whole batch."""
        with self._lock:
            steps = self._engine.generate(prompts, params)
        yield from each_step(steps, lambda: self._lock)

    def head(self) -> Head | None:
        """See `Engine.head`."""
        return None

    def close(self) -> None:
        """See `Engine.close`; does not wait for a version that is being read or loaded."""
        self._closed.set()
        self._thread.join(JOIN_SECONDS)
        with self._lock:
            self._engine.close()

    def due(self, newest: Version | None) -> bool:
        """Whether to load `newest`."""
        if newest is None:
            return False
        if self.version is None:
            return newest.step >= self._every
        return newest.lineage != self.version.lineage or newest.step >= self.version.step + self._every

    def _follow(self, poll_seconds: float) -> None:
        while not self._closed.wait(poll_seconds):
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
            if self._closed.is_set():
                return
            old, self._engine, self.version = self._engine, fresh, version
        old.close()
        log.info("serving %s after %.1f s", version, time.monotonic() - started)
