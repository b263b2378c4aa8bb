"""Sort letters from both ends: `kdzmb>` → `bzdmk`.

The prompt is 5 to 9 distinct letters. The completion lists each of them once; every next letter is the first
or the last, in the alphabet, of those not yet listed, at the student's choice. A prompt of n letters thus has
2^(n-1) right answers, and a perfect model has ln 2 nats of entropy at all but its last two tokens:
0.5 to 0.6 nats per token. A completion passes only when every letter obeys the rule and none is missing.

    python -m distill.tasks.sort_letters FOLDER SEED    makes the models and prints their two folders

Letters in shapes: B rows, N letters of a prompt, L tokens of a row, V vocabulary.
"""

from __future__ import annotations

import random
import string
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distill.tasks import Models, RewardedPrompt, TaskPrompt, is_held_out
from distill.tasks.teaching import ROWS, Recipe, make_tokenizer, taught_pair

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

PAD, EOS, ASK = "<pad>", "<eos>", ">"
LETTERS = string.ascii_lowercase
VOCABULARY = [PAD, EOS, ASK, *LETTERS]
"""Token of each id: one per character, no token before or after a text."""
PAD_ID, EOS_ID, ASK_ID, FIRST_LETTER_ID = range(4)
SHORTEST, LONGEST = 5, 9
TEACHER = Recipe(128, 3, 4, 2, 384, steps=500, muon=True, both_choices=True)
STUDENT = Recipe(96, 2, 3, 1, 256, steps=240)


def make() -> SortLetters:
    """The task; it has no options."""
    return SortLetters()


class SortLetters:
    """The task."""

    def prompt(self, seed: int, index: int) -> TaskPrompt:
        return _prompt(random.Random(f"{seed}/{index}"), held_out=False)

    def held_out(self, seed: int, index: int) -> TaskPrompt:
        return _prompt(random.Random(f"{seed}/held out/{index}"), held_out=True)

    def reward(self, prompt: RewardedPrompt, completion: Sequence[int]) -> bool:
        left = {character for character in prompt.text if character in LETTERS}
        *letters, last = completion or [PAD_ID]
        for letter in (VOCABULARY[token] for token in letters):
            if not left or letter not in (min(left), max(left)):
                return False
            left.remove(letter)
        return not left and last == EOS_ID


def _prompt(rng: random.Random, held_out: bool) -> TaskPrompt:
    while True:
        letters = rng.sample(range(len(LETTERS)), rng.randint(SHORTEST, LONGEST))
        text = "".join(LETTERS[place] for place in letters) + ASK
        if is_held_out(text) == held_out:
            return TaskPrompt(text, [*(FIRST_LETTER_ID + place for place in letters), ASK_ID])


# --- models


def make_models(folder: Path, seed: int) -> Models:
    """A teacher that has learned the task and a student that hardly has; made once, kept in `folder`."""
    return taught_pair(folder, seed, __file__, (TEACHER, STUDENT), letter_tokenizer(), lesson_loss)


def lesson_loss(model: Any, recipe: Recipe, rng: np.random.Generator, step: int) -> torch.Tensor:
    """Mean cross-entropy per completion token, end token included, of prompts of each length in turn.

    Against the whole distribution of the next token with `recipe.both_choices`, else against one sampled
    answer.
    """
    import torch

    letters = SHORTEST + step % (LONGEST + 1 - SHORTEST)
    asked_BN, answer_BN, other_BN = examples(rng, ROWS, letters)
    rows = len(asked_BN)
    ask_B1, end_B1 = np.full((rows, 1), ASK_ID), np.full((rows, 1), EOS_ID)
    row_BL = np.hstack([FIRST_LETTER_ID + asked_BN, ask_B1, FIRST_LETTER_ID + answer_BN, end_B1])
    tokens_BL = torch.from_numpy(row_BL)
    hidden = model.model(tokens_BL[:, :-1]).last_hidden_state[:, letters:]
    logp_BLV = model.lm_head(hidden).log_softmax(dim=-1)
    if not recipe.both_choices:
        return -logp_BLV.gather(-1, tokens_BL[:, letters + 1 :, None]).mean()
    either_BN2 = torch.from_numpy(np.stack([answer_BN, other_BN], axis=-1))
    expected_BN = logp_BLV[:, :letters, FIRST_LETTER_ID:].gather(2, either_BN2).mean(-1)
    return -(expected_BN.sum() + logp_BLV[:, letters, EOS_ID].sum()) / (rows * (letters + 1))


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, no token before or after a text."""
    return make_tokenizer(VOCABULARY, ".", EOS, PAD)


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


if __name__ == "__main__":
    sys.stdout.writelines(f"{path}\n" for path in make_models(Path(sys.argv[1]), int(sys.argv[2])))
