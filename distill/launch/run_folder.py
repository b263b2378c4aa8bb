"""A run's folder: its lock, its files for other processes, and the checkpoints that a rollback removes."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

from distill.config import ControllerConfig, RunConfig
from distill.config.loading import recorded
from distill.record.journal import JOURNAL
from distill.record.store import RECORD
from student_trainer.checkpoint_files import CHECKPOINTS, saved
from sync.base import durable, secrets
from sync.base.address import CONTROLLER_FILE, TOKEN_FILE, TOKEN_FILE_VARIABLE, WILDCARDS
from sync.base.errors import ConfigError
from sync.base.settings import Settings
from sync.wire import Version


class RunFolder(AbstractContextManager["RunFolder"]):
    """The folder of one run, locked for this process. Use inside `with`."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path, self._lock = path, lock
        self.logs = path / "logs"

    @classmethod
    def open(cls, config: RunConfig, resume: bool) -> RunFolder:
        """Create a run's folder, or enter the one to resume.

        Raises ConfigError when another process holds it, and when it holds a run and `resume` is false, or
        none and `resume` is true.
        """
        path = config.run_dir
        if resume:
            check_holds_run(path)
        try:
            durable.make_folder(path)
        except OSError as error:
            reason = f"run folder {path} cannot be made ({error.strerror}): set run.folder"
            raise ConfigError(reason) from None
        lock = _take_lock(path / "lock")
        if holds_run(path) and not resume:
            lock.close()
            raise ConfigError(
                f"run folder {path} holds a run already: go on with --resume, choose another run.name, "
                "or remove the folder"
            )
        (path / "logs").mkdir(exist_ok=True)
        return cls(path, lock)

    def keep(self, record: Mapping[str, Any]) -> None:
        """Write config.json (distill.record.resume), and keep an earlier one that differs as
        config.N.json."""
        path = self.path / "config.json"
        if path.exists() and (kept := recorded(self.path)) != record:
            number = len([*self.path.glob("config.*.json")])
            durable.write_json(self.path / f"config.{number}.json", kept, mode=0o600)
        durable.write_json(path, record, mode=0o600)

    def begin(self) -> None:
        """The run goes on: the summary of an earlier end is removed until it ends again."""
        (self.path / "summary.json").unlink(missing_ok=True)

    def keep_url(self, place: ControllerConfig, url: str) -> None:
        """Say where the controller is; nothing when it listens everywhere and no URL is configured."""
        path = self.path / CONTROLLER_FILE
        if place.url is None and place.host in WILDCARDS:
            path.unlink(missing_ok=True)
        else:
            durable.write_json(path, {"url": url})

    def keep_token(self, token: str | None) -> dict[str, str]:
        """Write the bearer token for roles and readers elsewhere: the variable that names its file."""
        path = self.path / TOKEN_FILE
        durable.write(path, f"{token}\n".encode(), mode=0o600)
        return {TOKEN_FILE_VARIABLE: str(path)}

    def fullest(self) -> tuple[Path, int]:
        """The part of the folder on the fullest disk, and the free bytes there."""
        parts = [self.path, *(self.path / name for name in ("arrays", CHECKPOINTS, "store"))]
        free = {part: shutil.disk_usage(part).free for part in parts if part.is_dir()}
        return min(free.items(), key=lambda item: item[1])

    def set_back(self, to: Version | None) -> None:
        """Remove the checkpoints after `to` (None: all), so that the next trainer resumes there.

        No trainer may run meanwhile.
        """
        folder = self.path / CHECKPOINTS
        if to is None:
            (folder / "latest").unlink(missing_ok=True)
        else:
            durable.write(folder / "latest", f"{to}\n".encode())
        for path in saved(folder):
            if to is None or Version.parse(path.name) > to:
                shutil.rmtree(path)

    def __exit__(self, *_: object) -> None:
        self._lock.close()


def check_holds_run(run_dir: Path) -> None:
    """Raise ConfigError where there is nothing to resume."""
    if not holds_run(run_dir):
        raise ConfigError(f"run folder {run_dir} holds no run to resume: leave --resume out")


def holds_run(run_dir: Path) -> bool:
    """Whether there is something to resume, of this release or of one that kept a journal."""
    return (run_dir / RECORD).is_file() or (run_dir / JOURNAL).is_dir()


def write_role(run_dir: Path, name: str, settings: Settings) -> Path:
    """Write what a role is started with as JSON; the role finds the secrets in its environment."""
    path = run_dir / "roles" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    # others write it meanwhile
    temporary = path.with_name(f".{name}.{socket.gethostname()}.{os.getpid()}.json")
    durable.write_json(temporary, secrets.hide(settings.model_dump(mode="json")), mode=0o600)
    durable.rename(temporary, path)
    return path


def _take_lock(path: Path) -> IO[str]:
    lock = path.open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise ConfigError(
                f"run folder {path.parent} cannot be locked ({error.strerror}): mount its file system with "
                "locks, as Lustre's option flock does, or set run.folder to a folder on another"
            ) from None
        raise ConfigError(
            f"run folder {path.parent} is in use by process {holder}: wait for it, or choose another run.name"
        ) from None
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock
