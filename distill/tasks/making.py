"""Makes the tiny teacher and the tiny student of `sort_letters`.

    python -m distill.tasks.making FOLDER SEED      prints the teacher's folder and the student's

Letters in shapes: B rows, N letters of a prompt, L tokens of a row, V vocabulary.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distill.tasks import Models
from distill.tasks import sort_letters as sort_letters
from distill.tasks.sort_letters import ASK_ID, EOS, EOS_ID, FIRST_LETTER_ID, PAD, PAD_ID, VOCABULARY
from distill.tasks.teaching import Recipe, made_once, make_tokenizer, new_model, recipe_hash, save_pair, teach

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

TEACHER = Recipe(128, 3, 4, 2, 384, steps=500, rows=64, rate=4e-3, muon=True, both_choices=True)
STUDENT = Recipe(96, 2, 3, 1, 256, steps=240, rows=64, rate=4e-3, muon=False, both_choices=False)


def make_models(folder: Path, seed: int) -> Models:
    """Teacher and student of `seed`, from `folder` when they were made before."""
    digest = recipe_hash((TEACHER, STUDENT), seed, (__file__, sort_letters.__file__))
    return made_once(folder / f"sort_letters-{digest}", lambda unfinished: _make_pair(unfinished, seed))


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, no token before or after a text."""
    return make_tokenizer(VOCABULARY, ".", EOS, PAD)


def untaught(recipe: Recipe) -> Qwen3ForCausalLM:
    """Random weights, fp32."""
    return new_model(recipe, len(VOCABULARY), EOS_ID, PAD_ID)


def _make_pair(folder: Path, seed: int) -> None:
    teacher, student = _taught(TEACHER, seed), _taught(STUDENT, seed)
    save_pair(folder, letter_tokenizer(), teacher=teacher, student=student)


def _taught(recipe: Recipe, seed: int) -> Any:
    def loss(model: Any, rng: np.random.Generator, step: int) -> torch.Tensor:
        letters = sort_letters.letters_at(step)
        return _loss(model, recipe, *sort_letters.examples(rng, recipe.rows, letters))

    return teach(recipe, seed, lambda: untaught(recipe), loss)


def _loss(
    model: Any, recipe: Recipe, asked_BN: np.ndarray, answer_BN: np.ndarray, other_BN: np.ndarray
) -> torch.Tensor:
    """Mean negative log-probability per completion token, end token included."""
    import torch

    def column(token: int) -> np.ndarray:
        return np.full((len(asked_BN), 1), token)

    end_B1, letters = column(EOS_ID), asked_BN.shape[1]
    tokens_BL = torch.from_numpy(
        np.hstack([asked_BN + FIRST_LETTER_ID, column(ASK_ID), answer_BN + FIRST_LETTER_ID, end_B1])
    )
    hidden = model.model(tokens_BL[:, :-1]).last_hidden_state[:, letters:]
    logp_BNV = model.lm_head(hidden).log_softmax(dim=-1)
    logp_BN = logp_BNV.gather(-1, tokens_BL[:, letters + 1 :, None])
    if recipe.both_choices:
        targets_BN1 = torch.from_numpy(np.hstack([other_BN + FIRST_LETTER_ID, end_B1]))[..., None]
        logp_BN = 0.5 * (logp_BN + logp_BNV.gather(-1, targets_BN1))
    return -logp_BN.mean()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.stdout.writelines(f"{path}\n" for path in make_models(Path(sys.argv[1]), int(sys.argv[2])))
