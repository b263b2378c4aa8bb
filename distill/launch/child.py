"""Guardian of one child process: whatever ends it or its parent, nothing of it stays behind.

    python -m distill.launch.child NAME PIPE COMMAND …

The guardian leads a session of its own and adopts every orphan in it. NAME says which role is guarded, to who
lists processes. PIPE is a descriptor whose other end only the launcher holds.

    command ends          → kill what it left behind, exit with its status
    PIPE closes           → the launcher is gone, even by SIGKILL: TERM the command, then kill everything
    a byte in PIPE        → kill everything at once
    the guardian is killed → the kernel kills the command (the launcher kills the rest of the session)

Signals to end are for the command, which gets them as a member of the group; the guardian waits for it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import sys
import termios
import time
from pathlib import Path

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
    pipe, command = int(sys.argv[2]), sys.argv[3:]
    os.set_inheritable(pipe, False)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    ended = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    for number in ended:
        signal.signal(number, signal.SIG_IGN)
    child = os.fork()
    if child == 0:
        _become(command, ended)
    status = _watch(child, pipe)
    kill_descendants()
    return status


def _become(command: list[str], ended: set[signal.Signals]) -> None:
    """In the fork: turn into the command; dies with the guardian."""
    for number in ended:
        signal.signal(number, signal.SIG_DFL)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127)


def _watch(child: int, pipe: int) -> int:
    """Exit status of the child, in the shell's way, or 128 + SIGKILL when the launcher went first."""
    deadline: float | None = None
    while (status := _reap(child)) is None:
        if deadline is None and select.select([pipe], [], [], POLL_SECONDS)[0]:
            at_once = _bytes_in(pipe) > 0
            deadline = time.monotonic() + (0.0 if at_once else ORPHAN_GRACE_SECONDS)
            os.killpg(0, signal.SIGTERM)
        elif deadline is not None:
            if time.monotonic() > deadline:
                return 128 + signal.SIGKILL
            time.sleep(POLL_SECONDS)
    return status


def _bytes_in(pipe: int) -> int:
    """Bytes that wait in a pipe; they stay there, for other guardians."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def _reap(child: int) -> int | None:
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


def kill_descendants() -> None:
    """Kill every process below this one; returns when none is left. Call only as the subreaper."""
    while True:
        for pid in children_of(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def children_of(parent: int) -> list[int]:
    """Processes whose parent is `parent`, zombies too, read from /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(entry.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
