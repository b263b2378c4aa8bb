"""Weights straight from the trainer to the replicas' workers: NCCL between GPUs, gloo between CPUs.

The trainer's rank 0 serves a store of keys (`rendezvous`: one address, the run's token) and is rank 0 of a
group that lives for one broadcast; each replica holds a ticket with its rank. All keys stand under its name,
so a group that failed leaves nothing that the next one meets. The buffers themselves go in the clear;
the digests show what a stranger puts among them.

    sender                                     every receiver
    backend: nccl or gloo        ──store──▶    refuses another one than its own
    plan: names, dtypes, shapes  ──store──▶    plan
    waits for all  ◀──────────────store────    "here"
    go                           ──store──▶    waits for it
    one flat buffer per bucket   ──group──▶    bucket, copied to host memory
    digest of every tensor       ──store──▶    compares with what it holds
    waits for all  ◀──────────────store────    "received"
    or: why it was given up      ──store──▶    looked for now and then

A replica dies, hangs or never comes: the sender learns it from `lost`, gives up at once and says so in the
store, so that the other receivers end too; without such word no wait takes longer than `timeout`. The sender
raises Unreachable, every receiver reports its failure. Nothing is loaded here: a reception is whole and
verified before anything touches a model.

Either side works in a thread of its own, for no call of torch's can be interrupted. Waiting for the others is
done here, where it can be, before torch forms the group and after; a thread that is given up inside a call
runs into the time-out by itself (NCCL: is aborted), and its result is discarded.

gloo runs in the tests. NCCL takes the same path through torch's ProcessGroupNCCL but needs a GPU for every
rank and was not run; on two GPUs, `pytest -m gpu tests/unit/sync/test_broadcast.py` runs it. Two of NCCL's
ways are heeded: a buffer that is complete on one rank may still be on its way from there to the next, so a
group ends by torch's `shutdown`, which flushes, unless the broadcast failed; and torch ends a process where a
collective passes its group's own time-out, so that one is longer than ours, and a failed group is aborted.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from datetime import timedelta
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import torch

from sync.decoding import json_decoder
from sync.errors import SnapshotError, Unreachable
from sync.rendezvous import Group, Meeting, Served, Visitor, backend_name, broadcast_key, used
from sync.snapshots.checkpoint import TensorMeta, meta_of
from sync.snapshots.checkpoint import tensor_digest as digest
from sync.wire import Audience, BroadcastTicket

logger = logging.getLogger(__name__)
_GLANCE_SECONDS: Final = 0.25
"""How often a sender asks whether a receiver is lost."""
T = TypeVar("T")


def own_address(host: str, port: int) -> str:
    """This machine's address as seen on the way to `host`; nothing is sent."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Do `work` in a daemon thread; the first to set the future decides its result."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # edge of a thread: any error is passed to the caller
            logger.debug("a thread failed", exc_info=True)
            _fail(future, error)
        else:
            with contextlib.suppress(InvalidStateError):
                future.set_result(result)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return future


def _fail(future: Future[Any], error: Exception) -> None:
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


# --- trainer ----------------------------------------------------------------------------------------------


class BroadcastSender:
    """Rank 0's side. One at a time: `send` for every version, `close` at the end.

    `host` is the address that replicas can reach; `timeout`, in seconds, bounds every single wait. `token` is
    the run's, which receivers must hold too.
    """

    def __init__(
        self,
        host: str,
        port: int,
        timeout: float,
        device: torch.device | str = "cpu",
        token: str | None = None,
    ) -> None:
        self._timeout = timedelta(seconds=timeout)
        self._device = torch.device(device)
        self._host = host
        self._served = Served(host, port, broadcast_key(token))

    @property
    def address(self) -> str:
        """ "host:port" for BroadcastTicket.address and Published.rendezvous."""
        return f"{self._host}:{self._served.port}"

    def send(
        self,
        audience: Audience,
        metas: Sequence[TensorMeta],
        tensors: Iterable[tuple[str, torch.Tensor]],
        lost: Callable[[], str | None] = lambda: None,
    ) -> int:
        """Send gathered checkpoint tensors, in the order of `metas`, to all of `audience`; returns bytes.

        `tensors` must not itself be a collective of a group that waits for this one: gather first. `lost` is
        asked now and then: why a receiver will not take part to the end (None: all do).
        Raises Unreachable when one is lost or does not take part within the time-out, and SnapshotError when
        `tensors` is not what `metas` says. Either way the next `send` needs a new group.
        """
        if audience.world_size < 2:
            return 0
        started, groups, over = time.monotonic(), list[Group](), threading.Event()
        sending = in_thread(lambda: self._transfer(audience, metas, iter(tensors), groups, over.is_set))
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
        return sum(nbytes(meta) for meta in metas)

    def _meeting(self, group: str) -> Meeting:
        return Meeting(self._served.ask, group, self._timeout)

    def _transfer(
        self,
        audience: Audience,
        metas: Sequence[TensorMeta],
        tensors: Iterator[tuple[str, torch.Tensor]],
        groups: list[Group],
        given_up: Callable[[], bool],
    ) -> None:
        """All of one broadcast; see `used` for `groups`."""
        ranks = range(1, audience.world_size)
        store = self._meeting(audience.group)
        store.set("backend", backend_name(self._device))
        store.set("plan", msgspec.json.encode(metas))
        store.wait([f"here/{rank}" for rank in ranks], given_up=given_up)
        store.set("go", "1")
        group = Group(store, 0, audience.world_size, self._host, self._timeout, self._device)
        with used(group, groups, given_up):
            digests = self._send_buckets(group, plan(metas), tensors)
        store.set("digests", msgspec.json.encode(digests))
        store.wait([f"received/{rank}" for rank in ranks], given_up=given_up)
        for key in ("backend", "plan", "digests"):
            store.delete_key(key)

    def _send_buckets(
        self, group: Group, buckets: list[Bucket], tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> dict[str, str]:
        digests: dict[str, str] = {}
        for bucket in buckets:
            flat = torch.zeros(bucket.nbytes, dtype=torch.uint8, device=self._device)
            for meta, offset in zip(bucket.metas, bucket.offsets, strict=True):
                name, tensor = next(tensors, ("nothing", torch.empty(0)))
                if meta_of(name, tensor) != meta:
                    raise SnapshotError(
                        f"the broadcast announced {meta} and was given {meta_of(name, tensor)}"
                    )
                view(flat, meta, offset).copy_(tensor.detach())
                digests[name] = digest(tensor)
            group.broadcast(flat)
        return digests

    def close(self) -> None:
        """Stop serving the store."""
        self._served.close()


# --- replica ----------------------------------------------------------------------------------------------


class Received(NamedTuple):
    """A whole, verified broadcast in host memory."""

    group: str
    tensors: dict[str, torch.Tensor]
    digests: dict[str, str]


class Reception:
    """A broadcast being received by a thread of its own, from a sender that holds the same `token`.

    `timeout`, in seconds, bounds every single wait.
    """

    def __init__(
        self,
        ticket: BroadcastTicket,
        timeout: float,
        device: torch.device | str = "cpu",
        token: str | None = None,
    ) -> None:
        self.bytes_received = 0
        self._device, self._given_up = torch.device(device), threading.Event()
        self._groups: list[Group] = []
        self._key = broadcast_key(token)
        limit = timedelta(seconds=timeout)
        self._received = in_thread(lambda: self._receive(ticket, limit))
        threading.Thread(target=self._heed, args=(ticket, limit), name="broadcast watch", daemon=True).start()

    @property
    def done(self) -> bool:
        """Whether it ended, well or badly."""
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

    @contextlib.contextmanager
    def _meeting(self, ticket: BroadcastTicket, timeout: timedelta) -> Iterator[Meeting]:
        """Over a connection of its own: a waiting one cannot be shared."""
        with contextlib.closing(Visitor(ticket.address, self._key, timeout)) as visitor:
            yield Meeting(visitor.ask, ticket.group, timeout)

    def _heed(self, ticket: BroadcastTicket, timeout: timedelta) -> None:
        """End when the sender says that it gave up."""
        try:
            with self._meeting(ticket, timeout) as store:
                while not self.done:
                    if store.come(["given up"]):
                        _fail(self._received, SnapshotError(store.get("given up").decode()))
                        self._give_up()
        except RuntimeError as error:  # the sender is gone: receiving finds out by itself
            logger.info("broadcast %s: its sender does not answer: %s", ticket.group, error)
            self._give_up()

    def _give_up(self) -> None:
        self._given_up.set()
        for group in self._groups:
            group.abort()

    def _receive(self, ticket: BroadcastTicket, timeout: timedelta) -> Received:
        with self._meeting(ticket, timeout) as store:
            return self._receive_from(store, ticket, timeout)

    def _receive_from(self, store: Meeting, ticket: BroadcastTicket, timeout: timedelta) -> Received:
        if store.check(["given up"]):
            raise SnapshotError(store.get("given up").decode())
        self._check_backend(store.get("backend").decode())
        metas = json_decoder(list[TensorMeta]).decode(store.get("plan"))
        host, _, port = ticket.address.rpartition(":")
        own = own_address(host, int(port))
        store.set(f"here/{ticket.rank}", "1")
        store.wait(["go"], given_up=self._given_up.is_set)
        group = Group(store, ticket.rank, ticket.world_size, own, timeout, self._device)
        with used(group, self._groups, self._given_up.is_set):
            tensors = self._receive_buckets(group, plan(metas))
        sent = json_decoder(dict[str, str]).decode(store.get("digests"))
        digests = {name: digest(tensor) for name, tensor in tensors.items()}
        if digests != sent:
            wrong = sorted(name for name in sent if digests.get(name) != sent[name])
            raise SnapshotError(f"tensors {wrong[:3]} did not arrive as they were sent")
        store.set(f"received/{ticket.rank}", "1")
        return Received(ticket.group, tensors, digests)

    def _check_backend(self, sent: str) -> None:
        """Raise SnapshotError when the sender and this side could never meet."""
        own = backend_name(self._device)
        if sent != own:
            raise SnapshotError(
                f"the trainer broadcasts with {sent} and this replica is on a {self._device.type} device, "
                f'which receives with {own}: set weights.transport = "snapshot", or run both on the same kind'
            )

    def _receive_buckets(self, group: Group, buckets: list[Bucket]) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for bucket in buckets:
            flat = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)
            group.broadcast(flat)
            host = flat.cpu()
            for meta, offset in zip(bucket.metas, bucket.offsets, strict=True):
                tensors[meta.name] = view(host, meta, offset)
            self.bytes_received += bucket.nbytes
        return tensors


# --- buckets --------------------------------------------------------------------------------------------


BUCKET_BYTES: Final = 64 << 20
"""Small tensors travel together up to this many bytes; a larger tensor travels alone."""
_ALIGN: Final = 16


class Bucket(NamedTuple):
    """Tensors that travel in one flat buffer of `nbytes`, each at its offset."""

    metas: list[TensorMeta]
    offsets: list[int]
    nbytes: int


def plan(metas: Sequence[TensorMeta], limit: int = BUCKET_BYTES) -> list[Bucket]:
    """Cut tensors, in order, into buckets of at most `limit` bytes, or of one tensor."""
    buckets: list[Bucket] = []
    for meta in metas:
        size = _aligned(nbytes(meta))
        if not buckets or buckets[-1].nbytes + size > limit:
            buckets.append(Bucket([], [], 0))
        last = buckets[-1]
        buckets[-1] = Bucket([*last.metas, meta], [*last.offsets, last.nbytes], last.nbytes + size)
    return buckets


def nbytes(meta: TensorMeta) -> int:
    """Bytes of a tensor."""
    return math.prod(meta.shape) * _dtype(meta).itemsize


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _dtype(meta: TensorMeta) -> torch.dtype:
    dtype = getattr(torch, meta.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise SnapshotError(f"tensor {meta.name!r} has dtype {meta.dtype!r}: torch has no such dtype")
    return dtype


def view(flat: torch.Tensor, meta: TensorMeta, offset: int) -> torch.Tensor:
    """The tensor at `offset` of a flat u1 buffer, sharing its memory."""
    return flat[offset : offset + nbytes(meta)].view(_dtype(meta)).view(meta.shape)
