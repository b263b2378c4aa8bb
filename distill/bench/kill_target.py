"""A real run in processes of its own that can be killed, resumed and looked at from outside.

    start ─▶ wait_at_work ─▶ kill … wait_at_work | kill_launcher … start(resume=True) | stop ─▶ end
                             suspend … wait_at_work | slow, cut, spoil, fill_disk … wait_at_work(since)

Leaving the context kills what is left of it. Linux only: processes are found below the launcher's.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from distill.bench.full_disk import fill, free
from distill.bench.process_tree import (
    DEEPSPEED,
    ENGINE_OF,
    descendants,
    helpers,
    lives,
    role_processes,
)
from distill.bench.relays import CUT, FAULTS, MALFORMED
from distill.launch.guardian import guarded_role
from distill.launch.roles import EVALUATOR, TRAINER
from distill.launch.supervise import last_lines
from sync.errors import DistillError

CONTROLLER = "controller"
POLL_SECONDS = 0.2
SLOW_SECONDS = 0.5
"""Of a slow process, from one stop to the next."""
ORPHAN_SECONDS = 15.0
"""Time for the processes of a killed launcher to be gone; after it they are orphans."""


class KillTarget:
    """One run: `command` starts it, with --resume put behind it goes on."""

    def __init__(self, command: Sequence[str], run_dir: Path, patience: float = 300.0) -> None:
        """`patience`: seconds that anything waited for may take, and the longest between two steps."""
        self.run_dir = run_dir
        self._command, self._patience = list(command), patience
        self._launcher: subprocess.Popen[bytes] | None = None
        self._seen: set[psutil.Process] = set()
        self._dead: set[psutil.Process] = set()
        self._log = run_dir / "logs" / "launcher.log"
        self._orphans = 0
        self._steps, self._spans = Tail(run_dir / "metrics.jsonl"), Tail(run_dir / "timeline.jsonl")
        self._step = 0
        self._worked_until: dict[tuple[str, str], float] = {}
        """End of the last span of work, by role and kind."""

    def __enter__(self) -> KillTarget:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.wait()
        for process in filter(lives, self._seen):
            process.kill()

    # --- what is done to it -------------------------------------------------------------------------------

    def start(self, resume: bool = False) -> None:
        """Start the launcher, its output behind the earlier one's."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = [*self._command, *(["--resume"] if resume else [])]
        with self._log.open("ab") as output:
            self._launcher = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    def kill(self, role: str, rng: random.Random) -> None:
        """Kill −9 the process of a role; of the trainer, one of its ranks."""
        process = rng.choice(self._players()[role])
        self._dead |= set(self._players()[role])
        process.kill()

    def suspend(self, role: str, rng: random.Random) -> None:
        """SIGSTOP the process of a role for good, of the trainer one rank; of the deepspeed launcher all."""
        processes = self._named(role)
        self._dead |= {*processes, *self._players().get(role.removeprefix(ENGINE_OF), [])}
        for process in processes if role == DEEPSPEED else [rng.choice(processes)]:
            process.suspend()

    def slow(self, role: str, seconds: float) -> None:
        """Let a role run for a tenth of the time, by SIGSTOP and SIGCONT."""
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

    def cut(self, role: str) -> None:
        """Reset every connection to a role's server; returns once it had some. The relays do it."""
        self._order(role, CUT)

    def spoil(self, role: str) -> None:
        """Have a stretch of the role's next long answer arrive spoilt; returns then. The relays do it."""
        self._order(role, MALFORMED)

    def _order(self, role: str, what: str) -> None:
        order = self.run_dir / FAULTS / f"{role}.{what}"
        order.touch()
        self.wait(lambda: self.over() or not order.exists(), f"{what} of {role}")

    def fill_disk(self, seconds: float) -> None:
        """Leave no room on the disk of the run's folder, which is its own, for a while."""
        assert self.run_dir.is_mount(), "the machine's disk is not to be filled"
        fill(self.run_dir)
        time.sleep(seconds)
        free(self.run_dir)

    def kill_guardian(self, role: str) -> int:
        """Kill −9 what guards a role; how many of the processes below it outlive it."""
        assert self._launcher is not None, "started before"
        guardian = next(
            one for one in psutil.Process(self._launcher.pid).children() if guarded_role(one) == role
        )
        below = descendants(guardian.pid)
        self._dead |= below
        guardian.kill()
        deadline = time.monotonic() + ORPHAN_SECONDS
        while any(map(lives, below)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return sum(map(lives, below))

    def signal(self, role: str, number: signal.Signals) -> None:
        """Send a signal to every process of a role."""
        for process in self._players()[role]:
            process.send_signal(number)

    def kill_launcher(self, everything: bool = False) -> None:
        """Kill −9 the launcher, which is the controller, or all processes; wait until nothing is left."""
        self._players()
        self._dead |= self._seen
        assert self._launcher is not None, "started before"
        self._launcher.kill()
        for process in filter(lives, list(self._seen) if everything else []):
            process.kill()
        self._launcher.wait()
        self._await_empty()

    def stop(self) -> int:
        """SIGTERM to the launcher; its exit status."""
        assert self._launcher is not None, "started before"
        self._players()
        self._launcher.send_signal(signal.SIGTERM)
        return self._ended()

    def end(self) -> None:
        """Wait until the run has come to its end. Raises DistillError when it fails."""
        status = self._ended()
        if status != 0:
            raise DistillError(f"the run ended with status {status}; the end of {self._log}:\n{self._said()}")

    # --- what is seen of it -------------------------------------------------------------------------------

    def roles(self) -> list[str]:
        """Roles that have a process now, such as "student-0"."""
        return sorted(self._players())

    def helpers(self) -> list[str]:
        """What else has a process now: DEEPSPEED, "engine of student-0"."""
        assert self._launcher is not None, "started before"
        return sorted(helpers(self._launcher.pid))

    def processes(self) -> set[psutil.Process]:
        """Those that play the roles now."""
        return {process for playing in self._players().values() for process in playing}

    def over(self) -> bool:
        """Whether it has ended well, or is about to: all steps are done."""
        assert self._launcher is not None, "started before"
        return self._launcher.poll() == 0 or (self.run_dir / "final").is_dir()

    def step(self) -> int:
        """Optimizer step that was reported last; 0: none."""
        for line in self._steps.new():
            self._step = int(line["step"]) if "seconds/train" in line else self._step
        return self._step

    def summary(self) -> dict[str, Any]:
        """summary.json"""
        return dict(json.loads((self.run_dir / "summary.json").read_text()))

    def orphans(self) -> int:
        """Processes that outlived a launcher, over all its endings so far."""
        return self._orphans

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Until the condition holds, or the run is over. Raises DistillError when that takes too long."""
        deadline = time.monotonic() + self._patience
        while not condition():
            status = None if self._launcher is None else self._launcher.poll()
            if status == 0:
                return
            if status is not None or time.monotonic() > deadline:
                why = "is not there in time" if status is None else f"cannot come: it ended with {status}"
                raise DistillError(f"{what} {why}; the end of {self._log}:\n{self._said()}")
            time.sleep(POLL_SECONDS)

    def wait_replaced(self, role: str) -> None:
        """Until a role that was killed has a new process; whether that one works is another matter."""
        self.wait(lambda: bool(set(self._players().get(role, ())) - self._dead), f"another {role}")

    def wait_at_work(self, roles: Iterable[str], anew: bool = True) -> None:
        """Until every one of these roles has done work from now on; `anew`: with a new process."""
        since = {} if anew else dict.fromkeys(roles, time.time())

        def all_work() -> bool:
            playing = self._players()
            for role in roles:
                fresh = set(playing.get(role, ())) - self._dead
                if fresh and role not in since:
                    since[role] = time.time()
            return all(role in since and self._worked(role, since[role], playing) for role in roles)

        self.wait(lambda: self.over() or all_work(), f"work of {', '.join(roles)}")

    def _worked(self, role: str, since: float, playing: dict[str, list[psutil.Process]]) -> bool:
        if role == EVALUATOR:
            return any(_answers(process) for process in playing.get(role, ()))
        for span in self._spans.new():
            self._worked_until[span["role"], span["what"]] = span["end"]
        name = role.replace("teacher-", "teacher ", 1)
        only = {"trainer rank": "train", "teacher": "score"}.get(kind_of(role))
        return any(
            end > since
            for (who, what), end in self._worked_until.items()
            if who == name and only in (None, what)
        )

    def _players(self) -> dict[str, list[psutil.Process]]:
        assert self._launcher is not None, "started before"
        self._seen |= descendants(self._launcher.pid)
        return role_processes(self._launcher.pid)

    def _named(self, role: str) -> list[psutil.Process]:
        """Processes of a role, of a helper, or the launcher, which is the controller."""
        assert self._launcher is not None, "started before"
        launcher = psutil.Process(self._launcher.pid)
        return {**self._players(), **helpers(launcher.pid), CONTROLLER: [launcher]}[role]

    def _ended(self) -> int:
        assert self._launcher is not None, "started before"
        step, deadline = self.step(), time.monotonic() + self._patience
        while self._launcher.poll() is None:
            if (now := self.step()) != step:
                step, deadline = now, time.monotonic() + self._patience
            if time.monotonic() > deadline:
                raise DistillError(f"the run does not end; the end of {self._log}:\n{self._said()}")
            self._players()
            time.sleep(POLL_SECONDS)
        self._await_empty()
        return self._launcher.wait()

    def _await_empty(self) -> None:
        """Count what outlives the launcher."""
        deadline = time.monotonic() + ORPHAN_SECONDS
        while any(map(lives, self._seen)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self._orphans += sum(map(lives, self._seen))
        self._seen = set(filter(lives, self._seen))

    def _said(self) -> str:
        return "\n".join(last_lines(self._log))


class Tail:
    """The lines of a JSONL file that grows, each given out once; a file that is not there yet has none."""

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


def _answers(process: psutil.Process) -> bool:
    """Whether a server of this machine is healthy; its guardian's command line has the address."""
    try:
        line = psutil.Process(process.ppid()).cmdline()
        address = f"http://{line[line.index('--host') + 1]}:{line[line.index('--port') + 1]}/health"
        return httpx.get(address, timeout=2.0, trust_env=False).status_code == 200
    except (psutil.Error, httpx.HTTPError, ValueError):
        return False
