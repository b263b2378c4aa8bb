"""Sort letters from both ends, every letter in one of 80 spellings: `k4d0z1>` → `d17k0z2`.

The rules are those of `sort_letters`. A token is a letter in one of its spellings (think of typefaces), and
the reward reads letters only. Spelling n has a probability proportional to (n + 1)^-ZIPF, whatever the letter
and the place. So the vocabulary has 2,083 tokens, a perfect model chooses among 160 of them at all but its
last two, and 64 of those leave 1 to 5 % of its probability outside: the shape of a real vocabulary, at a size
that a CPU learns in a minute.

The teacher is taught the whole distribution of every next token. The student is taught single right answers,
and for less long: it knows the spellings and half of the rule.

Letters in shapes: B rows, N letters of a prompt, L tokens of a row, V vocabulary, S spellings, H hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from distill.tasks import Models, sort_letters
from distill.tasks.sort_letters import ASK, ASK_ID, EOS, FIRST_LETTER_ID, LETTERS, PAD, SortLetters
from distill.tasks.sort_letters import EOS_ID as EOS_ID
from distill.tasks.sort_letters import PAD_ID as PAD_ID
from distill.tasks.teaching import Recipe, made_once, make_tokenizer, new_model, recipe_hash, save_pair, teach

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
    """A teacher that knows the task and a student that hardly does; made once, then found in `folder`."""
    digest = recipe_hash((TEACHER, STUDENT), seed, (__file__, sort_letters.__file__))
    tokenizer = make_tokenizer(VOCABULARY, TOKEN_PATTERN, EOS, PAD)
    return made_once(
        folder / f"spellings-{digest}",
        lambda path: save_pair(path, tokenizer, _taught(TEACHER, seed), _taught(STUDENT, seed)),
    )


def _taught(recipe: Recipe, seed: int) -> Any:
    def loss(model: Any, rng: np.random.Generator, step: int) -> torch.Tensor:
        letters = sort_letters.letters_at(step, SHORTEST, LONGEST)
        return _loss(model, recipe, rng, *sort_letters.examples(rng, recipe.rows, letters))

    return teach(recipe, seed, lambda: _new(recipe), loss)


def _new(recipe: Recipe) -> Any:
    import torch

    model = new_model(recipe, len(VOCABULARY), EOS_ID, PAD_ID)
    letter, spelling, own = START_SHARES
    alike_SH = letter * torch.randn(len(LETTERS), 1, recipe.width)
    alike_SH = alike_SH + spelling * torch.randn(1, SPELLINGS, recipe.width)
    alike_SH = alike_SH + own * torch.randn(len(LETTERS), SPELLINGS, recipe.width)
    with torch.no_grad():
        model.get_input_embeddings().weight[FIRST_LETTER_ID:] = START_SCALE * alike_SH.flatten(0, 1)
    return model


def _loss(
    model: Any,
    recipe: Recipe,
    rng: np.random.Generator,
    asked_BN: np.ndarray,
    answer_BN: np.ndarray,
    other_BN: np.ndarray,
) -> torch.Tensor:
    """Mean cross-entropy per completion token: with the whole target, or with one sampled answer."""
    import torch

    rows, letters = asked_BN.shape
    even = RARE_SHARE * recipe.both_choices
    ask_B1, end_B1 = np.full((rows, 1), ASK_ID), np.full((rows, 1), EOS_ID)
    tokens_BL = torch.from_numpy(
        np.hstack([_spelled(rng, asked_BN, even), ask_B1, _spelled(rng, answer_BN, even), end_B1])
    )
    hidden = model.model(tokens_BL[:, :-1]).last_hidden_state[:, letters:]
    logp_BLV = model.lm_head(hidden).log_softmax(dim=-1)
    if not recipe.both_choices:
        return -logp_BLV.gather(-1, tokens_BL[:, letters + 1 :, None]).mean()
    logp_BNlS = logp_BLV[:, :letters, FIRST_LETTER_ID:].unflatten(-1, (len(LETTERS), SPELLINGS))
    either_BN2 = torch.from_numpy(np.stack([answer_BN, other_BN], axis=-1))
    logp_BN2S = logp_BNlS.gather(2, either_BN2[..., None].expand(-1, -1, -1, SPELLINGS))
    expected_BN = (logp_BN2S @ torch.tensor(SHARES, dtype=torch.float32)).mean(-1)
    return -(expected_BN.sum() + logp_BLV[:, letters, EOS_ID].sum()) / (rows * (letters + 1))


def _spelled(rng: np.random.Generator, places_BN: np.ndarray, even: float) -> np.ndarray:
    """Token ids of letters; a share of `even` is spelled evenly, the rest as the task does."""
    spelling_BN = rng.choice(SPELLINGS, size=places_BN.shape, p=SHARES)
    evenly_BN = rng.integers(SPELLINGS, size=places_BN.shape)
    chosen_BN = np.where(rng.random(places_BN.shape) < even, evenly_BN, spelling_BN)
    return FIRST_LETTER_ID + places_BN * SPELLINGS + chosen_BN
