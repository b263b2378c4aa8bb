"""Controller or evaluator ↔ environment service: episodes, turn by turn.

    EpisodeBegin ─▶ Turn ─▶ EpisodeContinue ─▶ Turn ─▶ … ─▶ EpisodeOver | EpisodeFailed

The sequence of an episode grows by turns. A Turn carries the tokens that the environment adds,
EpisodeContinue those that the student sampled behind them: nothing is tokenized twice.
"""

from __future__ import annotations

from typing import Final, Literal

from sync.wire.base import Array, Count, Message, Number

EVALUATION_ID: Final = "eval:"
"""The ids of an evaluation's episodes begin so."""


class EpisodeBegin(Message, frozen=True):
    """Begin an episode. Client → environment; answered with its first Turn, EpisodeOver or EpisodeFailed.

    One of the same id that is under way ends: nothing of it is kept.
    """

    id: str
    """Unique within the run; an evaluation's begins with EVALUATION_ID."""
    task: Count
    """Which task: the same one always begins, and answers the same tokens, in the same way."""


class EpisodeContinue(Message, frozen=True):
    """What the student answered to a Turn. Client → environment; answered as EpisodeBegin is.

    Sending it again gives the same answer: a lost connection costs nothing.
    """

    id: str
    turn: Count
    """`Turn.turn` that is answered."""
    token_ids: Array
    """i4 [T], T >= 1: as sampled, the end token included"""
    finish_reason: Literal["stop", "length", "time"]


class EpisodeEnd(Message, frozen=True):
    """These episodes are given up; answered with Ok. Ids that are not under way are ignored."""

    ids: list[str]


class Turn(Message, frozen=True):
    """Environment → client: it is the student's turn."""

    id: str
    turn: Count
    """0, 1, …"""
    token_ids: Array
    """i4 [E], E >= 1: what comes behind the first `keep` tokens of the sequence; of turn 0 the prompt"""
    keep: Count
    """Tokens of the context that stay. Fewer than it has: the environment rewrote it, and what follows is
    trained as a sequence of its own."""


class EpisodeOver(Message, frozen=True):
    """Environment → client: the episode has ended."""

    id: str
    reward: Number | None = None
    """Of the whole episode, `turn_rewards` included; None: the environment gives none."""
    turn_rewards: list[Number] = []
    """The part of each of the student's turns, in order; empty: the episode is rewarded as a whole."""
    metrics: dict[str, Number] = {}
    """Further figures, by name."""


class EpisodeFailed(Message, frozen=True):
    """Environment → client: the episode cannot go on, and is over."""

    id: str
    error: str
    lost: bool = False
    """The service does not know the episode: it was restarted, and the episode may begin again."""


class EnvironmentInfo(Message, frozen=True):
    """What an environment service serves; answer to GET /v1/info."""

    name: str
    environment: str
    """Such as "verifiers: guess" or "package.module:function"."""
    tasks: Count | None
    """How many there are; None: they have no end."""
    tokenizer_fingerprint: str
    """Of the tokenizer that makes its tokens (`sync.base.tokenizers.fingerprint`)."""
