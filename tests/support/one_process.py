"""A step of the launched trainer's batches by one process without DeepSpeed, to compare it with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from launched_trainer import VOCAB, Share
from plain_step import ALONE, PlainEngine

from student_trainer.engine import Student, head_shape
from student_trainer.objectives.config import TopK
from student_trainer.step import loss_of, train_step
from sync.wire import Message, Rows, TrainBatch, Version, pack, unpack

SGD: dict[str, Any] = {
    "optimizer": {"type": "SGD"},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 1e9,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
}
"""In fp32, without clipping: a step is the gradient times the rate."""


RATE = 30.0


def by_one_process(
    folder: Path, batch: TrainBatch, into: Path, objective: TopK = TopK(k=4)
) -> dict[str, float]:
    """Take the step of `batch` without DeepSpeed and save the model; its metrics."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    engine: Any = PlainEngine(Student(model, head_shape(model.config, VOCAB, 1.0), 64), RATE)
    metrics = train_step(engine, batch, loss_of(objective, ["only"]), ALONE)
    model.save_pretrained(into)
    return metrics


def routed(share: Share) -> Share:
    """`share` with recorded experts for every token but the last of a row, in the two layers of Qwen3Moe."""

    def give(version: Version, rank: int, world_size: int) -> Message:
        batch = share(version, rank, world_size)
        if not isinstance(batch, TrainBatch):
            return batch
        return msgspec.structs.replace(batch, micro_batches=[with_routes(one) for one in batch.micro_batches])

    return give


def with_routes(rows: Rows) -> Rows:
    """Of a row the same ones, whatever it is trained beside."""
    lens = (unpack(rows.prompt_lens) + unpack(rows.completion_lens) - 1).astype(np.int32)
    if not lens.size:
        return rows
    draws = [np.random.default_rng(int(id.rpartition("r")[2])) for id in rows.ids]
    every = [np.broadcast_to(np.arange(4, dtype=np.uint8), (count, 2, 4)) for count in lens]
    chosen = [draw.permuted(one, axis=-1)[..., :2] for draw, one in zip(draws, every, strict=True)]
    return msgspec.structs.replace(rows, routes=pack(np.concatenate(chosen)), route_lens=pack(lens))
