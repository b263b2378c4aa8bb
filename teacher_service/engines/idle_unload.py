"""An engine that is unloaded while it has no work, so that teachers can share a machine.

loaded ──(idle_seconds without work, or its slot is wanted)──▶ unloaded ──(work, a slot)──▶ loaded
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sync.wire import Head
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
from teacher_service.engines.gpu_slots import POLL_SECONDS, GpuSlot

log = logging.getLogger(__name__)


class IdleUnloadEngine:
    """Loads an engine when work comes, and closes it after `idle_seconds` without work.

    It is loaded once at the start, so that a teacher that cannot serve fails early, and for `engine_info`.
    With a `slot` it is loaded only while it holds one, and is unloaded early when another teacher wants that.
    It is never unloaded while completions are generated: they hold the model until their last step.
    """

    def __init__(self, load: Callable[[], Engine], idle_seconds: float, slot: GpuSlot | None = None) -> None:
        self._load, self._idle_seconds, self._slot = load, idle_seconds, slot
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._engine: Engine | None = None
        self._used = time.monotonic()
        self._generating = 0
        """Batches of completions under way."""
        with self._held() as engine:
            self.engine_info = engine.engine_info
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def loaded(self) -> bool:
        """Whether the engine is in memory."""
        return self._engine is not None

    def score(self, items: Sequence[Item], options: ScoreOptions) -> EngineScores:
        """See `Engine.score`; the first batch after an idle time waits for the engine to load."""
        with self._held() as engine:
            return engine.score(items, options)

    def generate(self, prompts: Sequence[EnginePrompt], params: GenerationParams) -> Steps:
        """See `Engine.generate`; counts as work until the last step."""
        with self._lock:
            if self._wanted:
                self._unload("for another teacher")
            self._generating += 1
        try:
            with self._held() as engine:
                steps = engine.generate(prompts, params)
            yield from each_step(steps, self._held)
        finally:
            self._generating -= 1

    def head(self) -> Head | None:
        """See `Engine.head`."""
        with self._held() as engine:
            return engine.head()

    @contextmanager
    def _held(self) -> Iterator[Engine]:
        """The engine, loaded for as long as the context lasts."""
        with self._lock:
            try:
                yield self._engine or self._load_engine()
            finally:
                self._used = time.monotonic()
                if self._slot is not None:
                    self._slot.used()

    def _load_engine(self) -> Engine:
        if self._slot is not None:
            self._slot.take()
        started = time.monotonic()
        try:
            self._engine = self._load()
        except BaseException:
            if self._slot is not None:
                self._slot.leave()
            raise
        seconds = time.monotonic() - started
        if self._slot is not None:
            self._slot.keep_for(seconds)
        log.info("loaded in %.1f s", seconds)
        return self._engine

    def _watch(self) -> None:
        """Unload the engine when it was idle for long, or when its slot is wanted; between two batches."""
        while not self._closed.wait(min(POLL_SECONDS, self._idle_seconds)):
            idle = time.monotonic() - self._used >= self._idle_seconds
            if self._engine is not None and (idle or self._wanted):
                with self._lock:
                    if not self._generating:
                        self._unload("without work" if idle else "for another teacher")

    @property
    def _wanted(self) -> bool:
        return self._slot is not None and self._slot.wanted

    def _unload(self, why: str) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            log.info("unloaded %s", why)
        if self._slot is not None:
            self._slot.leave()

    def close(self) -> None:
        """See `Engine.close`."""
        self._closed.set()
        self._thread.join()
        with self._lock:
            self._unload("at the end")
