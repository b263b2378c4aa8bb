"""What the loss of one micro-batch takes in memory and time: the trainer's chunked head against full logits.

Each measurement is a process of its own, `python -m distill.bench.loss_cost CASE`, where CASE is JSON. It
finds what the loss adds to the process's peak (resident memory on a CPU, allocated memory on a GPU) over
hidden states, weights and marks that are there anyway; forward and backward, gradients of hidden states and
head.

The plain way computes the same objective from [tokens, vocabulary] logits by autograd, without the
statistics that the chunked head takes along.

Letters in shapes: C completion tokens, K ids per token, V vocabulary, H hidden size.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from distill.bench.objectives import configured
from student_trainer.objectives.config import needs

if TYPE_CHECKING:
    from torch import Tensor

    from student_trainer.head import HeadWeights, Loss
    from student_trainer.objectives.targets import Targets

KIB = 1024


@dataclass(frozen=True)
class Case:
    """One measurement."""

    way: Literal["chunked", "full"]
    objective: str
    tokens: int
    vocabulary: int
    hidden: int
    chunk: int
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 1
    k: int = 64


@dataclass(frozen=True)
class Cost:
    """What a case took."""

    peak_bytes: int
    seconds: float
    """Forward and backward, the better of two: processor time on a CPU, wall time on a GPU."""
    loss: float
    """Sum over tokens: both ways must find the same."""


def measure(case: Case) -> Cost:
    """Cost of one case in this process, which should do nothing else."""
    import torch

    torch.set_num_threads(case.threads)
    torch.manual_seed(0)
    hidden_CH, head, targets, spec = _inputs(case)
    meter = _CudaPeak() if case.device == "cuda" else _ResidentPeak()
    meter.start()
    loss, seconds = _once(case, hidden_CH, head, targets, spec)
    peak = meter.read()
    _, again = _once(case, hidden_CH, head, targets, spec)
    return Cost(peak, min(seconds, again), loss)


def _once(
    case: Case, hidden_CH: Tensor, head: HeadWeights, targets: Targets, spec: Loss
) -> tuple[float, float]:
    import torch

    hidden_CH.grad = head.weight_VH.grad = None
    now = time.perf_counter if case.device == "cuda" else time.process_time
    way = _chunked if case.way == "chunked" else _full
    begun = now()
    loss = way(case, hidden_CH, head, targets, spec)
    loss.backward()
    if case.device == "cuda":
        torch.cuda.synchronize()
    return float(loss.detach()), now() - begun


def _chunked(case: Case, hidden_CH: Tensor, head: HeadWeights, targets: Targets, spec: Loss) -> Tensor:
    from student_trainer.head import chunked_loss

    return chunked_loss(hidden_CH, head, targets, spec, case.chunk)[0]


def _full(case: Case, hidden_CH: Tensor, head: HeadWeights, targets: Targets, spec: Loss) -> Tensor:
    import torch

    from student_trainer.head import log_probs, project
    from student_trainer.objectives.diagnostics import diagnose

    if targets.teacher_hidden_NG is not None:
        teacher, hidden_CG = spec.heads[0], targets.teacher_hidden_NG
        with torch.no_grad():
            logq_CV = log_probs(project(hidden_CG, teacher.weight_VH, teacher.bias_V), teacher.shape)
        targets = replace(targets, teacher_logp_NV=logq_CV)
    logp_CV = log_probs(project(hidden_CH, head.weight_VH, head.bias_V), head.shape)
    loss = spec.objective(logp_CV, targets)[0].sum()
    diagnose(logp_CV.detach(), targets)  # the chunked loss gives these figures too
    return loss


def _inputs(case: Case) -> tuple[Tensor, HeadWeights, Targets, Loss]:
    """Random hidden states, head and marks, on the case's device; the marks that the objective needs."""
    import torch

    from student_trainer.head import HeadShape, HeadWeights, Loss
    from student_trainer.objectives.divergences import build

    dtype = torch.bfloat16 if case.device == "cuda" else torch.float32
    shape, count = HeadShape(case.vocabulary), case.tokens

    def hidden() -> Tensor:
        return torch.randn(count, case.hidden, dtype=dtype)

    def weight() -> Tensor:
        return torch.randn(case.vocabulary, case.hidden, dtype=dtype) / case.hidden**0.5

    with torch.device(case.device):
        student = HeadWeights(weight().requires_grad_(), None, shape)
        config = configured(case.objective, case.k)
        teacher = needs(config).hidden
        targets = replace(_targets(case), teacher_hidden_NG=hidden() if teacher else None)
        spec = Loss(build(config), heads=(HeadWeights(weight(), None, shape),) if teacher else ())
        return hidden().requires_grad_(), student, targets, spec


def _targets(case: Case) -> Targets:
    """Random marks; the top-k ids of a token are all different and hold 97 % of the teacher's mass."""
    import torch

    from student_trainer.objectives.targets import Targets

    count, k, stretch = case.tokens, case.k, case.vocabulary // case.k
    ids_CK = logq_CK = None
    if needs(configured(case.objective, k)).topk:
        ids_CK = torch.randint(stretch, (count, k)) + stretch * torch.arange(k)
        logq_CK = torch.randn(count, k).log_softmax(1) + math.log(0.97)
    logq_C = -8.0 * torch.rand(count)
    return Targets(
        token_N=torch.randint(case.vocabulary, (count,)),
        behavior_logp_N=logq_C.clone(),
        teacher_logp_N=logq_C,
        fresh_N=torch.ones(count, dtype=torch.bool),
        support_NK=ids_CK,
        support_logp_NK=logq_CK,
        teacher_entropy_N=torch.rand(count),
    )


class _ResidentPeak:
    """Peak of this process's resident memory since `start`, over what it was then. Linux."""

    def start(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # 5: forget the peak so far
        self._before = _status("VmRSS")

    def read(self) -> int:
        return _status("VmHWM") - self._before


class _CudaPeak:
    """Peak of allocated CUDA memory since `start`, over what it was then."""

    def start(self) -> None:
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def read(self) -> int:
        import torch

        return torch.cuda.max_memory_allocated() - self._before


def _status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * KIB
    raise KeyError(name)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(measure(Case(**json.loads(sys.argv[1]))))))
