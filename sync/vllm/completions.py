"""Wire messages of what an engine returns, and what a prompt must fit. No engine is imported here.

Letters in shapes: T tokens of a completion, K ids asked for per position.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from sync import wire
from sync.base.errors import DataError

TIMED_OUT: Final = "time"
"""`Completion.finish_reason` of one that `Sampling.max_seconds` ended."""
_MASS_ROUNDING: Final = 1e-3
_REASONS: Final = ("stop", "length", "abort", TIMED_OUT)


class Completion(NamedTuple):
    """A finished completion as the engine gave it."""

    token_ids: np.ndarray
    """i4 [T]"""
    logprob: np.ndarray
    """f4 [T, 1 + K]: of the sampled token, then of ranks 1…K; -inf outside the support"""
    ids: np.ndarray
    """i4 [T, 1 + K]"""
    versions: list[tuple[str, int, int]]
    """Label, start and end of contiguous spans over the T tokens."""
    finish_reason: str | None
    routes: np.ndarray | None = None
    """[P + T - 1, layers of the model, experts of a token]; None: the engine does not record them itself"""


def prompt_problem(prompt: wire.GeneratePrompt, vocab_size: int, context: int) -> str | None:
    """Why a prompt cannot be completed; None: it can. A completion may be cut at the context's end."""
    if not prompt.token_ids:
        return "the prompt has no tokens: send at least one"
    if len(prompt.token_ids) >= context:
        return (
            f"the prompt has {len(prompt.token_ids)} tokens and the context holds {context}, "
            "completion included: shorten it, or start the engine with a larger max-model-len"
        )
    if not 0 <= prompt.routes_from < len(prompt.token_ids):
        return (
            f"routes_from is {prompt.routes_from} and the prompt has {len(prompt.token_ids)} tokens: at most "
            "the route of its last token is the first that is wanted"
        )
    low, high = min(prompt.token_ids), max(prompt.token_ids)
    if low < 0 or high >= vocab_size:
        return (
            f"token id {low if low < 0 else high} is outside the model's vocabulary of {vocab_size}: "
            "use the student's own tokenizer"
        )
    return None


def ranks(sampling: wire.Sampling, vocab_size: int) -> int:
    """K: ids per position to ask the engine for."""
    masked = sampling.top_k + wire.MASK_TIES if sampling.mask else 0
    return min(max(sampling.student_topk, masked), vocab_size)


def generated(
    id: str, completion: Completion, sampling: wire.Sampling, routes: np.ndarray | None = None
) -> wire.Generated:
    """The answer for one finished completion; top-k ids without probability become -1. `routes`: as in
    Generated, of a completion with tokens. Raises DataError for what is no completion, and WireError for
    versions that are not ours: the engine's fault, never the prompt's."""
    length = len(completion.token_ids)
    reason = completion.finish_reason
    if reason not in _REASONS or (length == 0 and reason not in ("abort", TIMED_OUT)):
        raise DataError(f"the engine ended the completion after {length} tokens: {reason!r}")
    spans = [  # vLLM's label of the weights that it was started with is "default"
        wire.VersionSpan(wire.Version(0, 0) if label == "default" else wire.Version.parse(label), start, end)
        for label, start, end in completion.versions
        if end != start
    ]
    topk_TK = np.full((length, sampling.student_topk), -1, np.int32)
    ids, logprob = (of[:, 1 : 1 + sampling.student_topk] for of in (completion.ids, completion.logprob))
    topk_TK[:, : ids.shape[1]] = np.where(np.isneginf(logprob), -1, ids)  # a vocabulary may have fewer than K
    return wire.Generated(
        id=id,
        token_ids=wire.pack(completion.token_ids),
        logprob=wire.pack(completion.logprob[:, 0]),
        spans=spans,
        finish_reason=reason,  # type: ignore[arg-type]
        topk_ids=wire.pack(topk_TK) if sampling.student_topk else None,
        mask=_mask(completion) if sampling.mask else None,
        routes=None if routes is None else wire.pack(routes),
    )


def _mask(completion: Completion) -> wire.SamplingMask:
    """What every token was sampled from. Raises DataError where the K ids do not hold all of it."""
    ids_TK, logprob_TK = completion.ids[:, 1:], completion.logprob[:, 1:]
    left_TK = np.isfinite(logprob_TK)
    mass_T = np.exp(logprob_TK, where=left_TK, out=np.zeros_like(logprob_TK)).sum(1)
    if (least := mass_T.min(initial=1.0)) < 1 - _MASS_ROUNDING:
        raise DataError(
            f"the {ids_TK.shape[1]} most likely ids of a token hold {least:.4f} of what it was sampled from, "
            "and a sampling mask needs all: the engine must sample with the top_k of the request, and give "
            "log-probabilities of what it sampled from (--logprobs-mode processed_logprobs)"
        )
    return wire.SamplingMask(wire.pack(left_TK.sum(1).astype("i4")), wire.pack(ids_TK[left_TK]))
