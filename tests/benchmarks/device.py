"""Every path of a run on this machine's device: short runs of the quickstart's task, one line each.

For the day a GPU is at hand. On a CPU the same runs take the CPU's engines, so that the command itself is
tried without one. A path that fails costs its own line, not the others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from distill.preflight_checks.devices import gpu_names, gpus, visible
from sync.base.errors import DistillError
from tests.benchmarks.asynchronous import run_quickstart, step_lines
from tests.benchmarks.figures import Figures, TrialCache, command, markdown

STEPS: Final = 24
CPU: Final = "CPU"
COMMON: Final = (
    "trainer.ranks=1",
    "evaluation.every=0",
    "evaluation.prompts=256",
    "tracking.wandb=disabled",
    "tracking.samples_every=0",
)
ON_GPU: Final = ("trainer.deepspeed=configs/deepspeed/zero3_gpu.json", "trainer.attention=sdpa")
PATHS: Final[dict[str, tuple[str, ...]]] = {
    "full": (),
    "sampled": ('objective={type="sampled"}', "trainer.lr=2e-4"),
    "topk": ('objective={type="topk", k=8}',),
    "topk by reference": ('objective={type="topk", k=8}', "buffer.scores=reference"),
    "student_topk": ('objective={type="student_topk", k=8}',),
    "forward_topk": ('objective={type="forward_topk", k=8}',),
    "jsd": ('objective={type="jsd"}',),
    "skew": ('objective={type="skew"}',),
    "sft": ('objective={type="sft", on_policy=0.5}',),
    "activation checkpointing": ("trainer.activation_checkpointing=true",),
    "optimizer in CPU memory": ("trainer.deepspeed=configs/deepspeed/zero3_offload.json",),
    "LoRA": ("trainer.lora={rank=8, alpha=16}", "trainer.lr=1e-2"),
    "broadcast": ("weights.transport=broadcast", "evaluation=false"),
    "teacher in vLLM": (
        "teachers.sorter.engine=vllm",
        "teachers.sorter.engine_args={gpu-memory-utilization=0.2, enforce-eager=true}",
    ),
    "compiled replica": ("student.engine_args.enforce-eager=false",),
}
"""What is tried → overrides of the quickstart."""


def run(folder: Path = Path("runs/bench-device"), only: str = "") -> Figures:
    """Try what is missing in `folder`; `only`: paths, such as LoRA,broadcast.

    What failed is tried again the next time.
    """
    cache = TrialCache(folder.absolute() / "trials.jsonl")
    device = ", ".join(sorted(gpu_names())) if visible(gpus()) else CPU
    rows: dict[str, Figures] = {}
    for name, words in PATHS.items():
        if only and name not in only.split(","):
            continue
        settings = (*COMMON, *(ON_GPU if device != CPU else ()), *words)
        try:
            make = partial(_trial, folder.absolute(), settings)
            rows[name] = cache.get({"device": device, "settings": settings}, make)
        except DistillError as error:
            rows[name] = {"error": str(error)}
    return {"device": device, "steps": STEPS, "paths": rows}


def _trial(folder: Path, settings: Sequence[str]) -> Figures:
    began = time.monotonic()
    run_quickstart(folder, "trial", 0, STEPS, settings)
    summary = json.loads((folder / "trial" / "summary.json").read_text())
    return figures(summary, step_lines(folder / "trial"), time.monotonic() - began)


def figures(summary: dict[str, Any], lines: Sequence[dict[str, Any]], seconds: float) -> Figures:
    """One line of the table, of a run's summary and its steps; None: the run has no such figure."""
    pause = summary["sync"]["pause_seconds"]
    return {
        "seconds": seconds,
        "reverse_kl": [one and one["reverse_kl"] for one in (summary.get("before"), summary.get("after"))],
        "mismatch_kl": lines[0].get("train/mismatch_kl"),
        "train_ms": 1000 * median(line["perf/train_seconds"] for line in lines[1:]),
        "pause_ms": None if pause is None else 1000 * pause,
        "weights_identical": summary["weights_identical"],
    }


def table(report: Figures) -> str:
    """The paths as Markdown, with the first lines of what failed."""
    head = [
        "path",
        "s",
        "KL before",
        "after",
        "KL(μ‖p) at version 0",
        "step, ms",
        "pause, ms",
        "weights equal",
    ]
    rows, failed = [], []
    for name, one in report["paths"].items():
        if "error" in one:
            rows.append([name, "**failed**", *[""] * (len(head) - 2)])
            failed.append(f"{name}: {one['error']}")
            continue
        before, after = (_number(kl, ".3f") for kl in one["reverse_kl"])
        measured = [
            _number(one["mismatch_kl"], ".1e"),
            f"{one['train_ms']:.0f}",
            _number(one["pause_ms"], ".0f"),
        ]
        equal = "yes" if one["weights_identical"] else "**no**"
        rows.append([name, f"{one['seconds']:.0f}", before, after, *measured, equal])
    title = f"{report['device']}; {report['steps']} steps of the quickstart each, one trainer rank"
    return "\n".join([title, "", *markdown(head, rows), *failed])


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


if __name__ == "__main__":
    command("device", run, table)
