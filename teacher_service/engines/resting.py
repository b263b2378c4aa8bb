"""An engine that gives its memory back while nobody needs it.

awake ──(idle_seconds without work)──▶ resting ──(work comes)──▶ awake
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from sync.wire import Head
from teacher_service.engines.base import Asked, Draft, Engine, Item, Manner, Marks, Text, each_step, writer

log = logging.getLogger(__name__)
R = TypeVar("R")


class RestingEngine:
    """Loads an engine when work comes, and closes it after `idle_seconds` without work.

    It is loaded once at the start, so that a teacher that cannot serve says so, and for its facts.
    """

    def __init__(self, load: Callable[[], Engine], idle_seconds: float) -> None:
        self._load, self._idle_seconds = load, idle_seconds
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._engine: Engine | None = load()
        self.facts = self._engine.facts
        self._rest_later()

    @property
    def awake(self) -> bool:
        """Whether the engine is loaded."""
        return self._engine is not None

    def score(self, items: Sequence[Item], asked: Asked) -> Marks:
        """See `Engine.score`; the first batch after a rest waits for the engine to load."""
        return self._while_awake(lambda engine: engine.score(items, asked))

    def write(self, drafts: Sequence[Draft], manner: Manner) -> Iterator[list[Text] | None]:
        """See `Writer.write`; it is no time without work until the last step."""
        steps = self._while_awake(lambda engine: writer(engine).write(drafts, manner))
        yield from each_step(steps, lambda step: self._while_awake(lambda _: step()))

    def head(self) -> Head | None:
        """See `Engine.head`."""
        return self._while_awake(lambda engine: engine.head())

    def _while_awake(self, work: Callable[[Engine], R]) -> R:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            try:
                return work(self._wake())
            finally:
                self._rest_later()

    def _wake(self) -> Engine:
        if self._engine is None:
            started = time.monotonic()
            self._engine = self._load()
            log.info("loaded again in %.1f s", time.monotonic() - started)
        return self._engine

    def _rest_later(self) -> None:
        self._timer = threading.Timer(self._idle_seconds, self._rest)
        self._timer.daemon = True
        self._timer.start()

    def _rest(self) -> None:
        """Close the engine, unless work came in the meantime (then another timer runs)."""
        with self._lock:
            if self._timer is threading.current_thread() and self._engine is not None:
                self._engine.close()
                self._engine = None
                log.info("released after %.0f s without work", self._idle_seconds)

    def close(self) -> None:
        """See `Engine.close`."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if self._engine is not None:
                self._engine.close()
                self._engine = None
