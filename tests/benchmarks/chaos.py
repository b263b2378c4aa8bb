"""Inject faults of every kind into a real run at random moments, and audit what they cost.

    start ─▶ (a random moment ─▶ a fault ─▶ wait for the recovery of its target) × events ─▶ end ─▶ audit

The kinds (tests/support/kill_target.py) come in turns, and each hits every target of its own once before any
does so again, in random order. Each event is a line of chaos.jsonl in the run's folder, which is on a disk of
its own: mounting that takes root.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections import defaultdict
from statistics import median
from typing import Annotated

import faults
import typer
from disks import keep, mount
from kill_target import HEALTH_SECONDS, INJECT, KillTarget, kind_of, targets
from whole_run import over

from distill import quickstart
from distill.config.loading import load
from distill.record.audit import VIOLATIONS, audit
from sync.base.errors import ConfigError
from sync.base.jsonl import JsonLines
from tests.benchmarks.figures import Figures, command, listing

MAX_PAUSE_SECONDS = 4.0  # between a recovery and the next event: a random time up to this
DISK_KIB = 1 << 20
TIMEOUT = 4.0  # times run.start_seconds that anything may take before the run counts as stalled


def target_of(events: int, seed: int) -> KillTarget:
    """The quickstart with relays, steps and restarts enough. Raises ConfigError."""
    path, settings = quickstart.source(0)
    settings += [
        f"run.steps={40 * events}",  # enough that it still runs at the last event
        f"run.restarts={2 * events + 10}",
        f"run.health_timeout_seconds={HEALTH_SECONDS}",
        "rollout.stall_timeout_seconds=60",  # an engine that is stopped behind its server is detected then
        "run.min_free_disk_gib=0",
        "tracking.wandb=disabled",
        "trainer.checkpoint_every=10",  # without checkpoints a killed trainer starts over
        f"run.name=quickstart-chaos-{seed}",
    ]
    config = load(path, settings)
    if config.run_dir.exists():
        raise ConfigError(f"{config.run_dir} is there: remove it, or take another --seed")
    words = [sys.executable, "-P", faults.__file__, str(path), *over(*settings)]
    return KillTarget(words, config.run_dir, timeout=TIMEOUT * config.run.start_seconds)


def strike(target: KillTarget, events: int, seed: int) -> Figures:
    """Start the run, inject faults, let it end; figures. Raises DistillError when it does not recover."""
    rng, began = random.Random(f"{seed} moments"), time.monotonic()
    took: dict[tuple[str, str], list[float]] = defaultdict(list)
    with target:
        target.start()
        target.wait(lambda: target.over() or target.step() > 0, "a step")
        target.wait_at_work(target.roles())
        lines = JsonLines(target.run_dir / "chaos.jsonl")
        pairs = targets(random.Random(seed), [*INJECT], target.roles(), target.helpers())
        for number, (kind, name) in enumerate(itertools.islice(pairs, events), 1):
            time.sleep(rng.uniform(0.0, MAX_PAUSE_SECONDS))
            if target.over():
                break
            step = target.step()
            seconds = INJECT[kind](target, rng, name)
            if target.over():  # whether it recovered, and for some kinds whether it was hit, was not seen
                break
            took[kind, kind_of(name)].append(seconds)
            lines.write({"kind": kind, "target": name, "step": step, "seconds": seconds})
            typer.echo(f"{number:>3} of {events}: {kind} {name} at step {step}, recovered in {seconds:.1f} s")
        target.end()
    report, summary, rows = audit(target.run_dir), target.summary(), list[Figures]()
    for (kind, of), seconds in sorted(took.items()):
        recovered = {"recovered, median s": median(seconds), "max s": max(seconds)}
        rows.append({"fault": kind, "of": of, "times": len(seconds)} | recovered)
    return {
        "events_asked": events,
        "events": rows,
        "minutes": (time.monotonic() - began) / 60,
        "orphans": target.orphans,
        **{name: len(report.violations.get(name, [])) for name in VIOLATIONS},
        "ok": report.ok,
        "trained": report.trained,
        "oldest": report.oldest,
        "weights_identical": summary.get("weights_identical"),
        "completed": summary.get("completed"),
    }


def table(figures: Figures) -> str:
    totals = [{"": name, "in all": value} for name, value in figures.items() if name != "events"]
    return "\n".join([*listing(figures["events"]), "", *listing(totals)])


def run(
    events: Annotated[int, typer.Option(min=1, help="Faults to inject.")] = 24,
    seed: Annotated[int, typer.Option(help="Of moments and targets.")] = 0,
) -> Figures:
    """Inject faults into a run at random moments, let it end, and audit it; exit 1 for a broken guarantee."""
    target = target_of(events, seed)
    mount(target.run_dir, DISK_KIB)
    try:
        return strike(target, events, seed)
    finally:
        keep(target.run_dir)


def problem(figures: Figures) -> str:
    sound = figures["ok"] and figures["completed"] and figures["weights_identical"]
    if sound and figures["events"] and not figures["orphans"]:
        return ""
    return "a guarantee was broken, or no fault was injected: see the lines above"


if __name__ == "__main__":
    command(run, table, problem)
