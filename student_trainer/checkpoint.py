"""Checkpoints: DeepSpeed's files, complete and verified or not there at all.

    checkpoints/L000-v00000012/deepspeed/*.pt     DeepSpeed's own, one set per rank
                              /checkpoint.json    version, ranks, model, size and BLAKE3 of every file
    checkpoints/latest                            name of the newest one

A checkpoint is written as `.partial-NAME` and renamed when every file is on disk, then `latest` moves, then
older versions go. While the disk is full all ranks wait and `latest` names the one before. Every rank digests
the files that bear its number, rank 0 all others; digests are checked before torch.load reads the files. When
one was altered, the checkpoint before it is used (`checkpoint_files.choose`). No random state is saved:
nothing in a step is random (`engine.without_randomness`).

Of a checkpoint of another number of ranks, every rank cuts its shards out of the files of the old ones:

    rank q of n holds of a parameter its flat elements [q·k, (q+1)·k), k = ⌈elements / n⌉, padded with zeros

where q and n count, of experts that ranks share, the ranks that hold the same ones. The files are mapped and
decoded without running any code of theirs. What comes out is the state that a rank of the new number would
have saved. (DeepSpeed's universal checkpoint loses optimizer states other than `exp_avg` and `exp_avg_sq`,
and settings of parameter groups, and writes a second checkpoint to disk.)
"""

from __future__ import annotations

import errno
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial as bind
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch import Tensor

from student_trainer import checkpoint_files as files
from student_trainer.ranks import Ranks, all_done
from sync.base import durable
from sync.base.decoding import json_decoder
from sync.base.errors import DataError

log = logging.getLogger(__name__)
_TAG: Final = "deepspeed"
_OF_RANK: Final = re.compile(r"zero_pp_rank_(\d+)_")


def save(engine: Any, folder: Path, index: files.Index, ranks: Ranks, keep: int) -> Path:
    """Save all that a resumed run needs to go on bit for bit; keep the newest `keep`. Collective.

    `index`: of this checkpoint, still without files.
    """
    partial, final = folder / f".partial-{index.version}", folder / index.version
    digests: dict[str, files.File] = {}
    done = bind(all_done, ranks, f"checkpoint {index.version}")
    done(bind(_write_all, engine, partial, ranks))
    done(lambda: digests.update(_digests(partial, ranks)))
    for part in ranks.collect(msgspec.json.encode(digests)):
        index.files |= json_decoder(dict[str, files.File]).decode(part)
    done(bind(_finish, partial, final, index, keep) if ranks.rank == 0 else lambda: None)
    return final


def _write_all(engine: Any, partial: Path, ranks: Ranks) -> None:
    """DeepSpeed's files of all ranks. Raises OSError behind the last collective when the disk is full."""
    try:
        with _full_disk_later(engine) as noted:
            if ranks.rank == 0:
                with noted():
                    shutil.rmtree(partial, ignore_errors=True)
                    durable.make_folder(partial)
            ranks.barrier()
            engine.save_checkpoint(str(partial), tag=_TAG, client_state={}, save_latest=False)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)  # others may need the room meanwhile
        raise


@contextmanager
def _full_disk_later(engine: Any) -> Iterator[Callable[[], AbstractContextManager[None]]]:
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
            if not durable.is_full(error) and not isinstance(error, FileNotFoundError):
                raise
            met.append(error)

    def save(state_dict: Any, path: str) -> None:
        with noted(), open(path, "wb") as file:  # given a path, torch does not report a full disk
            torch.save(state_dict, file)

    writer = engine.checkpoint_engine
    writer.save, writer.makedirs = save, noted()(writer.makedirs)  # these hide the methods of the classes
    engine._copy_recovery_script = noted()(engine._copy_recovery_script)
    try:
        yield noted
    finally:
        del writer.save, writer.makedirs, engine._copy_recovery_script
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


def find(folder: Path, ranks: Ranks) -> tuple[Path | None, list[str]]:
    """The checkpoint to start from, and a line for each that was altered where sizes are right. Collective.

    Every rank reads its share of the chosen one's files; when one was altered, all choose again. Raises
    DataError on every rank when there are checkpoints and none is whole.
    """
    altered: dict[str, str] = {}
    while True:
        name = line = refusal = ""
        if ranks.rank == 0:
            try:
                choice = files.choose(folder, altered, digested=0)
                name, line = choice.path.name if choice.path else "", choice.line
            except DataError as error:
                refusal = str(error)
        body = ranks.broadcast(msgspec.json.encode((name, line, refusal)))
        name, line, refusal = json_decoder(tuple[str, str, str]).decode(body)
        if refusal:
            raise DataError(refusal)
        if not name:
            return None, []
        index, problem = files.index(folder / name)
        if index is not None:
            mine = {name: file for name, file in index.files.items() if _is_own(name, ranks)}
            problem = files.altered(folder / name, mine)
        problems = [text.decode() for text in ranks.collect((problem or "").encode()) if text]
        if not problems:
            if line and ranks.rank == 0:
                log.warning("%s", line)
            return folder / name, [line] if altered else []
        altered[name] = problems[0]


def load(engine: Any, path: Path, fingerprint: str, ranks: Ranks, expert_parallel: int = 1) -> files.Index:
    """Bring a fresh engine to a checkpoint that `find` accepted; its index. Collective.

    Raises DataError for a checkpoint of another model, or where other numbers of ranks share the experts.
    """
    index, _ = files.index(path)
    assert index is not None
    if index.fingerprint != fingerprint:
        raise DataError(
            f"checkpoint {path} is of model {index.fingerprint[:12]}, this run has {fingerprint[:12]}: "
            "start it with the same student"
        )
    if index.expert_parallel != expert_parallel:
        raise DataError(
            f"checkpoint {path} was saved with trainer.expert_parallel = {index.expert_parallel}, this run "
            f"has {expert_parallel}: resume with the same, the number of ranks may be another"
        )
    if index.world_size == ranks.world_size:
        engine.load_checkpoint(str(path), tag=_TAG)
    else:
        log.info("%s is of %d ranks, this run has %d", path, index.world_size, ranks.world_size)
        restore(engine, path / _TAG, index.world_size, ranks, expert_parallel)
    return index


def _digests(folder: Path, ranks: Ranks) -> dict[str, files.File]:
    """Size and digest of this rank's files below `folder`, each forced to disk."""
    recorded = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and _is_own(path.name, ranks)):
        durable.force(path)
        recorded[str(path.relative_to(folder))] = files.File(path.stat().st_size, files.digest(path))
    return recorded


def _is_own(name: str, ranks: Ranks) -> bool:
    """Whether this rank digests a file: DeepSpeed's are numbered by rank, rank 0 takes all others."""
    number = _OF_RANK.search(name)
    return (int(number[1]) if number else 0) % ranks.world_size == ranks.rank


# --- another number of ranks --------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where the old ranks hold a parameter: in which flat group, and from which element on."""

    group: int
    offset: int
    numel: int
    shared: int = 1
    """n ranks that share the experts in it: rank r, r + n, r + 2n, … have the same ones"""


def restore(engine: Any, folder: Path, saved: int, ranks: Ranks, expert_parallel: int = 1) -> None:
    """Bring a fresh engine to the checkpoint of `saved` ranks in `folder`. Collective.

    `expert_parallel`: ranks that share experts, then as now. Raises DataError for an optimizer state that is
    not one value for each element.
    """
    shards = [_read(folder, rank, "optim_states")["optimizer_state_dict"] for rank in range(saved)]
    common = _read(folder, min(ranks.rank, saved - 1), "model_states")
    zero = engine.optimizer
    shared = {
        name: expert_parallel
        for parameter, name in zero.param_names.items()
        if getattr(parameter, "ds_zero_placement_family", "") == "autoep_expert"
    }
    places = layout(common["param_shapes"], saved, shared)
    zero.checkpoint_event_prologue()
    groups = [[places[zero.param_names[parameter]] for parameter in group] for group in zero.fp16_groups]
    state = rebuild(shards, groups, list(zero.sub_group_to_group_id.values()), ranks)
    zero.load_state_dict({ranks.rank: state})
    zero.checkpoint_event_epilogue()
    for name in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, name, common[name])


def layout(
    shapes: Sequence[dict[str, Any]], saved: int, shared: Mapping[str, int] | None = None
) -> dict[str, Place]:
    """Place of every parameter, from the names and shapes of each flat group in order.

    `shared`: parameter of shared experts → `Place.shared`; its shape is that of one rank's experts.
    """
    places = {}
    for group, names in enumerate(shapes):
        offset = 0
        for name, shape in names.items():
            numel = torch.Size(shape).numel()
            places[name] = Place(group, offset, numel, (shared or {}).get(name, 1))
            offset += -(-numel // (saved // places[name].shared))
    return places


def rebuild(
    shards: Sequence[dict[str, Any]], groups: Sequence[Sequence[Place]], owners: Sequence[int], ranks: Ranks
) -> dict[str, Any]:
    """The ZeRO state of this rank from those of the old ranks.

    `groups`: parameters of each flat group as this rank has them; `owners`: its optimizer group.
    """
    settings = [
        {**group, "params": [index for index, owner in enumerate(owners) if owner == number]}
        for number, group in enumerate(shards[0]["optimizer_state_dict"]["param_groups"])
    ]
    state, flat = {}, []
    for index, places in enumerate(groups):
        # the old ranks that hold what this rank does of a parameter, in the order of its flat elements
        holders = [(place.group, shards[ranks.rank % place.shared :: place.shared]) for place in places]
        masters = [[shard["fp32_flat_groups"][group] for shard in old] for group, old in holders]
        flat.append(_joined(masters, places, ranks))
        states = [[shard["optimizer_state_dict"]["state"][group] for shard in old] for group, old in holders]
        state[index] = {
            name: _state([[values[name] for values in piece] for piece in states], places, masters, ranks)
            for name in states[0][0]
        }
    optimizer = {"state": state, "param_groups": settings}
    # which ranks hold which experts, which DeepSpeed compares where it is stated
    rest = {name: value for name, value in shards[0].items() if name != "ds_zero_partition_groups"}
    return {**rest, "optimizer_state_dict": optimizer, "fp32_flat_groups": flat}


def _state(
    pieces: list[list[Any]], places: Sequence[Place], masters: list[list[Tensor]], ranks: Ranks
) -> Any:
    """One state of a flat group: cut like the weights, or a number that all old ranks share."""
    first = pieces[0][0]
    if isinstance(first, Tensor) and first.dim() == 1 and first.shape == masters[0][0].shape:
        return _joined(pieces, places, ranks)
    same = torch.equal if isinstance(first, Tensor) else lambda left, other: left == other
    if not all(same(value, first) for piece in pieces for value in piece):
        raise DataError(
            "the optimizer keeps a state that is neither one value a weight nor the same on all ranks: "
            "resume on as many ranks as wrote the checkpoint"
        )
    return first


def _joined(pieces: Sequence[Sequence[Tensor]], places: Sequence[Place], ranks: Ranks) -> Tensor:
    """This rank's shards of a group, padded, one behind the other; `pieces`: the flat groups of the old ranks
    that hold each parameter."""
    shards = []
    for old_flat, place in zip(pieces, places, strict=True):
        old = -(-place.numel // len(old_flat))
        new = -(-place.numel // (ranks.world_size // place.shared))
        shard, first = torch.zeros(new, dtype=old_flat[0].dtype), ranks.rank // place.shared * new
        for owner, piece in enumerate(old_flat):
            start, end = max(first, owner * old), min(first + new, (owner + 1) * old, place.numel)
            if start < end:
                inside = place.offset + start - owner * old
                shard[start - first : end - first] = piece[inside : inside + end - start]
        shards.append(shard)
    return torch.cat(shards)


def _read(folder: Path, rank: int, kind: str) -> dict[str, Any]:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    paths = sorted(folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_{kind}.pt"))
    if len(paths) != 1:
        raise DataError(
            f"{folder} has {len(paths)} files with the {kind} of rank {rank}, there must be one: "
            "resume on as many ranks as wrote it"
        )
    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum]):
        content: dict[str, Any] = torch.load(paths[0], map_location="cpu", mmap=True, weights_only=True)
    return content
