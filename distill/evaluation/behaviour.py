"""How completions read, from their token ids alone: a divergence may fall while none of them ends.

ended        share that ended by themselves, not at a limit
length       tokens of a completion, mean and 90th percentile
looping      share whose last tokens are one sequence, of at most LONGEST tokens, again and again: at
             least three times and over at least LEAST tokens
distinct     of all runs of four tokens of a completion, those that differ, summed over the completions
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from distill.evaluation.completions import Completion
from sync.wire import Behaviour

LONGEST: Final = 32
LEAST: Final = 12
GRAM: Final = 4


def behaviour(completions: Sequence[Completion]) -> Behaviour:
    """Of at least one completion."""
    lengths = [completion.tokens for completion in completions]
    texts = [
        sequence.token_ids[start:end].tolist()
        for completion in completions
        for sequence in completion.sequences
        for start, end in sequence.own
    ]
    grams = [[tuple(ids[at : at + GRAM]) for at in range(len(ids) - GRAM + 1)] for ids in texts]
    number = sum(map(len, grams))
    return Behaviour(
        ended=sum(completion.finish_reason not in ("length", "failed") for completion in completions)
        / len(completions),
        length_mean=float(np.mean(lengths)),
        length_p90=float(np.percentile(lengths, 90)),
        looping=sum(map(loops, texts)) / max(1, len(texts)),
        distinct=sum(len(set(of_text)) for of_text in grams) / number if number else 1.0,
    )


def loops(token_ids: list[int]) -> bool:
    """Whether the end of these tokens is a loop."""
    for period in range(1, min(LONGEST, len(token_ids) // 3) + 1):
        tail = token_ids[-max(3 * period, LEAST) :]
        if len(tail) >= LEAST and tail[period:] == tail[:-period]:
            return True
    return False
