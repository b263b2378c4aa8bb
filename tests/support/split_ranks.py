"""Ranks over gloo: cases of sequence parallelism, each beside one process that has whole rows.

python split_ranks.py WORLD MEETING_FILE < cases.json: rank R writes what it found into MEETING_FILE.R.
"""

from __future__ import annotations

import copy
import gc
import json
import multiprocessing
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from attention_families import model
from launched_trainer import rows, shares
from plain_step import ALONE, PlainEngine

from student_trainer.config import LoRAConfig, TrainerSettings
from student_trainer.engine import Student, check_rows, with_adapters
from student_trainer.head import Loss
from student_trainer.objectives.config import TopK
from student_trainer.ranks import Ranks
from student_trainer.sequence_split import SplitRows, join, split_attention
from student_trainer.step import collate, divided, loss_of, train_step
from student_trainer.varlen import replace_attention
from sync.base.errors import DistillError
from sync.wire import Version
from sync.wire.head import HeadShape

VOCAB, CPU = 30, torch.device("cpu")


class AveragingEngine(PlainEngine):
    """DeepSpeed's averaging of gradients over all ranks, before the step."""

    def step(self) -> None:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        super().step()


def network_of(case: dict[str, Any]) -> Any:
    found = model(case["family"], **case.get("more", {}))
    if case.get("checkpointing"):
        found.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return found


def adapted(network: Any, case: dict[str, Any]) -> Any:
    if not case.get("lora"):
        return network
    wrapped = with_adapters(network, LoRAConfig(rank=2), 0)
    generator = torch.Generator().manual_seed(9)
    for parameter in wrapped.parameters():  # those that start from zero too; wide ones amplify rounding
        if parameter.requires_grad:
            parameter.data.normal_(std=0.05, generator=generator)
    return wrapped


class Misplaced(Student):
    """Hands the model places that begin anew on every rank."""

    def forward(self, tokens_RL: Any, *arguments: Any) -> Any:
        if isinstance(arguments[-1], SplitRows):
            places = torch.arange(tokens_RL.shape[1]).expand(tokens_RL.shape)
            arguments = (*arguments[:-1], replace(arguments[-1], position_RL=places))
        return super().forward(tokens_RL, *arguments)


def kept_bytes(student: Student, micro: Any, loss: Loss) -> int:
    """Of activations that the backward pass of one micro-batch needs."""
    found: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in student.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        student(micro.tokens_RL, micro.positions_C, micro.targets, loss, micro.layout)[0].backward()
    return sum(found.values())


def compared(case: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    settings = TrainerSettings(deepspeed=Path(), sequence_parallel=case["size"])
    varlen, shape = case["packing"] == "varlen", HeadShape(VOCAB)
    loss = loss_of(TopK(k=4, discount=0.7), ["only"])
    plain, split = network_of(case), network_of(case)
    if varlen:
        replace_attention(plain, "eager")
    replace_attention(split, case["attention"], split_attention)
    alone = Student(adapted(plain, case), shape, 5, varlen)
    group = join(settings, ranks)
    kind = Misplaced if case.get("misplaced") else Student
    together = kind(adapted(split, case), shape, 5, varlen, group)
    found: dict[str, Any] = {"check": check_rows(together, together, CPU)}
    groups = ranks.world_size // case["size"]
    share = shares(False)(Version(0, 3), ranks.rank // case["size"], groups)
    whole = shares(False)(Version(0, 3), 0, 1)
    one, many = PlainEngine(alone, 0.0), AveragingEngine(together, 0.0)
    expected, metrics = train_step(one, whole, loss, ALONE), train_step(many, share, loss, ranks)
    named = dict(alone.named_parameters())
    pairs = [(p.grad, named[name].grad, name) for name, p in together.named_parameters() if p.requires_grad]
    small = 1e-2 * expected["grad_norm"]  # rounding alone makes 1e-5 of what is smaller
    gaps = {name: float((a - b).norm() / b.norm().clamp(min=small)) for a, b, name in pairs}
    found["parameter"], found["gradient"] = max(gaps.items(), key=lambda pair: pair[1])
    found["metrics"], found["expected"] = metrics, expected
    if "kept" in case:
        micro = collate(rows(3, range(case["kept"]), False), 3, VOCAB, varlen)  # many short rows
        found["kept"] = [kept_bytes(alone, micro, loss), kept_bytes(together, divided(micro, group), loss)]
    return found


def main(rank: int, world: int, meeting: str, cases: list[dict[str, Any]]) -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    method, limit = f"file://{meeting}", timedelta(seconds=1200)
    deepspeed.init_distributed(
        "gloo", False, init_method=method, rank=rank, world_size=world, timeout=limit, verbose=False
    )
    found = []
    for case in cases:
        try:
            found.append(compared(copy.deepcopy(case), Ranks(rank, world, CPU)))
        except DistillError as error:
            found.append({"refused": str(error)})
    Path(f"{meeting}.{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    size, cases_ = int(sys.argv[1]), json.load(sys.stdin)
    gc.freeze()
    forks = [
        multiprocessing.Process(target=main, args=(rank, size, sys.argv[2], cases_)) for rank in range(size)
    ]
    for fork in forks:
        fork.start()
    for fork in forks:
        fork.join()
    sys.exit(any(fork.exitcode for fork in forks))
