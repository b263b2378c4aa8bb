"""Weights straight from the trainer to the replicas' workers: NCCL between GPUs, gloo between CPUs.

The trainer's rank 0 serves a store of keys (`rendezvous`: one address, the run's token) and is rank 0 of a
group; each replica holds a ticket with its rank. All keys of a broadcast stand under its name, so one that
failed leaves nothing that the next one meets. At its end they are deleted, except torch's own of a group and
why it was given up, for whoever comes late. The buffers themselves go in the clear; the digests show what a
stranger puts among them.

    sender                                     every receiver
    backend: nccl or gloo        ──store──▶    refuses another one than its own
    plan: tensors, buckets       ──store──▶    plan; of an adapter with its adapter_config.json
    waits for all  ◀──────────────store────    "here", with the group that it holds
    go, in which group           ──store──▶    waits for it
    bucket after bucket          ──group──▶    its place in host memory
    digest of every tensor       ──store──▶    compares with what it holds
    waits for all  ◀──────────────store────    "received"
    or: why it was given up      ──store──▶    looked for now and then

How long a group lasts, and when a broadcast is given up: docs/weight-sync.md, "Broadcast". Nothing is loaded
here: a reception is whole and verified before anything touches a model.

Either side works in a thread of its own, for no call of torch's can be interrupted. Waiting for the others is
done here, where it can be, before torch forms the group and after; a thread that is given up inside a call
runs into the time-out by itself (NCCL: is aborted), and its result is discarded.

gloo runs in the tests. NCCL takes the same path through torch's ProcessGroupNCCL but needs a GPU for every
rank and was not run; on two GPUs, `pytest -m gpu tests/unit/sync/test_broadcast.py` runs it. Two of NCCL's
ways are heeded: a buffer that is complete on one rank may still be on its way from there to the next, so a
group is let go of only when all have said "received", or when its broadcast failed; and torch ends a process
where a collective passes its group's own time-out, so that one is longer than ours, and a failed group is
aborted.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError, wait
from datetime import timedelta
from typing import Final, NamedTuple, TypeVar

import msgspec
import torch

from sync.base.address import address_towards
from sync.base.decoding import json_decoder
from sync.base.errors import SnapshotError, Unreachable
from sync.weights.buckets import Plan, nbytes
from sync.weights.rendezvous import Group, Meeting, Served, Visitor, backend_name, used
from sync.weights.snapshots.checkpoint import TensorMeta, hasher, tensor_bytes, tensor_digest
from sync.wire import Audience, BroadcastTicket

logger = logging.getLogger(__name__)
_GLANCE_SECONDS: Final = 0.25
"""How often a sender asks whether a receiver is lost."""
_NEW: Final = ""
"""Stands for a group's name: none is held, or a new one is formed."""
T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Do `work` in a daemon thread; the first to set the future decides its result."""
    future: Future[T] = Future()

    def run() -> None:
        with contextlib.suppress(InvalidStateError):
            try:
                future.set_result(work())
            except Exception as error:  # edge of a thread: any error is passed to the caller
                logger.debug("a thread failed", exc_info=True)
                future.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return future


# --- trainer ----------------------------------------------------------------------------------------------


class BroadcastSender:
    """Rank 0's side. One at a time: `send` for every version, `close` at the end. `host` is the address that
    replicas can reach; `timeout`, in seconds, bounds every single wait. `token` is the run's, which receivers
    must hold too."""

    def __init__(
        self, host: str, timeout: float, device: torch.device | str = "cpu", token: str | None = None
    ) -> None:
        self._timeout, self._device, self._host = timedelta(seconds=timeout), torch.device(device), host
        self._served = Served(host, token)
        self._group: Group | None = None  # of the last broadcast

    @property
    def address(self) -> str:
        """The "host:port" for BroadcastTicket.address and Published.rendezvous."""
        return f"{self._host}:{self._served.port}"

    def send(
        self,
        audience: Audience,
        plan: Plan,
        buckets: Iterable[torch.Tensor],
        lost: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Send `buckets`, the bytes of `plan.buckets` in order, to all of `audience`.

        The next bucket is asked for while the one before is on its way, so it must not wait for that. `lost`
        is asked now and then: why a receiver will not take part to the end (None: all do).
        Raises Unreachable when one is lost or does not take part within the time-out, and SnapshotError when
        `buckets` are not those of `plan`. Either way the next `send` needs another name.
        """
        if audience.world_size < 2:
            return
        started, groups, over = time.monotonic(), list[Group](), threading.Event()
        sending = in_thread(lambda: self._transfer(audience, plan, iter(buckets), groups, over.is_set))
        try:
            while not wait([sending], _GLANCE_SECONDS).done:
                if (gone := lost()) is not None:
                    raise RuntimeError(gone)
            sending.result()
        except Exception as error:
            over.set()
            self._meeting(audience.group).set("given up", str(error))
            for group in groups:
                group.abort()
            if not isinstance(error, RuntimeError):
                raise
            raise Unreachable(
                f"broadcast {audience.group} to {audience.world_size - 1} workers failed after "
                f"{time.monotonic() - started:.1f} s: {error}"
            ) from error

    def _meeting(self, name: str) -> Meeting:
        return Meeting(self._served.ask, name, self._timeout)

    def _transfer(
        self,
        audience: Audience,
        plan: Plan,
        buckets: Iterator[torch.Tensor],
        groups: list[Group],
        given_up: Callable[[], bool],
    ) -> None:
        """All of one broadcast; see `used` for `groups`. Its keys are deleted at the end: whoever said
        "received" asks for none of them, and where it failed, whoever waits for one hears that it was given
        up."""
        ranks = range(1, audience.world_size)
        here, received = [f"here/{rank}" for rank in ranks], [f"received/{rank}" for rank in ranks]
        store = self._meeting(audience.group)
        try:
            store.set("backend", backend_name(self._device))
            store.set("plan", msgspec.json.encode((plan.metas, plan.bucket_bytes, plan.adapter_config)))
            store.wait(here, given_up=given_up)
            group = self._group_of(audience, store)
            with used(group, groups, given_up):
                store.set("digests", msgspec.json.encode(self._send_buckets(group, plan, buckets)))
                store.wait(received, given_up=given_up)
            self._group = group
        finally:
            for key in ("backend", "plan", *here, "go", "digests", *received):
                store.delete_key(key)

    def _group_of(self, audience: Audience, store: Meeting) -> Group:
        """The one that all hold, or a new one."""
        kept, self._group = self._group, None
        holders = {store.get(f"here/{rank}") for rank in range(1, audience.world_size)}
        if kept is not None and (kept.size, {kept.name.encode()}) == (audience.world_size, holders):
            store.set("go", kept.name)
            return kept
        if kept is not None:
            kept.close()
        store.set("go", _NEW)
        return Group(store, 0, audience.world_size, self._host, self._timeout, self._device)

    def _send_buckets(self, group: Group, plan: Plan, buckets: Iterator[torch.Tensor]) -> dict[str, str]:
        """Send all of them; returns the digest of every tensor."""
        sizes = {meta.name: nbytes(meta) for meta in plan.metas}
        hashes = {name: hasher(size) for name, size in sizes.items()}
        parts_by_bucket = plan.parts((name, 0, size) for name, size in sizes.items())
        arrived: Callable[[], None] | None = None
        for bucket, parts in zip(plan.buckets, parts_by_bucket, strict=True):
            flat = next(buckets, torch.empty(0))
            if flat.nbytes != len(bucket):
                raise SnapshotError(
                    f"the broadcast announced {len(bucket)} bytes and was given {flat.nbytes}"
                )
            if arrived is not None:
                arrived()
            arrived = group.start(flat)
            host = flat.cpu()  # it is hashed, and the next one is gathered, while it is on its way
            for part in parts:
                hashes[part.name].update(tensor_bytes(host[part.start : part.stop]))
        if arrived is not None:
            arrived()
        return {name: hashed.hexdigest() for name, hashed in hashes.items()}

    def close(self) -> None:
        self._served.close()
        if self._group is not None:
            self._group.close()


# --- replica ----------------------------------------------------------------------------------------------


class Received(NamedTuple):
    """A whole, verified broadcast in host memory."""

    group: str
    tensors: dict[str, torch.Tensor]
    digests: dict[str, str]
    adapter_config: str | None
    """That of the sender's `Plan`."""


class Receiver:
    """One worker's side: `receive` for every ticket, `close` at the end. Senders hold the same `token`.
    `timeout`, in seconds, bounds every single wait but those for the sender's word, which last as long as the
    sender answers. Give the sender's own."""

    def __init__(self, timeout: float, device: torch.device | str = "cpu", token: str | None = None) -> None:
        self.timeout, self.device, self.token = timedelta(seconds=timeout), torch.device(device), token
        self.group: Group | None = None
        """Of the last broadcast; held by nobody while one is received, and after one that failed."""

    def receive(self, ticket: BroadcastTicket) -> Reception:
        return Reception(self, ticket)

    def close(self) -> None:
        if self.group is not None:
            self.group.close()


class Reception:
    """A broadcast being received by a thread of its own."""

    def __init__(self, receiver: Receiver, ticket: BroadcastTicket) -> None:
        self.bytes_received = 0
        self._receiver, self._given_up = receiver, threading.Event()
        self._groups = list[Group]()
        sender = Visitor(ticket.address, receiver.token, receiver.timeout)
        self._store = Meeting(sender.ask, ticket.group, receiver.timeout)
        self._received = in_thread(lambda: self._receive(ticket))
        threading.Thread(target=self._heed, args=(ticket,), name="broadcast watch", daemon=True).start()

    @property
    def done(self) -> bool:
        return self._received.done()

    @property
    def error(self) -> str | None:
        """Why it failed; None: it did not, so far."""
        error = self._received.exception() if self.done else None
        return None if error is None else f"{type(error).__name__}: {error}"

    def result(self) -> Received:
        """Wait for the end. Raises SnapshotError when the broadcast failed; nothing was loaded then."""
        wait([self._received])
        if self.error is not None:
            raise SnapshotError(f"the broadcast was not received: {self.error}")
        return self._received.result()

    def _heed(self, ticket: BroadcastTicket) -> None:
        """End when the sender says that it gave up."""
        try:
            while not self.done:
                if why := self._store.find("given up"):
                    with contextlib.suppress(InvalidStateError):
                        self._received.set_exception(SnapshotError(why.decode()))
                    self._give_up()
        except RuntimeError as error:  # the sender is gone: receiving finds out by itself
            logger.info("broadcast %s: its sender does not answer: %s", ticket.group, error)
            self._give_up()

    def _give_up(self) -> None:
        self._given_up.set()
        for group in self._groups:
            group.abort()

    def _receive(self, ticket: BroadcastTicket) -> Received:
        device, backend = self._receiver.device, backend_name(self._receiver.device)
        given_up, store = self._given_up.is_set, self._store
        if why := store.find("given up", 0.0):
            raise SnapshotError(why.decode())
        if (sent_by := store.get("backend", given_up).decode()) != backend:  # they could never meet
            raise SnapshotError(
                f"the trainer broadcasts with {sent_by} and this replica is on a {device.type} device, "
                f'which receives with {backend}: set weights.transport = "snapshot", or run both on one '
                "kind"
            )
        text = store.get("plan", given_up)
        plan = Plan(*json_decoder(tuple[list[TensorMeta], int, str | None]).decode(text))
        last = self._receiver.group
        store.set(f"here/{ticket.rank}", last.name if last and last.rank == ticket.rank else _NEW)
        # How long the others may take is the sender's to bound: this one is counted as there.
        group = self._group_of(ticket, store.get("go", given_up, math.inf).decode())
        with used(group, self._groups, given_up):
            tensors = self._receive_buckets(group, plan)
            sent = json_decoder(dict[str, str]).decode(store.get("digests", given_up, math.inf))
            digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
            if digests != sent:
                wrong = sorted(name for name in sent if digests.get(name) != sent[name])
                raise SnapshotError(f"tensors {wrong[:3]} did not arrive as they were sent")
        self._receiver.group = group
        store.set(f"received/{ticket.rank}", "1")
        return Received(ticket.group, tensors, digests, plan.adapter_config)

    def _group_of(self, ticket: BroadcastTicket, name: str) -> Group:
        """The receiver's, where that is `name`; else, for _NEW, one under the ticket's name."""
        receiver = self._receiver
        kept, receiver.group = receiver.group, None
        if kept is not None:
            if kept.name == name:
                return kept
            kept.close()
        host, _, port = ticket.address.rpartition(":")
        address = address_towards(host, int(port))
        size, timeout, device = ticket.world_size, receiver.timeout, receiver.device
        return Group(self._store, ticket.rank, size, address, timeout, device)

    def _receive_buckets(self, group: Group, plan: Plan) -> dict[str, torch.Tensor]:
        whole_N, device = torch.empty(plan.nbytes, dtype=torch.uint8), self._receiver.device
        for bucket in plan.buckets:
            place = whole_N[bucket.start : bucket.stop]
            flat = place if device.type == "cpu" else torch.empty_like(place, device=device)
            group.start(flat)()
            if flat is not place:
                place.copy_(flat)
            self.bytes_received += len(bucket)
        return plan.tensors(whole_N)
