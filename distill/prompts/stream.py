"""Prompts, their order, and the cursor from which a restarted run continues.

Every order depends on the seed and the sources alone, so that an index is the whole position in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from concurrent.futures import Future
from typing import Final, NamedTuple, Protocol

import msgspec
import numpy as np
from blake3 import blake3

LARGEST_SHARE: Final = 0.1
"""Share of the different prompts that are held out at most."""
DRAWS: Final = 1024
"""Random numbers of a mixture that are drawn at a time."""


class Prompt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One prompt, tokenized once. Sources produce it; student and teacher engines consume it."""

    id: str
    """In a source: the row's name. From a PromptStream: unique within the run."""
    token_ids: list[int]
    source: str = "default"
    """Data source, for routing to teachers."""
    answer: str | None = None
    """Reference answer; None: the row has none."""
    text: str = ""
    """`token_ids` as text, if the source knows it; else empty."""
    environment: str | None = None
    """Environment that the student plays against; it gives the first prompt, and `token_ids` is empty until
    then. None: the prompt is completed once."""
    task: int = 0
    """Number of the environment's task."""
    messages: str = ""
    """JSON of [messages, variables of the template] that `token_ids` were rendered from, for a teacher that
    renders them by its own template; empty: none does, or there are none."""


def content_of(token_ids: Sequence[int] | np.ndarray) -> bytes:
    """Digest that two rows have in common which are one prompt, whatever their ids and answers."""
    return blake3(np.asarray(token_ids, "<i4").tobytes()).digest(16)


def held_out_of(prompts: int, count: int) -> int:
    """How many of so many different prompts are held out where `count` are asked for."""
    return min(count, int(prompts * LARGEST_SHARE))


def group_of(prompt: str) -> str:
    """What the ids of all completions of one prompt have in common: "epoch:row" of "epoch:row:copy"."""
    return prompt.rpartition(":")[0]


class PromptSource(Protocol):
    """Rows by index. One with `__len__` is read in shuffled epochs; any other is endless.

    One that has to read rows before it can give them out has `loading` too.
    """

    def __getitem__(self, index: int, /) -> Prompt: ...


def loading(source: PromptSource, first: int, last: int) -> Future[None] | None:
    """What to wait for before rows `first` to `last` of a source are in memory; None: they are."""
    ahead: Callable[[int, int], Future[None] | None] | None = getattr(source, "loading", None)
    return None if ahead is None else ahead(first, last)


class EpochOrder:
    """Rows in shuffled epochs: place p of epoch e is a row that depends on `seeds`, e and p alone."""

    def __init__(self, seeds: Sequence[int], rows: int) -> None:
        self._seeds, self.rows = list(seeds), rows
        self._order: tuple[int, np.ndarray] | None = None

    def row(self, epoch: int, place: int) -> int:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([*self._seeds, epoch]).permutation(self.rows)
        return int(self._order[1][place])

    def place(self, nth: int) -> tuple[int, int]:
        """(epoch, row) of the n-th row, over all epochs."""
        epoch, place = divmod(nth, self.rows)
        return epoch, self.row(epoch, place)


class Cursor(NamedTuple):
    """Position of a PromptStream: `position` prompts of `epoch` were issued."""

    epoch: int
    position: int


class PromptStream:
    """Endless prompts in an order that depends on `seed` alone.

    Each row is issued `per_prompt` times in succession, each time under a new id "epoch:row:copy".
    Set `cursor` to continue from an earlier position.
    """

    def __init__(self, source: PromptSource, seed: int, per_prompt: int = 1) -> None:
        self.cursor = Cursor(0, 0)
        self._source = source
        self.per_prompt = per_prompt
        self.rows = len(source) if isinstance(source, Sized) else None
        """Rows of an epoch; None: the source is endless."""
        self._order = None if self.rows is None else EpochOrder([seed], self.rows)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; moves the cursor."""
        return [self._next() for _ in range(count)]

    def loading(self, count: int) -> Future[None] | None:
        """What to wait for before `take(count)` is immediate; None: it is."""
        first = self.cursor.position
        return loading(self._source, *((first + i) // self.per_prompt for i in (0, max(0, count - 1))))

    def _next(self) -> Prompt:
        epoch, position = self.cursor
        if self.rows is not None and position >= self.rows * self.per_prompt:
            epoch, position = epoch + 1, 0
        place, copy = divmod(position, self.per_prompt)
        row = self._source[place if self._order is None else self._order.row(epoch, place)]
        self.cursor = Cursor(epoch, position + 1)
        return msgspec.structs.replace(row, id=f"{epoch}:{row.id}:{copy}")


class Mixture:
    """Endless prompts of several sources, each with its part's name as data source.

    Draw i is of part c_i, with c random numbers, in proportion to the weights, that depend on the seed alone;
    the n-th draw of a part is its n-th prompt.
    """

    def __init__(self, parts: Mapping[str, PromptSource], weights: Mapping[str, float], seed: int) -> None:
        self.parts, self._seed, self._names = dict(parts), seed, [*parts]
        shares = np.array([weights.get(name, 1.0) for name in parts])
        self._shares = shares / shares.sum()
        self._orders = {
            name: EpochOrder([seed, number + 1], len(part))
            for number, (name, part) in enumerate(parts.items())
            if isinstance(part, Sized)
        }
        self._counts = [np.zeros(len(parts), int)]
        """Draws of each part before each block of draws."""

    @property
    def sources(self) -> set[str]:
        return {*self.parts}

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt of the parts whose rows are all known."""
        return max(getattr(part, "longest", 0) for part in self.parts.values())

    def __getitem__(self, index: int) -> Prompt:
        counts, part = self._before(index)
        name, nth = self._names[part], int(counts[part])
        if (order := self._orders.get(name)) is None:
            row, prefix = nth, name
        else:
            epoch, row = order.place(nth)
            prefix = f"{name}/{epoch}"
        prompt = self.parts[name][row]
        return msgspec.structs.replace(prompt, id=f"{prefix}/{prompt.id}", source=name)

    def loading(self, first: int, last: int) -> Future[None] | None:
        """What to wait for before prompts `first` to `last` are in memory; None: they are."""
        (begin, _), (end, _) = self._before(first), self._before(last + 1)
        waits = [
            loading(self.parts[name], int(begin[i]), int(max(begin[i], end[i] - 1)))
            for i, name in enumerate(self._names)
        ]
        return next((wait for wait in waits if wait is not None), None)

    def _before(self, index: int) -> tuple[np.ndarray, int]:
        """Draws of each part before draw `index`, and the part of that draw."""
        block, place = divmod(index, DRAWS)
        while (known := len(self._counts)) <= block:
            self._counts.append(self._counts[-1] + self._counted(self._draws(known - 1)))
        draws = self._draws(block)
        return self._counts[block] + self._counted(draws[:place]), int(draws[place])

    def _counted(self, draws: np.ndarray) -> np.ndarray:
        return np.bincount(draws, minlength=len(self.parts))

    def _draws(self, block: int) -> np.ndarray:
        return np.random.default_rng([self._seed, 0, block]).choice(len(self.parts), DRAWS, p=self._shares)


def by_weight(count: int, weights: list[float]) -> list[int]:
    """`count` cut into whole parts in proportion to the weights, by largest remainder."""
    exact = count * np.array(weights) / sum(weights)
    parts = np.floor(exact).astype(int)
    parts[np.argsort(parts - exact, kind="stable")[: count - parts.sum()]] += 1
    return parts.tolist()
