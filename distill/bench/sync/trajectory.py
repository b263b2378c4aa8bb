"""A real training trajectory in bf16: a small Qwen3, AdamW on fp32 masters, at several learning rates."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

Weights = dict[str, np.ndarray]
"""Tensor name → uint16 bits of bf16, [rows, columns]; vectors are one row."""


@dataclass(frozen=True)
class Size:
    """What is trained, and how long."""

    hidden: int
    layers: int
    vocabulary: int
    tokens: int
    """Per step."""
    warm_up: int
    """Steps at learning rate 1e-3 before anything is measured."""
    settle: int
    """Steps at the measured learning rate before the first weights are kept."""


SMALL = Size(hidden=256, layers=3, vocabulary=2048, tokens=512, warm_up=60, settle=4)
FULL = Size(hidden=768, layers=12, vocabulary=20480, tokens=256, warm_up=40, settle=2)


@dataclass(frozen=True)
class Pair:
    """Weights at two times of one run."""

    lr: float
    steps: int
    old: Weights
    new: Weights


def pairs(size: Size, lrs: tuple[float, ...], steps: tuple[int, ...], seed: int = 0) -> Iterator[Pair]:
    """For each learning rate, the weights now and each of `steps` optimizer steps later."""
    torch.manual_seed(seed)
    model = _model(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    _train(model, optimizer, size, size.warm_up)
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for lr in lrs:
        model.load_state_dict(start[0])
        optimizer.load_state_dict(copy.deepcopy(start[1]))
        for group in optimizer.param_groups:
            group["lr"] = lr
        _train(model, optimizer, size, size.settle)
        old, done = _bits(model), 0
        for count in sorted(steps):
            _train(model, optimizer, size, count - done)
            done = count
            yield Pair(lr, count, old, _bits(model))


def _model(size: Size) -> Any:
    config = Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64,
        num_key_value_heads=max(1, size.hidden // 128),
        head_dim=64,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def _train(model: Any, optimizer: torch.optim.Optimizer, size: Size, steps: int) -> None:
    """Next-token prediction on arithmetic sequences modulo the vocabulary, with noise."""
    length = 64
    for _ in range(steps):
        rows = size.tokens // length
        first = torch.randint(size.vocabulary, (rows, 1))
        stride = torch.randint(1, 17, (rows, 1))
        tokens = (first + stride * torch.arange(length)) % size.vocabulary
        noise = torch.rand(tokens.shape) < 0.1
        tokens = torch.where(noise, torch.randint(size.vocabulary, tokens.shape), tokens)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _bits(model: Any) -> Weights:
    """The masters rounded to bf16."""
    out = {}
    for name, parameter in model.named_parameters():
        bits = parameter.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        out[name] = bits.reshape(bits.shape[0] if bits.ndim > 1 else 1, -1).copy()
    return out
