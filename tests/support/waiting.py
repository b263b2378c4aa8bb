"""Waiting, in real time, for what must come about."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Process(Protocol):
    """What is asked of Popen, and of what stands for it."""

    def poll(self) -> int | None: ...


def until(
    condition: Callable[[], object],
    seconds: float = 300.0,
    say: Callable[[], str] = lambda: "waited in vain",
    process: Process | None = None,
    poll_seconds: float = 0.02,
) -> float:
    """Seconds until it holds; fails with what `say` says after `seconds`, and where `process` has ended."""
    began = time.monotonic()
    while not condition():
        assert process is None or process.poll() is None, say()
        assert time.monotonic() < began + seconds, say()
        time.sleep(poll_seconds)
    return time.monotonic() - began
