"""Weights on their way through post-training: a small Qwen3, AdamW on fp32 masters, rounded to bf16."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from distill.bench.sync_transports import qwen3

Weights = dict[str, np.ndarray]
"""Tensor name → uint16 bits of bf16, [rows, columns]; vectors are one row."""


class Training(NamedTuple):
    """What is trained, and how long."""

    hidden: int
    layers: int
    vocabulary: int
    tokens: int
    """Per step."""
    sequence: int
    """Tokens of a row."""
    warm_up: int
    """Steps at learning rate 1e-3 before anything is measured."""
    settle: int
    """Steps at the measured learning rate before the first weights are kept."""


def trajectory(
    size: Training, lrs: Sequence[float], steps: Sequence[int]
) -> Iterator[tuple[float, int, Weights, Weights]]:
    """(learning rate, steps, old, new): for each of `lrs` the weights, and those each of `steps` later."""
    torch.manual_seed(0)
    model = qwen3(size.vocabulary, size.hidden, size.layers, 3 * size.hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    _train(model, optimizer, size, size.warm_up)
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for lr in lrs:
        model.load_state_dict(start[0])
        optimizer.load_state_dict(copy.deepcopy(start[1]))
        optimizer.param_groups[0]["lr"] = lr
        _train(model, optimizer, size, size.settle)
        old, done = _bits(model), 0
        for count in steps:
            _train(model, optimizer, size, count - done)
            done = count
            yield lr, count, old, _bits(model)


def _train(model: Any, optimizer: Any, size: Training, steps: int) -> None:
    """Next-token prediction on arithmetic sequences modulo the vocabulary, with noise."""
    for _ in range(steps):
        rows = size.tokens // size.sequence
        first = torch.randint(size.vocabulary, (rows, 1))
        stride = torch.randint(1, 17, (rows, 1))
        tokens = (first + stride * torch.arange(size.sequence)) % size.vocabulary
        noise = torch.rand(tokens.shape) < 0.1
        tokens = torch.where(noise, torch.randint(size.vocabulary, tokens.shape), tokens)
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _bits(model: Any) -> Weights:
    """The masters rounded to bf16."""
    found = {}
    for name, parameter in model.named_parameters():
        bits = parameter.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        found[name] = bits.reshape(bits.shape[0] if bits.ndim > 1 else 1, -1).copy()
    return found
