"""Completions that a teacher writes, beside the scores it gives.

    line of drafts ──▶ one batch under way (≤ budget tokens, one Manner) ──▶ slices of SLICE_SECONDS ──▶ texts

Between two slices the engine computes a batch of scores, if any wait: neither keeps the other from its turn.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from sync.errors import DataError, Unreachable
from teacher_service.engines.base import EngineCompletion, EnginePrompt, GenerationParams, Writer
from teacher_service.request_queue import Outcome, QueuedItem, RequestQueue

log = logging.getLogger(__name__)
SLICE_SECONDS: Final = 0.1
"""Writing goes on for so long before scores get their turn; at least one step."""


class _Batch(NamedTuple):
    generation: GenerationParams
    waiting: list[QueuedItem[EnginePrompt]]


class GenerationQueue:
    """Writes one batch at a time. Order of use: `ready`, and while it is true `advance`, then `settle`."""

    def __init__(self, engine: Writer, budget: int) -> None:
        self._engine, self._budget = engine, budget
        self._batch: _Batch | None = None
        self._steps: Iterator[list[EngineCompletion] | None] | None = None
        self._again: deque[_Batch] = deque()
        """Halves of batches that failed."""

    def ready(self, line: RequestQueue[GenerationParams, EnginePrompt]) -> bool:
        """Whether there is something to advance; a batch that nobody waits for is given up."""
        now = time.monotonic()
        if self._batch is not None and not any(w.ticket.live(now) for w in self._batch.waiting):
            self._batch = self._steps = None
        while self._batch is None:
            if self._again:
                self._batch = self._again.popleft()
            elif (taken := line.take(self._budget)) is not None:
                self._batch = _Batch(*taken)
            else:
                return False
        return True

    def advance(self) -> list[Outcome] | None:
        """One slice, in the engine's thread: outcomes of the batch once all its texts have ended."""
        assert self._batch is not None, "ready() said so"
        try:
            return self._slice(self._batch)
        except Unreachable as error:
            return [error] * len(self._batch.waiting)
        except Exception as error:  # noqa: BLE001 (an engine may fail in any way: the batch is halved, the cause told)
            return self._after_failure(self._batch, error)

    def _slice(self, batch: _Batch) -> list[Outcome] | None:
        if self._steps is None:
            self._steps = self._engine.write([waiting.work for waiting in batch.waiting], batch.generation)
        end = time.monotonic() + SLICE_SECONDS
        while (texts := next(self._steps)) is None:
            if time.monotonic() >= end:
                return None
        if len(texts) != len(batch.waiting):
            raise DataError(f"the engine gave {len(texts)} texts for {len(batch.waiting)} prompts")
        return [*texts]

    def _after_failure(self, batch: _Batch, error: Exception) -> list[Outcome] | None:
        """Each half on its own, so that a prompt that cannot be completed fails alone."""
        if len(batch.waiting) == 1:
            log.error("a prompt of %d tokens failed", len(batch.waiting[0].work.token_ids_P), exc_info=error)
            return [f"the engine failed on this prompt: {type(error).__name__}: {error}"]
        middle = len(batch.waiting) // 2
        for half in (batch.waiting[:middle], batch.waiting[middle:]):
            self._again.append(_Batch(batch.generation, half))
        self._batch = self._steps = None
        return None

    def settle(self, outcomes: list[Outcome]) -> int:
        """Hand the finished batch to its callers; tokens written."""
        assert self._batch is not None, "advance() gave its outcomes"
        for waiting, outcome in zip(self._batch.waiting, outcomes, strict=True):
            waiting.ticket.settle(waiting.index, outcome)
        self._batch = self._steps = None
        return sum(len(one.token_ids_T) for one in outcomes if isinstance(one, EngineCompletion))
