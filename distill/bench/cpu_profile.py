"""A run as a user starts it, watched from outside: how much processor time each role has used, and when.

Processor seconds say what work costs even when other programs share the machine; wall time does not.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import psutil

from distill.bench.process_tree import descendants, role_processes
from sync.errors import DistillError

CONTROLLER = "controller"
SAMPLE_SECONDS = 0.5
LOOK_AGAIN = 10
"""Samples between two looks for processes: looking costs more than reading their clocks."""


@dataclass(frozen=True)
class Watched:
    """What was seen of one process tree."""

    times: list[float] = field(default_factory=list)
    """Of the samples; seconds since the epoch."""
    used: dict[str, list[float]] = field(default_factory=dict)
    """Processor seconds used up to each sample, by role; 0 while a role has no process yet."""
    machine: list[float] = field(default_factory=list)
    """Processor seconds used up to each sample by everything on this machine."""

    def seconds(self, began: float, ended: float) -> dict[str, float]:
        """Processor seconds of every role between two moments."""
        return {role: _between(self.times, used, began, ended) for role, used in self.used.items()}

    def machine_seconds(self, began: float, ended: float) -> float:
        """Processor seconds of the whole machine between two moments."""
        return _between(self.times, self.machine, began, ended)


def _between(times: Sequence[float], used: Sequence[float], began: float, ended: float) -> float:
    at = np.interp([began, ended], times, used) if times else np.zeros(2)
    return float(at[1] - at[0])


def run(arguments: Sequence[str]) -> Watched:
    """Run `distill` with `arguments` to its end. Raises DistillError with what it said when it fails."""
    command = [sys.executable, "-P", "-m", "distill.cli.main", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found, done = Watched(), threading.Event()
    watcher = threading.Thread(target=_watch, args=(process.pid, found, done))
    watcher.start()
    try:
        said, _ = process.communicate()
    finally:
        done.set()
        watcher.join()
        process.kill()
        process.wait()
    if process.returncode != 0:
        raise DistillError(f"distill {' '.join(arguments)} ended with {process.returncode}:\n{said[-2000:]}")
    return found


def _watch(pid: int, found: Watched, done: threading.Event) -> None:
    actors: dict[str, list[psutil.Process]] = {}
    while not done.wait(SAMPLE_SECONDS):
        if len(found.times) % LOOK_AGAIN == 0:
            actors = _actors(pid)
        found.times.append(time.time())
        found.machine.append(busy_seconds())
        for role, processes in actors.items():
            used = found.used.setdefault(role, [0.0] * (len(found.times) - 1))
            used.append(max([sum(map(_used, processes)), *used[-1:]]))
        for used in found.used.values():
            used += used[-1:] * (len(found.times) - len(used))


def _actors(pid: int) -> dict[str, list[psutil.Process]]:
    """Processes of every role, with those that they started themselves, such as an engine's core."""
    try:
        found = {CONTROLLER: [psutil.Process(pid)]}
    except psutil.NoSuchProcess:
        return {}
    for role, processes in role_processes(pid).items():
        found[role] = [*processes, *(child for one in processes for child in descendants(one.pid))]
    return found


def _used(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def busy_seconds() -> float:
    """Processor seconds that this machine has worked since it was started."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "steal", 0.0))
