"""Reading run.db on file systems whose machines share no memory, such as NFS.

Readers of a database that is written find its newest rows by memory that they share with the writer. Without
it a controller has the file for itself (`Store`), and readers ask a copy:

    run.db is locked ──▶ its controller's, GET /v1/record
               else  ──▶ of run.db and of what an end without farewell left in run.db-wal
"""

from __future__ import annotations

import fcntl
import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import Final

from sync.base.address import controller_url, token_of_run
from sync.base.errors import DistillError, RemoteError
from sync.wire.client import BlockingPeer

SECONDS: Final = 600.0
"""Limit of the controller's answer: it copies before it answers."""
_READERS: Final = 510, (1 << 30) + 2
"""Length and start of what a reader of an SQLite database locks (its "shared bytes")."""


def open_copy(path: Path) -> sqlite3.Connection:
    """A copy of a run's database as of one commit, which is gone when it is closed.

    `path`: run.db, whose controller is another process. Raises RemoteError when that has locked it and does
    not give it.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy, log = Path(folder) / path.name, path.with_name(f"{path.name}-wal")
        with path.open("rb") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, *_READERS)
            except (BlockingIOError, PermissionError):
                _download(path, copy)
            else:  # by this file alone: closing another one of run.db would give up the lock
                with copy.open("wb") as rows:
                    shutil.copyfileobj(file, rows)
                if log.is_file():
                    shutil.copy(log, folder)
        connection = sqlite3.connect(copy, isolation_level=None)
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute(
            "PRAGMA journal_mode = DELETE"
        )  # all is in one file, which the end of this removes
        return connection


def _download(path: Path, copy: Path) -> None:
    try:
        answer = BlockingPeer(controller_url(path.parent), token_of_run(path.parent)).once(
            "/v1/record", None, SECONDS, max_bytes=1 << 62
        )
        copy.write_bytes(answer)
    except (DistillError, OSError) as error:
        raise RemoteError(
            f"{path} is locked by the run's controller, and no copy of it comes from there: {error}"
        ) from None
