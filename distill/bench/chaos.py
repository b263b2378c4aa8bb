"""Faults of every kind in a real run at random moments, and what they cost by its audit.

    distill chaos --events 50 --seed 1

    start ─▶ (a random moment ─▶ a fault ─▶ wait until what it struck works again) × events ─▶ end ─▶ audit

    kill        SIGKILL: a student replica, a teacher, one rank of the trainer, the evaluator, the controller
                (then the run is resumed), or all of them at once
    stop        SIGSTOP for good: a role's process, vLLM's engine where it has a process of its own, the
                deepspeed launcher (and a rank is killed, unnoticed by it); the controller for a while
    slow        a process runs for a tenth of the time, for a while: a role's, or the controller
    cut         every connection is reset: to a role's server, or to the controller from the trainer
    malformed   a stretch of an answer arrives overwritten: a replica's, or a teacher's
    disk        the disk of the run's folder has no room for a while

Every kind strikes every target once before any does so again, in random order. Each event is a line of
chaos.jsonl in the run's folder. The same command given again, after this program was stopped, goes on with
the next one; of a run that has ended it prints the figures again.
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
from distill.bench.full_disk import keep, mount
from distill.bench.kill_target import CONTROLLER, Patient, kind_of
from distill.run_log.audit import VIOLATIONS, AuditReport, audit
from distill.launch.process_tree import DEEPSPEED, ENGINE_OF
from distill.launch.roles import EVALUATOR, TRAINER
from distill.loading import load
from distill.metrics.trackers import Lines
from distill.metrics.plot import read_lines
from sync.errors import ConfigError, DistillError

KINDS = ("kill", "stop", "slow", "cut", "malformed", "disk")
ALL, DISK = "all at once", "the run's folder"
LONGEST_CALM_SECONDS = 4.0
"""Between a recovery and the next event: a random time up to this."""
HEALTH_SECONDS = 20.0
"""run.health_timeout_seconds, unless it is overridden: what is stopped is found so late."""
SILENT_SECONDS = 60.0
"""rollout.silent_seconds, likewise: an engine that is stopped behind its server is."""
PAUSE_SECONDS = 1.5 * HEALTH_SECONDS
"""For which the controller is stopped: by the clock it would take everybody for hung."""
FAULT_SECONDS = 5.0
"""Length of a fault that passes: slowness, a full disk."""
CHECKPOINT_EVERY = 10
"""Steps, where the configuration has none: without checkpoints a killed trainer begins anew."""
STEPS_PER_EVENT = 40
"""Length of the quickstart that is struck: enough that it still runs at the last event."""
PATIENCE = 4.0
"""Times run.start_seconds that anything may take before the run counts as stuck."""
_OTHERWISE = VIOLATIONS.keys() - {"lost", "trained_twice", "too_old"}
Seconds = dict[str, dict[str, list[float]]]
"""Kind → target's kind → seconds of every recovery."""


def run(
    patient: Patient,
    events: int,
    seed: int,
    kinds: Sequence[str] = KINDS,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Start or resume the run, strike until there were `events`, let it end; figures.

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
        targets = _targets(random.Random(seed), kinds, patient.roles(), patient.helpers())
        left_over = itertools.islice(targets, len(done), events)
        for number, (kind, target) in enumerate(left_over, len(done) + 1):
            time.sleep(rng.uniform(0.0, LONGEST_CALM_SECONDS))
            if patient.over():
                break
            step, took = patient.step(), STRIKES[kind](patient, rng, target)
            elapsed, orphans = before + time.monotonic() - began, left + patient.orphans()
            event = {"kind": kind, "target": target, "step": step, "seconds": took}
            done.append({**event, "elapsed": elapsed, "orphans": orphans})
            _append(lines, done[-1])
            say(
                f"{number:>3} of {events}, {elapsed / 60:.1f} min: {kind} {target} at step {step}, "
                f"at work after {took:.1f} s"
            )
        patient.end()
    seconds: Seconds = defaultdict(lambda: defaultdict(list))
    for line in done:
        seconds[line["kind"]][kind_of(line["target"])].append(line["seconds"])
    return figures(audit(patient.run_dir), seconds, patient.summary()) | {
        "events_asked": events,
        "seed": seed,
        "orphans": left + patient.orphans(),
        "seconds": before + time.monotonic() - began,
    }


def _append(path: Path, line: dict[str, Any]) -> None:
    lines = Lines(path)
    lines.write(json.dumps(line))
    lines.close()


def chosen(kinds: str) -> list[str]:
    """The kinds in a list with commas. Raises ConfigError for others."""
    found = [kind.strip() for kind in kinds.split(",")]
    if unknown := [kind for kind in found if kind not in KINDS]:
        raise ConfigError(f"--kinds has {', '.join(unknown)}: choose of {','.join(KINDS)}")
    return found


def patient(
    config: Path | None, overrides: Sequence[str], events: int, seed: int, kinds: Sequence[str] = KINDS
) -> Patient:
    """The run to strike, of a file or the quickstart's; it may restart often enough. Raises ConfigError."""
    if config is None:
        path, ours = quickstart.source(0)
        ours += [f"run.steps={STEPS_PER_EVENT * events}"]
    else:
        path, ours = config, []
    ours += [f"run.restarts={2 * events + 10}", "tracking.wandb=disabled", "run.min_free_disk_gib=0"]
    ours += [f"run.health_timeout_seconds={HEALTH_SECONDS}", f"rollout.silent_seconds={SILENT_SECONDS}"]
    settings = load(path, [*ours, *overrides])
    every = settings.trainer.checkpoint_every or CHECKPOINT_EVERY
    ours += [*overrides, f"trainer.checkpoint_every={every}", f"run.name={settings.run.name}-chaos-{seed}"]
    settings = load(path, ours)
    relayed = "distill.bench.relays" if {"cut", "malformed"} & set(kinds) else "distill.cli.main"
    command = [sys.executable, "-P", "-m", relayed, "run", str(path)]
    for override in ours:
        command += ["--set", override]
    return Patient(command, settings.run_dir, patience=PATIENCE * settings.run.start_seconds)


def mount_disk(run_dir: Path, gib: float) -> None:
    """Put the folder of a run that has not begun on a small disk; keeps that of one that goes on."""
    if not (run_dir / "journal").is_dir() and not run_dir.is_mount():
        mount(run_dir, round(gib * (1 << 20)))


def keep_run(run_dir: Path) -> None:
    """Take a run that has ended from its small disk to where the folder is."""
    if run_dir.is_mount():
        keep(run_dir)


# --- what is struck ---------------------------------------------------------------------------------------


def _targets(
    rng: random.Random, kinds: Sequence[str], roles: Sequence[str], helpers: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Without end: rounds of every kind with every target, shuffled; of alike processes one."""
    names = sorted([*roles, *helpers])
    players = sorted({kind_of(role) for role in roles})
    servers = [one for one in players if one != kind_of(TRAINER)]
    struck = {
        "kill": [*players, CONTROLLER, ALL],
        "stop": [*players, *sorted({kind_of(helper) for helper in helpers}), CONTROLLER],
        "slow": [*players, CONTROLLER],
        "cut": [*servers, CONTROLLER],
        "malformed": [one for one in servers if one != EVALUATOR],
        "disk": [DISK],
    }
    pairs = [(kind, target) for kind in KINDS if kind in kinds for target in struck[kind]]
    while True:
        rng.shuffle(pairs)
        for kind, target in pairs:
            yield kind, rng.choice([name for name in names if kind_of(name) == target] or [target])


# --- how: each strikes, waits for the recovery, and returns its seconds -----------------------------------


def _kill(patient: Patient, rng: random.Random, target: str) -> float:
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


def _stop(patient: Patient, rng: random.Random, target: str) -> float:
    """Raises DistillError when the controller, on waking, kills what did nothing."""
    if target == CONTROLLER:
        before = patient.processes()
        seconds = _passing(patient, target, lambda: patient.pause(target, PAUSE_SECONDS))
        if gone := before - patient.processes():
            raise DistillError(f"the controller was stopped for a while, and on waking it killed {gone}")
        return seconds
    patient.wait(lambda: target in [*patient.roles(), *patient.helpers()], f"a process of {target}")
    began = time.monotonic()
    patient.suspend(target, rng)
    if target == DEEPSPEED:
        patient.kill(TRAINER, rng)
    patient.wait_at_work([TRAINER if target == DEEPSPEED else target.removeprefix(ENGINE_OF)])
    return time.monotonic() - began


def _passing(patient: Patient, target: str, fault: Callable[[], None]) -> float:
    """Of a fault that costs no process: seconds from its end on."""
    roles = patient.roles()
    fault()
    began = time.monotonic()
    patient.wait_at_work([target] if target in roles else roles, anew=False)
    return time.monotonic() - began


STRIKES: dict[str, Callable[[Patient, random.Random, str], float]] = {
    "kill": _kill,
    "stop": _stop,
    "slow": lambda one, rng, target: _passing(one, target, lambda: one.slow(target, FAULT_SECONDS)),
    "cut": lambda one, rng, target: _passing(one, target, lambda: one.cut(target)),
    "malformed": lambda one, rng, target: _passing(one, target, lambda: one.spoil(target)),
    "disk": lambda one, rng, target: _passing(one, target, lambda: one.fill_disk(FAULT_SECONDS)),
}


# --- what came of it --------------------------------------------------------------------------------------


def figures(report: AuditReport, seconds: Seconds, summary: dict[str, Any]) -> dict[str, Any]:
    """What the documentation prints."""
    broken = {name: len(getattr(report, name)) for name in VIOLATIONS}
    return {
        "events": {
            kind: {
                target: {"times": len(took), "median": median(took), "max": max(took)}
                for target, took in sorted(seconds[kind].items())
            }
            for kind in KINDS
            if kind in seconds
        },
        **broken,
        "ok": report.ok,
        "trained": report.trained,
        "oldest": report.oldest,
        "weights_identical": summary.get("weights_identical"),
        "completed": summary.get("completed"),
        "steps": summary.get("steps"),
        "dropped": summary.get("tokens", {}).get("dropped"),
        "audit": asdict(report),
    }


def holds(figures: dict[str, Any]) -> bool:
    """Whether the run came through with every guarantee."""
    return bool(
        figures["ok"] and figures["completed"] and figures["weights_identical"] and not figures["orphans"]
    )


def table(figures: dict[str, Any]) -> str:
    """The figures as Markdown."""
    events = [
        (kind, target, one) for kind, targets in figures["events"].items() for target, one in targets.items()
    ]
    rows = [
        f"| {kind} | {target} | {one['times']} | {one['median']:.1f} | {one['max']:.1f} |"
        for kind, target, one in events
    ]
    facts = {
        "events": f"{sum(one['times'] for *_, one in events)} of {figures['events_asked']}",
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
    head = ["| fault | of | times | back at work, median s | max s |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows, "", *(f"{name:<18} {value}" for name, value in facts.items())])
