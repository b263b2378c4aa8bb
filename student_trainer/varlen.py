"""Rows laid end to end in one sequence, each attending to itself alone: Σ L² products and no padding.

On GPUs `row_attention` calls torch's flash attention for rows of unlike lengths where it computes what the
model asks for; otherwise, and on CPUs, long rows are computed one by one and short ones in groups of about
one length. Whatever it does not compute exactly it refuses by name.

Letters: B sequences (1 when rows are packed; the rows of a group), S tokens of all rows, L tokens of one row,
H heads (keys and values may have fewer), D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from student_trainer.parallelism import ATTENTIONS
from sync.base.errors import ConfigError

NEUTRAL: Final = frozenset(
    ["cache_position", "cu_seq_lens_k", "deterministic", "layer_idx", "max_length_k", "max_length_q"]
    + ["num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits"]
    + ["position_ids", "return_dict", "use_cache"]
)
"""Arguments of an attention function that change nothing of what it computes."""
STRETCH: Final = 8
"""Rows of lengths between two of its multiples are computed together, stretched to the same length."""
TOGETHER: Final = 1 << 16
"""Elements of the matrices of one head, at most, that rows are computed together with: longer rows gain
nothing."""
LONG: Final = 256
"""Tokens of a row from which torch's attention for CPUs is as fast in bf16 as in fp32: with gradients, rows
of 128 take it twice as long, rows of 32 four times."""


class Groups(NamedTuple):
    """Which rows are computed together."""

    sizes: list[tuple[int, int]]
    """(rows, length) of each group"""
    source_P: Tensor
    """int64: place in the sequence of every token of all groups; a row is stretched by its own last token,
    which none of its others sees"""
    home_S: Tensor
    """int64: place among those of every token of the sequence"""


@dataclass(frozen=True)
class PackedRows:
    """Rows that lie end to end in one sequence; one object for one forward and backward pass."""

    lengths: tuple[int, ...]
    """Tokens of each, at least 1."""
    modules: set[int] = field(default_factory=set)
    """`id` of every module that computed its attention row by row; filled by `row_attention`."""

    def positions(self) -> Tensor:
        """int64 [1, S]: place of every token in its row."""
        return torch.cat([torch.arange(length) for length in self.lengths])[None]

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """What the model takes besides token ids; its layers hand all of it on to the attention function."""
        begins = torch.tensor((0, *self.lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        longest = max(self.lengths)
        return {
            "position_ids": self.positions().to(device),
            "packed_rows": self,
            "cu_seq_lens_q": begins,
            "cu_seq_lens_k": begins,
            "max_length_q": longest,
            "max_length_k": longest,
        }


@lru_cache(1)
@torch.inference_mode(False)
def groups_of(lengths: tuple[int, ...], device: torch.device) -> Groups:
    """Of rows that lie end to end; those of the newest micro-batch are kept, for all layers."""

    def stretched(row: int) -> int:
        return -(-lengths[row] // STRETCH) * STRETCH

    groups: list[list[int]] = []
    for length, same in groupby(sorted(range(len(lengths)), key=stretched), stretched):
        rows, at_once = list(same), max(1, TOGETHER // length**2)
        groups += [rows[i : i + at_once] for i in range(0, len(rows), at_once)]
    begins = np.cumsum((0, *lengths))
    sizes, sources, home_S, at = [], list[np.ndarray](), np.empty(begins[-1], np.int64), 0
    for rows in groups:
        sizes.append((len(rows), longest := max(lengths[row] for row in rows)))
        for row in rows:
            sources.append(begins[row] + np.arange(longest).clip(max=lengths[row] - 1))
            home_S[begins[row] : begins[row + 1]] = at + np.arange(lengths[row])
            at += longest
    places = (torch.from_numpy(each).to(device) for each in (np.concatenate(sources), home_S))
    return Groups(sizes, *places)


@contextmanager
def computing(model: Any, attention: str) -> Iterator[None]:
    """Meanwhile `model` uses another implementation of transformers, if it can."""
    implementation = model.config._attn_implementation
    if model._can_set_attn_implementation():
        model.set_attn_implementation(attention)
    try:
        yield
    finally:
        if model._can_set_attn_implementation():
            model.set_attn_implementation(implementation)


def _refused(model: Any, why: str) -> ConfigError:
    return ConfigError(
        f'trainer.packing = "varlen" or trainer.sequence_parallel: {type(model).__name__} {why}: set '
        'trainer.packing = "padded", and trainer.sequence_parallel = 1 where it is more'
    )


def window_of(
    *, config: Any, local_size: int | None = None, use_vmap: bool = False, **others: Any
) -> int | None:
    """The window of a causal mask, in its place: how many tokens a token sees, itself included; None where it
    has none. Called by the model.

    What lies in other rows is no part of it: `row_attention` never sees two rows at once.
    """
    if use_vmap or "allow_is_bidirectional_skip" in others or others.get("attention_mask") is not None:
        raise _refused(config, "asks for a mask that is not causal")
    return local_size


# --- the function that layers call --------------------------------------------------------------------------


def row_attention(
    module: nn.Module,
    query_BHSD: Tensor,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    attention_mask: int | None,
    *,
    exact: bool = False,
    packed_rows: PackedRows | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention of every row to itself: [B, S, H, D].

    Without `packed_rows` each of the B sequences is a row. `exact`: softmax of the whole matrix in fp32, as
    transformers' "eager" has it. `s_aux`: a logit per head that takes probability from all tokens.
    """
    odd = {name for name, value in others.items() if value is not None and name not in NEUTRAL}
    if dropout:
        odd.add("dropout")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        odd.add("is_causal = False")
    if not isinstance(attention_mask, int | None):
        odd.add("a mask of its own")
    if odd:
        raise _refused(module, f"asks for {', '.join(sorted(odd))}, which is not computed row by row")
    window = sliding_window if attention_mask is None else attention_mask
    if packed_rows:
        packed_rows.modules.add(id(module))
    states = query_BHSD, key_BHSD, value_BHSD
    if exact or softcap is not None or s_aux is not None:
        by_rows: Callable[..., Tensor] = partial(_by_matrix, softcap=softcap, sink_H=s_aux)
    elif packed_rows and cu_seq_lens_q is not None and _has_kernel(*states):
        return _by_kernel(states, cu_seq_lens_q, max(packed_rows.lengths), window, scaling), None
    else:
        by_rows = _by_sdpa
    if packed_rows is None:
        return by_rows(*states, window, scaling).transpose(1, 2).contiguous(), None
    groups = groups_of(packed_rows.lengths, query_BHSD.device)
    return _by_groups(groups, states, partial(by_rows, window=window, scale=scaling)), None


def replace_attention(
    model: Any, attention: str, function: Callable[..., tuple[Tensor, None]] = row_attention
) -> None:
    """Have `model` compute trainer.attention by `function`, if it is one of ATTENTIONS.

    Others of transformers are told where rows begin (`PackedRows.arguments`) and keep them apart themselves.
    Raises ConfigError for a model whose attention transformers cannot replace. `engine.check_rows` compares
    what the model makes of it with rows alone.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    if not model._can_set_attn_implementation():
        raise _refused(model, "does not take its attention from transformers' AttentionInterface")
    if attention in ATTENTIONS:
        # transformers refuses names with "sdpa" for families that it does not compute so
        exact = attention == "eager"
        name = f"{function.__name__}_eager" if exact else function.__name__
        AttentionInterface.register(name, partial(function, exact=exact))
        AttentionMaskInterface.register(name, window_of)
        model.set_attn_implementation(name)


def _by_groups(groups: Groups, query_key_value: tuple[Tensor, ...], by_rows: Callable[..., Tensor]) -> Tensor:
    """[1, S, H, D]; `by_rows` computes rows of one length."""
    tokens = [rows * length for rows, length in groups.sizes]
    parts = [
        states[0].transpose(0, 1).index_select(0, groups.source_P).split(tokens) for states in query_key_value
    ]
    done = []
    for size, *part in zip(groups.sizes, *parts, strict=True):
        attended_BHLD = by_rows(*(states_PHD.unflatten(0, size).transpose(1, 2) for states_PHD in part))
        done.append(attended_BHLD.transpose(1, 2).flatten(0, 1))
    return torch.cat(done).index_select(0, groups.home_S)[None]


def _by_sdpa(query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float | None) -> Tensor:
    """Rows of one length, [B, H, L, D], by torch's own function."""
    length, grouped, dtype = query.shape[2], query.shape[1] != key.shape[1], query.dtype
    if not query.is_cuda and dtype == torch.bfloat16 and length < LONG:
        query, key, value = query.float(), key.float(), value.float()
    seen_LL = _seen(length, window, query.device) if window is not None and window < length else None
    attended = scaled_dot_product_attention(
        query, key, value, seen_LL, is_causal=seen_LL is None, scale=scale, enable_gqa=grouped
    )
    return attended.to(dtype)


def _by_matrix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    sink_H: Tensor | None,
) -> Tensor:
    """Rows of one length, [B, H, L, D], by the [L, L] matrix of every head."""
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, 1) for states in (key, value))
    score_BHLL = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        score_BHLL = softcap * torch.tanh(score_BHLL / softcap)
    seen_LL = _seen(query.shape[2], window, query.device)
    score_BHLL = score_BHLL.masked_fill(~seen_LL, -torch.inf)
    if sink_H is not None:
        sink_BHL1 = sink_H.to(score_BHLL.dtype).reshape(1, -1, 1, 1).expand(*score_BHLL.shape[:3], 1)
        score_BHLL = torch.cat([score_BHLL, sink_BHL1], -1)
    share_BHLL = score_BHLL.softmax(-1, dtype=torch.float32).to(query.dtype)
    return share_BHLL[..., : key.shape[2]] @ value


def _seen(length: int, window: int | None, device: torch.device) -> Tensor:
    """bool [L, L]: whether the token of the row sees that of the column."""
    seen_LL = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen_LL if window is None else seen_LL.triu(1 - window)


# --- torch's kernel for rows of unlike lengths --------------------------------------------------------------


def _has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether flash attention takes these tensors: half precision, heads of one size, an Ampere or newer."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    size = query.shape[3]
    sized = size == value.shape[3] == key.shape[3] and size <= 256 and size % 8 == 0
    return sized and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _by_kernel(
    query_key_value: tuple[Tensor, ...], begins: Tensor, longest: int, window: int | None, scale: float | None
) -> Tensor:
    """[1, S, H, D] of all rows at once. The kernel's window does not count the token itself."""
    from torch.nn.attention.varlen import varlen_attn

    query_SHD, key_SHD, value_SHD = (states[0].transpose(0, 1) for states in query_key_value)
    seen, grouped = (-1 if window is None else window - 1, 0), query_SHD.shape[1] != key_SHD.shape[1]
    states = query_SHD, key_SHD, value_SHD
    output = varlen_attn(
        *states, begins, begins, longest, longest, scale=scale, window_size=seen, enable_gqa=grouped
    )
    assert isinstance(output, Tensor)
    return output[None]
