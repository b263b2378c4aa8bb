"""Sequence parallelism as it is configured: how many ranks, which attention, which students. No torch.

With `trainer.sequence_parallel` = n, n neighbouring ranks train on the same rows: each computes 1/n of every
row's positions, and attention, the only layer that sees other positions, all of them for 1/n of the heads.
`student_trainer.sequence_split` does it; `engine.check_rows` compares it with the plain model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from student_trainer.config import TrainerSettings, unpackable

ATTENTIONS: Final = ("sdpa", "eager")
"""Of trainer.attention, those that are computed for some of the heads at a time."""
MOVING: Final = frozenset({"dynamic", "longrope"})
"""Kinds of rotary embeddings whose frequencies follow the longest position that a rank has."""


def problems(settings: TrainerSettings, model: Any, world_size: int | None) -> Iterator[str]:
    """Why rows cannot be split as it is asked for; `model`: transformers' text configuration.

    `world_size`: ranks of the trainer; None: another launcher decides.
    """
    if (size := settings.sequence_parallel) == 1:
        return
    asked = f"trainer.sequence_parallel is {size} and "
    if world_size is not None and world_size % size:
        yield f"{asked}the trainer has {world_size} ranks: it must divide them"
    if settings.attention not in ATTENTIONS:
        yield (
            f"{asked}trainer.attention is {settings.attention!r}: heads are exchanged for "
            f"{' and '.join(ATTENTIONS)} alone, set one of them"
        )
    if kinds := unpackable(model):
        yield (
            f"{asked}the student has layers of the kind {', '.join(kinds)}, which would not see what other "
            "ranks hold of a row: leave it out"
        )
    if moving := sorted(_rope_types(model) & MOVING):
        yield (
            f"{asked}the student's rotary embedding is of the type {', '.join(moving)}, which follows the "
            "longest position of a row, and a rank holds a part of it: leave it out"
        )
    heads = getattr(model, "num_attention_heads", None) or size  # without heads `check_rows` refuses it
    keys = getattr(model, "num_key_value_heads", None) or heads
    if heads % size:
        yield f"{asked}the student has {heads} attention heads: it must divide them"
    elif keys % size and size % keys:
        yield (
            f"{asked}the student has {keys} heads of keys and values: it must divide them, or be a multiple "
            "of them"
        )


def _rope_types(model: Any) -> set[str]:
    """Kinds of rotary embeddings, of one table for all layers or of one for each kind of layer."""
    parameters = getattr(model, "rope_parameters", None) or {}
    tables = [parameters, *(table for table in parameters.values() if isinstance(table, dict))]
    return {str(table["rope_type"]) for table in tables if "rope_type" in table}


def counts_rows(settings: TrainerSettings, rank: int) -> bool:
    """Whether a rank is the first of those that train on the same rows: it alone counts and records them."""
    return rank % settings.sequence_parallel == 0
