"""`distill prune`: a student of the teacher's family, made by leaving layers out.

    teacher ──completes some of the user's prompts──▶ text
    each layer ──left out──▶ cost: KL(teacher ‖ without it), nats per token of that text
    the cheapest layer goes, costs are measured again, until as many are left as wanted

Costs of layers do not add up: two neighbours that are cheap each may be dear together. A layer's last cost is
taken as the least that it can be now, so that only those that could be the cheapest are measured again.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from distill.planning.starter import prompt_lines
from distill.prompts.rows import RowReader, RowsConfig, rows_of
from sync.base.errors import ConfigError
from sync.base.settings import ModelSource
from sync.base.tokenizers import load_tokenizer

PROMPTS: Final = 8
"""Prompts whose completions the costs are measured on."""
TOKENS: Final = 48
"""Tokens of each completion, at most."""
LONGEST_PROMPT: Final = 1024


class Completed(NamedTuple):
    """A prompt with the teacher's completion."""

    ids_T: Tensor
    prompt: int
    """Tokens of it."""


def prune(
    teacher: str, student: Path, layers: int, prompts: str, say: Callable[[str], None] = print
) -> list[int]:
    """Write the folder `student`, `teacher` with `layers` of its layers; returns the places that went.

    `prompts`: rows as `distill init` takes them. Raises ConfigError for a folder that is not empty, a model
    without a list of layers or with quantised weights, and a number of layers that it does not have.
    """
    if student.exists() and any(student.iterdir()):
        raise ConfigError(f"{student} is not empty: name a new folder")
    tokenizer = load_tokenizer(ModelSource(path=teacher))
    section = tomllib.loads(prompt_lines(prompts))
    config: RowsConfig = TypeAdapter(RowsConfig).validate_python(section)
    reader = RowReader(config, tokenizer, LONGEST_PROMPT)
    rows = [list(prompt.token_ids) for prompt in islice(reader.prompts(rows_of(config)), PROMPTS)]
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype="auto").eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    decoder_layers = _layers(model, teacher, layers)
    texts = _completions(model, tokenizer, rows)
    target = logp(model, texts)
    kept, gone = list(range(len(decoder_layers))), list[int]()
    costs = dict.fromkeys(kept, 0.0)
    while len(kept) > layers:
        measured = dict[int, float]()
        for place in sorted(kept, key=costs.__getitem__):
            if measured and costs[place] >= min(measured.values()):
                break
            less_logp = _without(model, decoder_layers, [*gone, place], texts)
            costs[place] = measured[place] = kl(target, less_logp)
        cheapest = min(measured, key=measured.__getitem__)
        kept.remove(cheapest)
        gone.append(cheapest)
        say(f"layer {cheapest} goes: {len(kept)} layers are {costs[cheapest]:.3f} nats from the teacher")
    _keep(model, decoder_layers, kept)
    model.save_pretrained(student)
    tokenizer.save_pretrained(student)
    return sorted(gone)


def logp(model: Any, texts: list[Completed]) -> Tensor:
    """fp32 [N, V]: log-probabilities at the N positions whose next token is of a completion."""
    with torch.inference_mode():
        rows = [model(ids_T[None], use_cache=False).logits[0, prompt - 1 : -1] for ids_T, prompt in texts]
    return torch.cat(rows).float().log_softmax(-1)


def kl(target_NV: Tensor, logp_NV: Tensor) -> float:
    """Mean KL(target ‖ other), nats per token."""
    return float((target_NV.exp() * (target_NV - logp_NV)).sum(-1).mean())


def _layers(model: Any, teacher: str, layers: int) -> nn.ModuleList:
    decoder_layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(decoder_layers, nn.ModuleList) or getattr(model.config, "quantization_config", None):
        raise ConfigError(
            f"{teacher} has quantised weights, or no list of layers to leave out: name a model in full "
            "precision whose decoder has `layers`"
        )
    if getattr(model.config, "num_hidden_layers", None) != len(decoder_layers):
        raise ConfigError(
            f"{teacher} says in a part of its config.json how many layers it has, as models of images and "
            "text do: name one of text alone"
        )
    if layers not in range(1, count := len(decoder_layers)):
        raise ConfigError(f"--layers {layers}: {teacher} has {count}, keep 1 to {count - 1} of them")
    return decoder_layers


def _completions(model: Any, tokenizer: Any, prompts: list[list[int]]) -> list[Completed]:
    """Sampled at temperature 1, one after the other, so that nothing is padded."""
    torch.manual_seed(0)
    texts = []
    for prompt in prompts:
        ids_1P = torch.tensor([prompt], device=model.device)
        with torch.inference_mode():
            out_1T = model.generate(
                ids_1P, attention_mask=torch.ones_like(ids_1P), max_new_tokens=TOKENS, do_sample=True,
                temperature=1.0, top_k=0, top_p=1.0, pad_token_id=tokenizer.eos_token_id,
            )  # fmt: skip
        texts.append(Completed(out_1T[0], len(prompt)))
    return texts


def _without(model: Any, decoder_layers: nn.ModuleList, gone: list[int], texts: list[Completed]) -> Tensor:
    """`logp` of the model without these layers; the model has all of them again afterwards."""
    fields = vars(model.config)
    before = dict(fields)
    _keep(model, decoder_layers, [place for place in range(len(decoder_layers)) if place not in gone])
    try:
        return logp(model, texts)
    finally:
        model.get_decoder().layers = decoder_layers
        fields.update(before)


def _keep(model: Any, decoder_layers: nn.ModuleList, kept: list[int]) -> None:
    """Leave the model with these layers, and its configuration with what it says of each."""
    fields = model.config.to_dict()
    model.config.num_hidden_layers = len(kept)
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == len(decoder_layers):
            setattr(model.config, name, [value[place] for place in kept])
    model.get_decoder().layers = nn.ModuleList(decoder_layers[place] for place in kept)
