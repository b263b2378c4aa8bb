"""How a new version leaves the trainer: snapshots in a store, or a broadcast. Never more than one on its way.

    main thread                                      publishing thread
    wait for the previous one (the only waiting)
    copy this rank's shards                  ──▶     encode, write; or announce, gather and send
    train on                                         Published

What needs a collective of training's (a folder) happens in the main thread, in the same order on every rank.

For a broadcast the copies of the ranks are gathered on rank 0 bucket by bucket, beside training:

    rank r > 0                                    rank 0
    waits for a number   ◀────── gloo ────────    bucket k
    its bytes of bucket k  ── gloo or NCCL ──▶    put where they belong: the bucket is whole

Rank 0 asks and the others answer, in a thread of their own and a process group of their own: no collective of
training waits for this one, and rank 0 may begin again when a broadcast failed. It holds the bucket that it
gathers, the one that it sends, and one rank's bytes of the first: at most 3 × BUCKET_BYTES, however large the
model is.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Final

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from student_trainer.config import TrainerConfig
from student_trainer.controller_client import ControllerClient
from student_trainer.engine import Learner
from student_trainer.ranks import Ranks
from student_trainer.weights import DTYPES
from sync.base.address import own_address, token_from_environment
from sync.base.decoding import json_decoder
from sync.base.durable import waiting_for_space
from sync.base.errors import ConfigError, SnapshotError, StoreError, Unreachable
from sync.base.retry import retrying
from sync.weights.broadcast import BroadcastSender
from sync.weights.buckets import BUCKET_BYTES, Part, Plan, nbytes
from sync.weights.delta.codec import Bits
from sync.weights.delta.file import Slice
from sync.weights.publish import Publisher
from sync.weights.snapshots.admin import Collected, gc
from sync.weights.snapshots.checkpoint import BITS, TensorMeta
from sync.weights.stores import open_store
from sync.wire import Published, RunIdentity, TrainerWelcome, Version

log = logging.getLogger(__name__)
Work = Callable[[], bool]
"""What is left to do in the background; whether the next version should be an anchor then."""
Transport = Callable[[Version, bool], Work]
"""(version, whether it must be an anchor) → what is left. Copies what is published; collective."""
MAX_FAILURES: Final = 3
"""Publications in a row that may fail before the run does."""
REPEAT_SECONDS: Final = 60.0
"""Time from a failure until the same version is published again: an outage of a minute or two ends no run."""
_TRIES: Final = 4  # of one broadcast, each time without the replicas that were lost before
_PAUSE_SECONDS: Final = 0.5  # before another try: by then the controller has noticed replicas that died
_COLLECT_SECONDS: Final = 600.0  # between two garbage collections of the store
_TORCH_NAMES: Final = {kind: str(dtype).removeprefix("torch.") for dtype, kind in DTYPES.items()}
_DONE: Final = -1  # the number behind the last bucket of a version
_PATIENCE: Final = timedelta(days=7)  # between two numbers; the end of rank 0 is noticed at once


class Publishing:
    """Sends versions by a transport, one at a time. One that fails may be skipped, or published again; a few
    failures in a row are an error.

    Order: (`publish` → `settle`)*.
    """

    def __init__(self, transport: Transport) -> None:
        self.newest: Version | None = None
        """The version published last, or on its way."""
        self.arrived: Version | None = None
        """The newest version that can be read, or was received; meaningful on rank 0, after `settle`."""
        self.anchor_due = True
        """Whether the next version should be a whole one, as after a failed one, which left no base; known
        between `settle` and `publish`."""
        self._transport, self._failures, self._repeat_at = transport, 0, 0.0
        self._thread = ThreadPoolExecutor(1, "publish")
        self._running: Future[None] | None = None

    def settle(self, seconds: float | None = None) -> bool:
        """Wait until the version before has arrived or failed; False: neither after `seconds`.

        Raises what went wrong; of failures of store or replica, the last of MAX_FAILURES in a row.
        """
        if self._running is not None:
            if wait([self._running], seconds).not_done:
                return False
            running, self._running = self._running, None
            running.result()
        return True

    def words(self) -> str:
        """What is on its way, and whether it waits for disk space; empty: nothing is. From any thread."""
        running = self._running
        if running is None or running.done():
            return ""
        return "; ".join([f"it publishes {self.newest}", *waiting_for_space])

    def repeats(self, due: bool) -> bool:
        """Whether to publish the newest version again: it is `due` or has failed, and REPEAT_SECONDS have
        passed since a failure. Meaningful on rank 0. Raises as `settle` does."""
        over = self.settle(0.0) and time.monotonic() >= self._repeat_at
        return over and (due or self.arrived != self.newest)

    def publish(self, version: Version, anchor: bool) -> None:
        """Send this version on its way; call `settle` first. Collective."""
        assert self._running is None
        self.newest = version
        self._running = self._thread.submit(self._attempt, version, self._transport(version, anchor))

    def _attempt(self, version: Version, work: Work) -> None:
        try:
            self.anchor_due = work()
        except (StoreError, Unreachable) as error:
            self._failures, self.anchor_due = self._failures + 1, True
            self._repeat_at = time.monotonic() + REPEAT_SECONDS
            if self._failures >= MAX_FAILURES:
                raise
            log.error("%s was not published (%d of %d): %s", version, self._failures, MAX_FAILURES, error)
        else:
            self._failures, self._repeat_at, self.arrived = 0, 0.0, version


def open_transport(
    config: TrainerConfig, learner: Learner, client: ControllerClient, welcome: TrainerWelcome
) -> Transport:
    """The configured way for new versions: by the store, or by broadcasts, beside which some go there too."""
    settings, ranks, weights = config.weights, learner.ranks, learner.weights
    broadcasts, kept = settings.transport == "broadcast", None
    if not broadcasts or config.keep_every is not None:
        store = open_store(settings.store, config.run_dir / "store")
        publisher = Publisher(
            store,
            RunIdentity(config.run, welcome.run.id, weights.fingerprint),
            weights.slices,
            rank=ranks.rank,
            world_size=ranks.world_size,
            weights=settings,
            anchors_only=weights.adapters or broadcasts,
        )
        scratch, collect = config.run_dir / "anchors", partial(gc, store, config.run, settings.keep_anchors)
        kept = SnapshotTransport(publisher, learner, client, scratch, welcome.parent, collect).stage
        if not broadcasts:
            return kept
    sender = None
    if ranks.rank == 0:
        host, token = own_address(config.controller_url), token_from_environment()
        sender = BroadcastSender(host, settings.timeout_seconds, ranks.device, token)
    return BroadcastTransport(sender, learner, client, kept, config.keeps).stage


class SnapshotTransport:
    """Versions in a store; every rank writes its own shards, rank 0 the manifest."""

    def __init__(
        self,
        publisher: Publisher,
        learner: Learner,
        client: ControllerClient,
        scratch: Path,
        parent: Version | None,
        collect: Callable[[], Collected],
    ) -> None:
        """`scratch` holds the folder of an anchor until it is published; `parent`: of the first version.

        `collect` removes what a new anchor made superfluous; called on rank 0, beside everything else.
        """
        self._publisher, self._learner, self._client = publisher, learner, client
        self._scratch, self._parent = scratch, parent
        self._collect, self._collect_at = collect, 0.0
        self._rank0 = learner.ranks.rank == 0
        if self._rank0:
            shutil.rmtree(scratch, ignore_errors=True)

    def stage(self, version: Version, anchor: bool) -> Work:
        """A `Transport`."""
        shards, folder = self._learner.weights.snapshot(), self._scratch / str(version)
        if not anchor:
            return lambda: self._report(self._publisher.delta(version, shards))
        self._learner.export(folder)
        return lambda: self._anchor(version, folder, shards)

    def _anchor(self, version: Version, folder: Path, shards: dict[str, Any]) -> bool:
        target, kind = folder if self._rank0 else None, "lora" if self._learner.weights.adapters else "full"
        try:
            published = self._publisher.anchor(version, self._parent, target, shards, kind)  # type: ignore[arg-type]
        finally:
            if target is not None:
                shutil.rmtree(target, ignore_errors=True)
        due = self._report(published)
        if self._rank0 and time.monotonic() >= self._collect_at:
            self._collect_at = time.monotonic() + _COLLECT_SECONDS
            Thread(target=self._collect_garbage, name="collect", daemon=True).start()
        return due

    def _report(self, published: Published) -> bool:
        """Whether an anchor is due, which rank 0 alone knows: the deltas since the last cost too much."""
        if not self._rank0:
            return False
        self._client.report(published)
        return self._publisher.anchor_due

    def _collect_garbage(self) -> None:
        """Remove what is superfluous; a later collection makes up for one that fails or is cut off."""
        try:
            for name, problem in self._collect().odd.items():
                log.warning("garbage collection left %s: %s", name, problem)
        except (StoreError, SnapshotError) as error:
            log.warning("the store was not collected: %s", error)


class BroadcastTransport:
    """Straight to the replicas: copies of the ranks' shards, gathered bucket by bucket while rank 0 sends.

    A replica that is lost ends the broadcast at once; the same copies then go to those that are left. A
    version to be kept goes to the store next, whether it was received or not; if the store fails, the next
    one that is broadcast goes there, the same or another.
    """

    def __init__(
        self,
        sender: BroadcastSender | None,
        learner: Learner,
        client: ControllerClient,
        keep: Transport | None = None,
        keeps: Callable[[int], bool] = bool,
    ) -> None:
        """`sender`: None but on rank 0; `keep`: to the store, None where nothing goes there, `keeps`: whether
        the version of a step does. Collective. Once the client is stopping, nothing is retried."""
        self._sender, self._learner, self._client = sender, learner, client
        self._keep, self._keeps = keep, keeps
        self._kept: Version | None = None  # the newest version that went to the store, or failed there
        weights = learner.weights
        self._gathering = Gathering(learner.ranks, weights.slices, adapter_config=weights.adapter_config)

    def stage(self, version: Version, anchor: bool) -> Work:
        """A `Transport`."""
        shards, keep = self._learner.weights.snapshot(), None
        if self._keep and (anchor or (version != self._kept and self._keeps(version.step))):
            keep, self._kept = self._keep(version, True), version

        def work() -> bool:
            try:
                if self._sender is None:
                    self._gathering.answer(shards)
                else:
                    self._send(self._sender, version, shards)
            finally:
                if keep is not None:
                    keep()
            return False  # nothing that comes later builds on it

        return work

    def _send(self, sender: BroadcastSender, version: Version, shards: dict[str, Bits]) -> None:
        stopping = self._client.stopping
        again = retrying(
            lambda error: isinstance(error, Unreachable) and not stopping.is_set(),
            attempts=_TRIES,
            first=_PAUSE_SECONDS,
            longest=_PAUSE_SECONDS,
            note=lambda error: log.warning("%s; %s goes to those that are left", error, version),
        )
        try:
            again(self._send_once, sender, version, shards)
        finally:
            self._gathering.done()

    def _send_once(self, sender: BroadcastSender, version: Version, shards: dict[str, Bits]) -> None:
        plan, attempt = self._gathering.plan, secrets.token_hex(8)
        size = sum(map(nbytes, plan.metas))
        published = Published(
            version, "broadcast", size, size, 0.0, rendezvous=sender.address, attempt=attempt
        )
        audience = self._client.audience(published)
        workers, buckets = audience.world_size - 1, self._gathering.buckets(shards)
        log.info("%s goes to %d workers as broadcast %s", version, workers, audience.group)
        sender.send(audience, plan, buckets, lambda: self._client.lost(audience.group))
        log.info("%s went to %d workers", version, workers)


# --- the ranks' copies, gathered on rank 0 ------------------------------------------------------------------


class Gathering:
    """Gathers what `Weights.snapshot` copied. Made by all ranks together, for the length of a run."""

    def __init__(
        self,
        ranks: Ranks,
        slices: list[Slice],
        bucket_bytes: int = BUCKET_BYTES,
        adapter_config: str | None = None,
    ) -> None:
        """`slices` and `adapter_config`: of `Weights`. Collective.

        Raises ConfigError when the slices do not tile the tensors.
        """
        bodies = ranks.collect(msgspec.json.encode(slices))
        every = [json_decoder(list[Slice]).decode(body) for body in bodies]
        self.plan = Plan(metas_of(every), bucket_bytes, adapter_config)
        self._parts = []
        for rank_slices in every:
            sized = ((piece, BITS[piece.dtype].itemsize) for piece in rank_slices)
            ranges = ((piece.name, piece.start * width, piece.count * width) for piece, width in sized)
            self._parts.append(self.plan.parts(ranges))
        self._ranks, self._group = ranks, None
        self._turn, self._exchange = 0, Lock()
        if ranks.world_size > 1:
            backend = "gloo" if ranks.device.type == "cpu" else f"cpu:gloo,{ranks.device.type}:nccl"
            self._group = dist.new_group(backend=backend, timeout=_PATIENCE)

    def buckets(self, shards: Mapping[str, Bits]) -> Iterator[torch.Tensor]:
        """Rank 0: every bucket of the plan, uint8, each in memory of its own.

        Called again it begins anew; who still asks the one before, or asks after `done`, gets a RuntimeError.
        """
        with self._exchange:
            self._turn += 1
            turn = self._turn
        for number in range(len(self.plan.buckets)):
            with self._exchange:
                if turn != self._turn:
                    raise RuntimeError("these buckets were given up")
                flat_N = self._bucket(number, shards)
            yield flat_N

    def _bucket(self, number: int, shards: Mapping[str, Bits]) -> torch.Tensor:
        flat_N = torch.zeros(len(self.plan.buckets[number]), dtype=torch.uint8, device=self._ranks.device)
        parts_by_rank = [parts[number] for parts in self._parts]
        others = [rank for rank, parts in enumerate(parts_by_rank) if rank > 0 and parts]
        for rank in others:
            dist.send(torch.tensor([number]), rank, group=self._group)
        _place(flat_N, parts_by_rank[0], _joined(parts_by_rank[0], shards, self._ranks.device))
        for rank in others:
            size = sum(part.nbytes for part in parts_by_rank[rank])
            received_N = torch.empty(size, dtype=torch.uint8, device=self._ranks.device)
            dist.recv(received_N, rank, group=self._group)
            _place(flat_N, parts_by_rank[rank], received_N)
        return flat_N

    def answer(self, shards: Mapping[str, Bits]) -> None:
        """Ranks above 0: send what rank 0 asks for, until it is `done`."""
        number, parts = torch.zeros(1, dtype=torch.int64), self._parts[self._ranks.rank]
        while True:
            dist.recv(number, 0, group=self._group)
            if int(number) == _DONE:
                return
            dist.send(_joined(parts[int(number)], shards, self._ranks.device), 0, group=self._group)

    def done(self) -> None:
        """Rank 0: nothing more is asked for of this version."""
        with self._exchange:
            self._turn += 1
            for rank in range(1, self._ranks.world_size):
                dist.send(torch.tensor([_DONE]), rank, group=self._group)


def metas_of(every: list[list[Slice]]) -> list[TensorMeta]:
    """The tensors of which the ranks hold slices. Raises ConfigError when those do not tile them."""
    whole, counts = dict[str, Slice](), Counter[str]()
    for part in chain.from_iterable(every):
        whole[part.name] = part
        counts[part.name] += part.count
    wrong = {name: counts[name] for name, part in whole.items() if counts[name] != np.prod(part.shape)}
    if wrong:
        raise ConfigError(
            f"the {len(every)} ranks hold {wrong} elements of these tensors: every element must belong to "
            'exactly one rank; use weights.transport = "snapshot" and report this model'
        )
    return [TensorMeta(part.name, _TORCH_NAMES[part.dtype], tuple(part.shape)) for part in whole.values()]


def _place(flat_N: torch.Tensor, parts: list[Part], pieces_N: torch.Tensor) -> None:
    for part, piece in zip(parts, pieces_N.split([part.nbytes for part in parts]), strict=True):
        flat_N[part.start : part.stop] = piece


def _joined(parts: list[Part], shards: Mapping[str, Bits], device: torch.device) -> torch.Tensor:
    """These parts of a rank's shards, one behind the other."""
    pieces = [torch.empty(0, dtype=torch.uint8, device=device)]
    for part in parts:
        bits: Any = shards[part.name]
        if isinstance(bits, np.ndarray):
            bits = torch.from_numpy(bits)
        pieces.append(bits.view(torch.uint8)[part.at : part.at + part.nbytes].to(device))
    return torch.cat(pieces)
