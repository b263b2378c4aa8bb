"""The checkpoints' folder as files: which there are, which one a trainer starts from, and which go. No torch.

`choose` alone decides: the launcher asks it before anything loads, the trainer at every start, and the audit.
Newer is the later lineage, and of one lineage the later step: the order in which a run saves them, whatever
the clocks.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from blake3 import blake3

from sync.base.decoding import json_decoder
from sync.base.errors import DataError
from sync.base.formats import check_json_format
from sync.wire import Version

log = logging.getLogger(__name__)
CHECKPOINTS: Final = "checkpoints"
"""Their folder in a run's."""
INDEX: Final = "checkpoint.json"
FORMAT: Final = 1
"""Of a checkpoint: INDEX names it, and what names none has it."""
DIGESTED_BYTES: Final = 256 << 20
"""Largest checkpoint that is read to compare digests before anything loads: a fraction of a second."""


class File(msgspec.Struct):
    """One of DeepSpeed's files."""

    size: int
    blake3: str


class Index(msgspec.Struct):
    """checkpoint.json: written by rank 0 when all files are on disk, read at a resume and by the audit."""

    version: str
    """such as L000-v00000012"""
    world_size: int
    """ranks that saved it"""
    fingerprint: str
    """of the model: `Weights.fingerprint`"""
    run_id: str | None = None
    """`RunIdentity.id` of the run that saved it"""
    expert_parallel: int = 1
    """ranks that shared the experts of a layer"""
    files: dict[str, File] = {}
    """path below the checkpoint's folder → file"""
    format: int = FORMAT


def latest(folder: Path) -> str:
    """What `latest` names; empty: there is none. Raises DataError when it is no file."""
    path = folder / "latest"
    try:
        return path.read_text(errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}): write the name of a checkpoint beside it into it"
        ) from None


def saved(folder: Path) -> list[Path]:
    """Folders of checkpoints, oldest first."""
    checkpoints = {}
    for path in folder.glob("L*-v*"):
        try:
            checkpoints[Version.parse(path.name)] = path
        except ValueError:  # not ours
            continue
    return [path for _, path in sorted(checkpoints.items())]


class Choice(NamedTuple):
    """What a trainer starts from."""

    path: Path | None
    """None: there is no checkpoint, and it starts from the model folder"""
    damaged: list[str]
    """what is wrong with `latest` and with the checkpoints that come before `path`"""

    @property
    def line(self) -> str:
        """What is damaged and what is used instead; empty: nothing is."""
        return "; ".join([*self.damaged, f"checkpoint {self.path} is used"]) if self.damaged else ""


def choose(folder: Path, altered: Mapping[str, str] | None = None, digested: int = DIGESTED_BYTES) -> Choice:
    """The checkpoint that `latest` names, or the newest whole one before it, else after it.

    `altered`: name → what its readers found wrong; `digested`: bytes up to which a checkpoint's digests are
    compared here, else its sizes alone. Raises DataError when there are checkpoints and none is whole, and
    for one of another format, instead of which none is used.
    """
    named, paths = latest(folder), saved(folder)[::-1]
    names = [path.name for path in paths]
    if not paths and not named:
        return Choice(None, [])
    damaged = []
    if not named:
        damaged.append(f"{folder / 'latest'} is {'empty' if (folder / 'latest').exists() else 'missing'}")
    elif named not in names:
        damaged.append(f"{folder / 'latest'} names {named:.40}: {index(folder / named)[1]}")
    after = 0
    with suppress(ValueError):  # it may be no version
        after = sum(Version.parse(name) > Version.parse(named) for name in names)
    for path in [*paths[after:], *paths[:after]]:
        problem = (altered or {}).get(path.name) or damage(path, digested)
        if problem is None:
            return Choice(path, damaged)
        damaged.append(f"checkpoint {path.name} is damaged: {problem}")
    raise DataError(
        f"no checkpoint in {folder} is whole ({'; '.join(damaged)}): put one back from a copy, or remove "
        "that folder to train again from the model folder, from step 0 on"
    )


def damage(path: Path, digested: int) -> str | None:
    """What is wrong with a checkpoint; None where nothing that is looked at is. `digested`: see `choose`."""
    with suppress(OSError):  # `index` says it
        check_json_format(path / INDEX, (path / INDEX).read_bytes(), FORMAT)
    header, problem = index(path)
    if header is None or sum(file.size for file in header.files.values()) > digested:
        return problem
    return altered(path, header.files)


def altered(path: Path, files: Mapping[str, File]) -> str | None:
    """The first of a checkpoint's `files` that is not as it was saved; reads them whole."""
    for name, file in files.items():
        try:
            if digest(path / name) != file.blake3:
                return f"{name} was altered"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def digest(path: Path) -> str:
    """BLAKE3 of a file, in hex."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def index(path: Path) -> tuple[Index | None, str | None]:
    """The index of a checkpoint, and what is wrong with it or with sizes of files."""
    try:
        Version.parse(path.name)
    except ValueError:
        return None, "no checkpoint is named so"
    try:
        index = json_decoder(Index).decode((path / INDEX).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None, f"it has no {INDEX}"
    except OSError as error:
        return None, f"its {INDEX} cannot be read ({error.strerror})"
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None, f"its {INDEX} is damaged"
    if index.version != path.name:
        return None, f"it is checkpoint {index.version:.40}, which was put in its place"
    if not index.files:
        return None, f"its {INDEX} names no files"
    for name, entry in index.files.items():
        size = None
        with suppress(OSError, ValueError):  # also names that no file can have
            size = (path / name).stat().st_size if (path / name).is_file() else None
        if size != entry.size:
            return None, f"{name} is missing or cut short"
    return index, None


def retain(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` whole checkpoints and what `latest` names, and broken saves."""
    named, paths = latest(folder), saved(folder)
    whole = [path for path in paths if index(path)[1] is None][-keep:]
    for path in [*(path for path in paths if path not in whole), *folder.glob(".partial-L*")]:
        if path.name != named:
            shutil.rmtree(path)
            log.info("removed checkpoint %s", path.name)
