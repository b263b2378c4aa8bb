"""Every path of a run on this machine's device: short runs of the quickstart's task, one line each.

For the day a GPU is at hand. On a CPU the same runs take the CPU's engines, so that the command itself is
tried without one. A path that fails costs its own line, not the others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from distill import quickstart
from distill.preflight_checks.devices import gpu_names, gpus, visible
from sync.base.errors import DistillError
from tests.benchmarks.figures import Figures, Folder, TrialCache, command, listing, run_steps, step_lines

CPU: Final = "CPU"
STEPS: Final = 24
COMMON: Final = (
    *("trainer.ranks=1", "evaluation.every=0", "evaluation.prompts=256"),
    *("tracking.wandb=disabled", "tracking.samples_every=0"),
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


def run(folder: Folder = Path("runs/bench-device")) -> Figures:
    """Try every path of a run on this machine's device, and print a line for each; exit 1 when one failed."""
    cache, rows = TrialCache(folder), dict[str, Figures]()
    device = ", ".join(sorted(gpu_names())) if visible(gpus()) else CPU
    for name, own in PATHS.items():
        settings = (*COMMON, *(ON_GPU if device != CPU else ()), *own)
        try:
            make = partial(trial, cache.folder / "trial", settings)
            rows[name] = cache.get({"device": device, "steps": STEPS, "settings": settings}, make)
        except DistillError as error:
            rows[name] = {"error": str(error)}
    return {"device": device, "steps": STEPS, "paths": rows}


def problem(report: Figures) -> str:
    failed = [name for name, row in report["paths"].items() if "error" in row]
    return f"{len(failed)} paths failed: {', '.join(failed)}" if failed else ""


def trial(run_dir: Path, settings: Sequence[str]) -> Figures:
    """One line of the table; None: the run has no such figure."""
    began = time.monotonic()
    finished, _ = run_steps(run_dir, quickstart.source(0), STEPS, settings)
    summary, lines = finished.summary, step_lines(finished)
    before, after = (summary.get(name) for name in ("before", "after"))
    return {
        "s": time.monotonic() - began,
        "KL before": before and before["reverse_kl"],
        "KL after": after and after["reverse_kl"],
        "KL(μ‖p) at version 0": lines[0].get("train/mismatch_kl"),
        "step, s": median(line["perf/train_seconds"] for line in lines[1:]),
        "pause, s": summary["sync"]["pause_seconds"],
        "weights equal": summary["weights_identical"],
    }


def table(report: Figures) -> str:
    paths = report["paths"].items()
    rows = [{"path": name} | row for name, row in paths if "error" not in row]
    failed = [f"{name} failed: {row['error']}" for name, row in paths if "error" in row]
    title = f"{report['device']}; {report['steps']} steps of the quickstart each, one trainer rank"
    return "\n".join([title, "", *listing(rows), *failed])


if __name__ == "__main__":
    command(run, table, problem)
