"""Rows laid end to end against padded rectangles: `distill bench packing`.

One random model and one mixture of lengths, spread evenly over their logarithms. For either way the rows are
split as the controller splits a step for one rank; timed are forward and backward of all its micro-batches,
objective `sampled`, the ways in turns in this process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from distill.batching.filling import Split, end_to_end, rectangles
from distill.bench.runner import Figures, Work, interleaved, markdown
from student_trainer.engine import Student, head_shape
from student_trainer.head import Loss
from student_trainer.objectives.config import Sampled
from student_trainer.step import MicroBatch, collate, loss_of
from student_trainer.varlen import pack_rows
from sync.base.errors import ConfigError
from sync.wire import Rows, pack

VOCAB, HEAD_CHUNK, PROMPT_SHARE = 512, 512, 0.25
MODEL: Final = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
WAYS: Final[Mapping[str, Callable[..., Split]]] = {"padded": rectangles, "varlen": end_to_end}
"""trainer.packing → how the controller splits."""


class Size(NamedTuple):
    """Of the measurement."""

    rows: int = 96
    shortest: int = 32
    """Tokens of the shortest row, prompt included."""
    longest: int = 4096
    micro_batch_tokens: int = 8192
    rounds: int = 5


def run(*sizes: int) -> Figures:
    """Measure both ways; `sizes` as in Size. Raises ConfigError for sizes that make no sense."""
    size = Size(*sizes)
    if not 8 <= size.shortest <= size.longest or min(size.rows, size.rounds, size.micro_batch_tokens) < 1:
        raise ConfigError(f"{size}: lengths of at least 8, and at least one row, round and token, are needed")
    lengths, spec = mixture(size), loss_of(Sampled(), ("t",))
    parts = {name: micro_batches(name, lengths, size.micro_batch_tokens) for name in WAYS}
    learners = {name: student(name == "varlen", size.longest) for name in WAYS}
    works = {name: Work(partial(train, learners[name], parts[name], spec)) for name in WAYS}
    losses = {name: train(learners[name], parts[name], spec) for name in WAYS}
    seconds = interleaved(works, size.rounds)
    tokens = int(lengths.sum())
    ways = {
        name: {
            "micro_batches": len(parts[name]),
            "tokens_per_slot": tokens / sum(micro.counts["slots"] for micro in parts[name]),
            "microseconds_per_token": 1e6 * median(seconds[name]) / tokens,
            "loss_per_token": losses[name] / tokens,
        }
        for name in WAYS
    }
    # a pair of neighbours in time was slowed alike
    pairs = [padded / packed for padded, packed in zip(seconds["padded"], seconds["varlen"], strict=True)]
    return {**size._asdict(), "tokens": tokens, "ways": ways, "speed_ratio": median(pairs)}


def mixture(size: Size) -> np.ndarray:
    """int [rows]: lengths of prompt and completion, in an order of their own."""
    exponents = np.linspace(np.log(size.shortest), np.log(size.longest), size.rows)
    return np.random.default_rng(0).permutation(np.exp(exponents).round().astype(int))


def student(varlen: bool, positions: int) -> Student:
    """A random Qwen3, the same for both ways."""
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=VOCAB, max_position_embeddings=positions, **copy.deepcopy(MODEL))
    model = Qwen3ForCausalLM(config).train()
    if varlen:
        pack_rows(model, "sdpa")
    return Student(model, head_shape(config, VOCAB, 1.0), HEAD_CHUNK, varlen)


def micro_batches(name: str, lengths: np.ndarray, tokens: int) -> list[MicroBatch]:
    """What one rank would be sent of all rows, as tensors."""
    (share,) = WAYS[name](lengths.tolist(), [0] * len(lengths), 1, tokens)
    return [collate(rows_of(lengths, places), 0, VOCAB, name == "varlen") for places in share]


def rows_of(lengths: np.ndarray, places: Sequence[int]) -> Rows:
    """Rows with random tokens and scores, which depend on a row's place and not on the micro-batch."""
    draws = [np.random.default_rng(place) for place in places]
    prompt_R = (PROMPT_SHARE * lengths[places]).astype(np.int32)
    completion_R = lengths[places].astype(np.int32) - prompt_R
    tokens = [draw.integers(0, VOCAB, lengths[place]) for draw, place in zip(draws, places, strict=True)]
    logp = [-8.0 * draw.random(count) for draw, count in zip(draws, completion_R, strict=True)]
    logp_C = np.concatenate(logp).astype(np.float32)
    return Rows(
        ids=[str(place) for place in places],
        tokens=pack(np.concatenate(tokens).astype(np.int32)),
        prompt_lens=pack(prompt_R),
        completion_lens=pack(completion_R),
        behavior_logprob=pack(logp_C),
        token_step=pack(np.zeros(len(logp_C), np.int32)),
        teacher=pack(np.zeros(len(places), np.int32)),
        teacher_logprob=pack(logp_C),
    )


def train(learner: Student, parts: Sequence[MicroBatch], spec: Loss) -> float:
    """Forward and backward of all micro-batches; the summed loss."""
    learner.zero_grad()
    total = 0.0
    for micro in parts:
        loss, _ = learner(micro.tokens_RL, micro.positions_C, micro.targets, spec, micro.layout)
        loss.backward()
        total += float(loss.detach())
    return total


def table(report: Mapping[str, Any]) -> str:
    """The report as a Markdown table."""
    cells = [
        [f"`{name}`", str(way["micro_batches"]), f"{way['tokens_per_slot']:.3f}"]
        + [f"{way['microseconds_per_token']:.1f} µs"]
        for name, way in report["ways"].items()
    ]
    about = (
        f"{report['rows']} rows of {report['shortest']:,} to {report['longest']:,} tokens, "
        f"{report['tokens']:,} in all, micro-batches of {report['micro_batch_tokens']:,}, "
        f"{report['rounds']} rounds: end to end is {report['speed_ratio']:.2f}× as fast"
    )
    return "\n".join(
        [about, "", *markdown(["packing", "micro-batches", "tokens per slot", "a token"], cells)]
    )
