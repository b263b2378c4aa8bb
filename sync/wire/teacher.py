"""Controller and trainer ranks ↔ teachers."""

from __future__ import annotations

import enum
from typing import Annotated, Final, Literal

import msgspec

from sync.wire.base import Array, Count, Message

Temperature = Annotated[float, msgspec.Meta(ge=1e-3, le=1e300)]
"""Far below, logits that are divided by it are beyond float32."""


class Want(msgspec.Struct, frozen=True):
    """What a teacher returns per position, besides the log-probability of the sampled token."""

    topk: Count = 0
    """Ids and log-probabilities of the teacher's `topk` most likely tokens; 0: none."""
    entropy: bool = False
    """Entropy of the distribution, where the engine can compute it; a diagnostic, in no loss."""
    hidden: bool = False
    """Last hidden states after the final norm, for exact objectives with `Head`."""
    temperature: Temperature = 1.0
    """Temperature of the distribution that every score but the hidden states belongs to."""
    keep: bool = False
    """Answer with the log-probabilities of the tokens, and a reference to the rest (`Scored.kept`)."""

    def bulk_bytes(self, gather: int, width: int) -> int:
        """Bytes a position in half precision, besides its log-probability and entropy. `gather`: ids to score
        (K of ScoreSequence.gather_ids); `width`: of the teacher's hidden states."""
        return 6 * (self.topk + gather) + 2 * width * self.hidden


class ScoreSequence(msgspec.Struct, frozen=True):
    """One sequence to score; made by the controller from a completion."""

    id: str
    token_ids: Array
    """i4 [L]"""
    start: int
    """First completion token, 1 <= start < L; positions start … L-1 are scored, T = L - start."""
    gather_ids: Array | None = None
    """i4 [T, K] ids to score at each position, -1: skip (answered with 0); None: no gather"""

    @classmethod
    def of(cls, id: str, prompt: Array, completion: Array, gather_ids: Array | None = None) -> ScoreSequence:
        """Score the completion [T] of a prompt [P], both i4."""
        start = prompt.shape[0]
        tokens = Array("i4", (start + completion.shape[0],), prompt.data + completion.data)
        return cls(id, tokens, start, gather_ids)


class ScoreRequest(Message, frozen=True):
    """Score these sequences. Controller or trainer rank → teacher; answered with ScoreReply."""

    sequences: Annotated[list[ScoreSequence], msgspec.Meta(min_length=1)]
    want: Want = Want()


DIGEST_BYTES: Final = 16
PARTED_BYTES: Final = 33
"""Of the bits of 258 first bytes."""


class Kept(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a teacher keeps the scores of one sequence: GET {url}/v1/scores/{key} until they are released,
    evicted, or the process ends. The body: frames of ScoreReply, each with a Scored of the next positions."""

    url: str
    """URL of the process that keeps them, as the controller reaches it; "" from the process itself."""
    key: str
    """"BOOT-NUMBER": another start of the process has other keys."""
    size: Count
    """Bytes of the body."""
    digest: bytes
    """BLAKE3 of the body, DIGEST_BYTES of it: the record holds one for every rollout."""


class Segment(enum.IntEnum):
    """What a token is to the shortest run of tokens that is, as text, a run of the teacher's tokens too. The
    log-probability of the run stands at its last token, 0 at the others."""

    BEGINS = 0
    GOES_ON = 1
    UNSCORED = 2
    """It holds the first bytes of a character that the completion was cut off in: `logprob` says nothing."""
    TOKEN = 3
    """The teacher reads the student's tokens, as another one of the batch does not."""


class Scored(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A teacher's scores of one sequence: nats, full support, at `Want.temperature`. Every array but
    `logprob` is None when it was not asked for, or is kept."""

    id: str
    logprob: Array
    """f4 [T]: log q(y_t)"""
    topk_ids: Array | None = None
    """i4 [T, K], most likely first; with `parted`: those of the student's ids that it names, else -1"""
    topk_logprob: Array | None = None
    """f2 or f4 [T, K]"""
    gathered: Array | None = None
    """f2 or f4 [T, K]: log q at gather_ids"""
    gather_ids: Array | None = None
    """i4 [T, K]: as in the request; None: who reads this has them, as everybody but a rank does"""
    entropy: Array | None = None
    """f4 [T]; None: not requested, or the engine does not have it"""
    hidden: Array | None = None
    """bf16 or f4 [T, H]"""
    kept: Kept | None = None
    """What was asked for besides `logprob`, with `Want.keep`; None: it is here."""
    parted: Array | None = None
    """u1 [T, PARTED_BYTES], with a tokenizer of the teacher's own: bits of the first bytes
    (`tokenizers.first_bytes`) of the tokens G, among which is the sampled one, for any of which the teacher's
    distribution here would be known and the same; 0: of none"""
    segment: Array | None = None
    """u1 [T] of Segment, from a teacher with a tokenizer of its own; None: every token is scored by itself"""


class ScoreRefused(msgspec.Struct, frozen=True, tag=True):
    """One sequence or prompt that the teacher cannot serve; the others of its request are not affected."""

    id: str
    error: str
    unusable: bool = False
    """The engine's answer could not be used: the engine is at fault, not the sequence. False: the sequence
    cannot be served, or the engine fails on it alone."""
    no_text: bool = False
    """No server was asked: the caller's client found that the teacher's tokenizer cannot write it."""


class ScoreReply(Message, frozen=True):
    """Teacher → who asked: scores, or why there are none, one for each sequence of the request."""

    results: list[Scored | ScoreRefused]
    """Results in the order of the request."""


class ScoresRelease(Message, frozen=True):
    """Controller → teacher: nothing will fetch these again; answered with Ok. Keys not kept are ignored."""

    keys: list[str]


class TeacherPrompt(msgspec.Struct, frozen=True):
    """One prompt for the teacher to complete."""

    id: str
    token_ids: Array
    """i4 [P], P >= 1"""
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    """The same seed and prompt give the same completion in any batch."""


class TeacherGenerateRequest(Message, frozen=True):
    """Complete every prompt by sampling from the teacher's whole vocabulary. Controller → teacher."""

    prompts: Annotated[list[TeacherPrompt], msgspec.Meta(min_length=1)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    temperature: Temperature = 1.0
    stop_token_ids: list[int] = []
    """Ids that end a completion besides the teacher's own EOS; the ending id is part of the completion."""


class TeacherCompletion(msgspec.Struct, frozen=True, tag=True):
    """One completion by the teacher."""

    id: str
    token_ids: Array
    """i4 [T], T >= 1"""
    logprob: Array
    """f4 [T]: log-probability of each token at the temperature of the request, nats"""
    finish_reason: Literal["stop", "length"]


class TeacherGenerateReply(Message, frozen=True):
    """Teacher → controller: completions, or why there are none, one for each prompt of the request."""

    results: list[TeacherCompletion | ScoreRefused]
    """Results in the order of the request."""


class TeacherInfo(Message, frozen=True):
    """What a teacher serves and can compute. Teacher → controller, answer to GET /v1/info."""

    name: str
    model: str
    revision: str | None
    """Revision on the Hub; None: the model is a local folder."""
    dtype: str
    engine: str
    vocab_size: int
    """Rows of the tokenizer that may be scored; rows of the model beyond it are masked out."""
    hidden_size: int
    max_length: int
    """Longest sequence (L) that can be scored."""
    max_topk: int
    """Most ids per position (K) that the teacher chooses."""
    tokenizer_fingerprint: str
    """BLAKE3 hex over vocabulary and merges (`sync.base.tokenizers.fingerprint`)."""
    chat_template_fingerprint: str | None
    """Fingerprint of what it renders; None: the tokenizer has no chat template."""
    fingerprint: str
    """BLAKE3 hex over model, revision, dtype and samples of its files: every answer names it in a header."""
    can: list[str]
    """What it can, of: topk, gather, entropy, hidden, generate, temperature (other than 1)."""


class Head(Message, frozen=True):
    """Teacher → controller → trainer: the output head, logits = cap(scale · (hidden · weightᵀ + bias))."""

    weight: Array
    """bf16 or f4 [V, H], only rows below vocab_size"""
    bias: Array | None = None
    """[V]"""
    scale: float = 1.0
    soft_cap: float | None = None
    """cap(x) = soft_cap · tanh(x / soft_cap); None: no cap"""
