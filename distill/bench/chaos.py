"""Kills the processes of a real run at random moments, and has the audit say what it cost.

    distill chaos --kills 50 --seed 1

    start ─▶ (a random moment ─▶ kill −9 ─▶ wait until what was killed works again) × kills ─▶ end ─▶ audit

What is killed: a student replica, a teacher, one rank of the trainer, the evaluator, the controller (then the
run is resumed), or all of them at once; every kind once before any kind again, in random order.

Each kill is a line of chaos.jsonl in the run's folder. The same command given again, after this program was
stopped, goes on with the next one; of a run that has ended it prints the figures again.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from distill import quickstart
from distill.bench.patient import CONTROLLER, Patient, kind_of
from distill.control.audit import VIOLATIONS, AuditReport, audit
from distill.loading import load
from distill.report.metrics import Lines
from distill.report.picture import read_lines

ALL = "all at once"
LONGEST_CALM_SECONDS = 4.0
"""Between a recovery and the next kill: a random time up to this."""
CHECKPOINT_EVERY = 10
"""Steps, where the configuration has none: without checkpoints a killed trainer begins anew."""
STEPS_PER_KILL = 24
"""Length of the quickstart that is killed: enough that it still runs at the last kill."""
PATIENCE = 4.0
"""Times run.start_seconds that anything may take before the run counts as stuck."""
_OTHERWISE = VIOLATIONS.keys() - {"lost", "trained_twice", "too_old"}


def run(
    patient: Patient, kills: int, seed: int, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Start or resume the run, kill until there were `kills`, let it end; figures.

    Raises DistillError when it does not go on.
    """
    rng, lines = random.Random(f"{seed} moments"), patient.run_dir / "chaos.jsonl"
    done = read_lines(lines)
    before, left = (done[-1]["elapsed"], done[-1]["orphans"]) if done else (0.0, 0)
    began = time.monotonic()
    with patient:
        newest = patient.step()
        patient.start(resume=(patient.run_dir / "journal").is_dir())
        patient.wait(lambda: patient.over() or patient.step() > newest, "a step")
        patient.wait_at_work(patient.roles())
        targets = itertools.islice(_targets(random.Random(seed), patient.roles()), len(done), kills)
        for number, target in enumerate(targets, len(done) + 1):
            time.sleep(rng.uniform(0.0, LONGEST_CALM_SECONDS))
            if patient.over():
                break
            step, took = patient.step(), _strike(patient, rng, target)
            elapsed, orphans = before + time.monotonic() - began, left + patient.orphans()
            done.append(
                {"target": target, "step": step, "seconds": took, "elapsed": elapsed, "orphans": orphans}
            )
            _append(lines, done[-1])
            say(
                f"{number:>3} of {kills}, {elapsed / 60:.1f} min: {target} killed at step {step}, "
                f"at work after {took:.1f} s"
            )
        patient.end()
    seconds: dict[str, list[float]] = defaultdict(list)
    for line in done:
        seconds[kind_of(line["target"])].append(line["seconds"])
    return figures(audit(patient.run_dir), seconds, patient.summary()) | {
        "kills_asked": kills,
        "seed": seed,
        "orphans": left + patient.orphans(),
        "seconds": before + time.monotonic() - began,
    }


def _append(path: Path, line: dict[str, Any]) -> None:
    lines = Lines(path)
    lines.write(json.dumps(line))
    lines.close()


def patient(config: Path | None, overrides: Sequence[str], kills: int, seed: int) -> Patient:
    """The run to kill, of a file or the quickstart's; it may restart often enough. Raises ConfigError."""
    if config is None:
        path, ours = quickstart.source(0)
        ours += [f"run.steps={STEPS_PER_KILL * kills}"]
    else:
        path, ours = config, []
    ours = [*ours, f"run.restarts={2 * kills + 10}", "tracking.wandb=disabled", *overrides]
    settings = load(path, ours)
    every = settings.trainer.checkpoint_every or CHECKPOINT_EVERY
    ours += [f"trainer.checkpoint_every={every}", f"run.name={settings.run.name}-chaos-{seed}"]
    settings = load(path, ours)
    command = [sys.executable, "-P", "-m", "distill.cli.main", "run", str(path)]
    for override in ours:
        command += ["--set", override]
    return Patient(command, settings.run_dir, patience=PATIENCE * settings.run.start_seconds)


def _targets(rng: random.Random, roles: Sequence[str]) -> Iterator[str]:
    """Without end: rounds of every kind, shuffled; of a kind, one of its processes."""
    kinds = [*sorted({kind_of(role) for role in roles}), CONTROLLER, ALL]
    while True:
        rng.shuffle(kinds)
        for kind in kinds:
            yield rng.choice([role for role in sorted(roles) if kind_of(role) == kind] or [kind])


def _strike(patient: Patient, rng: random.Random, target: str) -> float:
    """Kill, and wait for the recovery; its seconds."""
    roles, began = patient.roles(), time.monotonic()
    if target in (CONTROLLER, ALL):
        patient.kill_launcher(everything=target == ALL)
        patient.start(resume=True)
        patient.wait_at_work(roles)
    else:
        patient.wait(lambda: target in patient.roles(), f"a process of {target}")
        patient.kill(target, rng)
        patient.wait_at_work([target])
    return time.monotonic() - began


def figures(report: AuditReport, seconds: dict[str, list[float]], summary: dict[str, Any]) -> dict[str, Any]:
    """What the documentation prints."""
    broken = {name: len(getattr(report, name)) for name in VIOLATIONS}
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
        "otherwise wrong": sum(figures[name] for name in _OTHERWISE),
        "weights identical": figures["weights_identical"],
        "orphans": figures["orphans"],
        "steps": figures["steps"],
        "minutes": f"{figures['seconds'] / 60:.1f}",
    }
    head = ["| killed | times | back at work, median s | max s |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, "", *(f"{name:<18} {value}" for name, value in facts.items())])
