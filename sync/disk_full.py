"""A full disk: how it is recognised, and how a line is appended whole or not at all."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
RETRY_SECONDS = 5.0
"""Between two attempts to write to a full disk."""
_WORDS = tuple(os.strerror(number) for number in FULL)
_log = logging.getLogger(__name__)


def is_full(error: BaseException) -> bool:
    """Whether a full disk is behind an error, however it was wrapped."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in FULL:
            return True
        if any(word in str(seen) for word in _WORDS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def append(path: Path, data: bytes, durable: bool = False) -> bool:
    """Append all of `data`; False, and nothing changed, when the disk is full. Raises other OSErrors.

    `durable`: it is on disk when this returns.
    """
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        if error.errno in FULL:
            return False
        raise
    try:
        size, rest = os.fstat(handle).st_size, memoryview(data)
        try:
            while rest:
                rest = rest[os.write(handle, rest) :]
            if durable:
                os.fsync(handle)
        except OSError as error:
            os.ftruncate(handle, size)
            if error.errno in FULL:
                return False
            raise
        return True
    finally:
        os.close(handle)


def until_disk_space(work: Callable[[], T], what: str, pause: float = RETRY_SECONDS) -> T:
    """What `work` returns, repeated while the disk is full, which is said once. `work` is all or nothing."""
    waiting = False
    while True:
        try:
            result = work()
        except (OSError, ValueError) as error:
            if not is_full(error):
                raise
            if not waiting:
                _log.error("disk full: %s waits for room, the run pauses (%s)", what, error)
            waiting = True
            time.sleep(pause)
        else:
            if waiting:
                _log.warning("there is room again for %s, the run goes on", what)
            return result
