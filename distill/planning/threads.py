"""Threads of each role, where the cores of this machine compute a whole run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from distill.config import RunConfig
from distill.config.loading import with_settings
from distill.hardware import core, cores
from distill.metrics.summary import threads
from distill.planning.estimate import Lengths, Stage, find_roles, lengths_of, plan
from distill.preflight_checks.machine import on_cores
from distill.topology import EVALUATOR, HERE, STUDENT, TRAINER, parallel, processes
from sync.base.errors import DistillError
from sync.base.memory import threads_in
from sync.base.own_code import is_own

LEAST_WORK: Final = 1.0
"""Seconds of work a step below which a process has one thread: threads meet after every product, and those of
a small model are short."""
CROWDED: Final = 1.05
"""Times as long as all cores need for everything that a stage takes before its second thread shares a core
with others. Where none took so long, two threads for each cost a tenth (docs/benchmarks.md)."""


def decide_threads(config: RunConfig, lengths: Lengths | None = None) -> tuple[RunConfig, list[str]]:
    """With `threads` of every role that has none, and what to say of it; the objective is chosen.

    `lengths`: of sequences; None: as a plan finds them. Left alone is a run that is not planned whole on
    these cores, and every one where OMP_NUM_THREADS is set.
    """
    now = threads(config)
    missing = [role for role, count in now.items() if count is None]
    if not missing or threads_in(os.environ) or not is_planned(config):
        return config, []
    fixed = {role: count for role, count in now.items() if count is not None}
    chosen = with_settings(config, words(dict.fromkeys(missing, 1)))
    try:
        lengths = lengths or lengths_of(config, None, None)
        for _ in range(2):  # the first changes how many completions a swap meets, and so the replicas' work
            best = best_threads(chosen, plan(chosen, core(), [], lengths).stages, fixed)
            chosen = with_settings(config, words({role: best.get(role, 1) for role in missing}))
    except DistillError as error:  # which is no reason to refuse a run
        return config, [f"threads: not chosen, for the run cannot be planned: {error}"]
    counts = ", ".join(f"{role} {count}" for role, count in threads(chosen).items())
    return chosen, [f"threads on {cores()} cores: {counts}"]


def is_planned(config: RunConfig) -> bool:
    """Whether the cores of this machine compute all of a run, and a plan has all that they compute: no engine
    has several workers or is the user's, and no teacher generates."""
    here = on_cores(config) and all(process.host == HERE for process in processes(config))
    engines = [config.student.engine_args, *(teacher.engine_args for teacher in config.teachers.values())]
    known = not any(is_own(teacher.engine) for teacher in config.teachers.values())
    known &= all(parallel(arguments) == (1, 1) for arguments in engines)
    return here and known and config.objective.on_policy == 1


def best_threads(
    config: RunConfig, stages: Sequence[Stage], fixed: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Role → threads of each of its processes with which a step is fastest, of a run that is planned.

    `fixed`: role → those that it has in any case. The evaluator computes what a teacher does. A role that is
    not named computes next to nothing.
    """
    counts = {role.name: role.processes for role in find_roles(config, core(), []).values()}
    work = {stage.role: stage.seconds * stage.devices / counts[stage.role] for stage in stages}
    if config.buffer.max_staleness == 0:  # stages of one kind share all cores
        sharing = Counter[str]()
        for stage in stages:
            sharing[stage.kind] += counts[stage.role]
        shares = {stage.role: max(1, cores() // sharing[stage.kind]) for stage in stages}
        best = {role: shares[role] if work[role] >= LEAST_WORK else 1 for role in work}
    else:
        best = threads_each(work, counts, cores(), fixed or {})
    teachers = [count for role, count in best.items() if role not in (STUDENT, TRAINER)]
    return best | {EVALUATOR: max(teachers, default=1)}


def threads_each(
    work: Mapping[str, float], processes: Mapping[str, int], cores: int, fixed: Mapping[str, int]
) -> dict[str, int]:
    """Role → threads of each of its processes, one at least, with which the slowest stage is as fast as so
    many cores allow, if a stage takes as much of the processor whatever its threads.

    `work`: seconds of a process, by one thread; `fixed`: threads that stay. Where too few cores are left for
    a second thread, a stage has it if it is slower, by CROWDED, than all together on all cores.
    """
    threads = {role: fixed.get(role, 1) for role in work}
    spare = cores - sum(processes[role] * threads[role] for role in work)
    together = sum(work[role] * processes[role] for role in work) / cores
    while True:
        slowest = max(work, key=lambda role: work[role] / threads[role])
        if slowest in fixed or work[slowest] < LEAST_WORK:
            return threads
        crowds = spare < processes[slowest]
        if crowds and (threads[slowest] > 1 or work[slowest] <= CROWDED * together):
            return threads
        threads[slowest] += 1
        spare -= processes[slowest]


def words(counts: Mapping[str, int]) -> list[str]:
    """The settings of roles' threads."""
    return [f"{_section(role)}.threads={count}" for role, count in counts.items()]


def _section(role: str) -> str:
    kind, _, name = role.partition(" ")
    return f'{kind}s."{name}"' if name else {EVALUATOR: "evaluation.placement"}.get(role, role)
