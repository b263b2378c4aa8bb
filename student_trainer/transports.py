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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Thread
from typing import Any, Final, Literal, Protocol

from student_trainer.controller_client import Controller
from student_trainer.weights import Weights
from sync.broadcast import BroadcastSender
from sync.errors import SnapshotError, StoreError, Unreachable
from sync.publish import Publisher, PublishReport
from sync.snapshots.checkpoint import meta_of
from sync.wire import Published, Version

log = logging.getLogger(__name__)
_PATIENCE: Final = 3
"""Publications in a row that may fail before the run does."""
_TRIES: Final = 4
"""How often one version is broadcast, each time without the replicas that were lost in the time before."""
_COLLECT_SECONDS: Final = 600.0
"""Between two garbage collections of the store."""
_PAUSE_SECONDS: Final = 0.5
"""Before another try: whoever died on the way is missed by then."""


class WeightTransport(Protocol):
    """One way to publish. `start` first, `close` last; every method is called on all ranks alike."""

    @property
    def anchor_due(self) -> bool:
        """Between `settle` and `publish`: this version should be a full one; any rank may say so."""

    newest: Version | None
    """The version published last, or on its way."""

    @property
    def arrived(self) -> Version | None:
        """The newest version that can be read, or was received; meaningful on rank 0, after `settle`."""

    def start(self, version: Version, parent: Version | None) -> None:
        """Publish what training starts from, and wait until it can be read. Collective."""

    def settle(self, seconds: float | None = None) -> bool:
        """Wait until the version before can be read, or has failed; False: neither after `seconds`.

        Raises what may not go on.
        """

    def publish(self, version: Version, anchor: bool) -> None:
        """Send this version on its way; call `settle` first. Collective."""

    def close(self) -> None:
        """Settle, and give up what is held."""


class Background:
    """A thread that publishes one version at a time; a store or replica that fails costs that version."""

    def __init__(self) -> None:
        self.failures = 0
        """In a row, so far."""
        self.arrived: Version | None = None
        """The newest version whose work was done."""
        self._thread = ThreadPoolExecutor(1, "publish")
        self._running: Future[None] | None = None

    def wait(self, seconds: float | None = None) -> bool:
        """Whether nothing runs, after `seconds` at most. Raises what went wrong; of failures, the last of
        `_PATIENCE`."""
        if self._running is not None and wait([self._running], seconds).not_done:
            return False
        running, self._running = self._running, None
        if running is not None:
            running.result()
        return True

    def submit(self, version: Version, work: Callable[[], None]) -> None:
        """Start `work`, which publishes `version`; nothing else may be running."""
        assert self._running is None
        self._running = self._thread.submit(self._attempt, version, work)

    def _attempt(self, version: Version, work: Callable[[], None]) -> None:
        try:
            work()
        except (StoreError, Unreachable) as error:
            self.failures += 1
            if self.failures >= _PATIENCE:
                raise
            log.error("%s was not published (%d of %d): %s", version, self.failures, _PATIENCE, error)
        else:
            self.failures, self.arrived = 0, version


class SnapshotTransport:
    """Versions in a store; every rank writes its own shards, rank 0 the manifest."""

    def __init__(
        self,
        publisher: Publisher,
        weights: Weights,
        export: Callable[[Path], None],
        scratch: Path,
        controller: Controller,
        rank: int,
        collect: Callable[[], object] = lambda: None,
    ) -> None:
        """`export` writes the folder of an anchor, a collective; `scratch` holds it until it is published.

        `collect` removes what a new anchor made superfluous; called on rank 0, beside everything else.
        """
        self.newest: Version | None = None
        self._publisher, self._weights, self._export = publisher, weights, export
        self._scratch, self._controller, self._rank = scratch, controller, rank
        self._collect, self._collect_at = collect, 0.0
        self._due = False
        self._parent: Version | None = None
        self._background = Background()

    @property
    def anchor_due(self) -> bool:
        """Adapters always go whole; else deltas grew dear, or the last version failed and left no base."""
        return self._weights.adapters or self._due or self._background.failures > 0

    @property
    def arrived(self) -> Version | None:
        return self._background.arrived

    def start(self, version: Version, parent: Version | None) -> None:
        self._parent = parent
        if self._rank == 0:
            shutil.rmtree(self._scratch, ignore_errors=True)
        self.publish(version, anchor=True)
        self.settle()

    def settle(self, seconds: float | None = None) -> bool:
        return self._background.wait(seconds)

    def publish(self, version: Version, anchor: bool) -> None:
        self.newest, shards = version, self._weights.snapshot()
        if not anchor:
            self._background.submit(version, lambda: self._tell(self._publisher.delta(version, shards)))
            return
        folder = self._scratch / str(version)
        self._export(folder)
        self._background.submit(version, lambda: self._anchor(version, folder, shards))

    def _anchor(self, version: Version, folder: Path, shards: dict[str, Any]) -> None:
        own = folder if self._rank == 0 else None
        try:
            kind: Literal["full", "lora"] = "lora" if self._weights.adapters else "full"
            report = self._publisher.anchor(version, self._parent, own, shards, kind)
        finally:
            if own is not None:
                shutil.rmtree(own)
        self._tell(report)
        if own is not None and time.monotonic() >= self._collect_at:
            self._collect_at = time.monotonic() + _COLLECT_SECONDS
            Thread(target=self._collect_garbage, name="collect", daemon=True).start()

    def _collect_garbage(self) -> None:
        """What fails, or is cut off by the end of the process, is made up for by a later one."""
        try:
            self._collect()
        except (StoreError, SnapshotError) as error:
            log.warning("the store was not collected: %s", error)

    def _tell(self, report: PublishReport) -> None:
        self._due = report.anchor_due
        if self._rank != 0:
            return
        self._controller.tell(
            Published(
                version=report.version,
                kind=report.kind,
                bytes=report.bytes,
                full_bytes=report.full_bytes,
                seconds=report.seconds,
            )
        )

    def close(self) -> None:
        self.settle()


class BroadcastTransport:
    """Straight to the replicas. All is gathered before rank 0 sends: a gather inside a send deadlocks.

    A replica that is lost ends the broadcast at once; the same tensors then go to those that are left.
    """

    anchor_due = False

    def __init__(
        self,
        sender: BroadcastSender | None,
        weights: Weights,
        controller: Controller,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """`sender` on rank 0, None elsewhere. `stopping`: asked to stop, nothing is tried again."""
        self.newest: Version | None = None
        self._sender, self._weights, self._controller = sender, weights, controller
        self._stopping = stopping
        self._background = Background()

    @property
    def arrived(self) -> Version | None:
        return self._background.arrived

    def start(self, version: Version, parent: Version | None) -> None:
        self.publish(version, anchor=True)
        self.settle()

    def settle(self, seconds: float | None = None) -> bool:
        return self._background.wait(seconds)

    def publish(self, version: Version, anchor: bool) -> None:
        self.newest, tensors = version, dict(self._weights.gathered())
        if self._sender is not None:
            self._background.submit(version, lambda: self._send(version, tensors))

    def _send(self, version: Version, tensors: dict[str, Any]) -> None:
        for attempt in range(1, _TRIES + 1):
            try:
                self._send_once(version, tensors)
                return
            except Unreachable as error:
                if attempt == _TRIES or self._stopping():
                    raise
                log.warning("%s; %s goes to those that are left", error, version)
                time.sleep(_PAUSE_SECONDS)

    def _send_once(self, version: Version, tensors: dict[str, Any]) -> None:
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
        group, replicas = audience.group, audience.world_size - 1
        log.info("%s goes to %d replicas as broadcast %s", version, replicas, group)
        self._sender.send(audience, metas, tensors.items(), lambda: self._controller.lost(group))
        log.info("%s went to %d replicas in %.3f s", version, replicas, time.monotonic() - started)

    def close(self) -> None:
        self.settle()
        if self._sender is not None:
            self._sender.close()
            self._sender = None


class NullTransport:
    """Nothing is published, only remembered: for tests of training alone."""

    anchor_due = False
    newest: Version | None = None

    @property
    def arrived(self) -> Version | None:
        return self.newest

    def start(self, version: Version, parent: Version | None) -> None:
        self.newest = version

    def publish(self, version: Version, anchor: bool) -> None:
        self.newest = version

    def settle(self, seconds: float | None = None) -> bool:
        return True

    def close(self) -> None:
        """Nothing."""
