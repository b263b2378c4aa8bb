"""Prompts of several sources, drawn at random in proportion to weights.

Draw i is of part c_i, with c a sequence of random numbers that depends on the seed alone; the n-th draw of a
part is its n-th prompt. So the order depends on the seed and the parts, and the index is the whole position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from concurrent.futures import Future
from typing import Final

import msgspec
import numpy as np

from distill.prompts.stream import EpochOrder, Prompt, PromptSource, loading

DRAWS: Final = 1024
"""Random numbers that are drawn at a time."""


class Mixture:
    """Endless prompts by index, each with its part's name as data source."""

    def __init__(self, parts: Mapping[str, PromptSource], weights: Mapping[str, float], seed: int) -> None:
        self.parts, self._seed, self._names = dict(parts), seed, [*parts]
        shares = np.array([weights.get(name, 1.0) for name in parts])
        self._shares = shares / shares.sum()
        self._orders = {
            name: EpochOrder([seed, number + 1], len(part))
            for number, (name, part) in enumerate(parts.items())
            if isinstance(part, Sized)
        }
        self._known = 0, np.zeros(len(parts), int)
        """A block of draws, and the draws of each part before it."""

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
        block_wanted, place = divmod(index, DRAWS)
        block, counts = self._known if self._known[0] <= block_wanted else (0, np.zeros(len(self.parts), int))
        while block < block_wanted:
            counts = counts + np.bincount(self._draws(block), minlength=len(self.parts))
            block += 1
        self._known = block, counts
        draws = self._draws(block)
        return counts + np.bincount(draws[:place], minlength=len(self.parts)), int(draws[place])

    def _draws(self, block: int) -> np.ndarray:
        return np.random.default_rng([self._seed, 0, block]).choice(len(self.parts), DRAWS, p=self._shares)


def by_weight(count: int, weights: list[float]) -> list[int]:
    """`wanted` cut into whole parts in proportion to the weights, by largest remainder."""
    exact = count * np.array(weights) / sum(weights)
    parts = np.floor(exact).astype(int)
    parts[np.argsort(parts - exact, kind="stable")[: count - parts.sum()]] += 1
    return parts.tolist()
