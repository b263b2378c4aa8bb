"""A checkpoint of another number of ranks: every rank cuts its shards out of the files of the old ones.

    rank q of n holds of a parameter its flat elements [q·k, (q+1)·k), k = ⌈elements / n⌉, padded with zeros

The old files are mapped and decoded without running any code of theirs. What comes out is the state that a
rank of the new number would have saved; DeepSpeed restores it as such. DeepSpeed's universal checkpoint keeps
`exp_avg` and `exp_avg_sq` alone of an optimizer, gives every parameter group the settings of the first,
writes a second checkpoint to disk, and loads it with `weights_only=False`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from student_trainer.ranks import Ranks
from sync.errors import DataError


class Place(NamedTuple):
    """Where the old ranks hold a parameter: in which flat group, and from which element on."""

    group: int
    offset: int
    numel: int


def restore(engine: Any, folder: Path, saved: int, ranks: Ranks) -> None:
    """Bring a fresh engine to the checkpoint of `saved` ranks in `folder`. Collective.

    Raises DataError for an optimizer state that is not one value for each element.
    """
    shards = [_read(folder, rank, "optim_states")["optimizer_state_dict"] for rank in range(saved)]
    common = _read(folder, min(ranks.rank, saved - 1), "model_states")
    places = layout(common["param_shapes"], saved)
    zero = engine.optimizer
    zero.checkpoint_event_prologue()
    groups = [[places[zero.param_names[parameter]] for parameter in group] for group in zero.fp16_groups]
    state = rebuild(shards, groups, list(zero.sub_group_to_group_id.values()), ranks)
    zero.load_state_dict({ranks.rank: state})
    zero.checkpoint_event_epilogue()
    for name in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, name, common[name])


def layout(shapes: Sequence[dict[str, Any]], saved: int) -> dict[str, Place]:
    """Place of every parameter, from the names and shapes of each flat group in order."""
    places = {}
    for group, names in enumerate(shapes):
        offset = 0
        for name, shape in names.items():
            numel = torch.Size(shape).numel()
            places[name] = Place(group, offset, numel)
            offset += -(-numel // saved)
    return places


def rebuild(
    shards: Sequence[dict[str, Any]], groups: Sequence[Sequence[Place]], owners: Sequence[int], ranks: Ranks
) -> dict[str, Any]:
    """The ZeRO state of this rank from those of the old ranks.

    `groups`: parameters of each flat group as this rank has them; `owners`: its optimizer group.
    """
    optimizers = [shard["optimizer_state_dict"] for shard in shards]
    settings = [
        {**group, "params": [index for index, owner in enumerate(owners) if owner == number]}
        for number, group in enumerate(optimizers[0]["param_groups"])
    ]
    state, flat = {}, []
    for index, places in enumerate(groups):
        masters = [[shard["fp32_flat_groups"][place.group] for shard in shards] for place in places]
        old = [[optimizer["state"][place.group] for optimizer in optimizers] for place in places]
        flat.append(_joined(masters, places, ranks))
        state[index] = {
            name: _state([[values[name] for values in piece] for piece in old], places, masters, ranks)
            for name in old[0][0]
        }
    optimizer = {"state": state, "param_groups": settings}
    return {**shards[0], "optimizer_state_dict": optimizer, "fp32_flat_groups": flat}


def _state(
    pieces: list[list[Any]], places: Sequence[Place], masters: list[list[Tensor]], ranks: Ranks
) -> Any:
    """One state of a flat group: cut like the weights, or a number that all old ranks share."""
    first = pieces[0][0]
    if isinstance(first, Tensor) and first.dim() == 1 and first.shape == masters[0][0].shape:
        return _joined(pieces, places, ranks)
    same = torch.equal if isinstance(first, Tensor) else lambda one, other: one == other
    if not all(same(value, first) for piece in pieces for value in piece):
        raise DataError(
            "the optimizer keeps a state that is neither one value a weight nor the same on all ranks: "
            "resume on as many ranks as wrote the checkpoint"
        )
    return first


def _joined(pieces: Sequence[Sequence[Tensor]], places: Sequence[Place], ranks: Ranks) -> Tensor:
    """This rank's shards of a group, one behind the other; `pieces`: by parameter and old rank."""
    pairs = zip(pieces, places, strict=True)
    return torch.cat([cut(piece, place, ranks.rank, ranks.world_size) for piece, place in pairs])


def cut(pieces: Sequence[Tensor], place: Place, rank: int, world_size: int) -> Tensor:
    """Shard `rank` of `world_size` of a parameter, padded; `pieces`: its flat group on the old ranks."""
    old, new = -(-place.numel // len(pieces)), -(-place.numel // world_size)
    shard, first = torch.zeros(new, dtype=pieces[0].dtype), rank * new
    for owner, piece in enumerate(pieces):
        start, end = max(first, owner * old), min(first + new, (owner + 1) * old, place.numel)
        if start < end:
            inside = place.offset + start - owner * old
            shard[start - first : end - first] = piece[inside : inside + end - start]
    return shard


def _read(folder: Path, rank: int, kind: str) -> dict[str, Any]:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    found = sorted(folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_{kind}.pt"))
    if len(found) != 1:
        raise DataError(
            f"{folder} has {len(found)} files with the {kind} of rank {rank}, there must be one: "
            "resume on as many ranks as wrote it"
        )
    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum]):
        content: dict[str, Any] = torch.load(found[0], map_location="cpu", mmap=True, weights_only=True)
    return content
