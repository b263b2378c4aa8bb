"""The student's head and loss, forward and backward: in chunks, against whole logits.

Both compute an objective of the same bf16 hidden states and weight, by bf16 products whose logits are fp32
from then on. One thread, and a role's allocator if its variables are set (`sync.base.memory.ALLOCATOR`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Annotated, Final

import torch
import typer
from torch import Tensor

from student_trainer.head import Loss, chunked_loss
from student_trainer.objectives import config
from student_trainer.objectives.divergences import Targets
from student_trainer.step import loss_of
from sync.wire.head import HeadShape, OutputHead
from tests.benchmarks.figures import Figures, command, interleaved, listing

OBJECTIVES: Final = {"sampled": config.Sampled(), "topk": config.TopK(), "full": config.Full()}


def run(
    tokens: Annotated[int, typer.Option(min=1, help="Completion tokens of a micro-batch.")] = 2048,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size of student and teacher.")] = 576,
    vocabularies: Annotated[str, typer.Option(help="Ids, with commas.")] = "49152,151936",
    chunk: Annotated[int, typer.Option(min=1, help="trainer.head_chunk.")] = 1024,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 5,
) -> Figures:
    """Measure processor time of head and loss, in chunks and with whole logits, in turns."""
    torch.set_num_threads(1)
    rows = [
        measured(name, tokens, hidden, int(vocab), chunk, repeats)
        for vocab in vocabularies.split(",")
        for name in OBJECTIVES
    ]
    return {"load": os.getloadavg(), "rows": rows}


def measured(name: str, tokens: int, hidden: int, vocab: int, chunk: int, repeats: int) -> Figures:
    """Seconds of one micro-batch, medians, and how far both gradients of the hidden states are apart."""
    torch.manual_seed(0)
    hidden_CH = torch.randn(tokens, hidden).bfloat16().requires_grad_()
    weights = [(torch.randn(vocab, hidden) * 0.05).bfloat16().requires_grad_(i == 0) for i in range(2)]
    student, teacher = (OutputHead(weight_VH, None, HeadShape(vocab)) for weight_VH in weights)
    loss = loss_of(OBJECTIVES[name], ["teacher"], (teacher,) if name == "full" else ())
    logp_C = torch.full((tokens,), -9.0)
    targets = Targets(torch.randint(vocab, (tokens,)), logp_C, logp_C, torch.ones(tokens, dtype=torch.bool))
    if name == "topk":
        ids_CK = torch.randint(vocab, (tokens, 64))
        targets = replace(targets, support_NK=ids_CK, support_logp_NK=torch.full(ids_CK.shape, -7.0))
    elif name == "full":
        targets = replace(targets, teacher_hidden_NG=torch.randn(tokens, hidden).bfloat16())
    works: dict[str, Callable[[], Tensor]] = {
        "chunks": lambda: chunked_loss(hidden_CH, student, targets, loss, chunk)[0],
        "whole logits": lambda: whole(hidden_CH, student, teacher, targets, loss),
    }
    gradients = {work: gradient(hidden_CH, student, value) for work, value in works.items()}  # warms up
    turns = {work: partial(gradient, hidden_CH, student, value) for work, value in works.items()}
    seconds = {work: median(taken) for work, taken in interleaved(turns, repeats, time.process_time).items()}
    apart = (gradients["chunks"] - gradients["whole logits"]).norm() / gradients["chunks"].norm()
    ratio = {"ratio": seconds["chunks"] / seconds["whole logits"], "gradients apart": float(apart)}
    return {"vocabulary": vocab, "objective": name, **seconds, **ratio}


def gradient(hidden_CH: Tensor, student: OutputHead, value: Callable[[], Tensor]) -> Tensor:
    """The gradient of the hidden states, once that of the head's weight is there too."""
    hidden_CH.grad = student.weight_VH.grad = None
    value().backward()  # type: ignore[no-untyped-call]
    assert hidden_CH.grad is not None
    return hidden_CH.grad.float()


def whole(
    hidden_CH: Tensor, student: OutputHead, teacher: OutputHead, targets: Targets, loss: Loss
) -> Tensor:
    """The objective's sum over all tokens at once."""
    if targets.teacher_hidden_NG is not None:
        logits_CV = (targets.teacher_hidden_NG @ teacher.weight_VH.t()).float()
        targets = replace(targets, teacher_logp_NV=logits_CV.log_softmax(1))
    logp_CV = (hidden_CH @ student.weight_VH.t()).float().log_softmax(1)
    return loss.objective(logp_CV, targets)[0].sum()


def table(figures: Figures) -> str:
    """What `run` measured."""
    return "\n".join(listing(figures["rows"]))


if __name__ == "__main__":
    command(run, table)
