"""The processes of a run that registered: one table of leases, the controller's.

    registers ──▶ has the name ──renews──▶ … ──lease ends, or it leaves──▶ forgotten
        └── another has it, dead perhaps: 429 ──that goes on renewing for a lease──▶ 410, this one ends

A process that is started again is another one, by its boot, and has the name when the lease before it ends.

The trainer's machines are entries as servers are, with one rule more where it has several: once all are
there they are a gang, and when one loses its name or its lease ends, all lose theirs, end, and register anew.
One whose ranks ended well is not missed.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from distill.config import RunConfig
from distill.rollout.replica_client import ReplicaEngine
from distill.rollout.replica_pool import ReplicaPool
from distill.topology import TRAINER, servers
from sync.base import secrets
from sync.base.address import Address, url_problem
from sync.base.errors import DistillError, Overloaded, RemoteError, Replaced, WrongServer
from sync.wire import ServerLease, ServerLeaves, ServerRegisters, Servers, ServerStatus
from sync.wire.client import BlockingPeer

log = logging.getLogger(__name__)
LEASE_SECONDS: Final = 15.0
"""A process renews at a third of it; the controller looks at all of them at a fifth."""
FOLLOW_SECONDS: Final = 2.0
UNANSWERED: Final = (
    "replica {name} was added and does not answer at {url}: start it there, listening on an address that the "
    "controller's machine reaches; it joins once it answers, or `distill servers remove {name}` takes it out"
)
EXIT_REFUSED: Final = 3
"""Exit status of a role that the controller refuses: its name is another process's, it is of another run, or
none such is expected."""


@dataclass
class _Holder:
    """Who has a name, or had it. Times are monotonic."""

    address: Address
    expected: bool = True
    """A process of the configuration; else a replica that joined."""
    boot: str | None = None
    expires: float = math.inf
    """Infinite: people registered it, or its ranks ended well; nobody renews it."""
    asked: dict[str, float] = field(default_factory=dict)
    """Boot of other processes that register as this one → when each first did."""

    def free(self) -> None:
        """Nobody has the name now."""
        self.boot, self.expires, self.address.url = None, math.inf, None
        self.asked.clear()


class Registry:
    """The controller's. `run()` for its whole length."""

    def __init__(
        self,
        run: str,
        expected: Mapping[str, Address],
        pool: ReplicaPool,
        connect: Callable[[Address], ReplicaEngine] | None,
        machines: Sequence[str],
    ) -> None:
        """`expected`: servers of the configuration that have no fixed URL. `connect`: a client of a replica;
        None: none can join while the run goes on. `machines`: names of the trainer's that register."""
        self._run, self._pool, self._connect = run, pool, connect
        self._gang = {name: _Holder(Address(name)) for name in machines}
        self._holders = {name: _Holder(address) for name, address in expected.items()} | self._gang
        self._configured = frozenset(expected)
        self._lost: set[tuple[str, str | None]] = set()
        """(name, boot) of processes that had it."""
        self._looked = time.monotonic()

    async def register(self, registration: ServerRegisters) -> ServerLease:
        """Note where a server is. Raises RemoteError for what cannot join: Overloaded while another process
        has the name and may be dead, Replaced once that lives, or this one has lost the name."""
        taken = self._holders.keys() | self._pool.replicas.keys() | self._configured
        free = (f"student-{index}" for index in itertools.count() if f"student-{index}" not in taken)
        name, boot = registration.name or next(free), registration.boot
        self._check(registration, name)
        if registration.url is None:
            return self._lease(name, 0.0)
        url, holder, answers = registration.url.rstrip("/"), self._holders.get(name), True
        if holder is None:
            assert self._connect is not None, "none is expected then"
            address = Address(name, url)
            answers = await self._pool.join(self._connect(address), name)
            holder = self._holders[name] = _Holder(address, expected=False)
        elif holder.boot not in (None, boot):
            self._lose(name)
        if holder.address.url != url:
            log.info("%s is at %s", name, url)
        seconds = 0.0 if boot is None else LEASE_SECONDS
        holder.boot, holder.address.url = boot, url
        holder.expires = time.monotonic() + seconds if seconds else math.inf
        if answers or boot is not None:  # what registers by itself may be loading still
            return self._lease(name, seconds)
        warning = UNANSWERED.format(name=name, url=secrets.redact(url))
        log.warning("%s", warning)
        return ServerLease(name=name, seconds=seconds, warning=warning)

    def _lease(self, name: str, seconds: float) -> ServerLease:
        gang = [machine.address.url for machine in self._gang.values()] if name in self._gang else []
        return ServerLease(name=name, seconds=seconds, gang=gang)

    def _check(self, registration: ServerRegisters, name: str) -> None:
        """Raise what `register` does, unless the name is free or this process's."""
        if registration.run not in (None, self._run):
            raise WrongServer(
                f"this is the controller of run {self._run!r}, and a process of run {registration.run!r} "
                "registers: give it the URL of that run's controller, or the run's folder"
            )
        if (url := registration.url) is not None:
            problem = url_problem(url)
            if problem is None and urlsplit(url).username is not None:
                problem = "one with a user's name: leave that out"
            if problem is not None:
                shown, called = secrets.redact(url.rstrip("/")), registration.name or ""
                raise RemoteError(f"server {called} at {shown!r} cannot register: it is {problem}")
        holder, boot = self._holders.get(name), registration.boot
        if name in self._gang and boot is None:
            raise RemoteError(
                f"{name} is no server but a machine of the trainer, which registers itself: start "
                f"`distill train --node {name.removeprefix(f'{TRAINER}-')}` there"
            )
        if (name, boot) in self._lost:
            place = f"is at {holder.address}" if holder and holder.address.url else "was removed"
            others = ", or with another of the trainer's machines" if name in self._gang else ""
            raise Replaced(
                f"{name} {place}: this process has lost the name to another, or to a person{others}"
            )
        if holder is None and not (re.fullmatch(r"student-[A-Za-z0-9._-]+", name) and self._connect):
            expected = ", ".join(taken for taken, known in self._holders.items() if known.expected) or "none"
            raise RemoteError(
                f"no server {name!r} is expected to register: expected are {expected}, and replicas "
                "student-N: start it from the controller's configuration, with a name and a number of it"
                + (f"; this run starts its {TRAINER} itself" if name == machine_name(0) else "")
            )
        if holder is not None and holder.boot not in (None, boot):
            self._await(name, holder, boot)

    def _await(self, name: str, holder: _Holder, boot: str | None) -> None:
        """Raise what a process is told while another has the name; nothing when nobody renews it."""
        if boot is None:
            raise RemoteError(f"{name} is at {holder.address} already: remove it first")
        if holder.expires == math.inf:
            return
        asked = holder.asked.setdefault(boot, time.monotonic())
        if holder.expires > asked + 2 * LEASE_SECONDS:  # it was renewed more than a lease after that
            option = "--node" if name in self._gang else "--index or --name"
            raise Replaced(
                f"{name} is at {holder.address}, and the process there renews it: give this one another "
                f"{option}, or end that one"
            )
        raise Overloaded(
            f"{name} is at {holder.address}: this process gets the name when that one's lease of "
            f"{LEASE_SECONDS:g} s ends, and has to leave if it lives",
            LEASE_SECONDS / 3,
        )

    async def leave(self, leaving: ServerLeaves) -> Servers:
        """Forget a process; the others. Raises RemoteError when there is none.

        One that people remove has lost its name for good; of a replica a new process may join under it.
        """
        name, holder = leaving.name, self._holders.get(leaving.name)
        if leaving.boot is None:
            if holder is not None and holder.boot is not None:
                self._lose(name)
            if holder is None or name in self._pool.replicas:
                await self._pool.remove(name)
                self._holders.pop(name, None)  # its lease may have ended meanwhile
        if name in self._holders and leaving.boot in (None, self._holders[name].boot):
            if name in self._gang and self._met():
                self._gang[name].expires = math.inf
            else:
                await self._forget(name, self._holders[name])
        return self.listing()

    def _met(self) -> bool:
        """Whether all of the trainer's several machines are there, or their ranks ended well."""
        return len(self._gang) > 1 and all(machine.boot is not None for machine in self._gang.values())

    def _lose(self, name: str) -> None:
        """The process that has `name` loses it; with it, once they had met, all of the trainer's machines."""
        holders = self._gang if name in self._gang and self._met() else {name: self._holders[name]}
        if len(holders) > 1:
            log.warning("the trainer's gang has lost %s: all of its machines register anew", name)
        for lost, holder in holders.items():
            self._lost.add((lost, holder.boot))
            if lost in self._gang:
                holder.free()

    def trainer_died(self) -> None:
        """The process of machine 0, which the launcher starts, is gone: nobody waits for its lease."""
        if (name := machine_name(0)) in self._gang:
            self._lose(name)

    async def _forget(self, name: str, holder: _Holder) -> None:
        """What it registered; a replica that is not in the configuration leaves the run."""
        holder.free()
        if not holder.expected:
            del self._holders[name]
            if name in self._pool.replicas:
                await self._pool.remove(name)

    def listing(self) -> Servers:
        """Every replica, and every other server that registers."""
        replicas = [
            ServerStatus(
                name,
                self._holders[name].address.url if name in self._holders else replica.engine.url,
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
            await asyncio.sleep(LEASE_SECONDS / 5)
            await self.expire()

    async def expire(self) -> None:
        """Forget whoever has not renewed in time, but for the time in which this process did not listen."""
        now = time.monotonic()
        late, self._looked = now - self._looked - LEASE_SECONDS / 5, now
        for name, holder in [*self._holders.items()]:
            if late > LEASE_SECONDS / 3:
                holder.expires += late
                holder.asked = {boot: since + late for boot, since in holder.asked.items()}
            here = self._holders.get(name) is holder  # it may have left while another was removed
            if here and time.monotonic() > holder.expires:
                log.warning("%s at %s has not renewed its registration", name, holder.address)
                if name in self._gang and self._met():
                    self._lose(name)
                else:
                    await self._forget(name, holder)


def machine_name(index: int) -> str:
    """Under which a machine of the trainer's registers."""
    return f"{TRAINER}-{index}"


def expected_machines(config: RunConfig) -> list[str]:
    """The names of the trainer's machines; none: its ranks are the launcher's own children."""
    starts = config.controller.trainer == "launch" and config.cluster.type in ("local", "external")
    nodes = config.trainer.nodes
    return [] if starts and nodes == 1 else [machine_name(index) for index in range(nodes)]


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
