"""Validation of rollouts: the checks of sync.wire.checks, bound to what this run requested. Pure.

A problem is returned, never raised: the caller quarantines, requeues or refuses.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from distill.config import RolloutConfig
from distill.config.evaluation import EvaluationSet
from sync.wire import Array, Generated, Routing, Sampling, Scored, TeacherCompletion, Want, checks, unpack
from sync.wire.checks import Problem

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


@dataclass(frozen=True)
class Validator:
    """Validates what engines return for one run; None: no problem."""

    sampling: Sampling
    want: Want
    vocab_size: int = checks.ANY_ID
    routing: Routing | None = None
    """Of a student whose routes are recorded."""

    def generated(self, answer: Generated, prompt: int, routes_from: int = 0) -> Problem | None:
        """Of a completion of `prompt` tokens by the student."""
        count = answer.token_ids.shape[0] if answer.token_ids.shape else 0
        places = prompt + count - 1 - routes_from
        return checks.generated(answer, self.sampling, self.vocab_size) or (
            checks.routes(answer.routes, places, self.routing) if answer.token_ids.data else None
        )

    def teacher_completion(self, answer: TeacherCompletion) -> Problem | None:
        return checks.teacher_completion(answer, self.sampling.max_tokens, self.vocab_size)

    def scored(
        self, answer: Scored, count: int, hidden_size: int | None = None, keep: bool = False
    ) -> Problem | None:
        """Of a teacher's scores of `count` completion tokens; `keep`: it was to keep them."""
        gather, want = self.sampling.student_topk, msgspec.structs.replace(self.want, keep=keep)
        return checks.scored(answer, count, gather, want, self.vocab_size, hidden_size)


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
