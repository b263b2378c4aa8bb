"""What an engine is: it marks a batch of token sequences, and knows what it can be asked for.

One whose `engine_info.can` has "write" completes prompts too, step by step: scores need not wait for it.

The service validates sequences before an engine sees them, and never asks for more than `engine_info.can`.

Letters in shapes: L tokens of one sequence, T its scored positions, C scored positions of a batch (sum of T),
K ids per position, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np

from sync.wire import Head

CAPABILITIES: Final = ("topk", "gather", "entropy", "hidden", "prompt", "write", "temperature")
MAX_TOPK: Final = 1024


class ScoreOptions(NamedTuple):
    """What is marked per position; the same for every item of one batch."""

    topk: int = 0
    gather: int = 0
    """K of every item's `gather_ids`; 0: none."""
    entropy: bool = False
    hidden: bool = False
    temperature: float = 1.0
    """Of every mark but hidden states."""


@dataclass(frozen=True, slots=True)
class Item:
    """One sequence to mark: positions `first` … L-1, from the hidden states one position earlier."""

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
    """Marks of a whole batch, its items' positions one after the other, nats."""

    logprob_C: np.ndarray
    """float32"""
    topk_ids_CK: np.ndarray | None = None
    """int32, most likely first"""
    topk_logprob_CK: np.ndarray | None = None
    """float32"""
    tail_C: np.ndarray | None = None
    """float32, in [0, 1]"""
    gathered_CK: np.ndarray | None = None
    """float32, 0 where the id was -1"""
    entropy_C: np.ndarray | None = None
    """float32"""
    hidden_CH: np.ndarray | None = None
    """float32, or uint16 holding bfloat16 bits"""


class GenerationParams(NamedTuple):
    """How completions are written; the same for every draft of one batch."""

    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    """Besides the model's own end."""


@dataclass(frozen=True, slots=True)
class EnginePrompt:
    """One prompt to complete."""

    token_ids_P: np.ndarray
    """int32, every id in [0, vocab_size)"""
    seed: int


@dataclass(frozen=True, slots=True)
class EngineCompletion:
    """What became of a draft."""

    token_ids_T: np.ndarray
    """int32"""
    logprob_T: np.ndarray
    """float32, at the temperature of writing"""
    ended: bool
    """By an id that ends completions, which is the last one; False: at `Manner.max_tokens`."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says about itself; see `sync.wire.TeacherInfo` for the fields' meaning."""

    model: str
    dtype: str
    engine: str
    vocab_size: int
    hidden_size: int
    max_length: int
    can: tuple[str, ...]
    revision: str | None = None
    max_topk: int = MAX_TOPK
    """Most ids per position that may be asked for; a whole vocabulary is what hidden states are for."""


class Engine(Protocol):
    """One teacher. `score` and `head` are called from one worker thread, never at the same time."""

    engine_info: EngineInfo

    def score(self, items: Sequence[Item], options: ScoreOptions) -> EngineScores:
        """Marks of a non-empty batch.

        Raises DataError when an item cannot be marked; the service then finds out which one.
        """
        ...

    def head(self) -> Head | None:
        """What turns `Marks.hidden_CH` into logits; None: this engine shows no hidden states."""
        ...

    def close(self) -> None:
        """Release what the engine holds; called once, last."""
        ...


@runtime_checkable
class Writer(Protocol):
    """What an engine with "write" in `engine_info.can` does besides; from the same thread."""

    def write(
        self, engine_prompts: Sequence[EnginePrompt], generation: GenerationParams
    ) -> Iterator[list[EngineCompletion] | None]:
        """None after every step that leaves more to do, then the texts, in order.

        `score` may be called between two steps. Closing the iterator gives the work up.
        """
        ...


def writer(engine: Engine) -> Writer:
    """`engine` as one that writes; its `engine_info.can` must say so."""
    assert isinstance(engine, Writer), f"{engine.engine_info.engine} cannot write"
    return engine


Steps = Iterator[list[EngineCompletion] | None]


def each_step(
    steps: Steps, run: Callable[[Callable[[], list[EngineCompletion] | None]], list[EngineCompletion] | None]
) -> Steps:
    """`steps`, each of them taken inside `run`."""
    while (texts := run(lambda: next(steps))) is None:
        yield None
    yield texts
