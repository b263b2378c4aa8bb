"""Reverse KL and pass rate of a tiny student in this process: for benchmarks that start no servers.

The metric is `distill.evaluation.reverse_kl`, the sampler that of the teacher service; figures depend on
models, prompts and seed alone.

Letters in shapes: B prompts, V vocabulary, N completion tokens of a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from distill.bench.runner import Figures
from distill.config import RunConfig
from distill.config.evaluation import EvaluationConfig
from distill.evaluation.reverse_kl import exact, head_of
from distill.prompts.stream import Prompt
from teacher_service.engines.base import Item, ScoreOptions
from teacher_service.engines.sampling import Sampled, completions, grow
from teacher_service.engines.transformers import TransformersEngine

BATCH = 512
"""Completions sampled together."""
Watch = Callable[[Tensor, Tensor], None]
"""Called at every step with p [B, V] and the tokens drawn from it [B], rows that have ended included."""


def with_evaluation(config: RunConfig) -> RunConfig:
    """With the default evaluation where a configuration leaves it out."""
    if config.evaluation is not None:
        return config
    return config.model_copy(update={"evaluation": EvaluationConfig()})


class Limits(NamedTuple):
    """Of a completion."""

    max_tokens: int
    end_ids: tuple[int, ...]
    """Ids that end it; the ending one is part of it."""


@torch.inference_mode()
def sample(
    model: Any,
    vocab: int,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    generator: torch.Generator,
    watch: Watch = lambda p_BV, token_B: None,
) -> Sampled:
    """One completion of every prompt, temperature 1."""

    def draw(logits_BV: Tensor) -> Tensor:
        p_BV = logits_BV.softmax(-1)
        token_B1 = torch.multinomial(p_BV, 1, generator=generator)
        watch(p_BV, token_B1[:, 0])
        return token_B1

    return deque(grow(model, vocab, prompts, limits.end_ids, limits.max_tokens, draw), maxlen=1)[0]


def evaluate(
    model: Any,
    teacher: TransformersEngine,
    prompts: Sequence[Prompt],
    limits: Limits,
    passes: Callable[[Prompt, Sequence[int]], float],
    seed: int = 0,
) -> Figures:
    """reverse_kl, exact, and pass_rate; the same seed gives the same completions of the same model."""
    vocab, generator = teacher.engine_info.vocab_size, torch.Generator().manual_seed(seed)
    student, options = TransformersEngine(model, vocab), ScoreOptions(hidden=True)
    own, other = (head_of(engine.head(), torch.device("cpu")) for engine in (student, teacher))
    total, tokens, passed = 0.0, 0, 0
    for batch in _batches(prompts):
        found = completions(sample(model, vocab, [one.token_ids for one in batch], limits, generator))
        items = [
            Item(np.array([*prompt.token_ids, *ids], np.int32), len(prompt.token_ids))
            for prompt, ids in zip(batch, found, strict=True)
        ]
        hidden = [engine.score(items, options).hidden_CH for engine in (student, teacher)]
        mine_NH, theirs_NH = (torch.from_numpy(one) for one in hidden if one is not None)
        values_N = exact(own, mine_NH, other, theirs_NH)
        total, tokens = total + float(values_N.astype(np.float64).sum()), tokens + len(values_N)
        passed += sum(passes(prompt, ids) > 0 for prompt, ids in zip(batch, found, strict=True))
    return {"reverse_kl": total / tokens, "pass_rate": passed / len(prompts)}


def _batches(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    ordered = sorted(prompts, key=lambda prompt: len(prompt.token_ids))
    for start in range(0, len(ordered), BATCH):
        yield ordered[start : start + BATCH]
