"""Rows of a model's output head that its tokenizer has no id for.

The trainer leaves them out, so the replica must too, or it would sample from another distribution.
"""

from __future__ import annotations

from typing import Any


def never_sample_from(model: Any, known: int) -> None:
    """Give ids from `known` on a probability of 0 in all logits that `model.compute_logits` makes after this.

    The shape stays; ids below `known` keep their logits. Every sampler, greedy too, and its log-probabilities
    of processed logits follow from those.
    """
    compute = model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        if logits is not None:  # a tensor-parallel worker that does not sample gets none
            logits[..., known:] = float("-inf")
        return logits

    model.compute_logits = compute_logits
