"""Both ends of a step: nothing that srun started outlives the child of the launcher.

    python -m distill.launch.slurm.step launch srun … \
        python -m distill.launch.slurm.step guard COMMAND …

`launch` runs on the launcher's machine and shows what srun shows; `guard` is the task, once on each machine.
srun alone does not do: SIGTERM makes it kill its tasks, and tasks go on for ever when it is killed together
with the helper that it forks. So every guard holds a connection to `launch`:

    launch gets TERM                → each guard sends TERM to its command, and waits
    launch is gone, even by SIGKILL,
    or its machine for a while      → each guard kills all that is below it
    command ends                    → kill what it left behind; srun, so launch, ends with its exit status
    a guard is killed               → the kernel kills its command, Slurm the rest of the step
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
from typing import Final

from distill import guardian

MODULE: Final = "distill.launch.slurm.step"
LAUNCH, GUARD = "launch", "guard"
LINK_VARIABLE: Final = "DISTILL_STEP_LINK"
"""Environment variable of a task: "PORT:WORD", where `launch` listens, and what a guard says first."""
ADDRESS_VARIABLE: Final = "SLURM_LAUNCH_NODE_IPADDR"
"""Slurm's, of a task: the machine of its srun."""
CONNECT_SECONDS: Final = 30.0
_KEEPALIVE: Final = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
"""A machine that is silent for 30 s is gone."""


# --- beside the launcher


def launch(command: list[str]) -> int:
    """Run srun; its exit status."""
    asked, told = list[int](), 0  # an item for every TERM, and how many of them the guards know
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    guards, word = list[socket.socket](), secrets.token_hex(16)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as listener:
        link = {LINK_VARIABLE: f"{listener.getsockname()[1]}:{word}"}
        with subprocess.Popen(command, env={**os.environ, **link}, process_group=0) as srun:
            while srun.poll() is None:
                ready = select.select([listener], [], [], guardian.POLL_SECONDS)[0]
                joined = ready and _accepted(listener, word.encode())
                if joined:
                    guards.append(joined)
                for guard in guards if told < len(asked) else [joined] if joined and told else []:
                    with contextlib.suppress(OSError):  # it is gone, and srun about to say so
                        guard.sendall(guardian.ASK)
                if told < len(asked) and not guards:  # nothing runs yet
                    srun.terminate()
                told = len(asked)
        return srun.returncode if srun.returncode >= 0 else 128 - srun.returncode


def _accepted(listener: socket.socket, word: bytes) -> socket.socket | None:
    """A guard of this step; None: a stranger."""
    peer, _ = listener.accept()
    peer.settimeout(1.0)
    with contextlib.suppress(OSError):
        if secrets.compare_digest(peer.recv(len(word)), word):
            return peer
    peer.close()
    return None


# --- on the machine of the task


def guard(command: list[str]) -> int:
    """Run a command for as long as `launch` is there; its exit status in the shell's way."""
    port, word = os.environ.pop(LINK_VARIABLE).split(":")
    there = os.environ.get(ADDRESS_VARIABLE, "127.0.0.1"), int(port)
    try:
        link = socket.create_connection(there, CONNECT_SECONDS)
        link.sendall(word.encode())
    except OSError as error:
        sys.stderr.write(
            f"no connection from {socket.gethostname()} to this step's launcher at {there[0]} port {port} "
            f"({error}): the machines of a job must reach each other's ports\n"
        )
        return 1
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        link.setsockopt(socket.IPPROTO_TCP, option, value)
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    return guardian.guard(command, link.fileno(), kill=True)


if __name__ == "__main__":
    sys.exit({LAUNCH: launch, GUARD: guard}[sys.argv[1]](sys.argv[2:]))
