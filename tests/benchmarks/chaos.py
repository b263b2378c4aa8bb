"""Inject faults of every kind into a real run at random moments, and audit what they cost.

    python -m tests.benchmarks.chaos --events 50 --seed 1

    start ─▶ (a random moment ─▶ a fault ─▶ wait for the recovery of its target) × events ─▶ end ─▶ audit

    kill        SIGKILL: a student replica, a teacher, an environment, one rank of the trainer, the evaluator,
                the controller (then the run is resumed), or all of them at once
    stop        SIGSTOP for good: a role's process, vLLM's engine where it has a process of its own, the
                deepspeed launcher (and a rank is killed, unnoticed by it); the controller for a while
    slow        a process runs for a tenth of the time, for a while: a role's, or the controller
    cut         every connection is reset: to a role's server, or to the controller from the trainer
    malformed   a stretch of an answer arrives overwritten: a replica's, a teacher's, an environment's
    disk        the disk of the run's folder is full for a while

Every kind hits every target once before any does so again, in random order. Each event is a line of
chaos.jsonl in the run's folder.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import faults
import typer
from faults import CUT, MALFORMED, keep, mount
from kill_target import CONTROLLER, DEEPSPEED, ENGINE_OF, KillTarget, kind_of

from distill import quickstart
from distill.config.loading import load
from distill.launch.placement import TRAINER
from distill.launch.roles import EVALUATOR
from distill.run_log.audit import VIOLATIONS, AuditReport, audit
from sync.base.errors import ConfigError, DistillError
from sync.base.jsonl import JsonLines
from tests.benchmarks.figures import Figures, command, markdown

KINDS = ("kill", "stop", "slow", "cut", "malformed", "disk")
ALL, DISK = "all at once", "the run's folder"
MAX_PAUSE_SECONDS = 4.0
"""Between a recovery and the next event: a random time up to this."""
HEALTH_SECONDS = 20.0
"""run.health_timeout_seconds, unless overridden: a stopped process is detected that late."""
STALL_SECONDS = 60.0
"""rollout.stall_timeout_seconds, likewise: of an engine that is stopped behind its server."""
STOP_SECONDS = 1.5 * HEALTH_SECONDS
"""Of the controller: by the clock it would take every other process for stalled."""
FAULT_SECONDS = 5.0
"""Length of a temporary fault: slowness, a full disk."""
CHECKPOINT_EVERY = 10
"""Steps, where the configuration has none: without checkpoints a killed trainer starts over."""
STEPS_PER_EVENT = 40
"""Length of the quickstart: enough that it still runs at the last event."""
TIMEOUT = 4.0
"""Times run.start_seconds that anything may take before the run counts as stalled."""
Line = dict[str, Any]


def chosen(kinds: str) -> list[str]:
    """The kinds in a list with commas. Raises ConfigError for others."""
    found = [kind.strip() for kind in kinds.split(",")]
    if unknown := [kind for kind in found if kind not in KINDS]:
        raise ConfigError(f"--kinds has {', '.join(unknown)}: choose of {','.join(KINDS)}")
    return found


def target_of(
    config: Path | None,
    overrides: Sequence[str],
    events: int,
    seed: int,
    kinds: Sequence[str],
    task: quickstart.Task = "sort_letters",
) -> KillTarget:
    """The run of a file or the quickstart's of `task`, with restarts enough. Raises ConfigError."""
    path, ours = (config, []) if config else quickstart.source(0, task)
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
    relayed = {CUT, MALFORMED} & set(kinds)
    program = [faults.__file__] if relayed else ["-m", "distill.cli.main", "run"]
    words = [sys.executable, "-P", *program, str(path)]
    words += [word for override in ours for word in ("--set", override)]
    return KillTarget(words, settings.run_dir, timeout=TIMEOUT * settings.run.start_seconds)


@contextmanager
def small_disk(run_dir: Path, gib: float) -> Iterator[None]:
    """Put the folder of a run on a small disk, and its files back in the end; 0: leave it where it is."""
    if gib:
        mount(run_dir, round(gib * (1 << 20)))
    try:
        yield
    finally:
        if gib:
            keep(run_dir)


def strike(
    target: KillTarget, events: int, seed: int, kinds: Sequence[str], report: Callable[[str], None]
) -> Figures:
    """Start the run, inject faults, let it end; figures. Raises DistillError when it does not recover."""
    rng, began = random.Random(f"{seed} moments"), time.monotonic()
    done: list[Line] = []
    with target:
        target.start()
        target.wait(lambda: target.over() or target.step() > 0, "a step")
        target.wait_at_work(target.roles())
        lines = JsonLines(target.run_dir / "chaos.jsonl")
        pairs = targets(random.Random(seed), kinds, target.roles(), target.helpers())
        for kind, hit in itertools.islice(pairs, events):
            time.sleep(rng.uniform(0.0, MAX_PAUSE_SECONDS))
            if target.over():
                break
            step = target.step()
            seconds = INJECT[kind](target, rng, hit)
            if target.over():  # whether it recovered, and for some kinds whether it was hit, was not seen
                break
            done.append({"kind": kind, "target": hit, "step": step, "seconds": seconds})
            lines.write(done[-1])
            report(
                f"{len(done):>3} of {events}, {(time.monotonic() - began) / 60:.1f} min: {kind} {hit} "
                f"at step {step}, recovered in {done[-1]['seconds']:.1f} s"
            )
        target.end()
    found = {"events_asked": events, "seconds": time.monotonic() - began, "orphans": target.orphans}
    return figures(audit(target.run_dir), done, target.summary()) | found


def targets(
    rng: random.Random, kinds: Sequence[str], roles: Sequence[str], helpers: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Rounds of every kind with every target, shuffled, without end; one of several processes of a role."""
    names = sorted([*roles, *helpers])
    processes = sorted({kind_of(role) for role in roles})
    servers = [one for one in processes if one != kind_of(TRAINER)]
    hit = {
        "kill": [*processes, CONTROLLER, ALL],
        "stop": [*processes, *sorted({kind_of(helper) for helper in helpers}), CONTROLLER],
        "slow": [*processes, CONTROLLER],
        "cut": [*servers, CONTROLLER],
        "malformed": [one for one in servers if one != EVALUATOR],
        "disk": [DISK],
    }
    pairs = [(kind, one) for kind in KINDS if kind in kinds for one in hit[kind]]
    while True:
        rng.shuffle(pairs)
        for kind, one in pairs:
            yield kind, rng.choice([name for name in names if kind_of(name) == one] or [one])


# --- faults: each is injected, waits for the recovery, and returns its seconds ---------------------------


def _kill(target: KillTarget, rng: random.Random, role: str) -> float:
    roles, began = target.roles(), time.monotonic()
    if role in (CONTROLLER, ALL):
        target.kill_launcher(everything=role == ALL)
        target.start(resume=True)
        target.wait_at_work(roles)
    else:
        target.wait(lambda: role in target.roles(), f"a process of {role}")
        target.kill(role, rng)
        target.wait_at_work([role])
    return time.monotonic() - began


def _stop(target: KillTarget, rng: random.Random, role: str) -> float:
    """Raises DistillError when the controller, continued, kills healthy processes."""
    if role == CONTROLLER:
        before = target.processes()
        seconds = _temporary(target, role, lambda: target.pause(role, STOP_SECONDS))
        if gone := before - target.processes():
            raise DistillError(f"the controller was stopped for a while, and when continued it killed {gone}")
        return seconds
    target.wait(lambda: role in [*target.roles(), *target.helpers()], f"a process of {role}")
    began = time.monotonic()
    target.suspend(role, rng)
    if role == DEEPSPEED:
        target.kill(TRAINER, rng)
    target.wait_at_work([TRAINER if role == DEEPSPEED else role.removeprefix(ENGINE_OF)])
    return time.monotonic() - began


def _temporary(target: KillTarget, role: str, fault: Callable[[], None]) -> float:
    """A fault that kills no process: seconds from its end to the recovery."""
    roles = target.roles()
    fault()
    began = time.monotonic()
    target.wait_at_work([role] if role in roles else roles, anew=False)
    return time.monotonic() - began


INJECT: dict[str, Callable[[KillTarget, random.Random, str], float]] = {
    "kill": _kill,
    "stop": _stop,
    "slow": lambda one, rng, role: _temporary(one, role, lambda: one.slow(role, FAULT_SECONDS)),
    "cut": lambda one, rng, role: _temporary(one, role, lambda: one.relay(role, CUT)),
    "malformed": lambda one, rng, role: _temporary(one, role, lambda: one.relay(role, MALFORMED)),
    "disk": lambda one, rng, role: _temporary(one, role, lambda: one.fill_disk(FAULT_SECONDS)),
}


# --- figures ----------------------------------------------------------------------------------------------


def figures(report: AuditReport, done: Sequence[Line], summary: dict[str, Any]) -> Figures:
    """Recoveries by kind and target, and what the audit found."""
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in done:
        seconds[line["kind"], kind_of(line["target"])].append(line["seconds"])
    return {
        "events": [
            {"kind": kind, "of": of, "times": len(took), "median": median(took), "max": max(took)}
            for (kind, of), took in sorted(seconds.items())
        ],
        **{name: len(report.violations.get(name, [])) for name in VIOLATIONS},
        "ok": report.ok,
        "trained": report.trained,
        "oldest": report.oldest,
        "weights_identical": summary.get("weights_identical"),
        "completed": summary.get("completed"),
    }


def holds(figures: Figures) -> bool:
    """Whether faults were injected and the run came through with every guarantee."""
    good = figures["ok"] and figures["completed"] and figures["weights_identical"]
    return bool(good and figures["events"] and not figures["orphans"])


def table(figures: Figures) -> str:
    """The figures as Markdown."""
    events = figures["events"]
    rows = [
        [one["kind"], one["of"], str(one["times"]), f"{one['median']:.1f}", f"{one['max']:.1f}"]
        for one in events
    ]
    found = {
        "events": f"{sum(one['times'] for one in events)} of {figures['events_asked']}",
        "rollouts trained": figures["trained"],
        "lost": figures["lost"],
        "trained twice": figures["trained_twice"],
        "beyond the bound": figures["too_old"],
        "otherwise wrong": sum(figures[n] for n in VIOLATIONS.keys() - {"lost", "trained_twice", "too_old"}),
        "oldest, versions": figures["oldest"],
        "orphans": figures["orphans"],
        "weights identical": figures["weights_identical"],
        "minutes": f"{figures['seconds'] / 60:.1f}",
    }
    head = ["fault", "of", "times", "recovered, median s", "max s"]
    return "\n".join([*markdown(head, rows), "", *(f"{name:<18} {value}" for name, value in found.items())])


def run(
    config: Path | None = None,
    overrides: Annotated[list[str] | None, typer.Option("--set")] = None,
    events: int = 24,
    kinds: str = ",".join(KINDS),
    task: Annotated[quickstart.Task, typer.Option()] = "sort_letters",
    seed: int = 0,
    disk_gib: float = 1.0,
) -> Figures:
    """Inject faults into the run of a file, or the quickstart's of a task. Raises DistillError for a broken
    guarantee."""
    kinds_chosen = chosen(kinds)
    target = target_of(config, overrides or [], events, seed, kinds_chosen, task)
    with small_disk(target.run_dir, disk_gib if "disk" in kinds_chosen else 0):
        struck = strike(target, events, seed, kinds_chosen, typer.echo)
    if not holds(struck):
        typer.echo(table(struck))
        raise DistillError("a guarantee was broken: see the lines above")
    return struck


if __name__ == "__main__":
    command("chaos", run, table)
