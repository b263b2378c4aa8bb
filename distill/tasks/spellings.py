"""Sort letters from both ends, every letter in one of 80 spellings: `k4d0z1>` → `d17k0z2`.

The rules are those of `sort_letters`. A token is a letter in one of its spellings (think of typefaces), and
the reward reads letters only. Spelling n has a probability proportional to (n + 1)^-ZIPF, whatever the letter
and the place: a vocabulary of 2,083 tokens, where a perfect model chooses among 160 at all but its last two,
and 64 of those leave 1 to 5 % of its probability outside. That is the shape of a real vocabulary, at a size
that a CPU learns in a minute.

The teacher learns the whole distribution of every next token, the student single right answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from distill.tasks import Models, sort_letters
from distill.tasks.sort_letters import ASK, EOS, FIRST_LETTER_ID, LETTERS, PAD, SortLetters
from distill.tasks.sort_letters import EOS_ID as EOS_ID
from distill.tasks.sort_letters import PAD_ID as PAD_ID
from distill.tasks.teaching import Recipe, make_tokenizer, new_model, taught_pair

if TYPE_CHECKING:
    import torch

SPELLINGS: Final = 80
"""Of each letter."""
ZIPF: Final = 1.6
SHORTEST, LONGEST = 4, 6
"""Letters of a prompt."""
VOCABULARY: Final = [PAD, EOS, ASK, *(f"{letter}{n}" for letter in LETTERS for n in range(SPELLINGS))]
"""Token of each id; no token before or after a text."""
_WEIGHTS: Final = np.arange(1.0, SPELLINGS + 1) ** -ZIPF
SHARES: Final = _WEIGHTS / _WEIGHTS.sum()
"""Probability of each spelling."""
TEACHER = Recipe(128, 3, 4, 2, 384, steps=600, rows=64, rate=6e-3, muon=True, both_choices=True)
STUDENT = Recipe(96, 2, 3, 1, 256, steps=600, rows=64, rate=4e-3, muon=True, both_choices=False)
TOKEN_PATTERN: Final = "[a-z][0-9]+|."
RARE_SHARE: Final = 0.2
"""Of the teacher's lessons that are spelled evenly, so that it has seen every spelling."""
START_SCALE: Final = 0.02
START_SHARES: Final = (0.9, 0.3, 0.3)
"""Of letter, spelling and token itself in an embedding at the start: spellings of one letter are alike."""


def make() -> SortLetters:
    """The task; it has no options."""
    return SortLetters(SHORTEST, LONGEST, SHARES.tolist())


def outside(letters: int, k: int) -> float:
    """Probability that a perfect model gives to tokens outside its k most likely, with `letters` choices."""
    shares = np.sort(np.concatenate([SHARES / letters] * letters))[::-1]
    return float(shares[k:].sum())


def make_models(folder: Path, seed: int) -> Models:
    """A teacher that has learned the task and a student that hardly has; made once, kept in `folder`."""

    def loss(model: Any, recipe: Recipe, rng: np.random.Generator, step: int) -> torch.Tensor:
        letters = sort_letters.letters_at(step, SHORTEST, LONGEST)
        lesson = sort_letters.examples(rng, recipe.rows, letters)
        return sort_letters.lesson_loss(model, recipe, rng, *lesson, SHARES, RARE_SHARE * recipe.both_choices)

    recipes, tokenizer = (TEACHER, STUDENT), make_tokenizer(VOCABULARY, TOKEN_PATTERN, EOS, PAD)
    sources = (__file__, str(sort_letters.__file__))
    return taught_pair(folder / "spellings", recipes, seed, tokenizer, _untaught, loss, sources)


def _untaught(recipe: Recipe) -> Any:
    import torch

    model = new_model(recipe, len(VOCABULARY), EOS_ID, PAD_ID)
    letter, spelling, untaught = START_SHARES
    alike_SH = letter * torch.randn(len(LETTERS), 1, recipe.width)
    alike_SH = alike_SH + spelling * torch.randn(1, SPELLINGS, recipe.width)
    alike_SH = alike_SH + untaught * torch.randn(len(LETTERS), SPELLINGS, recipe.width)
    with torch.no_grad():
        model.get_input_embeddings().weight[FIRST_LETTER_ID:] = START_SCALE * alike_SH.flatten(0, 1)
    return model
