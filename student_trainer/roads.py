"""How a new version leaves the trainer: snapshots in a store, or a broadcast. Never more than one on its way.

    main thread                                      publishing thread
    wait for the previous one (the only waiting)
    copy this rank's shards, or gather all   ──▶     encode, write; or announce and send
    train on                                         Published

What needs a collective (a gather) happens in the main thread, in the same order on every rank.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Protocol

from student_trainer.controller import Controller
from student_trainer.weights import Weights
from sync.errors import StoreError
from sync.weights.publish import Publisher, PublishReport
from sync.wire import Published, Version

log = logging.getLogger(__name__)
_PATIENCE: Final = 3
"""Publications in a row that may fail before the run does."""


class Road(Protocol):
    """One way to publish. `start` first, `drain` last; every method is called on all ranks alike."""

    anchor_due: bool
    """The next version should be a full one; any rank may say so."""
    newest: Version | None
    """The version published last, or on its way."""

    def start(self, version: Version, parent: Version | None) -> None:
        """Publish what training starts from, and wait until it can be read. Collective."""

    def publish(self, version: Version, anchor: bool) -> None:
        """Wait for the previous version, then send this one on its way. Collective."""

    def drain(self) -> None:
        """Wait until the last version can be read. Raises what went wrong with it."""


class Background:
    """A thread that does one thing at a time; `wait` raises what the last one met."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "publish")
        self._running: Future[None] | None = None

    def wait(self) -> None:
        """Return when nothing runs."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def submit(self, work: Callable[..., None], *arguments: Any) -> None:
        """Start `work` in the thread; nothing else may be running."""
        assert self._running is None
        self._running = self._thread.submit(work, *arguments)


class SnapshotRoad:
    """Versions in a store; every rank writes its own shards, rank 0 the manifest."""

    def __init__(
        self,
        publisher: Publisher,
        weights: Weights,
        export: Callable[[Path], None],
        scratch: Path,
        controller: Controller,
        rank: int,
    ) -> None:
        """`export` writes a Hugging Face folder, a collective; `scratch` holds it until it is published."""
        self.anchor_due = False
        self._failures = 0
        self.newest: Version | None = None
        self._publisher, self._weights, self._export = publisher, weights, export
        self._scratch, self._controller, self._rank = scratch, controller, rank
        self._parent: Version | None = None
        self._background = Background()

    def start(self, version: Version, parent: Version | None) -> None:
        self._parent = parent
        self.publish(version, anchor=True)
        self.drain()

    def publish(self, version: Version, anchor: bool) -> None:
        self._background.wait()
        self.newest, shards = version, self._weights.snapshot()
        if not anchor:
            self._background.submit(self._delta, version, shards)
            return
        folder = self._scratch / str(version)
        self._export(folder)
        self._background.submit(self._anchor, version, folder, shards)

    def _delta(self, version: Version, shards: dict[str, Any]) -> None:
        self._attempt(version, lambda: self._publisher.delta(version, shards))

    def _anchor(self, version: Version, folder: Path, shards: dict[str, Any]) -> None:
        own = folder if self._rank == 0 else None
        self._attempt(version, lambda: self._publisher.anchor(version, self._parent, own, shards))
        if own is not None:
            shutil.rmtree(own)

    def _attempt(self, version: Version, publish: Callable[[], PublishReport]) -> None:
        """Publish and say so. A store that fails costs the version; failing `_PATIENCE` times, the run."""
        try:
            report = publish()
        except StoreError as error:
            self.anchor_due = True
            self._failures += 1
            if self._failures >= _PATIENCE:
                raise
            log.error(
                "%s was not published (failure %d of %d): %s", version, self._failures, _PATIENCE, error
            )
            return
        self._failures, self.anchor_due = 0, report.anchor_due
        if self._rank == 0:
            self._tell(report)

    def _tell(self, report: PublishReport) -> None:
        self._controller.tell(
            Published(
                version=report.version,
                kind=report.kind,
                bytes=report.bytes,
                full_bytes=report.full_bytes,
                seconds=report.seconds,
            )
        )

    def drain(self) -> None:
        self._background.wait()


class BroadcastRoad:
    """Straight to the replicas. Everything is gathered before rank 0 sends: a gather inside a send deadlocks."""

    anchor_due = False

    def __init__(self, sender: Any | None, weights: Weights, controller: Controller) -> None:
        """`sender`: sync.weights.broadcast.BroadcastSender on rank 0, None elsewhere."""
        self.newest: Version | None = None
        self._sender, self._weights, self._controller = sender, weights, controller
        self._background = Background()

    def start(self, version: Version, parent: Version | None) -> None:
        self.publish(version, anchor=True)
        self.drain()

    def publish(self, version: Version, anchor: bool) -> None:
        self._background.wait()
        self.newest, tensors = version, dict(self._weights.gathered())
        if self._sender is not None:
            self._background.submit(self._send, version, tensors)

    def _send(self, version: Version, tensors: dict[str, Any]) -> None:
        from sync.replica.checkpoint import meta_of

        assert self._sender is not None
        started = time.monotonic()
        size = sum(tensor.nbytes for tensor in tensors.values())
        published = Published(
            version=version,
            kind="broadcast",
            bytes=size,
            full_bytes=size,
            seconds=0.0,
            rendezvous=self._sender.address,
        )
        audience = self._controller.audience(published)
        metas = [meta_of(name, tensor) for name, tensor in tensors.items()]
        self._sender.send(audience, metas, tensors.items())
        log.info(
            "%s went to %d replicas in %.3f s", version, audience.world_size - 1, time.monotonic() - started
        )

    def drain(self) -> None:
        self._background.wait()
        if self._sender is not None:
            self._sender.close()
            self._sender = None


class NoRoad:
    """Nothing is published, only remembered: for tests of training alone."""

    anchor_due = False
    newest: Version | None = None

    def start(self, version: Version, parent: Version | None) -> None:
        self.newest = version

    def publish(self, version: Version, anchor: bool) -> None:
        self.newest = version

    def drain(self) -> None:
        """Nothing."""
