"""The trainer's chunked loss against full logits, in memory and time: `distill bench objective --memory`.

Every measurement is a process of its own, `python -m distill.bench.loss_cost CASE`, CASE being JSON: what the
loss adds to the process's peak (resident memory on a CPU, allocated memory on a GPU) over hidden states,
weights and scores that are there anyway; forward and backward, gradients of hidden states and head. The plain
way computes the same objective from [tokens, vocabulary] logits by autograd, and the same statistics.

Full logits are measured at as many tokens as fit in a share of the machine's free memory, and at a half and a
quarter of that; beyond, the line through those points is continued, which the report marks.

Letters in shapes: C completion tokens, K ids per token, V vocabulary, H hidden size.
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from distill.bench.objective import configured
from distill.bench.runner import Figures, markdown, write_report
from student_trainer.objectives.config import needs
from sync.errors import DistillError

if TYPE_CHECKING:
    from torch import Tensor

    from student_trainer.head import HeadWeights, Loss
    from student_trainer.objectives.divergences import Targets

log = logging.getLogger(__name__)
FULL_ARRAYS: Final = 6
"""[tokens, vocabulary] fp32 arrays that full logits may need at once, to estimate what fits."""
FREE_SHARE: Final = 0.35
"""Of the free memory that a measurement may take."""
ALLOCATOR: Final = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Variables that make glibc keep what is freed, as torch does on GPUs: else both ways pay for
fresh pages. The environment overrides them."""
OBJECTIVES: Final = ("sampled", "topk", "full")


@dataclass(frozen=True)
class Case:
    """One measurement."""

    way: Literal["chunked", "full"]
    objective: str
    tokens: int
    vocabulary: int
    hidden: int
    chunk: int
    device: str = "cpu"
    """cpu or cuda"""
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


# --- one measurement, in this process ---------------------------------------------------------------------


def measure(case: Case) -> Cost:
    """Cost of one case in this process, which should do nothing else."""
    import torch

    torch.set_num_threads(case.threads)
    torch.manual_seed(0)
    hidden_CH, head, targets, spec = _inputs(case)
    before = _reset_peak(case.device)
    loss, seconds = _once(case, hidden_CH, head, targets, spec)
    peak = _peak(case.device) - before
    _, again = _once(case, hidden_CH, head, targets, spec)
    return Cost(peak, min(seconds, again), loss)


def _once(
    case: Case, hidden_CH: Tensor, head: HeadWeights, targets: Targets, spec: Loss
) -> tuple[float, float]:
    import torch

    hidden_CH.grad = head.weight_VH.grad = None
    now = time.perf_counter if case.device == "cuda" else time.process_time
    begun = now()
    loss = _loss(case, hidden_CH, head, targets, spec)
    loss.backward()
    if case.device == "cuda":
        torch.cuda.synchronize()
    return float(loss.detach()), now() - begun


def _loss(case: Case, hidden_CH: Tensor, head: HeadWeights, targets: Targets, spec: Loss) -> Tensor:
    import torch

    from student_trainer.head import chunked_loss, log_probs, project
    from student_trainer.objectives.token_statistics import token_sums

    if case.way == "chunked":
        return chunked_loss(hidden_CH, head, targets, spec, case.chunk)[0]
    if targets.teacher_hidden_NG is not None:
        teacher, hidden_CG = spec.heads[0], targets.teacher_hidden_NG
        with torch.no_grad():
            logq_CV = log_probs(project(hidden_CG, teacher.weight_VH, teacher.bias_V), teacher.shape)
        targets = replace(targets, teacher_logp_NV=logq_CV)
    logp_CV = log_probs(project(hidden_CH, head.weight_VH, head.bias_V), head.shape)
    loss = spec.objective(logp_CV, targets)[0].sum()
    token_sums(logp_CV.detach(), targets)  # the chunked loss gives these figures too
    return loss


def _inputs(case: Case) -> tuple[Tensor, HeadWeights, Targets, Loss]:
    """Random hidden states, head and the scores that the objective needs, on the case's device."""
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
    """Random scores; the top-k ids of a token are all different and hold 97 % of the teacher's mass."""
    import torch

    from student_trainer.objectives.divergences import Targets

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


def _reset_peak(device: str) -> int:
    """Forget the peak so far; bytes in use now. Linux on a CPU."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # 5: forget the peak
    return _status("VmRSS")


def _peak(device: str) -> int:
    """Most bytes in use since `_reset_peak`."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return _status("VmHWM")


def _status(name: str) -> int:
    """Bytes of a line of /proc/self/status, which are in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


# --- all of them ------------------------------------------------------------------------------------------


def in_child(case: Case) -> Cost:
    """Measure one case in a process of its own. Raises DistillError with its errors when it fails."""
    command = [sys.executable, "-P", "-m", "distill.bench.loss_cost", json.dumps(asdict(case))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ALLOCATOR | os.environ)
    if done.returncode != 0:
        raise DistillError(f"{case} could not be measured:\n{done.stderr[-2000:]}")
    return Cost(**json.loads(done.stdout))


def run(
    folder: Path,
    objectives: Sequence[str] = OBJECTIVES,
    *,
    tokens: int = 8192,
    vocabulary: int = 151_936,
    hidden: int = 256,
    chunks: Sequence[int] = (512, 256),
    device: str = "cpu",
    threads: int = 1,
    measure: Callable[[Case], Cost] = in_child,
    free: int | None = None,
) -> Figures:
    """Measure every objective both ways; the report, which is also in `folder` as memory.json.

    `free`: bytes of free memory to assume; None: the machine's.
    """
    from distill.metrics.summary import versions

    base = Case("full", "sampled", tokens, vocabulary, hidden, 0, device, threads)
    reach = fitting_tokens(tokens, vocabulary, _free_bytes(device) if free is None else free)
    bases = [replace(base, objective=name) for name in objectives]
    report = {
        "benchmark": "loss memory",
        "tokens": tokens,
        "vocabulary": vocabulary,
        "hidden": hidden,
        "device": device,
        "threads": threads,
        "full_measured_up_to_tokens": reach,
        "rows": [row for one in bases for row in _rows(one, reach, chunks, measure)],
        "versions": versions(),
    }
    return write_report(folder, "memory", report)


def fitting_tokens(tokens: int, vocabulary: int, free: int) -> int:
    """`tokens`, halved until full logits fit in the allowed share of `free` bytes."""
    while tokens > 64 and FULL_ARRAYS * 4 * vocabulary * tokens > FREE_SHARE * free:
        tokens //= 2
    return tokens


def _free_bytes(device: str) -> int:
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    import psutil

    return int(psutil.virtual_memory().available)


def _rows(base: Case, reach: int, chunks: Sequence[int], measure: Callable[[Case], Cost]) -> list[Figures]:
    sizes = [base.tokens] if reach == base.tokens else [reach // 4, reach // 2, reach]
    full = {size: measure(replace(base, tokens=size)) for size in sizes}
    (memory, error), (seconds, _) = (
        continued({size: getattr(cost, name) for size, cost in full.items()}, base.tokens)
        for name in ("peak_bytes", "seconds")
    )
    rows = []
    for chunk in chunks:
        log.info("%s: chunks of %d tokens", base.objective, chunk)
        ours = measure(replace(base, way="chunked", chunk=chunk))
        rows.append(
            {
                "objective": base.objective,
                "chunk": chunk,
                "chunked_bytes": ours.peak_bytes,
                "full_bytes": round(memory),
                "memory_ratio": ours.peak_bytes / memory,
                "chunked_seconds": ours.seconds,
                "full_seconds": seconds,
                "time_ratio": ours.seconds / seconds,
                "full_measured": {str(size): asdict(cost) for size, cost in full.items()},
                "full_is_continued": reach != base.tokens,
                "line_error": error,
            }
        )
    return rows


def continued(values: Mapping[int, float], x: int) -> tuple[float, float | None]:
    """Value at x, and the error: measured there (None), or on the least-squares line through the others.

    The error is how far the worst point is from the line, as a share of the point.
    """
    if x in values:
        return values[x], None
    at, y = np.array(list(values), float), np.array(list(values.values()), float)
    slope, offset = np.polyfit(at, y, 1)
    return float(offset + slope * x), float(np.abs((offset + slope * at - y) / y).max())


def table(report: Mapping[str, Any]) -> str:
    """The report as a Markdown table."""
    rows, reach = report["rows"], report["full_measured_up_to_tokens"]
    star = " *" if any(row["full_is_continued"] for row in rows) else ""
    head = ["objective", "chunk", "chunked, MB", f"full logits, MB{star}", "memory", "chunked, s"]
    cells = [
        [f"`{row['objective']}`", str(row["chunk"])]
        + [f"{row['chunked_bytes'] / 1e6:,.0f}", f"{row['full_bytes'] / 1e6:,.0f}"]
        + [f"{row['memory_ratio']:.3f}×", f"{row['chunked_seconds']:.1f}", f"{row['full_seconds']:.1f}"]
        + [f"{row['time_ratio']:.2f}×"]
        for row in rows
    ]
    lines = [
        f"{report['tokens']:,} tokens, vocabulary {report['vocabulary']:,}, hidden {report['hidden']}, "
        f"{report['device']}, {report['threads']} thread(s)",
        "",
        *markdown([*head, f"full, s{star}", "time"], cells),
    ]
    if star:
        worst = max(row["line_error"] for row in rows)
        note = (
            f"\\* measured at {reach // 4:,}, {reach // 2:,} and {reach:,} tokens, what fits here, and "
            f"continued along the line through them (it misses those points by {worst:.1%} of memory at most)"
        )
        lines += ["", note]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(measure(Case(**json.loads(sys.argv[1]))))))
