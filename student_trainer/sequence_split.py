"""Rows whose positions lie over the ranks of a group: DeepSpeed's Ulysses around our attention.

    each rank: S/n positions of all heads ──all-to-all──▶ S positions of H/n heads ─▶ `varlen.row_attention`
               S/n positions of all heads ◀──all-to-all── S positions of H/n heads ◀──┘

Everything else in a transformer treats positions one by one. Each rank computes the loss of its own, and
their sum over the ranks is that of the whole rows; so is the sum of the gradients, as an exchange's gradient
is the exchange back. DeepSpeed's optimizer sees ordinary data-parallel ranks.

The exchange is DeepSpeed's `DistributedAttention`. Its `UlyssesSPAttentionHF` takes as many rows in every
pass and values as wide as keys, drops masks, a sliding window's too, and takes the place of an implementation
of attention in the whole process.

Letters: R rows of L columns, B = R sequences (1 when rows are packed) of S = L positions, H heads (keys and
values may have fewer), D size of a head, C completion tokens of the micro-batch, c those of this rank, n
ranks of the group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from student_trainer.config import TrainerSettings
from student_trainer.objectives.divergences import future_credit
from student_trainer.ranks import Ranks
from student_trainer.varlen import PackedRows, row_attention
from sync.base.errors import ConfigError


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that train on the same rows, seen by one of them."""

    rank: int
    """Its place in the group, and that of its columns."""
    size: int
    """n"""
    handle: Any = None
    """torch's process group."""


def join(settings: TrainerSettings, ranks: Ranks) -> SequenceGroup | None:
    """Join neighbouring ranks to a group; None where every rank trains on whole rows. Collective."""
    if (size := settings.sequence_parallel) == 1:
        return None
    timeout = timedelta(seconds=settings.init_timeout_seconds)
    firsts = range(0, ranks.world_size, size)
    groups = [dist.new_group(list(range(first, first + size)), timeout) for first in firsts]
    return SequenceGroup(ranks.rank % size, size, groups[ranks.rank // size])


@dataclass(frozen=True)
class SplitRows:
    """One rank's columns of a micro-batch; one object for one forward and backward pass."""

    group: SequenceGroup
    columns: slice
    """Columns of the L, padded to a multiple of n, that are this rank's"""
    position_RL: Tensor
    """int64: place of every column in its row"""
    index_C: Tensor
    """int64 [c]: this rank's completion tokens among the C"""
    count: int
    """C"""
    packed: PackedRows | None = None
    """The whole rows that lie end to end, padding as one more; None where they are padded"""
    modules: set[int] = field(default_factory=set)
    """`id` of every module whose attention saw the other ranks' positions; filled by `split_attention`"""

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """What the model takes besides token ids; its layers hand all of it on to the attention function."""
        more = {} if self.packed is None else self.packed.arguments(device)
        return more | {"position_ids": self.position_RL.to(device), "split_rows": self}

    def part(self, whole_RL: Tensor, padding: int = 0) -> Tensor:
        """This rank's columns of [R, L, …], with `padding` where these go beyond L."""
        beyond = self.columns.stop - whole_RL.shape[1]
        if beyond > 0:
            whole_RL = pad(whole_RL, (0, 0) * (whole_RL.ndim - 2) + (0, beyond), value=padding)
        return whole_RL[:, self.columns]

    def whole(self, values_C: Tensor) -> Tensor:
        """[…, C] of all ranks' [..., c]. Collective, without gradient."""
        every_C = values_C.new_zeros((*values_C.shape[:-1], self.count))
        every_C[..., self.index_C.to(values_C.device)] = values_C.detach()
        dist.all_reduce(every_C, group=self.group.handle)
        return every_C

    def future_credit(self, d_C: Tensor, factor_C: Tensor, row_C: Tensor) -> Tensor:
        """`divergences.future_credit` of this rank's tokens, where later ones may be others'. Collective."""
        every_C = self.whole(torch.stack([d_C, factor_C, row_C.to(d_C)]))
        return future_credit(*every_C)[self.index_C.to(d_C.device)]


def split(
    group: SequenceGroup, tokens_RL: Tensor, positions_C: Tensor, packed: PackedRows | None
) -> tuple[Tensor, Tensor, SplitRows]:
    """This rank's tokens [R, L/n], its positions [c] in R · L/n, and the rest that the student needs.

    L is padded to a multiple of n; behind packed rows the padding is a row of its own.
    """
    rows, length = tokens_RL.shape
    width = -(-length // group.size)
    beyond = width * group.size - length
    if packed is not None and beyond:
        packed = PackedRows((*packed.lengths, beyond))
    columns = slice(group.rank * width, (group.rank + 1) * width)
    position_RL = torch.arange(width * group.size).expand(rows, -1) if packed is None else packed.positions()
    column_C = positions_C % length
    index_C = ((column_C >= columns.start) & (column_C < columns.stop)).nonzero().squeeze(1)
    layout = SplitRows(group, columns, position_RL[:, columns], index_C, len(positions_C), packed)
    place_C = positions_C // length * width + column_C - columns.start
    return layout.part(tokens_RL), place_C[index_C], layout


def split_attention(
    module: nn.Module,
    query_BHSD: Tensor,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    attention_mask: int | None,
    *,
    split_rows: SplitRows | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """`row_attention` of whole rows, [B, S/n, H, D] of this rank's positions. Collective.

    Without `split_rows` this rank has the whole rows. `s_aux`: a logit per head, as there.
    """
    query_key_value = query_BHSD, key_BHSD, value_BHSD
    if split_rows is None:
        return row_attention(module, *query_key_value, attention_mask, s_aux=s_aux, **others)
    from deepspeed.sequence.layer import DistributedAttention

    split_rows.modules.add(id(module))
    group, heads = split_rows.group, query_BHSD.shape[1]
    if heads % group.size or (key_BHSD.shape[1] % group.size and group.size % key_BHSD.shape[1]):
        raise ConfigError(
            f"trainer.sequence_parallel is {group.size} and {type(module).__name__} has {heads} heads, of "
            f"keys and values {key_BHSD.shape[1]}: set trainer.sequence_parallel = 1"
        )
    # heads, which are of keys or values where they are fewer than ranks, are repeated: one for each
    query_BSHD, key_BSHD, value_BSHD = (
        states.transpose(1, 2).repeat_interleave(max(1, group.size // states.shape[1]), 2)
        for states in query_key_value
    )
    part = heads // group.size
    sink_H = None if s_aux is None else s_aux[group.rank * part : (group.rank + 1) * part]

    def some_heads(*states_BSHD: Tensor) -> Tensor:
        query, key, value = (states.transpose(1, 2) for states in states_BSHD)
        return row_attention(module, query, key, value, attention_mask, s_aux=sink_H, **others)[0]

    exchange = DistributedAttention(some_heads, group.handle, scatter_idx=2, gather_idx=1)
    return exchange(query_BSHD, key_BSHD, value_BSHD, 0), None
