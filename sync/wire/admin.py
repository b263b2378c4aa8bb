"""People ↔ controller: replicas that join and leave a run."""

from __future__ import annotations

from typing import Literal

import msgspec

from sync.wire.base import Message, Version


class ReplicaJoins(Message, frozen=True):
    """A student replica that is to serve this run from now on; answered with the Replicas there are then."""

    url: str
    name: str | None = None
    """None: the next free "student-N"."""


class ReplicaLeaves(Message, frozen=True):
    """A replica that is to serve this run no more; answered with the Replicas that remain."""

    name: str


class ReplicaStatus(msgspec.Struct, frozen=True):
    """One replica as the controller sees it."""

    name: str
    url: str
    phase: Literal["absent", "catching_up", "serving"]
    version: Version | None
    """None: the folder it was started with."""
    in_flight: int
    """Completions it works on."""


class Replicas(Message, frozen=True):
    """The student replicas of a run."""

    replicas: list[ReplicaStatus]
