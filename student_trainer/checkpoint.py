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

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from functools import partial as bind
from pathlib import Path
from typing import Any, Final

import torch
from blake3 import blake3

from student_trainer import checkpoint_files as files
from student_trainer import repartition
from student_trainer.disk_full import all_done, full_disk_later
from student_trainer.ranks import Ranks
from sync import durable
from sync.errors import DataError
from sync.wire import Version

log = logging.getLogger(__name__)
_TAG: Final = "deepspeed"
_OF_RANK: Final = re.compile(r"zero_pp_rank_(\d+)_")


def save(
    engine: Any,
    folder: Path,
    version: Version,
    fingerprint: str,
    ranks: Ranks,
    keep: int,
    give_up: Callable[[], bool] = lambda: False,
    run_id: str | None = None,
) -> Path | None:
    """Save all that a resumed run needs to go on bit for bit; keep the newest `keep`. Collective.

    `run_id`: of the run that it belongs to (`RunIdentity.id`).
    A version is saved once: what is whole already is never removed to make room for the same again.
    None: the disk is full and `give_up` said not to wait; the checkpoints are as they were.
    """
    partial, final = folder / f".partial-{version}", folder / str(version)
    index: dict[str, Any] = {
        "version": str(version),
        "world_size": ranks.world_size,
        "fingerprint": fingerprint,
        "run_id": run_id,
    }
    own: dict[str, Any] = {}
    write = bind(_write_all, engine, partial, ranks)
    what = f"checkpoint {version}"
    done = all_done(ranks, what, write, give_up)
    done = done and all_done(ranks, what, lambda: own.update(_digests(partial, ranks)), give_up)
    if done:
        parts = [json.loads(part) for part in ranks.collect(json.dumps(own).encode())]
        index["files"] = {name: entry for part in parts for name, entry in part.items()}
        finish = bind(_finish, partial, final, index, keep) if ranks.rank == 0 else _nothing
        done = all_done(ranks, what, finish, give_up)
    if not done and ranks.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    return final if done else None


def _write_all(engine: Any, partial: Path, ranks: Ranks) -> None:
    """DeepSpeed's files of all ranks. Raises OSError behind the last collective when the disk is full."""
    try:
        with full_disk_later(engine) as noted:
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


def _nothing() -> None:
    """What is left to other ranks where rank 0 alone writes."""


def _finish(partial: Path, final: Path, index: dict[str, Any], keep: int) -> None:
    """Make what all ranks wrote the newest checkpoint; may be called again after a full disk stopped it."""
    if partial.exists():
        durable.write(partial / files.INDEX, json.dumps(index, indent=1).encode())
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


def load(engine: Any, path: Path, fingerprint: str, ranks: Ranks) -> Version:
    """Bring a fresh engine to a checkpoint that `find` accepted; its version. Collective."""
    index = json.loads((path / files.INDEX).read_text())
    if index["fingerprint"] != fingerprint:
        raise DataError(
            f"checkpoint {path} is of model {index['fingerprint'][:12]}, this run has {fingerprint[:12]}: "
            "start it with the same student"
        )
    saved = index["world_size"]
    if saved == ranks.world_size:
        _, state = engine.load_checkpoint(str(path), tag=_TAG)
    else:
        log.info(
            "%s is of %d ranks, this run has %d: every rank cuts its own shards",
            path,
            saved,
            ranks.world_size,
        )
        state = repartition.restore(engine, path / _TAG, saved, ranks)
    if "rng" in state:
        _draw_on(state["rng"], path, ranks)
    return Version.parse(index["version"])


def run_of(path: Path | None) -> str | None:
    """The id of the run that saved a checkpoint; None: there is none, or an older release saved it."""
    return None if path is None else json.loads((path / files.INDEX).read_text()).get("run_id")


def _rng(ranks: Ranks) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if ranks.device.type == "cuda" else {})


def _draw_on(states: dict[str, torch.Tensor], path: Path, ranks: Ranks) -> None:
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


def _digests(folder: Path, ranks: Ranks) -> dict[str, dict[str, Any]]:
    """Size and digest of this rank's files below `folder`, each forced to disk."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and _is_own(path.name, ranks)):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        found[str(path.relative_to(folder))] = {"size": path.stat().st_size, "blake3": _digest(path)}
    return found


def _is_own(name: str, ranks: Ranks) -> bool:
    """Whether this rank digests a file: those of DeepSpeed's bear the number of the rank that wrote them."""
    number = _OF_RANK.search(name)
    return (int(number[1]) if number else 0) % ranks.world_size == ranks.rank


def _digest(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def _problem(path: Path, ranks: Ranks) -> str | None:
    """Why a checkpoint must not be used, as far as this rank looks at its files; None: its part is whole."""
    digests, problem = files.index(path)
    if problem:
        return problem
    own = (name for name in digests if _is_own(name, ranks))
    return next((f"{name} was altered" for name in own if _digest(path / name) != digests[name]), None)
