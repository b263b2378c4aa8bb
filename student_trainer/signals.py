"""Stop signals of a rank, heard even while its main thread is inside a collective.

    training ──SIGTERM/SIGINT──▶ asked (the step ends, a checkpoint is saved) ──▶ finished
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
from types import FrameType

import psutil

log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1


class StopSignals:
    """Turns SIGTERM and SIGINT into the event `asked`. Made in the main thread; `finished` ends the watch."""

    def __init__(self, local_ranks: int, asked: threading.Event) -> None:
        self.asked = asked
        self._over = threading.Event()
        self._local_ranks = local_ranks
        self._pipe, writer = socket.socketpair()
        writer.setblocking(False)
        self._writer = writer
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._heard)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def finished(self) -> None:
        """Everything is saved on every rank: peers may leave now."""
        self._over.set()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        """Python's half; the event is set by the watching thread, which needs no main thread."""

    def _watch(self) -> None:
        heard = self._pipe.recv(1)
        log.warning("asked to stop by %s", signal.Signals(heard[0]).name)
        self.asked.set()
        while not self._over.wait(_LOOK_SECONDS):
            if self._siblings() < self._local_ranks:
                log.error("another rank ended, this one cannot go on")
                os._exit(1)

    def _siblings(self) -> int:
        """Ranks of this machine that live, this one included."""
        try:
            children = psutil.Process(os.getppid()).children()
            return sum(child.status() != psutil.STATUS_ZOMBIE for child in children)
        except psutil.Error:
            return 0


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
