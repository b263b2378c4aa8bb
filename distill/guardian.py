"""Guardian of one child process: whatever ends it or its parent, nothing of it stays behind.

    python -m distill.guardian NAME PIPE [--kill] COMMAND …

The guardian leads a session of its own and adopts every orphan in it. NAME is the role's, for whoever lists
processes. PIPE is a descriptor whose other end only the launcher holds.

    command ends          → kill what it left behind, exit with its status
    PIPE closes           → the launcher is gone, even by SIGKILL: TERM the command, then kill everything;
                            with --kill, because the run goes on without it: kill everything at once
    a byte in PIPE        → kill everything at once; with --kill, where the byte is ASK: TERM the command
    the guardian is killed → the kernel kills the command; the rest falls to the launcher, which adopts it

The launcher is a subreaper too (`adopt_orphans`): what a killed guardian leaves, in whatever session, becomes
its child, and `kill_adopted` finds it there.

Signals to end are for the command, which gets them as a member of the group; the guardian waits for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import os
import select
import signal
import sys
import termios
import time
from collections.abc import Collection
from typing import Final

import psutil

MODULE: Final = "distill.guardian"
KILL: Final = "--kill"
ASK: Final = b"t"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_SECONDS = 0.1
ORPHAN_GRACE_SECONDS = 3.0
"""From TERM to KILL after the launcher is gone."""


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def main() -> int:
    """Guard the command in this process's arguments; its exit status."""
    pipe, kill = int(sys.argv[2]), sys.argv[3] == KILL
    command = sys.argv[4:] if kill else sys.argv[3:]
    os.set_inheritable(pipe, False)
    return guard(command, pipe, kill)


def guard(command: list[str], pipe: int, kill: bool) -> int:
    """Run a command for as long as `pipe`, with or without --kill, lets it; its exit status in the shell's
    way, or 128 + SIGKILL when the launcher went first. This process leads its group."""
    child, deadline = _spawned(command), math.inf
    try:
        while (status := _reaped(child)) is None:
            if time.monotonic() > deadline:
                return 128 + signal.SIGKILL
            if deadline < math.inf:
                time.sleep(POLL_SECONDS)
            elif select.select([pipe], [], [], POLL_SECONDS)[0]:
                if kill and not _asks(pipe):
                    return 128 + signal.SIGKILL
                if not kill:  # bytes stay in the pipe, for other guardians
                    at_once = any(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
                    deadline = time.monotonic() + (0.0 if at_once else ORPHAN_GRACE_SECONDS)
                os.killpg(0, signal.SIGTERM)
        return status
    finally:
        _kill_descendants()


def _spawned(command: list[str]) -> int:
    """Execute `command` in a process that is killed with this one, which adopts its orphans; its process id.

    Signals to end are for that process from now on: this one ignores them.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    ended = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, ended)  # else one is lost that comes before the command listens
    for number in ended:
        signal.signal(number, signal.SIG_IGN)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        for number in ended:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ended)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was killed before the kernel was told
            os._exit(128 + signal.SIGKILL)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
            sys.stderr.flush()
            os._exit(127)
    if signal.sigpending() & ended:  # one that came before the fork
        os.kill(child, signal.SIGTERM)
    return child


def _asks(pipe: int) -> bool:
    try:
        return os.read(pipe, 1) == ASK
    except OSError:  # of a connection to another machine
        return False


def _reaped(child: int) -> int | None:
    """Collect every process that ended; the child's status if it was among them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 128 + signal.SIGKILL
        if pid == 0:
            return None
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _kill_descendants() -> None:
    """Kill every process below this one; returns when none is left. Call only as the subreaper."""
    while True:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                child.kill()
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


# --- in the launcher


_adopting = 0
"""How many launchers of this process want its orphans."""


def adopt_orphans(adopt: bool = True) -> None:
    """Let descendants whose parents die become children of this process, until each call is taken back.

    On Linux; elsewhere nothing.
    """
    global _adopting
    _adopting += 1 if adopt else -1
    if sys.platform == "linux":
        prctl(PR_SET_CHILD_SUBREAPER, int(_adopting > 0))


def kill_adopted(spared: Collection[int]) -> int:
    """Kill and collect the children of this process that it adopted, and theirs; how many there were.

    `spared`: children that it started itself. Not adopted either: guardians, and what shares this session,
    since nothing below a guardian can come back to it.
    """
    killed: set[int] = set()
    while adopted := [
        child for child in psutil.Process().children() if child.pid not in spared and _is_adopted(child)
    ]:
        for process in adopted:
            with contextlib.suppress(psutil.Error):
                process.kill()
                process.wait()
        killed.update(process.pid for process in adopted)
    return len(killed)


def _is_adopted(child: psutil.Process) -> bool:
    try:
        return os.getsid(child.pid) != os.getsid(0) and guarded_role(child) is None
    except ProcessLookupError:
        return False


def guarded_role(process: psutil.Process) -> str | None:
    """Role whose guardian a process is; None: it is none, or gone."""
    try:
        line = process.cmdline()
    except psutil.Error:
        return None
    return line[line.index(MODULE) + 1] if MODULE in line[:-1] else None


if __name__ == "__main__":
    sys.exit(main())
