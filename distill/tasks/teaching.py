"""Trains the tiny models of a task from scratch on a CPU.

A pair is a folder named by a hash of its recipe; it appears by one rename, so that it is always whole.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from distill.tasks import Models

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

ROWS: Final = 64
"""Rows of a step, about."""
RATE, WARM_UP_STEPS, LAST_RATE_SHARE, MAX_NORM = 4e-3, 25, 0.02, 1.0
DECAY, MOMENTUM = 0.01, 0.95


@dataclass(frozen=True)
class Recipe:
    """A Qwen3 and how it is taught."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    steps: int
    muon: bool = False
    """Matrices by Muon, the rest by AdamW: half the steps of AdamW alone."""
    both_choices: bool = False
    """Taught both right choices at each step, half the odds each; else one sampled answer."""


Loss = Callable[[Any, Recipe, np.random.Generator, int], "torch.Tensor"]
"""(model, recipe, randomness, step) → mean loss per token of about ROWS fresh rows."""
Lesson = tuple[list[int], list[bool]]
"""Token ids of an episode, and which of them are taught."""


def make_tokenizer(
    vocabulary: Sequence[str], token: str, end: str, pad: str, template: str | None = None
) -> PreTrainedTokenizerFast:
    """One id per word of `vocabulary`; `token`: the pattern that cuts a text into words; a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=pad))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(token), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=end, pad_token=pad, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer


def new_model(recipe: Recipe, tokenizer: Any) -> Qwen3ForCausalLM:
    """Random weights, fp32, tied embeddings."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=recipe.width,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.kv_heads,
            head_dim=32,
            intermediate_size=recipe.feed_forward,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def masked_loss(
    lesson: Callable[[np.random.Generator], Lesson],
    model: Any,
    _: Recipe,
    rng: np.random.Generator,
    step: int,
) -> torch.Tensor:
    """Mean cross-entropy of the taught tokens of B lessons. L tokens of the longest, V vocabulary."""
    import torch

    lessons = [lesson(rng) for _ in range(ROWS)]
    longest = max(len(ids) for ids, _ in lessons)
    tokens_BL = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in lessons])
    taught_BL = torch.tensor([taught + [False] * (longest - len(taught)) for _, taught in lessons])
    logp_BLV = model(tokens_BL[:, :-1]).logits.log_softmax(-1)
    return -logp_BLV.gather(-1, tokens_BL[:, 1:, None])[..., 0][taught_BL[:, 1:]].mean()


def taught_pair(
    folder: Path, seed: int, source: str, recipes: tuple[Recipe, Recipe], tokenizer: Any, loss: Loss
) -> Models:
    """The teacher and the student of two recipes, in bf16 and with the tokenizer; made once, kept in
    `folder`, under the name of the task's file `source`.

    All randomness comes from `seed`; a `source` that changed makes another pair.
    """
    parts = [json.dumps([*map(asdict, recipes), seed]).encode()]
    parts += [Path(path).read_bytes() for path in (source, __file__)]
    digest = hashlib.blake2b(b"\0".join(parts), digest_size=6).hexdigest()
    home = folder / f"{Path(source).stem}-{digest}"
    pair = Models(home / "teacher", home / "student")
    if home.is_dir():
        return pair
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as unfinished:
        made = Path(unfinished) / "pair"
        for place, recipe in zip(pair, recipes, strict=True):
            _taught(recipe, seed, tokenizer, loss).save_pretrained(made / place.name)
            tokenizer.save_pretrained(made / place.name)
        try:
            made.rename(home)
        except OSError:
            if not home.is_dir():  # else another process was faster, and its pair is as good
                raise
    return pair


def _taught(recipe: Recipe, seed: int, tokenizer: Any, loss: Loss) -> Any:
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model: Any = new_model(recipe, tokenizer)
    named = list(model.named_parameters())
    matrices = [p for name, p in named if recipe.muon and p.ndim == 2 and "embed" not in name]
    rest = [p for _, p in named if all(p is not matrix for matrix in matrices)]
    optimizer = torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=DECAY * (not recipe.muon))
    momenta = [torch.zeros_like(matrix) for matrix in matrices]
    for step in range(recipe.steps):
        warm_up, decay = (step + 1) / WARM_UP_STEPS, max(LAST_RATE_SHARE, 1 - step / recipe.steps)
        loss(model, recipe, rng, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        rate = RATE * min(1.0, warm_up) * decay
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        with torch.no_grad():
            muon_step(matrices, momenta, rate)
        model.zero_grad()
    return model.to(torch.bfloat16)


def muon_step(matrices: Sequence[torch.Tensor], momenta: Sequence[torch.Tensor], rate: float) -> None:
    """Change matrices with gradients, and their momenta, as `torch.optim.Muon` does with AdamW's learning
    rates, but in fp32: in bf16 its products take a CPU without AVX-512 five times as long as all the rest."""
    for matrix, momentum in zip(matrices, momenta, strict=True):
        assert matrix.grad is not None
        update = matrix.grad.lerp(momentum.lerp_(matrix.grad, 1 - MOMENTUM), MOMENTUM)
        tall = update.shape[0] > update.shape[1]
        wide = update.T if tall else update
        wide = wide / wide.norm().clamp(min=1e-7)
        for _ in range(5):
            gram = wide @ wide.T
            wide = 3.4445 * wide + (2.0315 * gram @ gram - 4.775 * gram) @ wide
        length = 0.2 * max(update.shape) ** 0.5
        matrix.mul_(1 - rate * DECAY).add_(wide.T if tall else wide, alpha=-rate * length)
