"""Controller ↔ teacher: sequences to score and prompts to complete, and what comes back.

Letters in shapes: L tokens of a sequence, T its scored positions, P tokens of a prompt, K ids per position,
H the teacher's hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sync.wire.base import Array, Message


class Want(msgspec.Struct, frozen=True):
    """What a teacher returns per position, besides the log-probability of the sampled token."""

    topk: int = 0
    """Ids and log-probabilities of the teacher's `topk` most likely tokens; 0: none."""
    entropy: bool = False
    """Where the engine has it: no objective needs it."""
    hidden: bool = False
    """Last hidden states after the final norm, for exact objectives with `Head`."""
    prompt: bool = False
    """Score prompt positions too, from the second token on (T then counts them)."""
    temperature: float = 1.0
    """Of the distribution that everything but hidden states is of."""


class ScoreSequence(msgspec.Struct, frozen=True):
    """One sequence to score."""

    id: str
    token_ids: Array
    """i4 [L]"""
    start: int
    """First completion token, 1 <= start < L; positions start … L-1 are scored, T = L - start."""
    gather_ids: Array | None = None
    """i4 [T, K] ids to score at each position, -1: skip (answered with 0); None: no gather"""


class ScoreRequest(Message, frozen=True):
    """Controller → teacher: score these sequences."""

    sequences: list[ScoreSequence]
    want: Want = Want()
    deadline: float | None = None
    """Seconds from arrival after which nobody waits for the answer; None: no deadline."""


class Scored(msgspec.Struct, frozen=True, tag=True):
    """A teacher's scores of one sequence, at the temperature of the request, nats, full support.

    None: not requested.
    """

    id: str
    logprob: Array
    """f4 [T]: log q(y_t)"""
    topk_ids: Array | None = None
    """i4 [T, K], most likely first"""
    topk_logprob: Array | None = None
    """f2 or f4 [T, K]"""
    tail: Array | None = None
    """f4 [T]: probability mass outside topk_ids, in [0, 1]"""
    gathered: Array | None = None
    """f2 or f4 [T, K]: log q at gather_ids"""
    entropy: Array | None = None
    """f4 [T]; None: not requested, or the engine does not have it"""
    hidden: Array | None = None
    """bf16 or f4 [T, H]"""


class ScoreRefused(msgspec.Struct, frozen=True, tag=True):
    """One sequence or prompt that the teacher cannot serve; the others of its request are not affected."""

    id: str
    error: str
    unusable: bool = False
    """The engine's answer could not be used: the engine is at fault, not the sequence."""


class ScoreReply(Message, frozen=True):
    """Teacher → controller: the scores, or why there are none, one for each sequence."""

    teacher: str
    results: list[Scored | ScoreRefused]
    """In the order of the request."""


class TeacherPrompt(msgspec.Struct, frozen=True):
    """One prompt for the teacher to complete."""

    id: str
    token_ids: Array
    """i4 [P], P >= 1"""
    seed: int
    """0 … 2^32 - 1; the same seed and prompt give the same completion, whatever the rest of its batch."""


class TeacherGenerateRequest(Message, frozen=True):
    """Controller → teacher: complete every prompt by sampling from the teacher's whole vocabulary."""

    prompts: list[TeacherPrompt]
    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: list[int] = []
    """Ids that end a completion besides the teacher's own EOS; the ending id is part of the completion."""
    deadline: float | None = None
    """Seconds from arrival after which nobody waits for the answer; None: no deadline."""


class TeacherCompletion(msgspec.Struct, frozen=True, tag=True):
    """One completion by the teacher."""

    id: str
    token_ids: Array
    """i4 [T], T >= 1"""
    logprob: Array
    """f4 [T]: log-probability of each token at the temperature of the request, nats"""
    finish_reason: Literal["stop", "length"]


class TeacherGenerateReply(Message, frozen=True):
    """Teacher → controller: the completions, or why there are none, one for each prompt."""

    teacher: str
    results: list[TeacherCompletion | ScoreRefused]
    """In the order of the request."""


class TeacherInfo(Message, frozen=True):
    """Teacher → controller: what it serves, and its capabilities."""

    name: str
    model: str
    revision: str | None
    """None: a local folder."""
    dtype: str
    engine: str
    vocab_size: int
    """Rows of the tokenizer that may be scored; rows of the model beyond it are masked out."""
    hidden_size: int
    max_length: int
    """Longest sequence (L) that can be scored."""
    tokenizer_fingerprint: str
    """BLAKE3 hex over vocabulary, merges and special ids (`sync.tokenizers.fingerprint`)."""
    chat_template_fingerprint: str | None
    """None: the tokenizer has no chat template."""
    fingerprint: str
    """BLAKE3 hex over model, revision, dtype and samples of its files: every answer names it in a header."""
    can: list[str]
    """Of: topk, gather, entropy, hidden, prompt, generate, temperature (other than 1, of scores)."""


class Head(Message, frozen=True):
    """Teacher → controller → trainer: the output head, logits = cap(scale · (hidden · weightᵀ + bias))."""

    teacher: str
    weight: Array
    """bf16 or f4 [V, H], only rows below vocab_size"""
    bias: Array | None = None
    """[V]"""
    scale: float = 1.0
    soft_cap: float | None = None
    """cap(x) = soft_cap · tanh(x / soft_cap); None: no cap"""
