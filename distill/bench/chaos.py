"""Kills the processes of a real run at random moments, and has the audit say what it cost.

    distill chaos --kills 50 --seed 1 --set run.steps=1000

    start ─▶ (a random moment ─▶ kill −9 ─▶ wait until what was killed works again) × kills ─▶ end ─▶ audit

What is killed: a student replica, a teacher, one rank of the trainer, the evaluator, the controller (then the
run is resumed), or all of them at once.
"""

from __future__ import annotations

import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from distill import quickstart
from distill.bench.patient import CONTROLLER, Patient, kind_of
from distill.control.audit import AuditReport, audit
from distill.loading import load

ALL = "all at once"
LONGEST_CALM_SECONDS = 4.0
"""Between a recovery and the next kill: a random time up to this."""
CHECKPOINT_EVERY = 10
"""Steps, where the configuration has none: without checkpoints a killed trainer begins anew."""
_BROKEN = ("lost", "trained_twice", "too_old", "issued_twice", "not_as_composed", "unrecorded")


def run(
    patient: Patient, kills: int, seed: int, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Start the run, kill `kills` times, let it end; figures. Raises DistillError when it does not go on."""
    rng, began = random.Random(seed), time.monotonic()
    seconds: dict[str, list[float]] = defaultdict(list)
    with patient:
        patient.start()
        patient.wait(lambda: patient.step() > 0, "the first step")
        patient.wait_at_work(patient.roles())
        for number in range(kills):
            time.sleep(rng.uniform(0.0, LONGEST_CALM_SECONDS))
            if patient.over():
                break
            target = _choose(rng, patient.roles())
            step, took = patient.step(), _strike(patient, rng, target)
            seconds[kind_of(target)].append(took)
            say(f"{number + 1:>3} of {kills}: {target} killed at step {step}, at work after {took:.1f} s")
        patient.end()
        orphans = patient.orphans()
    return figures(audit(patient.run_dir), seconds, patient.summary()) | {
        "kills_asked": kills,
        "seed": seed,
        "orphans": orphans,
        "seconds": time.monotonic() - began,
    }


def patient(config: Path | None, overrides: Sequence[str], kills: int, seed: int) -> Patient:
    """The run to kill, of a file or the quickstart's; it may restart often enough. Raises ConfigError."""
    path, ours = quickstart.source(0) if config is None else (config, [])
    ours = [*ours, f"run.restarts={2 * kills + 10}", "tracking.wandb=disabled", *overrides]
    settings = load(path, ours)
    every = settings.trainer.checkpoint_every or CHECKPOINT_EVERY
    ours += [f"trainer.checkpoint_every={every}", f"run.name={settings.run.name}-chaos-{seed}"]
    settings = load(path, ours)
    command = [sys.executable, "-P", "-m", "distill.cli.main", "run", str(path)]
    for override in ours:
        command += ["--set", override]
    return Patient(command, settings.run_dir, patience=settings.run.start_seconds)


def _choose(rng: random.Random, roles: Sequence[str]) -> str:
    """One of the kinds of roles, then one of its processes."""
    kinds = sorted({kind_of(role) for role in roles})
    kind = rng.choice([*kinds, CONTROLLER, ALL])
    return rng.choice([role for role in sorted(roles) if kind_of(role) == kind] or [kind])


def _strike(patient: Patient, rng: random.Random, target: str) -> float:
    """Kill, and wait for the recovery; its seconds."""
    roles, began = patient.roles(), time.monotonic()
    if target in (CONTROLLER, ALL):
        patient.kill_launcher(everything=target == ALL)
        patient.start(resume=True)
        patient.wait_at_work(roles)
    else:
        patient.kill(target, rng)
        patient.wait_at_work([target])
    return time.monotonic() - began


def figures(report: AuditReport, seconds: dict[str, list[float]], summary: dict[str, Any]) -> dict[str, Any]:
    """What the documentation prints."""
    broken = {name: len(getattr(report, name)) for name in _BROKEN}
    return {
        "kills": {kind: len(took) for kind, took in sorted(seconds.items())},
        "recovered_seconds": {
            kind: {"median": median(took), "max": max(took)} for kind, took in sorted(seconds.items())
        },
        **broken,
        "ok": report.ok,
        "trained": report.trained,
        "oldest": report.oldest,
        "weights_identical": summary.get("weights_identical"),
        "completed": summary.get("completed"),
        "steps": summary.get("steps"),
        "audit": asdict(report),
    }


def holds(figures: dict[str, Any]) -> bool:
    """Whether the run came through with every guarantee."""
    return bool(
        figures["ok"] and figures["completed"] and figures["weights_identical"] and not figures["orphans"]
    )


def table(figures: dict[str, Any]) -> str:
    """The figures as Markdown."""
    rows = [
        f"| {kind} | {count} | {took['median']:.1f} | {took['max']:.1f} |"
        for (kind, count), took in zip(
            figures["kills"].items(), figures["recovered_seconds"].values(), strict=True
        )
    ]
    facts = {
        "kills": f"{sum(figures['kills'].values())} of {figures['kills_asked']}",
        "rollouts trained": figures["trained"],
        "lost": figures["lost"],
        "trained twice": figures["trained_twice"],
        "over age": figures["too_old"],
        "otherwise wrong": figures["issued_twice"] + figures["not_as_composed"] + figures["unrecorded"],
        "weights identical": figures["weights_identical"],
        "orphans": figures["orphans"],
        "steps": figures["steps"],
        "minutes": f"{figures['seconds'] / 60:.1f}",
    }
    head = ["| killed | times | back at work, median s | max s |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, "", *(f"{name:<18} {value}" for name, value in facts.items())])
