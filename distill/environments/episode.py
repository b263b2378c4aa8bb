"""One episode: the student and an environment take turns, from the first prompt to the end.

Controller and evaluator play alike: they differ in the replica that generates. Letters: P tokens of the first
prompt, T tokens behind it, those of the environment included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np

from sync.errors import RemoteError, WireError
from sync.wire import (
    Array,
    EpisodeFailed,
    EpisodeOver,
    Generated,
    Turn,
    VersionSpan,
    pack,
    unpack,
)


class Environment(Protocol):
    """What plays against the student: distill.environments.client has it over HTTP.

    `begin` and `proceed` raise Unreachable when its process is gone, with the episode, RemoteError when it
    refuses, WireError for an answer that cannot be used. `name` is that of its section.
    """

    name: str

    async def begin(self, id: str, task: int) -> Turn | EpisodeOver | EpisodeFailed: ...
    async def proceed(
        self, id: str, turn: int, token_ids: Array, finish_reason: Literal["stop", "length", "time"]
    ) -> Turn | EpisodeOver | EpisodeFailed: ...
    async def end(self, ids: list[str]) -> None:
        """Give these up, if it can be told."""
        ...


class Limits(NamedTuple):
    """Of an episode."""

    turns: int
    tokens: int
    """Of the context that a turn begins with."""
    seconds: float | None
    """After which no turn begins; None: no limit."""
    vocab_size: int


Ended = Literal["over", "max_turns", "max_tokens", "time"]


@dataclass
class Episode:
    """An episode under way, or ended. Made by `play`."""

    id: str
    prompt: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """[T]"""
    logprob: list[np.ndarray] = field(default_factory=list)
    """f4, [T] in all: log μ, 0 for the environment's tokens"""
    topk_ids: list[np.ndarray] = field(default_factory=list)
    """i4, [T, K] in all, -1 for the environment's tokens; empty: not asked for"""
    spans: list[VersionSpan] = field(default_factory=list)
    """Contiguous, from 0 to T: the environment's tokens count to the turn before them."""
    own: list[tuple[int, int]] = field(default_factory=list)
    """Start and end of the tokens of each turn that the student sampled, in T."""
    ended: Ended | None = None
    """How it ended; None: it is under way."""
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def context(self) -> list[int]:
        """What the student is to continue: [P + T]."""
        return self.prompt + self.token_ids

    def asked(self, turn: Turn, limits: Limits) -> None:
        """Add the environment's tokens. Raises WireError for a turn that cannot be used."""
        added = unpack(turn.token_ids).tolist()
        if problem := self._problem(turn, added, limits):
            raise WireError(f"turn {turn.turn} of episode {self.id} cannot be used: {problem}")
        if not self.own:
            self.prompt = added
            return
        count = len(added)
        self.token_ids += added
        self.logprob.append(np.zeros(count, "f4"))
        if self.topk_ids:
            self.topk_ids.append(np.full((count, self.topk_ids[0].shape[1]), -1, "i4"))
        last = self.spans[-1]
        self.spans[-1] = VersionSpan(last.version, last.start, last.end + count)

    def _problem(self, turn: Turn, added: list[int], limits: Limits) -> str | None:
        held = len(self.prompt) + len(self.token_ids)
        if turn.id != self.id or turn.turn != len(self.own):
            return f"it is turn {turn.turn} of {turn.id!r}, and turn {len(self.own)} must follow"
        if turn.token_ids.dtype != "i4" or len(turn.token_ids.shape) != 1 or not added:
            return f"token_ids is {turn.token_ids.dtype} {turn.token_ids.shape}, and must be i4 [E], E >= 1"
        if min(added) < 0 or max(added) >= limits.vocab_size:
            return f"token ids lie in {min(added)} … {max(added)}, the vocabulary has {limits.vocab_size}"
        if not self.own and len(added) > limits.tokens:
            return f"the prompt has {len(added)} tokens, {limits.tokens} are left beside rollout.max_tokens"
        if turn.keep != held:
            return (
                f"it keeps {turn.keep} of {held} tokens: the environment rewrote its context, which has no "
                "log-probabilities to train on; have it append"
            )
        return None

    def answered(self, answer: Generated) -> None:
        """Add the student's tokens."""
        start, count = len(self.token_ids), answer.token_ids.shape[0]
        self.token_ids += unpack(answer.token_ids).tolist()
        self.logprob.append(unpack(answer.logprob))
        if answer.topk_ids is not None:
            self.topk_ids.append(unpack(answer.topk_ids))
        self.own.append((start, start + count))
        for span in answer.spans:
            first, last = start + span.start, start + span.end
            if self.spans and self.spans[-1].version == span.version:
                first = self.spans.pop().start
            self.spans.append(VersionSpan(span.version, first, last))

    @property
    def completion(self) -> Generated:
        """All T tokens, as one completion of the first prompt."""
        return Generated(
            id=self.id,
            token_ids=pack(np.array(self.token_ids, "i4")),
            logprob=pack(np.concatenate([np.zeros(0, "f4"), *self.logprob])),
            spans=self.spans,
            finish_reason={"over": "stop", "time": "time"}.get(self.ended or "", "length"),  # type: ignore[arg-type]
            topk_ids=pack(np.concatenate(self.topk_ids)) if self.topk_ids else None,
        )


async def play(
    environment: Environment,
    episode: Episode,
    task: int,
    generate: Callable[[Episode], Awaitable[Generated]],
    limits: Limits,
) -> None:
    """Play `episode` to its end. `generate` completes its context; what it raises is raised.

    A limit ends the episode before a turn begins: what was said is kept, and no turn is abandoned.
    Raises EnvironmentFailed, EnvironmentLost, and what `Environment` raises.
    """
    loop = asyncio.get_running_loop()
    began, said = loop.time(), None
    try:
        said = await environment.begin(episode.id, task)
        while isinstance(said, Turn):
            if episode.own and (ended := _limit(episode, said, limits, loop.time() - began)) is not None:
                episode.ended = ended
                return
            episode.asked(said, limits)
            answer = await generate(episode)
            episode.answered(answer)
            reason = "stop" if answer.finish_reason == "abort" else answer.finish_reason
            said = await environment.proceed(episode.id, said.turn, answer.token_ids, reason)
        if isinstance(said, EpisodeFailed):
            raise EnvironmentLost(said.error) if said.lost else EnvironmentFailed(said.error)
        episode.ended, episode.reward, episode.metrics = "over", said.reward, said.metrics
    finally:
        if isinstance(said, Turn):
            await environment.end([episode.id])


def _limit(episode: Episode, turn: Turn, limits: Limits, seconds: float) -> Ended | None:
    """The limit that this turn, not the first, would exceed; None: none."""
    if turn.turn >= limits.turns:
        return "max_turns"
    if limits.seconds is not None and seconds >= limits.seconds:
        return "time"
    held = len(episode.prompt) + len(episode.token_ids)
    return "max_tokens" if held + turn.token_ids.shape[0] > limits.tokens else None


class EnvironmentFailed(RemoteError):
    """An environment cannot play an episode on."""


class EnvironmentLost(RemoteError):
    """An environment no longer knows an episode, which may begin again."""
