"""A real run in processes of its own: faults are injected into it, and it is observed from outside.

    start ─▶ wait_at_work ─▶ kill … wait_at_work | kill_launcher … start(resume=True) ─▶ end
                             suspend … wait_at_work | slow, relay, fill_disk … wait_at_work(anew=False)

Leaving the context kills what is left of it. Linux only: processes are found below the launcher's.

Six kinds of faults; of each is told how long the run takes until it has recovered:

kill        SIGKILL: a server, one rank of the trainer, the controller (then the run is resumed), or all of
            them at once
stop        SIGSTOP for good: a role's process, vLLM's engine where it has a process of its own, the
            deepspeed launcher (and a rank is killed, unnoticed by it); the controller for a while
slow        a process runs for a tenth of the time, for a while: a role's, or the controller
cut         every connection is reset: to a role's server, or to the controller from the trainer
malformed   a stretch of an answer arrives overwritten: a replica's, a teacher's, an environment's
disk        the disk of the run's folder is full for a while
"""

from __future__ import annotations

import itertools
import json
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from disks import fill, free
from faults import CUT, FAULTS, MALFORMED

from distill.guardian import guarded_role
from distill.launch.supervise import last_lines
from distill.topology import EVALUATOR, TRAINER
from student_trainer.launch import ranks_of
from sync.base.errors import DistillError

CONTROLLER, DEEPSPEED, ENGINE_OF = "controller", "deepspeed launcher", "engine of "
POLL_SECONDS = 0.2
SLOW_SECONDS = 0.5
"""Of a slow process, from one stop to the next."""
ORPHAN_SECONDS = 15.0
"""Time for the processes of a killed launcher to be gone; after it they are orphans."""
ALL, DISK = "all at once", "the run's folder"
HEALTH_SECONDS = 20.0
"""run.health_timeout_seconds of the run that is hit: a stopped process is detected that late."""
STOP_SECONDS = 1.5 * HEALTH_SECONDS
"""Of the controller: by the clock it would take every other process for stalled."""
FAULT_SECONDS = 5.0
"""Length of a temporary fault: slowness, a full disk."""


class KillTarget:
    """One run: `command` starts it, `command --resume` resumes it."""

    def __init__(self, command: Sequence[str], run_dir: Path, timeout: float = 300.0) -> None:
        """`timeout`: seconds that any wait may take, and the longest between two steps."""
        self.run_dir = run_dir
        self._command, self.timeout = list(command), timeout
        self._launcher: Any = None
        """Started by `start`, which comes first."""
        self._seen: set[psutil.Process] = set()
        self._dead: set[psutil.Process] = set()
        self._log = run_dir / "logs" / "launcher.log"
        self.orphans = 0
        """Processes that outlived a launcher, over all its endings so far."""
        self._steps, self._spans = Tail(run_dir / "metrics.jsonl"), Tail(run_dir / "timeline.jsonl")
        self._step = 0
        self._worked_until: dict[tuple[str, str], float] = {}
        """End of the last span of work, by role and kind."""

    def __enter__(self) -> KillTarget:
        return self

    def __exit__(self, *_: object) -> None:
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.wait()
        for process in filter(lives, self._seen):
            process.kill()

    # --- faults -------------------------------------------------------------------------------------------

    def start(self, resume: bool = False) -> None:
        """Start the launcher; its output is appended to the log."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = [*self._command, *(["--resume"] if resume else [])]
        with self._log.open("ab") as output:
            self._launcher = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    def kill(self, role: str, rng: random.Random) -> None:
        """Kill −9 the process of a role; of the trainer, one of its ranks."""
        process = rng.choice(self._role_processes()[role])
        self._note_dead(role)
        process.kill()

    def suspend(self, role: str, rng: random.Random) -> None:
        """SIGSTOP the process of a role for good, of the trainer one rank; of the deepspeed launcher all."""
        processes = self._named(role)
        self._dead |= set(processes)
        self._note_dead(role.removeprefix(ENGINE_OF))
        for process in processes if role == DEEPSPEED else [rng.choice(processes)]:
            process.suspend()

    def slow(self, role: str, seconds: float) -> None:
        """SIGSTOP and SIGCONT a role in turns, so that it runs a tenth of the time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.pause(role, 0.9 * SLOW_SECONDS)
            time.sleep(0.1 * SLOW_SECONDS)

    def pause(self, role: str, seconds: float) -> None:
        """SIGSTOP every process of a role, and SIGCONT."""
        processes = self._named(role)
        for process in processes:
            process.suspend()
        time.sleep(seconds)
        for process in filter(lives, processes):
            process.resume()

    def relay(self, role: str, fault: str) -> None:
        """Have the relay before a role's server inject a fault of `faults`; returns afterwards."""
        order = self.run_dir / FAULTS / f"{role}.{fault}"
        order.touch()
        self.wait(lambda: self.over() or not order.exists(), f"{fault} of {role}")

    def fill_disk(self, seconds: float) -> None:
        """Leave no space on the disk of the run's folder, which is its own, for so long."""
        assert self.run_dir.is_mount(), "the machine's disk is not to be filled"
        fill(self.run_dir)
        time.sleep(seconds)
        free(self.run_dir)

    def kill_launcher(self, everything: bool = False) -> None:
        """Kill −9 the launcher, which is the controller, or all processes; wait until nothing is left."""
        self._role_processes()
        self._dead |= self._seen
        self._launcher.kill()
        for process in filter(lives, list(self._seen) if everything else []):
            process.kill()
        self._launcher.wait()
        self._await_empty()

    def kill_guardian(self, role: str) -> int:
        """Kill −9 the guardian of a role; how many of the processes below it outlive it."""
        guardian = next(
            one for one in psutil.Process(self._launcher.pid).children() if guarded_role(one) == role
        )
        below = descendants(guardian.pid)
        self._dead |= below
        guardian.kill()
        return len(survivors(below))

    def below(self) -> set[psutil.Process]:
        """Every process below the launcher."""
        return descendants(self._launcher.pid)

    def signal(self, role: str, number: signal.Signals) -> None:
        """Send a signal to every process of a role."""
        for process in self._role_processes()[role]:
            process.send_signal(number)

    def wait_replaced(self, role: str) -> None:
        """Until a role that was killed has a new process, working or not."""
        self.wait(lambda: bool(set(self._role_processes().get(role, ())) - self._dead), f"another {role}")

    def resume(self, steps: int) -> None:
        """Start it again, to its end so many steps behind the last one that was reported."""
        self._command = [*self._command, "--set", f"run.steps={self.step() + steps}"]
        self.start(resume=True)

    def stop(self) -> int:
        """SIGTERM to the launcher; its exit status."""
        self._role_processes()
        self._launcher.send_signal(signal.SIGTERM)
        return self.ended()

    def end(self) -> None:
        """Wait until the run has come to its end. Raises DistillError when it fails."""
        if (status := self.ended()) != 0:
            raise DistillError(f"the run ended with status {status}; {self._log_end()}")

    def ended(self) -> int:
        """Wait for the launcher; its exit status. Raises DistillError when no step is made for too long."""
        step, deadline = self.step(), time.monotonic() + self.timeout
        while (status := self._launcher.poll()) is None:
            if (now := self.step()) != step:
                step, deadline = now, time.monotonic() + self.timeout
            if time.monotonic() > deadline:
                raise DistillError(f"the run does not end; {self._log_end()}")
            self._role_processes()
            time.sleep(POLL_SECONDS)
        self._await_empty()
        return status

    # --- observation --------------------------------------------------------------------------------------

    def roles(self) -> list[str]:
        """Roles that have a process now, such as "student-0"; workers of rewards are no role."""
        return sorted(self._role_processes().keys() - {"rewards"})

    def helpers(self) -> list[str]:
        """What else has a process now: DEEPSPEED, "engine of student-0"."""
        return sorted(helper_processes(self._launcher.pid))

    def processes(self) -> set[psutil.Process]:
        """Of all roles, now."""
        return {process for processes in self._role_processes().values() for process in processes}

    def over(self) -> bool:
        """Whether it has ended well, or is about to: all steps are done."""
        return self._launcher.poll() == 0 or (self.run_dir / "final").is_dir()

    def step(self) -> int:
        """Optimizer step that was reported last; 0: none."""
        for line in self._steps.new():
            self._step = int(line["step"]) if "perf/train_seconds" in line else self._step
        return self._step

    def summary(self) -> dict[str, Any]:
        """summary.json"""
        return dict(json.loads((self.run_dir / "summary.json").read_text()))

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Until the condition holds, or the run is over. Raises DistillError when that takes too long."""
        deadline = time.monotonic() + self.timeout
        while not condition():
            if (status := self._launcher.poll()) == 0:
                return
            if status is not None or time.monotonic() > deadline:
                why = "is not there in time" if status is None else f"cannot come: it ended with {status}"
                raise DistillError(f"{what} {why}; {self._log_end()}")
            time.sleep(POLL_SECONDS)

    def wait_at_work(self, roles: Iterable[str], anew: bool = True) -> None:
        """Until every one of these roles has done work from now on; `anew`: with a new process."""
        since = {} if anew else dict.fromkeys(roles, time.time())

        def all_work() -> bool:
            processes = self._role_processes()
            for role in roles:
                if set(processes.get(role, ())) - self._dead:
                    since.setdefault(role, time.time())
            return all(role in since and self._worked(role, since[role], processes) for role in roles)

        self.wait(lambda: self.over() or all_work(), f"work of {', '.join(roles)}")

    def _worked(self, role: str, since: float, processes: dict[str, list[psutil.Process]]) -> bool:
        if role == EVALUATOR:
            return any(_healthy(process) for process in processes.get(role, ()))
        for span in self._spans.new():
            self._worked_until[span["role"], span["what"]] = span["end"]
        names = {role}
        if kind_of(role) in ("teacher", "environment"):
            whole = role.replace("-", " ", 1)
            names = {whole, re.sub(r"-\d+$", "", whole)}  # the timeline does not tell its processes apart
        only = {"trainer rank": "train", "teacher": "score"}.get(kind_of(role))
        return any(
            end > since
            for (who, what), end in self._worked_until.items()
            if who in names and only in (None, what)
        )

    def _role_processes(self) -> dict[str, list[psutil.Process]]:
        self._seen |= descendants(self._launcher.pid)
        return role_processes(self._launcher.pid)

    def _note_dead(self, role: str) -> None:
        """What is below a server too: when the server dies first, its guardian becomes the parent."""
        for process in self._role_processes().get(role, []):
            self._dead |= {process, *descendants(process.pid)}

    def _named(self, role: str) -> list[psutil.Process]:
        """Processes of a role, of a helper, or the launcher, which is the controller."""
        launcher = psutil.Process(self._launcher.pid)
        return {**self._role_processes(), **helper_processes(launcher.pid), CONTROLLER: [launcher]}[role]

    def _await_empty(self) -> None:
        """Count the processes that outlive the launcher."""
        self._seen = survivors(self._seen)
        self.orphans += len(self._seen)

    def _log_end(self) -> str:
        return f"the end of {self._log}:\n" + "\n".join(last_lines(self._log))


class Tail:
    """New lines of a JSONL file that grows; a file that is not there yet has none."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def new(self) -> list[dict[str, Any]]:
        """Whole lines since the last call; a line that is being written waits for the next one."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def kind_of(role: str) -> str:
    """ "student" of "student-0"; roles of one kind are alike."""
    return "trainer rank" if role == TRAINER else role.split("-")[0]


# --- kinds of faults --------------------------------------------------------------------------------------


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


# --- processes of a run, by the launcher's process id ------------------------------------------------------


def role_processes(launcher: int) -> dict[str, list[psutil.Process]]:
    """Role → the processes that do its work, the server or the trainer's ranks; only roles that have one."""
    found = {}
    for guardian in descendants(launcher, recursive=False):
        name = guarded_role(guardian)
        if name is not None:
            working = (
                ranks_of(guardian.pid) if name == TRAINER else descendants(guardian.pid, recursive=False)
            )
            found[name] = [process for process in working if lives(process)]
    return {name: processes for name, processes in found.items() if processes}


def helper_processes(launcher: int) -> dict[str, list[psutil.Process]]:
    """Name → processes that play no role and without which one is not played: the deepspeed launcher's, and
    "engine of ROLE" where vLLM's engine has a process of its own; only those that are there."""
    found: dict[str, list[psutil.Process]] = {}
    for guardian in descendants(launcher, recursive=False):
        role, below = guarded_role(guardian), descendants(guardian.pid)
        if role == TRAINER:
            ranks = set(ranks_of(guardian.pid))
            found[DEEPSPEED] = [process for process in below - ranks if lives(process)]
        elif role is not None:
            found[ENGINE_OF + role] = [process for process in below if _is_engine(process)]
    return {name: processes for name, processes in found.items() if processes}


def processor_seconds(launcher: int) -> dict[str, np.ndarray]:
    """Role → seconds in user mode and in the kernel, [2], of all its processes that live; "others": of what
    has no guardian."""
    families = {CONTROLLER: {psutil.Process(launcher)}}
    for guardian in descendants(launcher, recursive=False):
        role = guarded_role(guardian)
        families[role or "others"] = descendants(guardian.pid) if role else {guardian}
    taken = {}
    for role, family in families.items():
        with suppress(psutil.Error):  # one has ended meanwhile
            taken[role] = np.sum([(0.0, 0.0), *(process.cpu_times()[:2] for process in family)], axis=0)
    return taken


def descendants(launcher: int, recursive: bool = True) -> set[psutil.Process]:
    """Every process below the launcher; not `recursive`: its children."""
    try:
        return set(psutil.Process(launcher).children(recursive=recursive))
    except psutil.NoSuchProcess:
        return set()


def lives(process: psutil.Process) -> bool:
    """Whether it runs: neither gone nor waiting to be collected."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _is_engine(process: psutil.Process) -> bool:
    try:
        return any("EngineCore" in word for word in process.cmdline())
    except psutil.Error:
        return False


def survivors(processes: set[psutil.Process]) -> set[psutil.Process]:
    """Those that still live after ORPHAN_SECONDS."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while any(map(lives, processes)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return set(filter(lives, processes))


def _healthy(process: psutil.Process) -> bool:
    """Whether a server of this machine is healthy; its guardian's command line has the address."""
    try:
        line = psutil.Process(process.ppid()).cmdline()
        address = f"http://{line[line.index('--host') + 1]}:{line[line.index('--port') + 1]}/health"
        return httpx.get(address, timeout=2.0, trust_env=False).status_code == 200
    except (psutil.Error, httpx.HTTPError, ValueError):
        return False
