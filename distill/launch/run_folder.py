"""A run's folder: who may use it, and what is written into it before anything is started."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import IO, Any

from distill.config import RunConfig
from distill.launch.resume import compare
from distill.loading import load_run_dir
from student_trainer.checkpoint_files import saved
from sync import durable, secrets
from sync.errors import ConfigError
from sync.settings import Settings
from sync.wire import Version

GIB = 1 << 30


class RunFolder:
    """The folder of one run, locked for this process. Use inside `with`, or call `close()`."""

    def __init__(self, path: Path, lock: IO[str], resumed: bool) -> None:
        self.path, self._lock, self._resumed = path, lock, resumed
        self.logs = path / "logs"

    @classmethod
    def open(cls, config: RunConfig, resume: bool) -> RunFolder:
        """Make or re-enter the run's folder.

        Raises ConfigError when another process holds it, when it holds a run and `resume` is false (or none
        and `resume` is true), and when its disk is too full.
        """
        path = config.run_dir
        existing = (path / "journal").is_dir() and any((path / "journal").iterdir())
        if resume and not existing:
            raise ConfigError(f"run folder {path} holds no run to resume: leave --resume out")
        try:
            durable.make_folder(path)
        except OSError as error:
            raise ConfigError(
                f"run folder {path} cannot be made ({error.strerror}): set run.folder"
            ) from None
        check_disk(path, config.run.min_free_disk_gib)
        lock = _take_lock(path / "lock")
        if existing and not resume:
            lock.close()
            raise ConfigError(
                f"run folder {path} holds a run already: go on with --resume, choose another run.name, "
                "or remove the folder"
            )
        folder = cls(path, lock, resume)
        folder.logs.mkdir(exist_ok=True)
        return folder

    def keep(self, config: RunConfig, content: dict[str, Any]) -> list[str]:
        """Write config.json, an earlier one that differs kept as config.N.json; a line for every change.

        `content`: see `distill.launch.resume.content`. Raises ConfigError, and writes nothing, when a resumed
        run must not change so.
        """
        path, lines = self.path / "config.json", []
        record = secrets.hide(config.model_dump(mode="json")) | {"content": secrets.hide(content)}
        if path.is_file():
            kept = json.loads(path.read_text())
            if self._resumed:
                before = load_run_dir(self.path).model_dump(mode="json")
                lines = compare(before | {"content": kept.get("content", record["content"])}, record)
                if "content" not in kept:
                    lines.append(
                        "prompts that cannot be compared: an older version recorded no digest of them"
                    )
            if kept != record:
                number = len([*self.path.glob("config.*.json")])
                durable.write_json(self.path / f"config.{number}.json", kept, mode=0o600)
        durable.write_json(path, record, mode=0o600)
        return lines

    def write_role(self, name: str, settings: Settings) -> Path:
        """See `write_role`."""
        return write_role(self.path, name, settings)

    def fullest(self) -> tuple[Path, int]:
        """The part of the folder whose disk has the fewest free bytes, and how many."""
        parts = [self.path, *(self.path / name for name in ("journal", "checkpoints", "store"))]
        return min(
            ((part, shutil.disk_usage(part).free) for part in parts if part.is_dir()),
            key=lambda found: found[1],
        )

    def set_back(self, to: Version | None) -> None:
        """Remove the checkpoints after `to` (None: all), so that a trainer resumes there. None must run."""
        folder = self.path / "checkpoints"
        if to is None:
            (folder / "latest").unlink(missing_ok=True)
        else:
            durable.write(folder / "latest", f"{to}\n".encode())
        for path in saved(folder):
            if to is None or Version.parse(path.name) > to:
                shutil.rmtree(path)

    def close(self) -> None:
        """Let another process use the folder."""
        self._lock.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_disk(path: Path, min_free_gib: float) -> None:
    """Raise ConfigError when the disk of `path` has less free space than that."""
    free = shutil.disk_usage(path).free / GIB
    if free < min_free_gib:
        raise ConfigError(
            f"{path} has {free:.2f} GiB free, run.min_free_disk_gib asks for {min_free_gib:g}: "
            "free some space, or set run.folder to another disk"
        )


def write_role(run_dir: Path, name: str, settings: Settings) -> Path:
    """What a role is started with, as JSON in a run's folder; it finds the secrets in its environment."""
    path = run_dir / "roles" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.write_json(path, secrets.hide(settings.model_dump(mode="json")), mode=0o600)
    return path


def _take_lock(path: Path) -> IO[str]:
    lock = path.open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise ConfigError(
            f"run folder {path.parent} is in use by process {holder}: wait for it, or choose another run.name"
        ) from None
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock
