"""How a process ended, in words."""

from __future__ import annotations

import signal
from typing import Final

_FAULTS: Final = [getattr(signal, f"SIG{name}") for name in ("ILL", "ABRT", "BUS", "FPE", "KILL", "SEGV")]
_HINTS: Final = {
    signal.SIGILL: "this processor lacks an instruction of the program: docs/operations.md, Processors",
    signal.SIGBUS: "a file in memory could not be filled: look at the room in /dev/shm and on the run's disk",
    signal.SIGKILL: "nothing but a kill does that: somebody's, or the kernel's when memory ran out (dmesg)",
}


def ended_by(status: int) -> signal.Signals | None:
    """The signal behind an exit status; None: there was none.

    It is −n of a child process, 128 + n of one behind a shell or a guardian, and 256 − n of a rank behind the
    deepspeed launcher (read so only for faults, for 255 is many a program's own).
    """
    if 0 < -status < signal.NSIG or 0 < status - 128 < 32:
        return signal.Signals(-status if status < 0 else status - 128)
    return next((fault for fault in _FAULTS if status == 256 - fault), None)


def how_it_ended(status: int | None) -> str:
    """Such as "was ended by SIGILL (illegal instruction), …", or "ended with status 3"."""
    number = None if status is None else ended_by(status)
    if number is None:
        return f"ended with status {status}"
    hint = f", {_HINTS[number]}" if number in _HINTS else ""
    return f"was ended by {number.name} ({(signal.strsignal(number) or '?').lower()}){hint}"
