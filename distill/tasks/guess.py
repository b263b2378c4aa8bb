"""Guess the number: an environment of several turns, in which the best play is known.

    environment   u:?a:        student   [10]<eos>
                  u:highera:             [15]<eos>
                  u:lowera:              [12]<eos>      … up to TURNS guesses of a number from 1 to TOP

A malformed guess, or one made before, ends the game. Bisection always wins; the teacher has learned it from
games with detours, and the student hardly. A guess is one token, and its end token the second.

    python -m distill.tasks.guess FOLDER SEED    makes the models and prints their two folders
"""

from __future__ import annotations

import random
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from distill.tasks import Models
from distill.tasks.teaching import Lesson, Recipe, make_tokenizer, masked_loss, taught_pair

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from distill.environments.python_host import Talk

TOP, TURNS = 20, 5
ASK, HIGHER, LOWER = "?", "higher", "lower"
"""What the environment says: at first, and of a guess that is too low, too high."""
PAD, EOS, USER, ANSWER = "<pad>", "<eos>", "u:", "a:"
VOCABULARY: Final = [PAD, EOS, USER, ANSWER, HIGHER, LOWER, ASK, *(f"[{n}]" for n in range(1, TOP + 1))]
"""Token of each id."""
EOS_ID, FIRST_ID = 1, 7
"""FIRST_ID: that of the guess 1."""
TEMPLATE: Final = (
    "{% for one in messages %}"
    "{{ 'a:' + one.content + '<eos>' if one.role == 'assistant' else 'u:' + one.content }}"
    "{% endfor %}{{ 'a:' if add_generation_prompt else '' }}"
)
GOOD_SHARE: Final = 0.6
"""Share of the guesses of a lesson that are the best one; the others are any number."""
TEACHER = Recipe(128, 3, 4, 2, 384, steps=220, muon=True)
STUDENT = Recipe(96, 2, 3, 1, 256, steps=80)


async def play(task: int, talk: Talk) -> float:
    """One game, whose number depends on `task` alone: 1 when the student has found it, else 0."""
    secret, tried, said = random.Random(task).randint(1, TOP), set[int](), ASK
    for _ in range(TURNS):
        reply = await talk.say(said)
        match = re.fullmatch(r"\[(\d+)\]", reply.text)
        guess = int(match[1]) if match else 0
        if guess == secret or not 1 <= guess <= TOP or guess in tried:
            return float(guess == secret)
        tried.add(guess)
        said = HIGHER if guess < secret else LOWER
    return 0.0


# --- models


def make_models(folder: Path, seed: int) -> Models:
    """A teacher that plays well and a student that does not; made once, kept in `folder`."""
    return taught_pair(
        folder, seed, __file__, (TEACHER, STUDENT), guess_tokenizer(), partial(masked_loss, game)
    )


def guess_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word of the game, with the chat template."""
    return make_tokenizer(VOCABULARY, r"u:|a:|higher|lower|\[\d+\]|.", EOS, PAD, TEMPLATE)


def game(rng: np.random.Generator) -> Lesson:
    """One game; taught are best guesses, and end tokens."""
    secret, low, high, tried = int(rng.integers(1, TOP + 1)), 1, TOP, set[int]()
    ids, taught, said = list[int](), list[bool](), ASK
    while True:
        best = (low + high) // 2
        last = len(tried) == TURNS - 1
        guess = best if last or rng.random() < GOOD_SHARE else int(rng.integers(1, TOP + 1))
        turn = [VOCABULARY.index(word) for word in (USER, said, ANSWER)]
        ids += [*turn, FIRST_ID - 1 + guess, EOS_ID]
        taught += [False, False, False, guess == best, True]
        if guess == secret or guess in tried or last:
            return ids, taught
        tried.add(guess)
        if guess < secret:
            low, said = max(low, guess + 1), HIGHER
        else:
            high, said = min(high, guess - 1), LOWER


if __name__ == "__main__":
    sys.stdout.writelines(f"{path}\n" for path in make_models(Path(sys.argv[1]), int(sys.argv[2])))
