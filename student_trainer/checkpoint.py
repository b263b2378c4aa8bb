"""Checkpoints: DeepSpeed's files, complete and verified or not there at all.

    checkpoints/L000-v00000012/deepspeed/*.pt     DeepSpeed's own, one set per rank
                              /checkpoint.json    version, ranks, model, size and BLAKE3 of every file
    checkpoints/latest                            name of the newest one

A checkpoint is written as `.partial-NAME` and renamed when every file is on disk, then `latest` moves, then
older versions go, never the one that `latest` names. While the disk is full all ranks wait, `latest` names
the one before, and what was half-written is removed. DeepSpeed reads its files with torch.load; their digests
are checked first. Every rank digests the files that bear its number, rank 0 all others: ranks wait for each
other no longer than for the largest share.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial as bind
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from blake3 import blake3

from student_trainer import checkpoint_files as files
from student_trainer import repartition
from student_trainer.ranks import Ranks, all_done
from sync import durable
from sync.durable import is_full
from sync.errors import DataError

log = logging.getLogger(__name__)
_TAG: Final = "deepspeed"
_OF_RANK: Final = re.compile(r"zero_pp_rank_(\d+)_")


def save(
    engine: Any,
    folder: Path,
    index: files.Index,
    ranks: Ranks,
    keep: int,
    give_up: Callable[[], bool] = lambda: False,
) -> Path | None:
    """Save all that a resumed run needs to go on bit for bit; keep the newest `keep`. Collective.

    `index`: of this checkpoint, still without files. A version is saved once: what is whole already is never
    removed to make room for the same again. None: the disk is full and `give_up` returned True; the
    checkpoints are as they were.
    """
    partial, final = folder / f".partial-{index.version}", folder / index.version
    own: dict[str, files.File] = {}
    done = bind(all_done, ranks, f"checkpoint {index.version}", give_up=give_up)
    saved = done(bind(_write_all, engine, partial, ranks))
    saved = saved and done(lambda: own.update(_digests(partial, ranks)))
    if saved:
        for part in ranks.collect(msgspec.json.encode(own)):
            index.files |= msgspec.json.decode(part, type=dict[str, files.File])
        saved = done(bind(_finish, partial, final, index, keep) if ranks.rank == 0 else lambda: None)
    if not saved and ranks.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    return final if saved else None


def _write_all(engine: Any, partial: Path, ranks: Ranks) -> None:
    """DeepSpeed's files of all ranks. Raises OSError behind the last collective when the disk is full."""
    try:
        with _full_disk_later(engine) as noted:
            if ranks.rank == 0:
                with noted():
                    shutil.rmtree(partial, ignore_errors=True)
                    durable.make_folder(partial)
            ranks.barrier()
            state = {"rng": _rng(ranks)}
            engine.save_checkpoint(str(partial), tag=_TAG, client_state=state, save_latest=False)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)  # others may need the room meanwhile
        raise


Noted = Callable[[], AbstractContextManager[None]]


@contextmanager
def _full_disk_later(engine: Any) -> Iterator[Noted]:
    """Let DeepSpeed go through all its collectives though its files find no room; OSError at the end.

    Inside what it yields, a full disk is noted and nothing raised.
    """
    met: list[BaseException] = []

    @contextmanager
    def noted() -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            # on a full disk a folder may be missing that could not be made
            if not is_full(error) and not isinstance(error, FileNotFoundError):
                raise
            met.append(error)

    def save(state_dict: Any, path: str) -> None:
        with noted(), open(path, "wb") as file:  # given a path, torch does not report a full disk
            torch.save(state_dict, file)

    def guarded(call: Callable[..., Any]) -> Callable[..., None]:
        def run(*arguments: Any, **named: Any) -> None:
            with noted():
                call(*arguments, **named)

        return run

    writer, script = engine.checkpoint_engine, "_copy_recovery_script"
    with ExitStack() as stack:  # hides methods of DeepSpeed's classes
        for owner, name, instead in (
            (writer, "save", save),
            (writer, "makedirs", guarded(writer.makedirs)),
            (engine, script, guarded(getattr(engine, script))),
        ):
            setattr(owner, name, instead)
            stack.callback(delattr, owner, name)
        yield noted
    if met:
        raise OSError(errno.ENOSPC, str(met[0])) from met[0]


def _finish(partial: Path, final: Path, index: files.Index, keep: int) -> None:
    """Make what all ranks wrote the newest checkpoint; may be called again after a full disk stopped it."""
    if partial.exists():
        durable.write(partial / files.INDEX, msgspec.json.format(msgspec.json.encode(index), indent=1))
        for folder in {partial, *(path.parent for path in partial.rglob("*"))}:
            durable.force(folder)
        durable.rename(partial, final)
    durable.write(final.parent / "latest", f"{final.name}\n".encode())
    files.retain(final.parent, keep)


def find(folder: Path, wanted: str | None, ranks: Ranks) -> Path | None:
    """The checkpoint to start from: `wanted`, else what `latest` names; None when there is none at all.

    Raises DataError on every rank when it was named and is not there, or is not complete and unaltered; an
    older one is then named by its files' sizes, and verified when it is used. Collective.
    """
    named = (wanted or files.latest(folder)).encode() if ranks.rank == 0 else b""
    name = ranks.broadcast(named).decode()
    if not name:
        return None
    path = folder / name
    problems = [text.decode() for text in ranks.collect((_problem(path, ranks) or "").encode())]
    if any(problems):
        others = [one.name for one in files.saved(folder) if one != path and not files.index(one)[1]]
        remedy = (
            f'to start from an older one set checkpoint = "{others[-1]}"'
            if others
            else "no other one is whole"
        )
        raise DataError(f"checkpoint {path} cannot be used: {next(filter(None, problems))}; {remedy}")
    return path


def load(engine: Any, path: Path, fingerprint: str, ranks: Ranks) -> files.Index:
    """Bring a fresh engine to a checkpoint that `find` accepted; its index. Collective."""
    index, _ = files.index(path)
    assert index is not None
    if index.fingerprint != fingerprint:
        raise DataError(
            f"checkpoint {path} is of model {index.fingerprint[:12]}, this run has {fingerprint[:12]}: "
            "start it with the same student"
        )
    saved, size = index.world_size, ranks.world_size
    if saved == size:
        _, state = engine.load_checkpoint(str(path), tag=_TAG)
    else:
        log.info("%s is of %d ranks, this run has %d: every rank cuts its own shards", path, saved, size)
        state = repartition.restore(engine, path / _TAG, saved, ranks)
    if "rng" in state:
        _set_rng(state["rng"], path, ranks)
    return index


def _rng(ranks: Ranks) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if ranks.device.type == "cuda" else {})


def _set_rng(states: dict[str, torch.Tensor], path: Path, ranks: Ranks) -> None:
    """Set the random states that `_rng` saved, as far as this rank's device has one."""
    torch.set_rng_state(states["cpu"])
    on_gpu = ranks.device.type == "cuda"
    if on_gpu and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    elif on_gpu or "cuda" in states:
        log.warning(
            "%s was saved on %s and goes on on %s: the device's random numbers (dropout of adapters) are not "
            "those that would have come",
            path,
            *(("CPUs", "GPUs") if on_gpu else ("GPUs", "CPUs")),
        )


def _digests(folder: Path, ranks: Ranks) -> dict[str, files.File]:
    """Size and digest of this rank's files below `folder`, each forced to disk."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and _is_own(path.name, ranks)):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        found[str(path.relative_to(folder))] = files.File(path.stat().st_size, _digest(path))
    return found


def _is_own(name: str, ranks: Ranks) -> bool:
    """Whether this rank digests a file: DeepSpeed's are numbered by rank."""
    number = _OF_RANK.search(name)
    return (int(number[1]) if number else 0) % ranks.world_size == ranks.rank


def _digest(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def _problem(path: Path, ranks: Ranks) -> str | None:
    """Why a checkpoint must not be used, as far as this rank looks at its files; None: its part is whole."""
    index, problem = files.index(path)
    if index is None:
        return problem
    own = ((name, file) for name, file in index.files.items() if _is_own(name, ranks))
    return next((f"{name} was altered" for name, file in own if _digest(path / name) != file.blake3), None)
