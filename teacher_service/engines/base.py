"""The engine protocol: scores batches of token sequences and, when `can` has "generate", completes prompts.

The service validates requests before an engine sees them, and never asks for more than `engine_info.can`.

Letters in shapes: L tokens of one sequence, T its scored positions, C scored positions of a batch (sum of T),
P tokens of a prompt, K ids per position, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np

from sync.base.errors import Unreachable
from sync.wire import Head

MAX_TOPK: Final = 1024


class ScoreOptions(NamedTuple):
    """What to return per position; the same for every item of one batch."""

    topk: int = 0
    gather: int = 0
    """K of every item's `gather_ids_TK`; 0: none."""
    entropy: bool = False
    hidden: bool = False
    temperature: float = 1.0
    """Temperature of everything but hidden states."""


@dataclass(frozen=True, slots=True)
class Item:
    """One sequence to score: positions `first` … L-1, from the hidden states one position earlier."""

    token_ids_L: np.ndarray
    """int32, every id in [0, vocab_size)"""
    first: int
    """1 <= first < L"""
    gather_ids_TK: np.ndarray | None = None
    """int32, -1: skip"""

    @property
    def positions(self) -> int:
        """T."""
        return len(self.token_ids_L) - self.first


@dataclass(frozen=True, slots=True)
class EngineScores:
    """Scores of one item, or of a batch with its items' positions one after the other; nats.

    float32 where nothing else is named; None: not asked for.
    """

    logprob_C: np.ndarray
    topk_ids_CK: np.ndarray | None = None
    """int32, most likely first"""
    topk_logprob_CK: np.ndarray | None = None
    gathered_CK: np.ndarray | None = None
    """0 where the id was -1"""
    entropy_C: np.ndarray | None = None
    hidden_CH: np.ndarray | None = None
    """float32, or uint16 holding bfloat16 bits"""


class GenerationParams(NamedTuple):
    """How to sample; the same for every prompt of one batch."""

    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    """Ids that end a completion, the model's own among them."""


@dataclass(frozen=True, slots=True)
class EnginePrompt:
    """One prompt to complete."""

    token_ids_P: np.ndarray
    """int32, every id in [0, vocab_size)"""
    seed: int


@dataclass(frozen=True, slots=True)
class EngineCompletion:
    """The completion of one prompt."""

    token_ids_T: np.ndarray
    """int32"""
    logprob_T: np.ndarray
    """float32, at the temperature of sampling"""
    ended: bool
    """Whether a stop id ended it, the last token; else `GenerationParams.max_tokens` did."""


Steps = Iterator[list[EngineCompletion] | None]
"""None after every decoding step but the last, then the completions, in order. Closing it aborts."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine serves; `sync.wire.TeacherInfo` documents the fields."""

    model: str
    dtype: str
    engine: str
    vocab_size: int
    hidden_size: int
    max_length: int
    can: tuple[str, ...]
    revision: str | None = None
    max_topk: int = MAX_TOPK
    """Most ids per position; for a whole vocabulary there are hidden states."""
    concurrency: int = 1
    """Batches of scores, and as many of completions, that may overlap, each in a thread of its own; 1: one
    call at a time, of either kind."""


class EngineEnded(Unreachable):
    """What computes is gone for good: this process must be restarted."""


class Engine(Protocol):
    """One teacher, called from as many threads as `engine_info.concurrency` allows."""

    engine_info: EngineInfo

    def score(self, items: Sequence[Item], options: ScoreOptions) -> EngineScores:
        """Score a non-empty batch.

        Raises DataError when an item cannot be scored (the service isolates it), Unreachable when the server
        that computes is gone.
        """
        ...

    def generate(self, prompts: Sequence[EnginePrompt], params: GenerationParams) -> Steps:
        """Complete a non-empty batch, step by step: `score` may be called between two steps."""
        ...

    def head(self) -> Head | None:
        """What turns `EngineScores.hidden_CH` into logits; None: this engine gives no hidden states."""
        return None

    def close(self) -> None:
        """Release what the engine holds; called once, last."""
