"""An environment in memory, and players of it: guess a number from 1 to TOP within TURNS guesses.

Token ids are those of `distill.tasks.guess`. Every id names a number here, so that a replica which draws its
tokens at random plays as well: its guesses are the first token of each answer.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from distill.environments.episode import EnvironmentAnswer, FinishReason
from distill.environments.host import Host, Playing
from distill.environments.python_host import Reply
from sync.base.errors import Unreachable
from sync.wire import Array, EpisodeFailed, EpisodeOver, Turn, pack, unpack

END, USER, ANSWER, HIGHER, LOWER, ASK, FIRST = 1, 2, 3, 4, 5, 6, 7
"""Ids; FIRST is that of the number 1."""
TOP, TURNS = 20, 5
Trouble = Literal["raise", "lost", "gone", "lie", "rewrite"]


def number(token: int) -> int:
    """1 to TOP, of any id."""
    return 1 + (token - FIRST) % TOP


def bisects(context: Sequence[int]) -> list[int]:
    """The answer of a player that always wins."""
    low, high, last = 1, TOP, 0
    for token in context:
        if token == HIGHER:
            low = last + 1
        elif token == LOWER:
            high = last - 1
        elif token >= FIRST:
            last = number(token)
    return [FIRST - 1 + (low + high) // 2, END]


class Script:
    """A `Talk` of a student that says what it is given."""

    def __init__(self, *said: str) -> None:
        self.said, self.heard = list(said), list[str]()

    async def say(self, text: str) -> Reply:
        self.heard.append(text)
        return Reply(self.said.pop(0), [], "stop")


@dataclass
class Game:
    """An episode under way."""

    secret: int
    length: int
    """Tokens of its sequence."""
    turn: int = 0
    tried: list[int] = field(default_factory=list)


@dataclass
class GuessEnvironment:
    """Task i hides the i-th number of its own sequence; a guess made before ends the game, unwon.

    `trouble` of an episode's id and the turn that would come next: "raise" and "lost" end it as the service
    does, "gone" raises Unreachable, "lie" gives an id beyond every vocabulary, "rewrite" drops a token that
    was there.
    """

    name: str = "guess"
    seconds: float = 0.0
    """Of every answer."""
    delay: Callable[[str, int], float] = lambda id, turn: 0.0
    """More seconds before a turn, the first is 0, of an episode's id."""
    trouble: Callable[[str, int], Trouble | None] = lambda id, turn: None
    games: dict[str, Game] = field(default_factory=dict)
    """Under way; clear it as a restart of the service does."""
    begun: list[tuple[str, int]] = field(default_factory=list)
    """Id and task of every begin."""
    ended: list[str] = field(default_factory=list)
    """Ids that were given up."""

    async def begin(self, id: str, task: int) -> EnvironmentAnswer:
        await asyncio.sleep(self.delay(id, 0))
        self.begun.append((id, task))
        self.games[id] = Game(random.Random(task).randint(1, TOP), 0)
        return await self._turn(id, [USER, ASK, ANSWER])

    async def proceed(
        self, id: str, turn: int, token_ids: Array, finish_reason: FinishReason
    ) -> EnvironmentAnswer:
        await asyncio.sleep(self.delay(id, turn + 1))
        if (game := self.games.get(id)) is None:
            return EpisodeFailed(id=id, error="it is not under way here", lost=True)
        assert turn == game.turn, f"turn {turn} of {id} is answered, and {game.turn} was asked"
        said = unpack(token_ids).tolist()
        guess = number(said[0])
        game.length, game.turn = game.length + len(said), game.turn + 1
        game.tried.append(guess)
        if guess == game.secret or guess in game.tried[:-1] or len(game.tried) == TURNS:
            del self.games[id]
            await asyncio.sleep(self.seconds)
            return EpisodeOver(
                id=id, reward=float(guess == game.secret), metrics={"guesses": len(game.tried)}
            )
        return await self._turn(id, [USER, HIGHER if guess < game.secret else LOWER, ANSWER])

    async def end(self, id: str) -> None:
        self.ended.append(id)
        self.games.pop(id, None)

    async def _turn(self, id: str, added: list[int]) -> Turn | EpisodeFailed:
        game = self.games[id]
        trouble = self.trouble(id, game.turn)
        await asyncio.sleep(self.seconds)
        if trouble == "gone":
            raise Unreachable(f"environment {self.name} is gone, and with it {id}")
        if trouble in ("raise", "lost"):
            del self.games[id]
            return EpisodeFailed(id=id, error="the environment has failed", lost=trouble == "lost")
        keep = game.length - (trouble == "rewrite")
        game.length = keep + len(added)
        ids = [1 << 30] if trouble == "lie" else added
        return Turn(id=id, turn=game.turn, token_ids=pack(np.array(ids, "i4")), keep=keep)


class Played:
    """A host's episodes without its service; `under_way`: episodes that no `end` was for."""

    def __init__(self, host: Host) -> None:
        self._host, self.name = host, host.name
        self.under_way: dict[str, Playing] = {}

    async def begin(self, id: str, task: int) -> EnvironmentAnswer:
        self.under_way[id] = playing = Playing(self._host, id, task)
        return await playing.next()

    async def proceed(
        self, id: str, turn: int, token_ids: Array, finish_reason: FinishReason
    ) -> EnvironmentAnswer:
        self.under_way[id].answer(unpack(token_ids).tolist(), finish_reason)
        return await self.under_way[id].next()

    async def end(self, id: str) -> None:
        if (playing := self.under_way.pop(id, None)) is not None:
            await playing.stop(1.0)
