"""Where a rank's batches come from: one protocol, over HTTP and in memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from sync.client import BlockingPeer
from sync.wire import BatchRequest, Stop, TrainBatch, Version, Wait

_GLANCE_SECONDS = 0.2
"""How often a rank that waits for a batch looks whether it was asked to stop."""


class BatchSource(Protocol):
    """Batches of one rank, in order. Poll until a batch or Stop comes; `expect` may be left out."""

    def expect(self, version: Version) -> None:
        """The batch for `version` will be polled next: fetch it meanwhile."""

    def poll(self, version: Version, interrupted: threading.Event) -> TrainBatch | Wait | Stop:
        """One answer for `version`: within a long poll's time, at once when `interrupted` is set (Wait)."""

    def close(self) -> None:
        """Called once, after the last poll."""


class HttpSource:
    """Batches from the controller; the next one is asked for in a thread while a step trains."""

    def __init__(self, peer: BlockingPeer, rank: int, world_size: int) -> None:
        self._peer, self._rank, self._world_size = peer, rank, world_size
        self._thread = ThreadPoolExecutor(1, "batches")
        self._asked: tuple[Version, Future[TrainBatch | Wait | Stop]] | None = None

    def expect(self, version: Version) -> None:
        if self._asked is None:
            self._asked = (version, self._thread.submit(self._ask, version))

    def poll(self, version: Version, interrupted: threading.Event) -> TrainBatch | Wait | Stop:
        self.expect(version)
        assert self._asked is not None
        assert self._asked[0] == version
        answer = self._asked[1]
        while not interrupted.is_set():
            try:
                result = answer.result(_GLANCE_SECONDS)
            except TimeoutError:
                if answer.done():
                    raise
                continue
            self._asked = None
            return result
        return Wait()

    def _ask(self, version: Version) -> TrainBatch | Wait | Stop:
        request = BatchRequest(version=version, rank=self._rank, world_size=self._world_size)
        return self._peer.call("/v1/batch", request, TrainBatch | Wait | Stop)  # type: ignore[arg-type]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class MemorySource:
    """Batches from a list, then Stop; for tests and for training without a controller."""

    def __init__(self, batches: Sequence[TrainBatch], checkpoint: bool = False) -> None:
        self._batches = {batch.version: batch for batch in batches}
        self._stop = Stop(reason="all batches were trained on", checkpoint=checkpoint)

    def expect(self, version: Version) -> None:
        """Nothing to fetch."""

    def poll(self, version: Version, interrupted: threading.Event) -> TrainBatch | Wait | Stop:
        return Wait() if interrupted.is_set() else self._batches.get(version, self._stop)

    def close(self) -> None:
        """Nothing to close."""
