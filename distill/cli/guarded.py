"""How every command ends: errors as one message, signals as errors, and an exit status."""

from __future__ import annotations

import signal
import threading
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from sync.errors import ConfigError, DataError, DistillError, Interrupted
from sync.secrets import redact

EXIT_FAILED, EXIT_USER, EXIT_STOPPED = 1, 2, 130


def guarded(command: Callable[[], Any]) -> int:
    """Exit status of `command`; the one place where errors meant for people become text."""
    console = Console(stderr=True)
    try:
        with _sigterm_raises():
            command()
    except DistillError as error:
        console.print(redact(f"distill: {error}"), style="red", markup=False, highlight=False, soft_wrap=True)
        if isinstance(error, Interrupted):
            return EXIT_STOPPED
        return EXIT_USER if isinstance(error, ConfigError | DataError) else EXIT_FAILED
    except (KeyboardInterrupt, CancelledError):  # the latter: a run that was told to stop twice
        console.print("distill: stopped", style="red")
        return EXIT_STOPPED
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else EXIT_FAILED
    return 0


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM unwinds the command as Ctrl-C does, so that it ends what it started; a second one kills it.

    A run has a way of its own to stop, and takes the signal over while it lasts.
    """

    def leave(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
