"""The trainer's chunked loss against full logits, in memory and time: `distill bench objective --memory`.

Every measurement is a process of its own, `python -m distill.bench.loss_cost CASE`, CASE being JSON: what the
loss adds to the peak of resident memory over hidden states, weights and scores that are there anyway; forward
and backward, gradients of hidden states and head, one thread, fp32. The plain way computes the same objective
from [tokens, vocabulary] logits by autograd, and the same statistics.

Full logits are measured at as many tokens as fit in a share of the machine's free memory, and at a half and a
quarter of that; beyond, the line through those points is continued.

Letters in shapes: C completion tokens, K ids per token, V vocabulary, H hidden size.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

from distill.bench.runner import Figures, markdown
from distill.bench.toy import configured
from student_trainer.head import HeadShape, HeadWeights, Loss, chunked_loss, log_probs, project
from student_trainer.objectives.config import needs
from student_trainer.objectives.divergences import Targets, build
from student_trainer.objectives.token_statistics import token_sums
from sync.base.errors import DistillError

FULL_ARRAYS: Final = 6
"""[tokens, vocabulary] fp32 arrays that full logits may need at once, to estimate what fits."""
FREE_SHARE: Final = 0.35
"""Of the free memory that a measurement may take."""
ALLOCATOR: Final = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Variables that make glibc keep what is freed, as torch does on GPUs: else both ways pay for
fresh pages. The environment overrides them."""
OBJECTIVES: Final = ("full", "topk", "sampled")
CHUNKS: Final = (512, 256)
TOKENS, VOCABULARY, HIDDEN, K = 8192, 151_936, 256, 64


class Case(NamedTuple):
    """One measurement."""

    objective: str
    chunk: int
    """Tokens; 0: full logits."""
    tokens: int = TOKENS
    vocabulary: int = VOCABULARY


class Cost(NamedTuple):
    """What a case took."""

    peak_bytes: int
    seconds: float
    """CPU time of forward and backward, the better of two."""


# --- one measurement, in this process ---------------------------------------------------------------------


def measure(case: Case) -> Cost:
    """Cost of one case in this process, which should do nothing else. Linux."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    given = _inputs(case)
    Path("/proc/self/clear_refs").write_text("5")  # 5: forget the peak
    before = _status("VmRSS")
    seconds = _once(case, *given)
    peak = _status("VmHWM") - before
    return Cost(peak, min(seconds, _once(case, *given)))


def _once(case: Case, hidden_CH: Tensor, head: HeadWeights, targets: Targets, spec: Loss) -> float:
    hidden_CH.grad = head.weight_VH.grad = None
    began = time.process_time()
    loss(case.chunk, hidden_CH, head, targets, spec).backward()
    return time.process_time() - began


def loss(chunk: int, hidden_CH: Tensor, head: HeadWeights, targets: Targets, spec: Loss) -> Tensor:
    """Sum over tokens; both ways find the same."""
    if chunk:
        return chunked_loss(hidden_CH, head, targets, spec, chunk)[0]
    if targets.teacher_hidden_NG is not None:
        teacher, hidden_CG = spec.heads[0], targets.teacher_hidden_NG
        with torch.no_grad():
            logq_CV = log_probs(project(hidden_CG, teacher.weight_VH, teacher.bias_V), teacher.shape)
        targets = replace(targets, teacher_logp_NV=logq_CV)
    logp_CV = log_probs(project(hidden_CH, head.weight_VH, head.bias_V), head.shape)
    total = spec.objective(logp_CV, targets)[0].sum()
    token_sums(logp_CV.detach(), targets)  # the chunked loss gives these figures too
    return total


def _inputs(case: Case) -> tuple[Tensor, HeadWeights, Targets, Loss]:
    """Random hidden states, heads and scores; a token's top-k ids differ and hold 97 % of the mass."""
    config, count, shape = configured(case.objective, K), case.tokens, HeadShape(case.vocabulary)
    want, stretch = needs(config), case.vocabulary // K
    logq_C = -8.0 * torch.rand(count)
    targets = Targets(
        token_N=torch.randint(case.vocabulary, (count,)),
        behavior_logp_N=logq_C.clone(),
        teacher_logp_N=logq_C,
        fresh_N=torch.ones(count, dtype=torch.bool),
        support_NK=torch.randint(stretch, (count, K)) + stretch * torch.arange(K) if want.topk else None,
        support_logp_NK=torch.randn(count, K).log_softmax(1) + math.log(0.97) if want.topk else None,
        teacher_entropy_N=torch.rand(count),
        teacher_hidden_NG=torch.randn(count, HIDDEN) if want.hidden else None,
    )
    student, teacher = (
        HeadWeights(torch.randn(case.vocabulary, HIDDEN) / HIDDEN**0.5, None, shape) for _ in range(2)
    )
    student.weight_VH.requires_grad_()
    spec = Loss(build(config), heads=(teacher,) if want.hidden else ())
    return torch.randn(count, HIDDEN).requires_grad_(), student, targets, spec


def _status(name: str) -> int:
    """Bytes of a line of /proc/self/status, which are in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


# --- all of them ------------------------------------------------------------------------------------------


def in_child(case: Case) -> Cost:
    """Measure one case in a process of its own. Raises DistillError with its errors when it fails."""
    command = [sys.executable, "-P", "-m", "distill.bench.loss_cost", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ALLOCATOR | os.environ)
    if done.returncode != 0:
        raise DistillError(f"{case} could not be measured:\n{done.stderr[-2000:]}")
    return Cost(*json.loads(done.stdout))


def run(objectives: Sequence[str] = OBJECTIVES) -> Figures:
    """Measure every objective both ways."""
    rows = [row for name in objectives for row in compare(name, psutil.virtual_memory().available, in_child)]
    return {"tokens": TOKENS, "vocabulary": VOCABULARY, "hidden": HIDDEN, "rows": rows}


def compare(objective: str, free: int, measure: Callable[[Case], Cost]) -> list[Figures]:
    """Rows of one objective, one per chunk size; full logits where they fit in `free` bytes."""
    reach = TOKENS
    while FULL_ARRAYS * 4 * VOCABULARY * reach > FREE_SHARE * free and reach > 64:
        reach //= 2
    sizes = [TOKENS] if reach == TOKENS else [reach // 4, reach // 2, reach]
    full = [measure(Case(objective, 0, size)) for size in sizes]
    memory, error = continued(sizes, [cost.peak_bytes for cost in full])
    seconds, _ = continued(sizes, [cost.seconds for cost in full])
    rows = []
    for chunk in CHUNKS:
        ours = measure(Case(objective, chunk))
        rows.append(
            {
                "objective": objective,
                "chunk": chunk,
                "chunked_bytes": ours.peak_bytes,
                "full_bytes": memory,
                "memory_ratio": ours.peak_bytes / memory,
                "time_ratio": ours.seconds / seconds,
                "full_measured_up_to_tokens": reach,
                "line_error": error,
            }
        )
    return rows


def continued(sizes: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """The value at TOKENS on the least-squares line through the points, and its error.

    The error is how far the worst point is from the line, as a share of the point; 0 for one point.
    """
    if len(sizes) == 1:
        return values[0], 0.0
    x, y = np.array(sizes, float), np.array(values, float)
    slope, offset = np.polyfit(x, y, 1)
    return float(offset + slope * TOKENS), float(np.abs((offset + slope * x - y) / y).max())


def table(report: Mapping[str, Any]) -> str:
    """The report as a Markdown table."""
    cells = [
        [f"`{row['objective']}`", str(row["chunk"])]
        + [f"{row['chunked_bytes'] / 1e9:.1f} GB", f"{row['full_bytes'] / 1e9:.1f} GB"]
        + [f"{row['memory_ratio']:.2f}×", f"{row['time_ratio']:.2f}×"]
        + [f"{row['full_measured_up_to_tokens']:,}", f"{row['line_error']:.1%}"]
        for row in report["rows"]
    ]
    head = [
        "objective",
        "chunk",
        "chunked",
        "full logits",
        "memory",
        "time",
        "measured up to",
        "line's error",
    ]
    about = f"{report['tokens']:,} tokens, vocabulary {report['vocabulary']:,}, hidden {report['hidden']}"
    return "\n".join([about, "", *markdown(head, cells)])


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(Case(*json.loads(sys.argv[1])))))
