"""How completions are sampled, and which of them are degenerate. Pure."""

from __future__ import annotations

import msgspec
import numpy as np

from distill.config import RolloutConfig
from distill.config.evaluation import EvaluationSet
from sync.wire import Array, Sampling, unpack

LONGEST_PATTERN = 8  # tokens of a pattern whose repetition is looked for


def sampling_of(config: RolloutConfig, of: EvaluationSet | None = None) -> Sampling:
    """How completions that are trained on are sampled, or those of a set."""
    drawn = of or config
    sampling = Sampling(
        max_tokens=drawn.max_tokens or config.max_tokens,
        temperature=drawn.temperature,
        top_k=drawn.top_k,
        top_p=drawn.top_p,
        min_p=drawn.min_p,
        stop_token_ids=config.stop_token_ids,
    )
    if of is not None:
        return sampling
    return msgspec.structs.replace(sampling, routes=config.routing_replay, mask=sampling.cuts)


def repetitive(tokens: Array, repeats: int | None) -> str | None:
    """Why a completion is degenerate; None: it is not, or `repeats` is None. `tokens`: i4 [T]."""
    period = None if repeats is None else loop(unpack(tokens), LONGEST_PATTERN, repeats)
    return None if period is None else f"ends in {repeats} or more copies of {period} tokens"


def loop(tokens_T: np.ndarray, longest: int, copies: int, least: int = 0) -> int | None:
    """The fewest tokens, at most `longest`, that stand `copies` times at the end, and over at least `least`
    tokens; None: there are none."""
    for period in range(1, longest + 1):
        size = max(period * copies, least)
        tail = tokens_T[-size:]
        if len(tail) == size and (tail[period:] == tail[:-period]).all():
            return period
    return None
