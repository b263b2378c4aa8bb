"""A step of the launched trainer's batches by one process without DeepSpeed, to compare it with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from flat_tensors import digests
from launched_trainer import VOCAB, Share, trained
from plain_step import ALONE, PlainEngine
from safetensors.torch import load_file

from student_trainer.engine import Student, head_shape
from student_trainer.objectives.config import TopK
from student_trainer.step import loss_of, train_step
from sync.wire import FinalDigests, Message, Rows, StepReport, TrainBatch, Version, pack, unpack

SGD: dict[str, Any] = {
    "optimizer": {"type": "SGD"},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 1e9,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
}
"""In fp32, without clipping: a step is the gradient times the rate."""
RATE = 30.0


def same_step(
    models: Path, kind: str, folder: Path, share: Share, group: int, objective: TopK, **sections: Any
) -> tuple[dict[str, float], dict[str, float]]:
    """Take a step of SGD under the launcher and by one process, and see that every tensor changes alike.

    `group`: neighbouring ranks that are given the same rows. The metrics of both, the launched one's first.
    """
    from transformers import AutoModelForCausalLM

    (folder / "sgd.json").write_text(json.dumps(SGD))
    whole = share(Version(0, 0), 0, 1)
    assert isinstance(whole, TrainBatch)
    model = AutoModelForCausalLM.from_pretrained(models / kind, dtype=torch.float32).train()
    engine: Any = PlainEngine(Student(model, head_shape(model.config, VOCAB, 1.0), 64), RATE)
    expected = train_step(engine, whole, loss_of(objective, ["only"]), ALONE)
    model.save_pretrained(folder / "alone")
    trainer = {"lr": RATE, "deepspeed": str(folder / "sgd.json"), "overrides": {}, **sections.pop("trainer")}
    sections["objective"] = objective.model_dump(include={"type", "k", "discount"})
    run_dir, shared = folder / "run", sharing(share, group)
    stub, _ = trained(models, run_dir, kind, shared, trainer=trainer, **sections)
    (report,), (final,) = stub.told(StepReport), stub.told(FinalDigests)
    assert final.digests == digests(run_dir / "final")
    if sections.get("weights") == {"transport": "broadcast"}:
        assert stub.receptions[-1].result().digests == final.digests
    folders = models / kind, folder / "alone", run_dir / "final"
    start, alone, launched = (load_file(place / "model.safetensors") for place in folders)
    assert start.keys() == alone.keys() == launched.keys()
    for name, before in start.items():
        due, made = alone[name] - before, launched[name] - before
        assert float((made - due).norm() / due.norm().clamp(min=1e-9)) < 1e-5, name
    return report.metrics, expected


def sharing(share: Share, size: int) -> Share:
    """As the controller gives them: neighbouring ranks get the same rows."""
    return lambda version, rank, world: share(version, rank // size, world // size)


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
