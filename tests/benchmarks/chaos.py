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

The kinds come in turns, and each hits every target of its own once before any does so again, in random order.
Each event is a line of chaos.jsonl in the run's folder.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Annotated, Any

import faults
import typer
from faults import CUT, MALFORMED, keep, mount
from kill_target import CONTROLLER, DEEPSPEED, ENGINE_OF, KillTarget, kind_of

from distill import quickstart
from distill.config.loading import load
from distill.record.audit import VIOLATIONS, audit
from distill.topology import EVALUATOR, TRAINER
from sync.base.errors import ConfigError, DistillError
from sync.base.jsonl import JsonLines
from tests.benchmarks.figures import Figures, cell, chosen, command, command_line, listing

ALL, DISK = "all at once", "the run's folder"
MAX_PAUSE_SECONDS = 4.0
"""Between a recovery and the next event: a random time up to this."""
HEALTH_SECONDS = 20.0
"""run.health_timeout_seconds: a stopped process is detected that late."""
STALL_SECONDS = 60.0
"""rollout.stall_timeout_seconds, likewise: of an engine that is stopped behind its server."""
STOP_SECONDS = 1.5 * HEALTH_SECONDS
"""Of the controller: by the clock it would take every other process for stalled."""
FAULT_SECONDS = 5.0
"""Length of a temporary fault: slowness, a full disk."""
CHECKPOINT_EVERY = 10
"""Steps: without checkpoints a killed trainer starts over."""
STEPS_PER_EVENT = 40
"""Length of the quickstart: enough that it still runs at the last event."""
TIMEOUT = 4.0
"""Times run.start_seconds that anything may take before the run counts as stalled."""


def target_of(events: int, seed: int, kinds: Sequence[str], task: quickstart.Task) -> KillTarget:
    """The quickstart of a task, with steps and restarts enough. Raises ConfigError."""
    path, settings = quickstart.source(0, task)
    settings += [
        f"run.steps={STEPS_PER_EVENT * events}",
        f"run.restarts={2 * events + 10}",
        f"run.health_timeout_seconds={HEALTH_SECONDS}",
        f"rollout.stall_timeout_seconds={STALL_SECONDS}",
        "run.min_free_disk_gib=0",
        "tracking.wandb=disabled",
        f"trainer.checkpoint_every={CHECKPOINT_EVERY}",
    ]
    settings.append(f"run.name={load(path, settings).run.name}-chaos-{seed}")
    config = load(path, settings)
    if config.run_dir.exists():
        raise ConfigError(f"{config.run_dir} is there: remove it, or take another --seed")
    relayed = {CUT, MALFORMED} & set(kinds)
    words = command_line(path, settings, [faults.__file__]) if relayed else command_line(path, settings)
    return KillTarget(words, config.run_dir, timeout=TIMEOUT * config.run.start_seconds)


def strike(target: KillTarget, events: int, seed: int, kinds: Sequence[str]) -> Figures:
    """Start the run, inject faults, let it end; figures. Raises DistillError when it does not recover."""
    rng, began = random.Random(f"{seed} moments"), time.monotonic()
    done: list[dict[str, Any]] = []
    with target:
        target.start()
        target.wait(lambda: target.over() or target.step() > 0, "a step")
        target.wait_at_work(target.roles())
        lines = JsonLines(target.run_dir / "chaos.jsonl")
        pairs = targets(random.Random(seed), kinds, target.roles(), target.helpers())
        for kind, name in itertools.islice(pairs, events):
            time.sleep(rng.uniform(0.0, MAX_PAUSE_SECONDS))
            if target.over():
                break
            step = target.step()
            seconds = INJECT[kind](target, rng, name)
            if target.over():  # whether it recovered, and for some kinds whether it was hit, was not seen
                break
            done.append({"kind": kind, "target": name, "step": step, "seconds": seconds})
            lines.write(done[-1])
            typer.echo(
                f"{len(done):>3} of {events}, {(time.monotonic() - began) / 60:.1f} min: {kind} {name} "
                f"at step {step}, recovered in {seconds:.1f} s"
            )
        target.end()
    took: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in done:
        took[line["kind"], kind_of(line["target"])].append(line["seconds"])
    report, summary = audit(target.run_dir), target.summary()
    return {
        "events_asked": events,
        "events": [
            {"fault": kind, "of": of, "times": len(seconds)}
            | {"recovered, median s": median(seconds), "max s": max(seconds)}
            for (kind, of), seconds in sorted(took.items())
        ],
        "minutes": (time.monotonic() - began) / 60,
        "orphans": target.orphans,
        **{name: len(report.violations.get(name, [])) for name in VIOLATIONS},
        "ok": report.ok,
        "trained": report.trained,
        "oldest": report.oldest,
        "weights_identical": summary.get("weights_identical"),
        "completed": summary.get("completed"),
    }


def targets(
    rng: random.Random, kinds: Sequence[str], roles: Sequence[str], helpers: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Rounds of all kinds, without end, each with the next of its targets; of several processes any one."""
    names = sorted([*roles, *helpers])
    processes = sorted({kind_of(role) for role in roles})
    servers = [process for process in processes if process != kind_of(TRAINER)]
    hit = {
        "kill": [*processes, CONTROLLER, ALL],
        "stop": [*processes, *sorted({kind_of(helper) for helper in helpers}), CONTROLLER],
        "slow": [*processes, CONTROLLER],
        "cut": [*servers, CONTROLLER],
        "malformed": [server for server in servers if server != EVALUATOR],
        "disk": [DISK],
    }
    turns = [itertools.cycle([(kind, of) for of in rng.sample(hit[kind], len(hit[kind]))]) for kind in kinds]
    while True:
        for turn in rng.sample(turns, len(turns)):
            kind, of = next(turn)
            yield kind, rng.choice([name for name in names if kind_of(name) == of] or [of])


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
    "slow": lambda run, _, role: _temporary(run, role, lambda: run.slow(role, FAULT_SECONDS)),
    "cut": lambda run, _, role: _temporary(run, role, lambda: run.relay(role, CUT)),
    "malformed": lambda run, _, role: _temporary(run, role, lambda: run.relay(role, MALFORMED)),
    "disk": lambda run, _, role: _temporary(run, role, lambda: run.fill_disk(FAULT_SECONDS)),
}


# --- figures ----------------------------------------------------------------------------------------------


def table(figures: Figures) -> str:
    """The figures as Markdown."""
    totals = {name: value for name, value in figures.items() if name != "events"}
    events = listing(figures["events"]) if figures["events"] else []
    return "\n".join([*events, "", *(f"{name:<18} {cell(value)}" for name, value in totals.items())])


def run(
    events: Annotated[int, typer.Option(min=1, help="Faults to inject.")] = 24,
    kinds: Annotated[str, typer.Option(help="Kinds of faults, with commas.")] = ",".join(INJECT),
    task: Annotated[quickstart.Task, typer.Option(help="Of the quickstart.")] = "sort_letters",
    seed: Annotated[int, typer.Option(help="Of moments and targets.")] = 0,
    disk_gib: Annotated[float, typer.Option(min=0.01, help="Size of the disk that is filled.")] = 1.0,
) -> Figures:
    """Inject faults into a run at random moments, let it end, and audit it; exit 1 for a broken guarantee."""
    asked = chosen("--kinds", kinds, INJECT)
    target = target_of(events, seed, asked, task)
    if "disk" not in asked:
        return strike(target, events, seed, asked)
    mount(target.run_dir, round(disk_gib * (1 << 20)))
    try:
        return strike(target, events, seed, asked)
    finally:
        keep(target.run_dir)


def problem(figures: Figures) -> str:
    sound = figures["ok"] and figures["completed"] and figures["weights_identical"]
    if sound and figures["events"] and not figures["orphans"]:
        return ""
    return "a guarantee was broken, or no fault was injected: see the lines above"


if __name__ == "__main__":
    command(run, table, problem)
