"""Makes the tiny teacher and the tiny student of `both_ends` from scratch, on a CPU, once per recipe.

    python -m distill.tasks.making FOLDER SEED      prints the teacher's folder and the student's

A made pair is a folder named by a hash of this recipe; it appears by one rename, so that what is found there
is whole. Letters in shapes: B rows, N letters of a prompt, L tokens of a row, V vocabulary.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distill.tasks import Models, both_ends
from distill.tasks.both_ends import ASK_ID, EOS, EOS_ID, FIRST_LETTER_ID, PAD, PAD_ID, VOCABULARY

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """A Qwen3 and how it is taught."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    steps: int
    rows: int
    rate: float
    muon: bool
    """Matrices by Muon, the rest by AdamW: half the steps of AdamW alone."""
    both_choices: bool
    """Taught both right choices at each step, half the odds each; else one sampled answer."""


TEACHER = Recipe(128, 3, 4, 2, 384, steps=500, rows=64, rate=4e-3, muon=True, both_choices=True)
STUDENT = Recipe(96, 2, 3, 1, 256, steps=240, rows=64, rate=4e-3, muon=False, both_choices=False)
WARM_UP_STEPS, LAST_RATE_SHARE, MAX_NORM = 25, 0.02, 1.0


def make_models(folder: Path, seed: int) -> Models:
    """Teacher and student of `seed`, from `folder` when they were made before."""
    home = folder / f"both_ends-{recipe_hash(seed)}"
    if not home.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".making-", dir=folder))
        try:
            _make_pair(unfinished, seed)
            _appear(unfinished, home)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return Models(home / "teacher", home / "student")


def recipe_hash(seed: int) -> str:
    """Changes with the seed, any number of the recipes, and any line of the code that applies them."""
    sources = [Path(module).read_bytes() for module in (__file__, both_ends.__file__)]
    parts = [json.dumps([asdict(TEACHER), asdict(STUDENT), seed]).encode(), *sources]
    return hashlib.blake2b(b"\0".join(parts), digest_size=6).hexdigest()


def _make_pair(folder: Path, seed: int) -> None:
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    tokenizer = make_tokenizer()
    for name, recipe in {"student": STUDENT, "teacher": TEACHER}.items():
        model = teach(recipe, seed)
        model.to(torch.bfloat16).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def _appear(unfinished: Path, home: Path) -> None:
    """Give a whole folder its name; a pair that somebody else finished meanwhile is as good."""
    try:
        unfinished.rename(home)
    except OSError:
        if not home.is_dir():
            raise


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, no token before or after a text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def new_model(recipe: Recipe) -> Qwen3ForCausalLM:
    """Random weights, fp32, tied embeddings."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(VOCABULARY),
            hidden_size=recipe.width,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.kv_heads,
            head_dim=32,
            intermediate_size=recipe.feed_forward,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=EOS_ID,
            pad_token_id=PAD_ID,
        )
    )


def teach(recipe: Recipe, seed: int) -> Qwen3ForCausalLM:
    """A model taught by cross-entropy on right answers, prompts of one length a step."""
    import torch

    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = new_model(recipe)
    optimizers = _optimizers(model, recipe)
    lengths = itertools.cycle(range(both_ends.SHORTEST, both_ends.LONGEST + 1))
    for step, letters in zip(range(recipe.steps), lengths, strict=False):
        rate = recipe.rate * _rate_share(step, recipe.steps)
        loss = _loss(model, recipe, *both_ends.examples(rng, recipe.rows, letters))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            log.info("%d of %d steps, loss %.3f nats a token", step + 1, recipe.steps, loss.item())
    return model.eval()


def _rate_share(step: int, steps: int) -> float:
    """Linear warm-up, then linear down to a small share."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * max(LAST_RATE_SHARE, 1 - step / steps)


def _optimizers(model: torch.nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    import torch

    named = list(model.named_parameters())
    matrices = [p for name, p in named if recipe.muon and p.ndim == 2 and "embed" not in name]
    rest = [p for _, p in named if all(p is not matrix for matrix in matrices)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.01 * (not recipe.muon))
    ]
    if matrices:
        optimizers.append(
            torch.optim.Muon(matrices, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        )
    return optimizers


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
