"""How servers and trainer machines join a run: they register with the controller, and renew it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sync.wire.base import Amount, Count, Message, Version


class ServerRegisters(Message, frozen=True):
    """Server's announcer, or people → controller: it answers at this URL; answered with ServerLease.

    Sent again before the lease ends. A name that no server of the configuration has is a further replica's.
    """

    run: str | None
    """Name of the run that it is configured for; None: people say that it serves this one."""
    url: str
    name: str | None = None
    """Such as "student-0" or "teacher-main-1"; None: the next free "student-N"."""
    boot: str | None = None
    """Random, made by every start of a process: one that was never seen takes the name, one that lost it is
    refused with 410. None: nobody renews this, and it lasts until it is taken back."""


class ServerLease(Message, frozen=True):
    """Controller → announcer: registered under this name."""

    name: str
    seconds: Amount
    """The name is forgotten unless it is registered again within them; 0: it stays."""
    warning: str | None = None
    """What is wrong with a replica that people added, and the remedy; None: it answers."""


class ServerLeaves(Message, frozen=True):
    """Announcer, or people → controller: it serves no more; answered with the Servers that remain."""

    name: str
    boot: str | None = None
    """Leaves only if this one has the name; None: whichever has."""


class ServerStatus(msgspec.Struct, frozen=True):
    """One server as the controller sees it."""

    name: str
    url: str | None
    """None: it has not registered, or its lease has ended."""
    phase: str | None = None
    """Of a replica: absent, catching_up or serving; None: another server."""
    version: Version | None = None
    """Of a replica; None: the folder it was started with."""
    in_flight: Count = 0
    """Completions that a replica works on."""


class Servers(Message, frozen=True):
    """Controller → people, evaluator: every server of the run, answer to GET /v1/servers."""

    servers: list[ServerStatus]


class GangJoins(Message, frozen=True):
    """Launcher of one trainer machine → controller: it is there; sent again before the lease ends."""

    run: str
    """Name of the run that it is configured for."""
    index: Count
    """Of its machine among `trainer.nodes`."""
    of: Annotated[int, msgspec.Meta(ge=1)]
    address: str
    """Of its machine, as the others reach it."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    """Free on its machine; the ranks meet at that of machine 0."""
    boot: str
    """As `ServerRegisters.boot`."""
    ended: bool = False
    """Its ranks ended well: it is missed no more."""


class Gang(Message, frozen=True):
    """Controller → launcher: where the ranks of all machines meet."""

    address: str | None
    """Of machine 0; None: machines are missing, ask again."""
    port: Count
    missing: list[int]
    """Indices of machines that have not joined."""
    lease_seconds: Amount
