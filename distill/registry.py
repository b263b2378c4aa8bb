"""Where the servers of a run are, and which machines its trainer has, as they told the controller.

    never seen ──registers──▶ has the name ──renews──▶ … ──lease ends, or it leaves──▶ forgotten
                                    └── a process that was never seen registers ──▶ lost it: 410, it exits

Nothing of it is on record: a controller that starts anew is told again within seconds. Whether a server works
is judged by those that call it; the end of a lease only forgets its URL.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from distill.config import RunConfig
from distill.rollout.replica_client import ReplicaEngine
from distill.rollout.replica_pool import ReplicaPool
from distill.topology import servers
from sync.base import secrets
from sync.base.address import Address, url_problem
from sync.base.errors import DistillError, RemoteError, Replaced, WrongServer
from sync.wire import (
    Gang,
    GangJoins,
    ServerLease,
    ServerLeaves,
    ServerRegisters,
    Servers,
    ServerStatus,
)
from sync.wire.client import BlockingPeer

log = logging.getLogger(__name__)
LEASE_SECONDS: Final = 15.0
"""A process renews at a third of it."""
FOLLOW_SECONDS: Final = 2.0
UNANSWERED: Final = (
    "replica {name} was added and does not answer at {url}: start it there, listening on an address that the "
    "controller's machine reaches; it joins once it answers, or `distill servers remove {name}` takes it out"
)
EXIT_REPLACED: Final = 3
"""Exit status of a server that has lost its name to another process."""


@dataclass
class _Holder:
    """Who has a name, or had it. Times are monotonic."""

    address: Address
    expected: bool
    """A server of the configuration; else a replica that joined."""
    boot: str | None = None
    expires: float = math.inf


class Registry:
    """The controller's. `run()` for its whole length."""

    def __init__(
        self,
        run: str,
        expected: Mapping[str, Address],
        pool: ReplicaPool,
        connect: Callable[[Address], ReplicaEngine] | None,
    ) -> None:
        """`expected`: servers of the configuration that have no fixed URL. `connect`: a client of a replica;
        None: none can join while the run goes on."""
        self._run, self._pool, self._connect = run, pool, connect
        self._holders = {name: _Holder(address, expected=True) for name, address in expected.items()}
        self._configured = frozenset(expected)
        self._lost: set[tuple[str, str | None]] = set()
        """(name, boot) of processes that had it."""

    async def register(self, registration: ServerRegisters) -> ServerLease:
        """Note where a server is. Raises Replaced, and RemoteError for what cannot join."""
        url = registration.url.rstrip("/")
        _check_run(registration.run or self._run, self._run)
        problem = url_problem(url)
        if problem is None and urlsplit(url).username is not None:
            problem = "one with a user's name: leave that out"
        if problem is not None:
            raise RemoteError(
                f"server {registration.name or ''} at {secrets.redact(url)!r} cannot register: "
                f"it is {problem}"
            )
        name = registration.name or self._free_name()
        holder = self._holders.get(name)
        if (name, registration.boot) in self._lost:
            place = f"is at {holder.address}" if holder else "was removed"
            raise Replaced(f"{name} {place}: this process has lost the name to another, or to a person")
        answers = True
        if holder is None:
            holder, answers = await self._joined(name, url)
        elif holder.boot is not None and holder.boot != registration.boot:
            if registration.boot is None:
                raise RemoteError(f"{name} is at {holder.address} already: remove it first")
            self._lost.add((name, holder.boot))
        if holder.address.url != url:
            log.info("%s is at %s", name, url)
        seconds = 0.0 if registration.boot is None else LEASE_SECONDS
        holder.boot, holder.address.url = registration.boot, url
        holder.expires = time.monotonic() + seconds if seconds else math.inf
        if answers or registration.boot is not None:  # what registers by itself may be loading still
            return ServerLease(name=name, seconds=seconds)
        warning = UNANSWERED.format(name=name, url=secrets.redact(url))
        log.warning("%s", warning)
        return ServerLease(name=name, seconds=seconds, warning=warning)

    def _free_name(self) -> str:
        taken = self._holders.keys() | self._pool.replicas.keys() | self._configured
        return next(name for index in itertools.count() if (name := f"student-{index}") not in taken)

    async def _joined(self, name: str, url: str) -> tuple[_Holder, bool]:
        """A further replica, in the pool, and whether it answers."""
        if not re.fullmatch(r"student-[A-Za-z0-9._-]+", name) or self._connect is None:
            expected = (
                ", ".join(taken for taken, holder in self._holders.items() if holder.expected) or "none"
            )
            raise RemoteError(
                f"no server {name!r} is expected to register: expected are {expected}, and replicas student-N"
            )
        address = Address(name, url)
        answers = await self._pool.join(self._connect(address), name)
        holder = self._holders[name] = _Holder(address, expected=False)
        return holder, answers

    async def leave(self, leaving: ServerLeaves) -> Servers:
        """Forget a server; the others. Raises RemoteError when there is none.

        A process that people remove has lost its name for good; of a replica a new process may join under it.
        """
        name, holder = leaving.name, self._holders.get(leaving.name)
        if leaving.boot is None:
            if holder is not None and holder.boot is not None:
                self._lost.add((name, holder.boot))
            if holder is None or name in self._pool.replicas:
                await self._pool.remove(name)
                self._holders.pop(name, None)  # its lease may have ended meanwhile
        if name in self._holders and leaving.boot in (None, self._holders[name].boot):
            await self._forget(name, self._holders[name])
        return self.listing()

    async def _forget(self, name: str, holder: _Holder) -> None:
        """What it registered; a replica that is not in the configuration leaves the run."""
        holder.boot, holder.expires, holder.address.url = None, math.inf, None
        if not holder.expected:
            del self._holders[name]
            if name in self._pool.replicas:
                await self._pool.remove(name)

    def listing(self) -> Servers:
        """Every replica, and every other server that registers."""
        replicas = [
            ServerStatus(
                replica.name,
                None
                if name in self._holders and self._holders[name].address.url is None
                else replica.engine.url,
                replica.phase.value,
                replica.version,
                replica.in_flight,
            )
            for name, replica in self._pool.replicas.items()
        ]
        others = [
            ServerStatus(name, holder.address.url)
            for name, holder in self._holders.items()
            if name not in self._pool.replicas
        ]
        return Servers(servers=replicas + others)

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(LEASE_SECONDS / 5)
            if (late := time.monotonic() - began - LEASE_SECONDS / 5) > LEASE_SECONDS / 3:
                for holder in self._holders.values():  # it was this process that did not listen
                    holder.expires += late
            await self.expire()

    async def expire(self) -> None:
        for name, holder in [*self._holders.items()]:
            here = self._holders.get(name) is holder  # it may have left while another was removed
            if here and time.monotonic() > holder.expires:
                log.warning("%s at %s has not renewed its registration", name, holder.address)
                await self._forget(name, holder)


class Gangs:
    """The trainer's machines: when all are there, all are told where to meet.

    One that is replaced, or does not renew, ends the gang: the others are refused, end too, and join anew.
    """

    def __init__(self, run: str, nodes: int) -> None:
        self._run, self._nodes = run, nodes
        self._members: dict[int, GangJoins] = {}
        self._expires: dict[int, float] = {}
        self._met = False
        self._heard = time.monotonic()
        self._lost: set[str] = set()

    async def join(self, joining: GangJoins) -> Gang:
        """Raises Replaced when the gang of this process has ended, RemoteError for a machine too many."""
        _check_run(joining.run, self._run)
        if joining.of != self._nodes or joining.index >= joining.of:
            raise RemoteError(
                f"machine {joining.index} of {joining.of} cannot join: trainer.nodes is {self._nodes} here, "
                "and machines count from 0"
            )
        now = time.monotonic()
        if now - self._heard > LEASE_SECONDS / 2:  # nobody was heard: this process did not listen
            self._expires = {i: max(expires, now + LEASE_SECONDS) for i, expires in self._expires.items()}
        self._heard = now
        gone = [i for i, expires in self._expires.items() if now > expires and i != joining.index]
        before = self._members.get(joining.index)
        if before is not None and before.boot != joining.boot and joining.boot not in self._lost:
            gone.append(joining.index)
        if gone and self._met:
            log.warning("the trainer's gang has lost machine %s: all join anew", ", ".join(map(str, gone)))
            gone, self._met = list(self._members), False
        for index in gone:
            self._lost.add(self._members.pop(index).boot)
            del self._expires[index]
        if joining.boot in self._lost:
            raise Replaced(f"the trainer's gang of machine {joining.index} has ended: start it again")
        self._members[joining.index] = joining
        self._expires[joining.index] = math.inf if joining.ended else now + LEASE_SECONDS
        self._met = self._met or len(self._members) == self._nodes
        first = self._members.get(0)
        return Gang(
            address=first.address if first and self._met else None,
            port=first.port if first else 0,
            missing=[index for index in range(self._nodes) if index not in self._members],
            lease_seconds=LEASE_SECONDS,
        )


def _check_run(asking: str, run: str) -> None:
    """Raise WrongServer for a process of another run."""
    if asking != run:
        raise WrongServer(f"this is the controller of run {run!r}, and a process of run {asking!r} registers")


def expected_servers(config: RunConfig) -> dict[str, Address]:
    """An address that registers for every server without `urls`."""
    return {process.name: Address(process.name) for process in servers(config)}


def follow(controller: Callable[[], str], token: str | None, addresses: Mapping[str, Address]) -> None:
    """Keep addresses as the controller knows them, in a thread that lasts as long as the process."""

    def ask() -> None:
        connect = functools.cache(lambda url: BlockingPeer(url, token, timeout=10.0))
        while True:
            try:
                peer = connect(controller())
                for server in peer.call("/v1/servers", None, Servers).servers:
                    if server.name in addresses:
                        addresses[server.name].url = server.url
            except DistillError as error:
                log.warning("the controller does not say where servers are: %s", error)
            time.sleep(FOLLOW_SECONDS)

    threading.Thread(target=ask, name="servers", daemon=True).start()
