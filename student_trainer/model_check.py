"""Whether the student computes what its model does, measured before anything is trained: its head, its rows.

Letters: R rows, L longest row, C tokens, S tokens of all rows, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import nn

from student_trainer.sequence_split import split
from student_trainer.step import laid_out
from student_trainer.varlen import IMPLEMENTATIONS, PackedRows, computing
from sync.base.errors import ConfigError

if TYPE_CHECKING:
    from student_trainer.engine import Student

LEAST: Final = 3
"""Tokens whose median says something: one may be sent to another expert by rounding."""


def plain(model: nn.Module) -> Any:
    """The transformers model inside, without peft's wrapping."""
    get_base = getattr(model, "get_base_model", None)
    return get_base() if callable(get_base) else model


@torch.no_grad()
def check_head(student: Student, run: nn.Module, device: torch.device) -> float:
    """Largest difference in nats between our log-probabilities and the model's own on 12 tokens.

    `run` is what to call in the student's place: the student itself, or the engine that wraps it. Raises
    ConfigError for a difference that the model's precision does not explain: the family's head does something
    that `head_shape` does not cover, and every objective would be wrong.
    """
    tokens_RL = torch.arange(12, device=device).remainder(student.head.shape.vocab).reshape(1, 12)
    run.eval()
    ours_CV, theirs_CV = run(tokens_RL, torch.arange(12, device=device))
    run.train()
    difference = float((ours_CV - theirs_CV).abs().max())
    precise = student.head.weight.dtype == torch.float32
    limit = 1e-4 if precise else 2.0**-6 * max(1.0, float(theirs_CV.abs().max()))
    if not difference <= limit:
        raise ConfigError(
            f"{type(plain(student.model)).__name__}: our head differs from the model's own logits by "
            f"{difference:.3g} nats (limit {limit:.3g}): this model family's head is not supported"
        )
    return difference


@torch.no_grad()
def check_rows(student: Student, run: nn.Module, device: torch.device) -> float:
    """How far the log-probabilities of three rows of one micro-batch, split over the ranks of a group where
    there is one, are from those of each row alone. Collective.

    Alone by transformers' plainest attention, "eager". Of a token: the norm of the difference between centred
    log-probabilities, as a share of their norm. Of a row, or of what one rank computes of it: the median, as
    rounding may send a token to another expert. Of all: the largest. Raises ConfigError where the model's
    precision does not explain it, or a layer was not told of packed rows, which would see each other, or of
    split ones, which would not see their own.
    """
    length_R = np.array([5, 7, 6]) * (1 if student.group is None else 2 * student.group.size)
    flat = (7 * np.arange(length_R.sum()) + 3) % student.head.shape.vocab
    laid, begin_R = laid_out(flat, length_R, student.varlen)
    places = np.arange(len(flat)) + np.repeat(begin_R - (length_R.cumsum() - length_R), length_R)
    layout: Any = PackedRows(tuple(length_R.tolist())) if student.varlen else None
    tokens_RL, place_S, flat_S = map(torch.from_numpy, (laid, places, flat))
    own_S = torch.arange(len(flat))
    if student.group is not None:
        tokens_RL, place_S, layout = split(student.group, tokens_RL, place_S, layout)
        own_S = layout.index_C
    model = plain(student.model)
    run.eval()
    together_SV, _ = run(tokens_RL.to(device), place_S.to(device), None, None, layout)
    with computing(model, "eager"):
        rows = flat_S.to(device).split(length_R.tolist())
        alone_SV = torch.cat([run(row[None], torch.arange(len(row), device=device))[0] for row in rows])
    run.train()
    pair = together_SV, alone_SV[own_S.to(device)]
    together_SV, alone_SV = (logits - logits.mean(1, keepdim=True) for logits in pair)
    gap_S = (together_SV - alone_SV).norm(dim=1) / alone_SV.norm(dim=1).clamp(min=1e-6)
    part_S = torch.from_numpy(np.repeat(np.arange(len(length_R)), length_R)).to(device)
    if student.group is not None:  # all ranks find the same
        gap_S, rank_S = layout.whole(torch.stack([gap_S, torch.full_like(gap_S, student.group.rank)]))
        part_S = part_S * student.group.size + rank_S.long()
    parts = [gap_S[part_S == part] for part in part_S.unique()]
    gap = float(torch.stack([part.median() for part in parts if len(part) >= LEAST]).max())
    limit = 1e-4 if student.head.weight.dtype == torch.float32 else 0.2
    attention, layers = model.config._attn_implementation, model.config.get_text_config().num_hidden_layers
    told = attention in IMPLEMENTATIONS.values() or student.group is not None
    if layout and told and len(layout.modules) < layers:
        problem = f"{layers - len(layout.modules)} of {layers} layers were not told how rows lie"
    elif not gap <= limit:
        problem = f"rows together and rows alone differ by {gap:.3g} of their logits (limit {limit:g})"
    else:
        return gap
    remedy = 'trainer.packing = "padded"' if student.varlen else 'trainer.attention = "eager"'
    if student.group is not None:
        remedy = "trainer.sequence_parallel = 1"
    raise ConfigError(f"{type(model).__name__} with attention {attention!r}: {problem}: set {remedy}")
