"""Every error that a user of this project can meet, and how a process ended, in words.

DistillError(ValueError)     root: always "value, rule, remedy" in one message
├── ConfigError              a setting that cannot be used
├── DataError                prompts, tokens or scores that cannot be used
├── WireError                a message of another schema, or one that is not a message
├── RemoteError              a peer answered that it cannot do what was asked
│   ├── Overloaded           the peer cannot yet; `retry_after` seconds says when to come back
│   ├── TooLarge             the peer takes these items in several requests, not in one
│   ├── WrongServer          the peer serves another run, or another model
│   └── Replaced             another process has this one's name
├── Unreachable              a peer is really gone, after all retries
├── StoreError               a store cannot be read or written
│   └── AlreadyPublished     another writer was first under this name
├── SnapshotError            a snapshot that must not be applied (altered, cut, wrong base, wrong run)
└── Interrupted              the run was asked to stop, or must stop
"""

from __future__ import annotations

import signal
from typing import Final


class DistillError(ValueError):
    """Root of the errors meant for people; the message names value, rule and remedy."""

    def __init__(self, message: str) -> None:
        """A lone surrogate ("\\ud83d" in a peer's JSON, or of user code) becomes "?": UTF-8 has none."""
        super().__init__(message.encode("utf-8", "replace").decode())


class ConfigError(DistillError):
    """A setting that cannot be used."""


class DataError(DistillError):
    """Prompts, tokens or scores that cannot be used."""


class WireError(DistillError):
    """A message of another schema, or bytes that are no message at all."""


class RemoteError(DistillError):
    """A peer understood the request and refused it."""


class Overloaded(RemoteError):
    """A peer's queue is full, or a name is taken yet; ask again in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TooLarge(RemoteError):
    """A request holds more items than the peer takes at once; send it in parts."""


class WrongServer(RemoteError):
    """A peer serves another run, or scores with another model, than the one that asks."""


class Replaced(RemoteError):
    """Another process has this one's name, so that this one must leave."""


class Unreachable(DistillError):
    """A peer did not answer within the deadline, after every retry."""


class StoreError(DistillError):
    """A store cannot be read or written."""


class AlreadyPublished(StoreError):
    """Another writer created this key first; nothing was changed."""


class SnapshotError(DistillError):
    """A snapshot that must not be applied: altered, cut, on another base, or of another run."""


class Interrupted(DistillError):
    """The run was asked to stop, or has to stop, before its work was done."""


STATUSES: Final[dict[type[DistillError], int]] = {
    WireError: 400,
    Replaced: 410,
    TooLarge: 413,
    WrongServer: 421,
    Overloaded: 429,
    Unreachable: 503,
}
"""HTTP status of a server's refusal, by the error behind it; that of all others is 409."""


# --- how a process ended --------------------------------------------------------------------------------

_FAULTS: Final = [getattr(signal, f"SIG{name}") for name in ("ILL", "ABRT", "BUS", "FPE", "KILL", "SEGV")]
_HINTS: Final = {
    signal.SIGILL: "this processor lacks an instruction of the program: docs/large-models.md, Processors",
    signal.SIGBUS: "a file in memory could not be filled: look at the room in /dev/shm and on the run's disk",
    signal.SIGKILL: "killed by a user or, when memory ran out, by the kernel (dmesg)",
}


def ended_by(status: int) -> signal.Signals | None:
    """The signal behind an exit status; None: there was none. It is −n of a child process, 128 + n of one
    behind a shell or a guardian, and 256 − n of a rank behind the deepspeed launcher (read so only for
    faults, for 255 is many a program's own)."""
    if 0 < -status < signal.NSIG or 0 < status - 128 < 32:
        return signal.Signals(-status if status < 0 else status - 128)
    return next((fault for fault in _FAULTS if status == 256 - fault), None)


def how_it_ended(status: int | None) -> str:
    """How a process ended: "was ended by SIGILL (illegal instruction), …" or "ended with status 3"."""
    number = None if status is None else ended_by(status)
    if number is None:
        return f"ended with status {status}"
    hint = f", {_HINTS[number]}" if number in _HINTS else ""
    return f"was ended by {number.name} ({(signal.strsignal(number) or '?').lower()}){hint}"
