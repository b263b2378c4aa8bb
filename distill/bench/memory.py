"""`distill bench objective --memory`: the trainer's chunked loss against full logits, in memory and time.

Every measurement is a child process (see `loss_cost`). Full logits are measured at as many tokens as fit in
a share of the machine's free memory, and at a half and a quarter of that; beyond, the line through those
points goes on, and the report says so.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from distill.bench.curves import Line, fitted
from distill.bench.loss_cost import Case, Cost
from sync.errors import DistillError

log = logging.getLogger(__name__)
FULL_ARRAYS: Final = 6
"""[tokens, vocabulary] fp32 arrays that full logits may need at once, to reward_fn what fits."""
FREE_SHARE: Final = 0.35
"""Of the free memory that a measurement may take."""
KEEPING: Final = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Variables that make glibc keep what is freed, as torch does on GPUs: else both ways pay for
fresh pages. The environment may say otherwise."""
OBJECTIVES: Final = ("sampled", "topk", "full")

Measure = Callable[[Case], Cost]


def in_child(case: Case) -> Cost:
    """Measure one case in a process of its own. Raises DistillError with its last words when it fails."""
    command = [sys.executable, "-P", "-m", "distill.bench.loss_cost", json.dumps(asdict(case))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=KEEPING | os.environ)
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
    measure: Measure = in_child,
    free: int | None = None,
) -> dict[str, Any]:
    """Measure every objective both ways; the report, which is also in `folder` as memory.json.

    `free`: bytes of free memory to reckon with; None: what the machine says.
    """
    from distill.metrics.results import versions
    from sync.durable import write_json

    base = Case("full", "sampled", tokens, vocabulary, hidden, 0, device, threads)  # type: ignore[arg-type]
    reach = fitting_tokens(tokens, vocabulary, _free_bytes(device) if free is None else free)
    rows = [
        row for name in objectives for row in _rows(replace(base, objective=name), reach, chunks, measure)
    ]
    report = {
        "benchmark": "loss memory",
        "tokens": tokens,
        "vocabulary": vocabulary,
        "hidden": hidden,
        "device": device,
        "threads": threads,
        "full_measured_up_to_tokens": reach,
        "rows": rows,
        "versions": versions(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "memory.json", report)
    return report


def fitting_tokens(tokens: int, vocabulary: int, free: int) -> int:
    """`tokens`, halved until full logits fit in the allowed share of `free` bytes."""
    while tokens > 64 and FULL_ARRAYS * 4 * vocabulary * tokens > FREE_SHARE * free:
        tokens //= 2
    return tokens


def _rows(base: Case, reach: int, chunks: Sequence[int], measure: Measure) -> list[dict[str, Any]]:
    log.info("%s: full logits", base.objective)
    sizes = [base.tokens] if reach == base.tokens else [reach // 4, reach // 2, reach]
    full = {size: measure(replace(base, tokens=size)) for size in sizes}
    memory, seconds = (_at_all_tokens(full, field, base.tokens) for field in ("peak_bytes", "seconds"))
    rows = []
    for chunk in chunks:
        log.info("%s: chunks of %d tokens", base.objective, chunk)
        ours = measure(replace(base, way="chunked", chunk=chunk))
        rows.append(
            {
                "objective": base.objective,
                "chunk": chunk,
                "chunked_bytes": ours.peak_bytes,
                "full_bytes": round(memory.value),
                "memory_ratio": ours.peak_bytes / memory.value,
                "chunked_seconds": ours.seconds,
                "full_seconds": seconds.value,
                "time_ratio": ours.seconds / seconds.value,
                "full_measured": {size: asdict(cost) for size, cost in full.items()},
                "full_is_continued": reach != base.tokens,
                "line_error": memory.line.worst if memory.line else None,
            }
        )
    return rows


class _Estimate:
    """A figure at all tokens: measured there, or on the line through fewer."""

    def __init__(self, value: float, line: Line | None) -> None:
        self.value, self.line = value, line


def _at_all_tokens(full: dict[int, Cost], field: str, tokens: int) -> _Estimate:
    if tokens in full:
        return _Estimate(getattr(full[tokens], field), None)
    line = fitted([(size, getattr(cost, field)) for size, cost in full.items()])
    return _Estimate(line.at(tokens), line)


def _free_bytes(device: str) -> int:
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    import psutil

    return int(psutil.virtual_memory().available)


def table(report: dict[str, Any]) -> str:
    """The report as a Markdown table."""
    mark = " *" if any(row["full_is_continued"] for row in report["rows"]) else ""
    head = [
        f"{report['tokens']:,} tokens, vocabulary {report['vocabulary']:,}, hidden {report['hidden']}, "
        f"{report['device']}, {report['threads']} thread(s)",
        "",
        f"| objective | chunk | chunked, MB | full logits, MB{mark} | memory | chunked, s | full, s{mark} "
        "| time |",
        f"|{' --- |' * 8}",
    ]
    body = [
        f"| `{row['objective']}` | {row['chunk']} | {row['chunked_bytes'] / 1e6:,.0f} "
        f"| {row['full_bytes'] / 1e6:,.0f} | {row['memory_ratio']:.3f}× | {row['chunked_seconds']:.1f} "
        f"| {row['full_seconds']:.1f} | {row['time_ratio']:.2f}× |"
        for row in report["rows"]
    ]
    return "\n".join(head + body + _footnote(report))


def _footnote(report: dict[str, Any]) -> list[str]:
    errors = [row["line_error"] for row in report["rows"] if row["line_error"] is not None]
    if not errors:
        return []
    reach = report["full_measured_up_to_tokens"]
    return [
        "",
        f"\\* measured at {reach // 4:,}, {reach // 2:,} and {reach:,} tokens, what fits here, and continued "
        f"along the line through them (it misses those points by {max(errors):.1%} of memory at most)",
    ]
