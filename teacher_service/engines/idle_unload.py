"""An engine that gives its memory back while nobody needs it.

awake ──(idle_seconds without work, or its seat is wanted)──▶ resting ──(work comes, a seat)──▶ awake
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from sync.wire import Head
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
from teacher_service.engines.gpu_slots import POLL_SECONDS, GpuSlot

log = logging.getLogger(__name__)
R = TypeVar("R")


class IdleUnloadEngine:
    """Loads an engine when work comes, and closes it after `idle_seconds` without work.

    It is loaded once at the start, so that a teacher that cannot serve fails early, and for `engine_info`.
    With a `slot` it is loaded only while it holds one, and is unloaded early when another teacher wants that.
    It is never unloaded while a completion is generated: that holds the model until its last step.
    """

    def __init__(self, load: Callable[[], Engine], idle_seconds: float, slot: GpuSlot | None = None) -> None:
        self._load, self._idle_seconds, self._slot = load, idle_seconds, slot
        self._lock, self._over = threading.Lock(), threading.Event()
        self._engine: Engine | None = None
        self._used = time.monotonic()
        self._texts = 0
        """Batches of texts under way."""
        self.engine_info = self._wake().engine_info
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def awake(self) -> bool:
        """Whether the engine is loaded."""
        return self._engine is not None

    def score(self, items: Sequence[Item], options: ScoreOptions) -> EngineScores:
        """See `Engine.score`; the first batch after a rest waits for the engine to load."""
        return self._while_loaded(lambda engine: engine.score(items, options))

    def write(
        self, engine_prompts: Sequence[EnginePrompt], generation: GenerationParams
    ) -> Iterator[list[EngineCompletion] | None]:
        """See `Writer.write`; it is no time without work until the last step."""
        with self._lock:
            if self._wanted:
                self._rest("for another teacher")
            self._texts += 1
        try:
            steps = self._while_loaded(lambda engine: writer(engine).write(engine_prompts, generation))
            yield from each_step(steps, lambda step: self._while_loaded(lambda _: step()))
        finally:
            self._texts -= 1

    def head(self) -> Head | None:
        """See `Engine.head`."""
        return self._while_loaded(lambda engine: engine.head())

    def _while_loaded(self, work: Callable[[Engine], R]) -> R:
        with self._lock:
            try:
                return work(self._wake())
            finally:
                self._used = time.monotonic()
                if self._slot is not None:
                    self._slot.used()

    def _wake(self) -> Engine:
        if self._engine is None:
            if self._slot is not None:
                self._slot.take()
            started = time.monotonic()
            try:
                self._engine = self._load()
            finally:
                if self._engine is None and self._slot is not None:
                    self._slot.leave()
            seconds = time.monotonic() - started
            if self._slot is not None:
                self._slot.keep_for(seconds)
            log.info("loaded in %.1f s", seconds)
        return self._engine

    def _watch(self) -> None:
        """Close the engine when it was idle for long, or when its seat is wanted; between two batches."""
        while not self._over.wait(min(POLL_SECONDS, self._idle_seconds)):
            idle = time.monotonic() - self._used >= self._idle_seconds
            if self._engine is not None and (idle or self._wanted):
                with self._lock:
                    if not self._texts:
                        self._rest("without work" if idle else "for another teacher")

    @property
    def _wanted(self) -> bool:
        return self._slot is not None and self._slot.wanted

    def _rest(self, why: str) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            log.info("released %s", why)
        if self._slot is not None:
            self._slot.leave()

    def close(self) -> None:
        """See `Engine.close`."""
        self._over.set()
        self._thread.join()
        with self._lock:
            self._rest("at the end")
