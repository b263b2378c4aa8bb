"""Sort letters from both ends: `kdzmb>` → `bzdmk`.

The prompt is 5 to 9 distinct letters. The completion lists each of them once; every next letter is the first
or the last, in the alphabet, of those not yet listed, as the writer pleases. A prompt of n letters so has
2^(n-1) right answers, and a perfect writer has ln 2 nats of entropy at all but its last two tokens:
0.5 to 0.6 nats a token. A completion passes only when every letter obeys and nothing is missing.
"""

from __future__ import annotations

import random
import string
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from distill.tasks import Asked, Models, TaskPrompt

PAD, EOS, ASK = "<pad>", "<eos>", ">"
LETTERS = string.ascii_lowercase
VOCABULARY = [PAD, EOS, ASK, *LETTERS]
"""Token of each id: one per character, no token before or after a text."""
PAD_ID, EOS_ID, ASK_ID, FIRST_LETTER_ID = range(4)
SHORTEST, LONGEST = 5, 9
HELD_OUT_SHARE = 16
"""One prompt in so many, by a hash of its text, is never trained on."""


def make() -> BothEnds:
    """The task; it has no options."""
    return BothEnds()


def make_models(folder: Path, seed: int) -> Models:
    """A teacher that knows the task and a student that hardly does; made once, then found in `folder`."""
    from distill.tasks.making import make_models as make_both

    return make_both(folder, seed)


def is_held_out(text: str) -> bool:
    """Which side of the split a prompt belongs to, whatever the seed."""
    return zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0


def letters_at(step: int, shortest: int = SHORTEST, longest: int = LONGEST) -> int:
    """Letters of the prompts of one teaching step: each length in turn."""
    return shortest + step % (longest + 1 - shortest)


def choices(left: set[str]) -> set[str]:
    """What may come next when the letters `left` are not yet listed."""
    return {min(left), max(left)} if left else set()


class BothEnds:
    """See the module's docstring."""

    def prompt(self, seed: int, index: int) -> TaskPrompt:
        return _prompt(random.Random(f"{seed}/{index}"), held_out=False)

    def held_out(self, seed: int, index: int) -> TaskPrompt:
        return _prompt(random.Random(f"{seed}/held out/{index}"), held_out=True)

    def passes(self, prompt: Asked, completion: Sequence[int]) -> bool:
        left = set(prompt.text.removesuffix(ASK))
        *letters, last = completion or [PAD_ID]
        for token in letters:
            if VOCABULARY[token] not in choices(left):
                return False
            left.remove(VOCABULARY[token])
        return not left and last == EOS_ID


def _prompt(rng: random.Random, held_out: bool) -> TaskPrompt:
    while True:
        text = "".join(rng.sample(LETTERS, rng.randint(SHORTEST, LONGEST))) + ASK
        if is_held_out(text) == held_out:
            return TaskPrompt(text, [VOCABULARY.index(character) for character in text])


def examples(rng: np.random.Generator, rows: int, letters: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prompts of one length, one right answer to each, and the other choice at each step.

    Three int arrays [rows, letters] of places in LETTERS; at the last letter both choices are the same.
    Held-out prompts are left out, so there may be fewer rows.
    """
    asked_BN = rng.random((rows, len(LETTERS))).argsort(axis=1)[:, :letters]
    texts = ("".join(LETTERS[i] for i in row) + ASK for row in asked_BN)
    asked_BN = asked_BN[[not is_held_out(text) for text in texts]]
    sorted_BN, row = np.sort(asked_BN, axis=1), np.arange(len(asked_BN))
    first, last = np.zeros(len(row), int), np.full(len(row), letters - 1)
    answer_BN, other_BN = np.empty_like(asked_BN), np.empty_like(asked_BN)
    for step in range(letters):
        takes_first = rng.random(len(row)) < 0.5
        answer_BN[:, step] = sorted_BN[row, np.where(takes_first, first, last)]
        other_BN[:, step] = sorted_BN[row, np.where(takes_first, last, first)]
        first, last = first + takes_first, last - ~takes_first
    return asked_BN, answer_BN, other_BN
