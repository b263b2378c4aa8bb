"""A run's folder: its lock, its recorded configuration, and what of that may change on `--resume`.

A changed key takes effect, or is refused, or is judged by its content: prompts, held-out prompts and
DeepSpeed's configuration are compared themselves (`content`), wherever they come from.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator, Mapping, Sized
from pathlib import Path
from typing import IO, Any, Final

import msgspec
from blake3 import blake3

from distill.config import ControllerConfig, RunConfig
from distill.config.laws import decide
from distill.config.loading import PUT_BACK, recorded, validate
from distill.preflight_checks.machine import check_disk
from distill.prompts.sources import PromptSplit, sample_prompts
from distill.prompts.stream import Mixture, PromptSource
from distill.record.journal import JOURNAL
from distill.record.store import RECORD
from student_trainer.checkpoint_files import CHECKPOINTS, choose, saved
from student_trainer.deepspeed_json import deepspeed_config
from sync.base import durable, secrets
from sync.base.address import CONTROLLER_FILE, TOKEN_FILE, TOKEN_FILE_VARIABLE, WILDCARDS
from sync.base.errors import ConfigError
from sync.base.settings import LIVE, Settings
from sync.wire import Version


class RunFolder:
    """The folder of one run, locked for this process. Use inside `with`, or call `close()`."""

    def __init__(self, path: Path, lock: IO[str], resumed: bool) -> None:
        self.path, self._lock, self._resumed = path, lock, resumed
        self.logs = path / "logs"

    @classmethod
    def open(cls, config: RunConfig, resume: bool) -> RunFolder:
        """Create a run's folder, or enter the one to resume.

        Raises ConfigError when another process holds it, when it holds a run and `resume` is false (or none
        and `resume` is true), and when its disk is too full.
        """
        path = config.run_dir
        existing = holds_run(path)
        if resume and not existing:
            raise ConfigError(f"run folder {path} holds no run to resume: leave --resume out")
        try:
            durable.make_folder(path)
        except OSError as error:
            reason = f"run folder {path} cannot be made ({error.strerror}): set run.folder"
            raise ConfigError(reason) from None
        check_disk(path, config.run.min_free_disk_gib)
        lock = _take_lock(path / "lock")
        if existing and not resume:
            lock.close()
            raise ConfigError(
                f"run folder {path} holds a run already: go on with --resume, choose another run.name, "
                "or remove the folder"
            )
        (path / "logs").mkdir(exist_ok=True)
        return cls(path, lock, resume)

    def keep(self, config: RunConfig, content: dict[str, Any]) -> list[str]:
        """Write config.json, and keep an earlier one that differs as config.N.json; a line for every change.

        What a resume has no prompts of keeps its digest, for the next one. Raises ConfigError, and changes
        nothing, when a resumed run must not change so, or when what it ran with is not known.
        """
        path, lines = self.path / "config.json", []
        record = secrets.hide(config.model_dump(mode="json")) | {"content": secrets.hide(content)}
        if self._resumed or path.exists():
            kept = recorded(self.path)
            if self._resumed:
                if not isinstance(kept.get("content"), dict):
                    raise ConfigError(f"{path} has no table 'content', which every run writes: {PUT_BACK}")
                ran = {name: table for name, table in kept.items() if name != "content"}
                before = validate(ran, str(path)).model_dump(mode="json")
                lines = compare(before | {"content": kept["content"]}, record)
                record["content"] |= {
                    name: kept["content"][name]
                    for name in _OPTIONAL
                    if record["content"].get(name) is None and name in kept["content"]
                }
            if kept != record:
                number = len([*self.path.glob("config.*.json")])
                durable.write_json(self.path / f"config.{number}.json", kept, mode=0o600)
        durable.write_json(path, record, mode=0o600)
        return lines

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

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def holds_run(run_dir: Path) -> bool:
    """Whether there is something to resume, of this release or of one that kept a journal."""
    return (run_dir / RECORD).is_file() or (run_dir / JOURNAL).is_dir()


def checkpoint_line(run_dir: Path) -> str:
    """Which checkpoints are damaged and which one the trainer will use; empty: none is damaged.

    Raises DataError when checkpoints are there and none is whole.
    """
    return choose(run_dir / CHECKPOINTS).line


def write_role(run_dir: Path, name: str, settings: Settings) -> Path:
    """Write what a role is started with as JSON; the role finds the secrets in its environment."""
    path = run_dir / "roles" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(
        f".{name}.{socket.gethostname()}.{os.getpid()}.json"
    )  # others write it meanwhile
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


# --- resume

_FORM: Final = "refused: weights and optimizer in the checkpoint have that form"
_OF_CONTENT: Final = {
    **dict.fromkeys(("deepspeed.optimizer.type", "deepspeed.bf16", "deepspeed.fp16"), _FORM),
    "prompts": "refused: other prompts would be trained on, some of them held out or trained on before",
    "held_out": "refused: evaluations before and after would use different prompts",
}
"""Key below `content` → what a resume does with a change of it, and of all below it; else it takes effect."""
_OPTIONAL: Final = ("prompts", "held_out")
"""Parts of `content` that a run may not have."""


def content(config: RunConfig, split: PromptSplit) -> dict[str, Any]:
    """Digests of what a run trains on and with, wherever it comes from; of endless prompts, of a sample."""
    deepspeed = deepspeed_config(config.trainer)
    deepspeed["optimizer"]["params"].pop("lr")  # trainer.lr says it
    return {
        "prompts": _content(split.train),
        "held_out": _digest(split.held_out) if split.held_out else None,
        "deepspeed": deepspeed,
    }


def _content(source: PromptSource) -> Any:
    """Digest of a source's rows, of a mixture by part; of endless prompts, of a sample."""
    if isinstance(source, Mixture):
        return {name: _content(part) for name, part in source.parts.items()}
    if isinstance(source, Sized):
        return _digest(source)
    return _digest(sample_prompts(PromptSplit(source, [], None)), "the first of endless")


def _digest(prompts: Any, which: str = "") -> str:
    state = blake3()
    for index in range(len(prompts)):
        state.update(msgspec.msgpack.encode(prompts[index]))
    return f"{which} {len(prompts)} prompts, {state.hexdigest(length=16)}".strip()


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for every key that changed between two records of a run. Raises ConfigError for a refused one.

    What one record lacks (a newer field, prompts without an evaluator) is not compared with the other's.
    """
    lines: list[str] = []
    refused: list[str] = []
    for path, old, new in _differences(before, now):
        if path in [("content", name) for name in _OPTIONAL] and None in (old, new):
            continue
        decision = _decide(path)
        line = f"{'.'.join(path).removeprefix('content.')}: {old!s:.80} -> {new!s:.80} ({decision})"
        (refused if decision.startswith("refused") else lines).append(line)
    if refused:
        raise ConfigError(
            "\n".join(["the run cannot be resumed with these changes:", *refused])
            + "\nundo them, or start a new run under another run.name"
        )
    return lines


def _decide(path: tuple[str, ...]) -> str:
    if path[0] != "content":
        return decide(RunConfig, path)
    key = ".".join((*path[1:], ""))
    return next((words for part, words in _OF_CONTENT.items() if key.startswith(f"{part}.")), LIVE.words)


def _differences(
    before: Any, now: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Path and both values of what differs; a table that one side lacks is one difference."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in {**before, **now}:
            yield from _differences(before.get(key), now.get(key), (*path, key))
    elif before != now:
        yield path, before, now
