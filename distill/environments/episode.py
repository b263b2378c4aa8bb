"""One episode: the student and an environment take turns, from the first prompt to the end.

What is trained on and what is evaluated is played alike. Letters: P tokens of a sequence's prompt, T tokens
behind it, those of the environment included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np

from sync.base.errors import RemoteError, WireError
from sync.wire import (
    TOKEN_PARTS,
    Array,
    EpisodeFailed,
    EpisodeOver,
    Generated,
    Turn,
    VersionSpan,
    pack,
    unpack,
)
from sync.wire.checks import LARGEST_REWARD, Problem, turn_tokens

FinishReason = Literal["stop", "length", "time"]
EnvironmentAnswer = Turn | EpisodeOver | EpisodeFailed
"""To EpisodeBegin and EpisodeContinue."""
ANSWER: Final[Any] = EnvironmentAnswer
"""The same, for decoders: a union is no type."""


class Environment(Protocol):
    """What plays against the student: distill.environments.client has it over HTTP.

    `begin` and `proceed` raise Unreachable when its process is gone, with the episode, RemoteError when it
    refuses, WireError for an answer that cannot be used. `name` is that of its section.
    """

    name: str

    async def begin(self, id: str, task: int) -> EnvironmentAnswer: ...
    async def proceed(
        self, id: str, turn: int, token_ids: Array, finish_reason: FinishReason
    ) -> EnvironmentAnswer: ...
    async def end(self, id: str) -> None:
        """Give it up, if the environment can be told."""
        ...


class Limits(NamedTuple):
    """Bounds of an episode."""

    turns: int
    tokens: int
    """Tokens of the context that a turn begins with."""
    seconds: float | None
    """After which no turn begins; None: no limit."""
    vocab_size: int


Ended = Literal["over", "max_turns", "max_tokens", "time"]


@dataclass
class Sequence:
    """Tokens of an episode that continue one another. A context that is rewritten begins another."""

    prompt: list[int] = field(default_factory=list)
    """[P]"""
    token_ids: list[int] = field(default_factory=list)
    """[T]"""
    parts: dict[str, list[Any]] = field(default_factory=lambda: {"logprob": [Array("f4", (0,), b"")]})
    """Field of TOKEN_PARTS → its parts, of T tokens in all; without what was not asked for."""
    routes: list[Array] = field(default_factory=list)
    """[P + T - 1] in all, of the tokens as they were computed first; empty: not asked for"""
    spans: list[VersionSpan] = field(default_factory=list)
    """Contiguous, from 0 to T: the environment's tokens count to the turn before them."""
    own: list[tuple[int, int]] = field(default_factory=list)
    """Start and end of the tokens of each turn that the student sampled, in T."""

    @property
    def context(self) -> list[int]:
        """What the student is to continue: [P + T]."""
        return self.prompt + self.token_ids

    @property
    def routes_from(self) -> int:
        """Positions whose routes are known: those of the next answer begin behind them, and theirs are kept,
        whatever the student's weights have become since."""
        return sum(route.shape[0] for route in self.routes)

    def asked(self, added: list[int]) -> None:
        if not self.own:
            self.prompt = self.prompt + added
            return
        count = len(added)
        self.token_ids += added
        for parts in self.parts.values():
            parts.append(parts[0].none(count))
        last = self.spans[-1]
        self.spans[-1] = VersionSpan(last.version, last.start, last.end + count)

    def answered(self, answer: Generated) -> None:
        start, count = len(self.token_ids), answer.token_ids.shape[0]
        self.token_ids += unpack(answer.token_ids).tolist()
        for name in TOKEN_PARTS:
            if (part := getattr(answer, name)) is not None:
                self.parts.setdefault(name, []).append(part)
        if answer.routes is not None:
            self.routes.append(answer.routes)
        self.own.append((start, start + count))
        for span in answer.spans:
            first, last = start + span.start, start + span.end
            if self.spans and self.spans[-1].version == span.version:
                first = self.spans.pop().start
            self.spans.append(VersionSpan(span.version, first, last))

    def completion(self, id: str, finish_reason: FinishReason) -> Generated:
        """All T tokens, as one completion of the prompt."""
        return Generated(
            id=id,
            token_ids=pack(np.array(self.token_ids, "i4")),
            spans=self.spans,
            finish_reason=finish_reason,
            routes=Array.joined(self.routes) if self.routes else None,
            **{name: type(parts[0]).joined(parts) for name, parts in self.parts.items()},
        )


@dataclass
class Episode:
    """An episode under way, or ended. Made by `play`."""

    id: str
    sequences: list[Sequence] = field(default_factory=lambda: [Sequence()])
    """One, and one more for every time that the environment rewrote its context: the own tokens of those
    before are then part of its prompt, so that each is trained once, behind what it was sampled behind."""
    turns: int = 0
    """Turns that the student answered."""
    ended: Ended | None = None
    """How it ended; None: it is under way."""
    reward: float | None = None
    """0 where a limit ended it; None: the environment gives none."""
    turn_rewards: list[float] = field(default_factory=list)
    """Rewards of the turns, part of `reward`; empty: the episode is rewarded as a whole."""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def context(self) -> list[int]:
        return self.sequences[-1].context

    @property
    def own_length(self) -> int:
        """Tokens that the student sampled."""
        return sum(end - start for sequence in self.sequences for start, end in sequence.own)

    @property
    def finish_reason(self) -> FinishReason:
        """Finish reason of the episode as a completion."""
        return "stop" if self.ended == "over" else "time" if self.ended == "time" else "length"

    def asked(self, turn: Turn, limits: Limits) -> None:
        """Add the environment's tokens. Raises WireError for a turn that cannot be used."""
        last = self.sequences[-1]
        length = len(last.prompt) + len(last.token_ids)
        if problem := self._problem(turn, length, limits):
            raise WireError(f"turn {turn.turn} of episode {self.id} cannot be used: {problem}")
        if turn.keep < length:
            self.sequences.append(Sequence(self.context[: turn.keep]))
        self.sequences[-1].asked(unpack(turn.token_ids).tolist())

    def _problem(self, turn: Turn, total: int, limits: Limits) -> str | Problem | None:
        if turn.id != self.id or turn.turn != self.turns:
            return f"it is turn {turn.turn} of {turn.id!r}, and turn {self.turns} must follow"
        if problem := turn_tokens(turn.token_ids, limits.vocab_size):
            return problem
        if not 0 <= turn.keep <= total:
            return f"keep is {turn.keep}, and must be 0 to {total}, the tokens that there are"
        if (length := turn.keep + turn.token_ids.shape[0]) > limits.tokens:
            return f"the context has {length} tokens, {limits.tokens} are left beside rollout.max_tokens"
        return None

    def answered(self, answer: Generated) -> None:
        self.sequences[-1].answered(answer)
        self.turns += 1


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
    said = None
    try:
        said = await environment.begin(episode.id, task)
        began = loop.time()  # it may have waited for room
        while isinstance(said, Turn):
            if episode.turns and (ended := _limit(said, limits, loop.time() - began)) is not None:
                episode.ended, episode.reward = ended, 0.0
                return
            episode.asked(said, limits)
            answer = await generate(episode)
            episode.answered(answer)
            assert answer.finish_reason != "abort", "`generate` has it generated again"
            said = await environment.proceed(episode.id, said.turn, answer.token_ids, answer.finish_reason)
        if isinstance(said, EpisodeFailed):
            raise EnvironmentLost(said.error) if said.lost else EnvironmentFailed(said.error)
        if len(said.turn_rewards) not in (0, episode.turns):
            raise WireError(
                f"episode {episode.id} has {episode.turns} turns and {len(said.turn_rewards)} turn_rewards: "
                "give one for each, or none"
            )
        if max(map(abs, [said.reward or 0.0, *said.turn_rewards])) > LARGEST_REWARD:
            raise WireError(f"a reward of episode {episode.id} is beyond ±{LARGEST_REWARD:g}: scale it")
        episode.ended, episode.reward, episode.metrics = "over", said.reward, said.metrics
        episode.turn_rewards = said.turn_rewards
    finally:
        if isinstance(said, Turn):
            await environment.end(episode.id)


def _limit(turn: Turn, limits: Limits, seconds: float) -> Ended | None:
    """The limit that this turn, not the first, would exceed; None: none."""
    if turn.turn >= limits.turns:
        return "max_turns"
    if limits.seconds is not None and seconds >= limits.seconds:
        return "time"
    return "max_tokens" if turn.keep + turn.token_ids.shape[0] > limits.tokens else None


class EnvironmentFailed(RemoteError):
    """An environment cannot play an episode on."""


class EnvironmentLost(RemoteError):
    """An environment no longer knows an episode, which may begin again."""
