"""Sort letters from both ends, every letter in one of 80 spellings: `k4d0z1>` → `d17k0z2`.

The rules are those of `sort_letters`: each next letter is the first or the last, in the alphabet, of those
not yet listed. A token is a letter in one of its spellings (think of typefaces), and the reward reads
letters only. Spelling n is written with probability proportional to (n + 1)^-ZIPF, whatever the letter and
the place.
So the vocabulary has 2,083 tokens, a perfect writer hesitates between 160 of them at all but its last two,
and 64 of those leave 1 to 5 % of its probability outside: the shape of a real vocabulary, at a size that a
CPU learns in a minute.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from distill.tasks import Asked, Models, TaskPrompt
from distill.tasks.sort_letters import ASK, EOS, LETTERS, PAD, choices, is_held_out

SPELLINGS: Final = 80
"""Of each letter."""
ZIPF: Final = 1.6
SHORTEST, LONGEST = 4, 6
"""Letters of a prompt."""
VOCABULARY: Final = [PAD, EOS, ASK, *(f"{letter}{n}" for letter in LETTERS for n in range(SPELLINGS))]
"""Token of each id; no token before or after a text."""
PAD_ID, EOS_ID, ASK_ID, FIRST_LETTER_ID = range(4)
_WEIGHTS: Final = np.arange(1.0, SPELLINGS + 1) ** -ZIPF
SHARES: Final = _WEIGHTS / _WEIGHTS.sum()
"""Probability of each spelling."""
_CUMULATED: Final = list(itertools.accumulate(SHARES.tolist()))


def make() -> Spellings:
    """The task; it has no options."""
    return Spellings()


def make_models(folder: Path, seed: int) -> Models:
    """A teacher that knows the task and a student that hardly does; made once, then found in `folder`."""
    from distill.tasks.spellings_making import make_models as make_both

    return make_both(folder, seed)


def letter_of(token: int) -> str:
    """The letter that a token spells; EOS, PAD and ASK are their own."""
    return VOCABULARY[token] if token < FIRST_LETTER_ID else LETTERS[(token - FIRST_LETTER_ID) // SPELLINGS]


def outside(letters: int, k: int) -> float:
    """Probability that a perfect writer gives to tokens outside its k most likely, with `letters` choices."""
    shares = np.sort(np.concatenate([SHARES / letters] * letters))[::-1]
    return float(shares[k:].sum())


class Spellings:
    """See the module's docstring."""

    def prompt(self, seed: int, index: int) -> TaskPrompt:
        return _prompt(random.Random(f"{seed}/{index}"), held_out=False)

    def held_out(self, seed: int, index: int) -> TaskPrompt:
        return _prompt(random.Random(f"{seed}/held out/{index}"), held_out=True)

    def passes(self, prompt: Asked, completion: Sequence[int]) -> bool:
        left = {character for character in prompt.text if character in LETTERS}
        *letters, last = completion or [PAD_ID]
        for token in letters:
            if letter_of(token) not in choices(left):
                return False
            left.remove(letter_of(token))
        return not left and last == EOS_ID


def _prompt(rng: random.Random, held_out: bool) -> TaskPrompt:
    """Held out are sequences of letters, in all their spellings."""
    while True:
        letters = rng.sample(range(len(LETTERS)), rng.randint(SHORTEST, LONGEST))
        if is_held_out("".join(LETTERS[i] for i in letters) + ASK) == held_out:
            spellings = rng.choices(range(SPELLINGS), cum_weights=_CUMULATED, k=len(letters))
            ids = [token_of(i, n) for i, n in zip(letters, spellings, strict=True)] + [ASK_ID]
            return TaskPrompt("".join(VOCABULARY[i] for i in ids), ids)


def token_of(place: int, spelling: int) -> int:
    """Token id of the letter at `place` in LETTERS in one of its spellings."""
    return FIRST_LETTER_ID + place * SPELLINGS + spelling
