"""Stop signals of a rank, heard even while its main thread is inside a collective; and what ends it at once.

    training ──SIGTERM/SIGINT──▶ stopping (the step ends, a checkpoint is saved) ──▶ finished
                                   └── another rank of this machine is gone ──▶ exit 1 at once

The launcher sends SIGTERM both to end a run in order and after a rank died; in the second case the others can
never finish, and must not keep the machine.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time

import psutil

log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1


class StopSignals:
    """Turns SIGTERM and SIGINT into the event `stopping`; made in the main thread."""

    def __init__(self, local_ranks: int, stopping: threading.Event) -> None:
        self._stopping, self._local_ranks = stopping, local_ranks
        self._over = threading.Event()
        self._pipe, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # the watching thread acts: it needs no main thread
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def finished(self) -> None:
        """Everything is saved on every rank: peers may leave now."""
        self._over.set()

    def _watch(self) -> None:
        received = self._pipe.recv(1)
        log.warning("asked to stop by %s", signal.Signals(received[0]).name)
        self._stopping.set()
        while not self._over.wait(_LOOK_SECONDS):
            if _siblings() < self._local_ranks:
                log.error("another rank ended, this one cannot go on")
                os._exit(1)


def _siblings() -> int:
    """Ranks of this machine that are alive, this one included."""
    try:
        children = psutil.Process(os.getppid()).children()
        return sum(child.status() != psutil.STATUS_ZOMBIE for child in children)
    except psutil.Error:
        return 0


def unblock() -> None:
    """Let a rank receive what its launcher blocked."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})


def die_with_parent() -> None:
    """Have the kernel end this process when its parent is killed (Linux; elsewhere nothing happens)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with(ancestor: int) -> None:
    """End this process soon after a process further up has ended, which may be now already."""

    def watch() -> None:
        while any(parent.pid == ancestor for parent in psutil.Process().parents()):
            time.sleep(_LOOK_SECONDS)
        log.error("the launcher is gone, this rank leaves")
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
