"""Threads of each role, where the cores of this machine compute a whole run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

from distill.config import RunConfig
from distill.config.loading import with_settings
from distill.hardware import core
from distill.metrics.summary import threads
from distill.planning.estimate import REPLICAS, Role, Stage, find_roles, lengths_of, plan
from distill.preflight_checks.machine import on_cores
from distill.topology import EVALUATOR, TRAINER, processes
from student_trainer.launch import machines
from sync.base.memory import THREADS
from sync.base.own_code import is_own

LEAST_WORK: Final = 1.0
"""Seconds of work a step below which a process has one thread: threads meet after every product, and those of
a small model are short."""
CROWDED: Final = 1.05
"""Times as long as all cores need for everything that a stage takes before its second thread shares a core
with others. Two threads for each cost up to 20 % where none takes so long (docs/benchmarks.md)."""


def decide_threads(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """With `threads` of every role that has none, and what to say of it.

    Of a run whose objective is chosen. Left alone are runs that other machines or GPUs compute too, and all
    of them where OMP_NUM_THREADS is set. Raises ConfigError or DataError.
    """
    missing = [role for role, count in threads(config).items() if count is None]
    if not missing or THREADS in os.environ or not on_cores(config) or not is_here(config):
        return config, []
    lengths, chosen = lengths_of(config, None, None), with_settings(config, words(dict.fromkeys(missing, 1)))
    for _ in range(2):  # the first changes how many completions a swap meets, and so the replicas' work
        best = best_threads(chosen, plan(chosen, core(), [], lengths).stages)
        chosen = with_settings(config, words({role: best.get(role, 1) for role in missing}))
    counts = ", ".join(f"{role} {count}" for role, count in threads(chosen).items())
    return chosen, [f"threads on {cores()} cores: {counts}"]


def is_here(config: RunConfig) -> bool:
    """Whether this machine starts all processes of a run, and all that compute are known by their models."""
    others = config.controller.trainer == "external" or machines(config.trainer) > 1
    others |= any(process.url for process in processes(config))
    return not others and not any(is_own(teacher.engine) for teacher in config.teachers.values())


def best_threads(config: RunConfig, stages: Sequence[Stage]) -> dict[str, int]:
    """Role → threads of each of its processes with which a step of a run that is here is fastest.

    One stage after the other, each has all cores. The evaluator computes what a teacher does. A role that is
    not named computes next to nothing.
    """
    roles = find_roles(config, core(), [])
    if config.buffer.max_staleness == 0:
        work = processor_seconds(stages, roles)
        shares = {role: max(1, cores() // roles[role].processes) for role in work}
        best = {role: shares[role] if work[role] >= LEAST_WORK else 1 for role in work}
    else:
        best = threads_each(stages, roles, cores())
    best = {"student" if role == REPLICAS else role: count for role, count in best.items()}
    teachers = [count for role, count in best.items() if role not in ("student", TRAINER)]
    return best | {EVALUATOR: max(teachers, default=1)}


def threads_each(stages: Sequence[Stage], roles: Mapping[str, Role], cores: int) -> dict[str, int]:
    """Role → threads of each of its processes, one at least, with which the slowest stage is as fast as so
    many cores allow, if a stage takes as much of the processor whatever its threads.

    Where too few cores are left for a second, it has that if it is slower, by CROWDED, than all together on
    all cores.
    """
    work = processor_seconds(stages, roles)
    threads = dict.fromkeys(work, 1)
    spare = cores - sum(roles[role].processes for role in work)
    together = sum(stage.seconds * stage.devices for stage in stages) / cores
    while True:
        slowest = max(work, key=lambda role: work[role] / threads[role])
        taken = roles[slowest].processes
        if work[slowest] < LEAST_WORK:
            return threads
        if spare < taken and (threads[slowest] > 1 or work[slowest] <= CROWDED * together):
            return threads
        threads[slowest] += 1
        spare -= taken


def processor_seconds(stages: Sequence[Stage], roles: Mapping[str, Role]) -> dict[str, float]:
    """Role → what each of its processes computes in a step, by one thread."""
    return {stage.role: stage.seconds * stage.devices / roles[stage.role].processes for stage in stages}


def words(counts: Mapping[str, int]) -> list[str]:
    """The settings of roles' threads."""
    return [f"{_section(role)}.threads={count}" for role, count in counts.items()]


def _section(role: str) -> str:
    kind, _, name = role.partition(" ")
    return f'{kind}s."{name}"' if name else {EVALUATOR: "evaluation.placement"}.get(role, role)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
