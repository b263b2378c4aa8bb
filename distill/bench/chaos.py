"""Inject faults of every kind into a real run at random moments, and audit what they cost.

    distill chaos --events 50 --seed 1

    start ─▶ (a random moment ─▶ a fault ─▶ wait for the recovery of its target) × events ─▶ end ─▶ audit

    kill        SIGKILL: a student replica, a teacher, one rank of the trainer, the evaluator, the controller
                (then the run is resumed), or all of them at once
    stop        SIGSTOP for good: a role's process, vLLM's engine where it has a process of its own, the
                deepspeed launcher (and a rank is killed, unnoticed by it); the controller for a while
    slow        a process runs for a tenth of the time, for a while: a role's, or the controller
    cut         every connection is reset: to a role's server, or to the controller from the trainer
    malformed   a stretch of an answer arrives overwritten: a replica's, or a teacher's
    disk        the disk of the run's folder is full for a while

Every kind hits every target once before any does so again, in random order. Each event is a line of
chaos.jsonl in the run's folder. The same command given again, after this program was stopped, resumes with
the next one; of a run that has ended it prints the figures again.
"""

from __future__ import annotations

import itertools
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
from distill.bench.faults import keep, mount
from distill.bench.kill_target import CONTROLLER, KillTarget, kind_of
from distill.bench.process_tree import DEEPSPEED, ENGINE_OF
from distill.bench.runner import Figures, markdown
from distill.launch.roles import EVALUATOR, TRAINER
from distill.loading import load
from distill.run_log.audit import VIOLATIONS, AuditReport, audit
from sync.errors import ConfigError, DistillError
from sync.jsonl import JsonLines, read_lines

KINDS = ("kill", "stop", "slow", "cut", "malformed", "disk")
ALL, DISK = "all at once", "the run's folder"
MAX_PAUSE_SECONDS = 4.0
"""Between a recovery and the next event: a random time up to this."""
HEALTH_SECONDS = 20.0
"""run.health_timeout_seconds, unless overridden: a stopped process is detected that late."""
STALL_SECONDS = 60.0
"""rollout.stall_timeout_seconds, likewise: of an engine that is stopped behind its server."""
STOP_SECONDS = 1.5 * HEALTH_SECONDS
"""Of the controller: by the clock it would take every other process for hung."""
FAULT_SECONDS = 5.0
"""Length of a temporary fault: slowness, a full disk."""
CHECKPOINT_EVERY = 10
"""Steps, where the configuration has none: without checkpoints a killed trainer starts over."""
STEPS_PER_EVENT = 40
"""Length of the quickstart: enough that it still runs at the last event."""
TIMEOUT = 4.0
"""Times run.start_seconds that anything may take before the run counts as stuck."""
_OTHERWISE = VIOLATIONS.keys() - {"lost", "trained_twice", "too_old"}
Seconds = dict[str, dict[str, list[float]]]
"""Kind → target's kind → seconds of every recovery."""


def run(
    kill_target: KillTarget,
    events: int,
    seed: int,
    kinds: Sequence[str] = KINDS,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Start or resume the run, inject faults until there were `events`, let it end; figures.

    Raises DistillError when it does not recover.
    """
    rng, path = random.Random(f"{seed} moments"), kill_target.run_dir / "chaos.jsonl"
    done = read_lines(path)
    before, left = (done[-1]["elapsed"], done[-1]["orphans"]) if done else (0.0, 0)
    began = time.monotonic()
    with kill_target:
        newest = kill_target.step()
        kill_target.start(resume=(kill_target.run_dir / "journal").is_dir())
        kill_target.wait(lambda: kill_target.over() or kill_target.step() > newest, "a step")
        kill_target.wait_at_work(kill_target.roles())
        targets = _targets(random.Random(seed), kinds, kill_target.roles(), kill_target.helpers())
        left_over = itertools.islice(targets, len(done), events)
        for number, (kind, target) in enumerate(left_over, len(done) + 1):
            time.sleep(rng.uniform(0.0, MAX_PAUSE_SECONDS))
            if kill_target.over():
                break
            step, took = kill_target.step(), INJECT[kind](kill_target, rng, target)
            elapsed, orphans = before + time.monotonic() - began, left + kill_target.orphans()
            event = {"kind": kind, "target": target, "step": step, "seconds": took}
            done.append({**event, "elapsed": elapsed, "orphans": orphans})
            _append(path, done[-1])
            report(
                f"{number:>3} of {events}, {elapsed / 60:.1f} min: {kind} {target} at step {step}, "
                f"at work after {took:.1f} s"
            )
        kill_target.end()
    seconds: Seconds = defaultdict(lambda: defaultdict(list))
    for line in done:
        seconds[line["kind"]][kind_of(line["target"])].append(line["seconds"])
    return figures(audit(kill_target.run_dir), seconds, kill_target.summary()) | {
        "events_asked": events,
        "seed": seed,
        "orphans": left + kill_target.orphans(),
        "seconds": before + time.monotonic() - began,
    }


def _append(path: Path, line: dict[str, Any]) -> None:
    lines = JsonLines(path)
    lines.write(line)
    lines.close()


def chosen(kinds: str) -> list[str]:
    """The kinds in a list with commas. Raises ConfigError for others."""
    found = [kind.strip() for kind in kinds.split(",")]
    if unknown := [kind for kind in found if kind not in KINDS]:
        raise ConfigError(f"--kinds has {', '.join(unknown)}: choose of {','.join(KINDS)}")
    return found


def kill_target(
    config: Path | None, overrides: Sequence[str], events: int, seed: int, kinds: Sequence[str] = KINDS
) -> KillTarget:
    """The run of a file or the quickstart's, with restarts enough. Raises ConfigError."""
    path, ours = (config, []) if config else quickstart.source(0)
    if config is None:
        ours.append(f"run.steps={STEPS_PER_EVENT * events}")
    ours += [
        f"run.restarts={2 * events + 10}",
        f"run.health_timeout_seconds={HEALTH_SECONDS}",
        f"rollout.stall_timeout_seconds={STALL_SECONDS}",
        "run.min_free_disk_gib=0",
        "tracking.wandb=disabled",
        *overrides,
    ]
    settings = load(path, ours)
    every = settings.trainer.checkpoint_every or CHECKPOINT_EVERY
    ours += [f"trainer.checkpoint_every={every}", f"run.name={settings.run.name}-chaos-{seed}"]
    settings = load(path, ours)
    relayed = "distill.bench.faults" if {"cut", "malformed"} & set(kinds) else "distill.cli.main"
    command = [sys.executable, "-P", "-m", relayed, "run", str(path)]
    command += [word for override in ours for word in ("--set", override)]
    return KillTarget(command, settings.run_dir, timeout=TIMEOUT * settings.run.start_seconds)


def mount_disk(run_dir: Path, gib: float) -> None:
    """Put the folder of a run that has not begun on a small disk; keep that of one to resume."""
    if not (run_dir / "journal").is_dir() and not run_dir.is_mount():
        mount(run_dir, round(gib * (1 << 20)))


def keep_run(run_dir: Path) -> None:
    """Copy a run that has ended from its small disk to where the folder is."""
    if run_dir.is_mount():
        keep(run_dir)


# --- targets -----------------------------------------------------------------------------------------------


def _targets(
    rng: random.Random, kinds: Sequence[str], roles: Sequence[str], helpers: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Rounds of every kind with every target, shuffled, without end; one of several processes of a role."""
    names = sorted([*roles, *helpers])
    role_processes = sorted({kind_of(role) for role in roles})
    servers = [one for one in role_processes if one != kind_of(TRAINER)]
    targets = {
        "kill": [*role_processes, CONTROLLER, ALL],
        "stop": [*role_processes, *sorted({kind_of(helper) for helper in helpers}), CONTROLLER],
        "slow": [*role_processes, CONTROLLER],
        "cut": [*servers, CONTROLLER],
        "malformed": [one for one in servers if one != EVALUATOR],
        "disk": [DISK],
    }
    pairs = [(kind, target) for kind in KINDS if kind in kinds for target in targets[kind]]
    while True:
        rng.shuffle(pairs)
        for kind, target in pairs:
            yield kind, rng.choice([name for name in names if kind_of(name) == target] or [target])


# --- faults: each is injected, waits for the recovery, and returns its seconds ---------------------------


def _kill(kill_target: KillTarget, rng: random.Random, target: str) -> float:
    roles, began = kill_target.roles(), time.monotonic()
    if target in (CONTROLLER, ALL):
        kill_target.kill_launcher(everything=target == ALL)
        kill_target.start(resume=True)
        kill_target.wait_at_work(roles)
    else:
        kill_target.wait(lambda: target in kill_target.roles(), f"a process of {target}")
        kill_target.kill(target, rng)
        kill_target.wait_at_work([target])
    return time.monotonic() - began


def _stop(kill_target: KillTarget, rng: random.Random, target: str) -> float:
    """Raises DistillError when the controller, continued, kills healthy processes."""
    if target == CONTROLLER:
        before = kill_target.processes()
        seconds = _temporary(kill_target, target, lambda: kill_target.pause(target, STOP_SECONDS))
        if gone := before - kill_target.processes():
            raise DistillError(f"the controller was stopped for a while, and when continued it killed {gone}")
        return seconds
    kill_target.wait(
        lambda: target in [*kill_target.roles(), *kill_target.helpers()], f"a process of {target}"
    )
    began = time.monotonic()
    kill_target.suspend(target, rng)
    if target == DEEPSPEED:
        kill_target.kill(TRAINER, rng)
    kill_target.wait_at_work([TRAINER if target == DEEPSPEED else target.removeprefix(ENGINE_OF)])
    return time.monotonic() - began


def _temporary(kill_target: KillTarget, target: str, fault: Callable[[], None]) -> float:
    """A fault that kills no process: seconds from its end to the recovery."""
    roles = kill_target.roles()
    fault()
    began = time.monotonic()
    kill_target.wait_at_work([target] if target in roles else roles, anew=False)
    return time.monotonic() - began


INJECT: dict[str, Callable[[KillTarget, random.Random, str], float]] = {
    "kill": _kill,
    "stop": _stop,
    "slow": lambda one, rng, target: _temporary(one, target, lambda: one.slow(target, FAULT_SECONDS)),
    "cut": lambda one, rng, target: _temporary(one, target, lambda: one.cut(target)),
    "malformed": lambda one, rng, target: _temporary(one, target, lambda: one.malform(target)),
    "disk": lambda one, rng, target: _temporary(one, target, lambda: one.fill_disk(FAULT_SECONDS)),
}


# --- figures ----------------------------------------------------------------------------------------------


def figures(report: AuditReport, seconds: Seconds, summary: dict[str, Any]) -> Figures:
    """What the documentation prints."""
    broken = {name: len(report.violations.get(name, [])) for name in VIOLATIONS}
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
        [kind, target, str(one["times"]), f"{one['median']:.1f}", f"{one['max']:.1f}"]
        for kind, target, one in events
    ]
    found = {
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
    head = ["fault", "of", "times", "back at work, median s", "max s"]
    return "\n".join([*markdown(head, rows), "", *(f"{name:<18} {value}" for name, value in found.items())])
