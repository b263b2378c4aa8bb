"""Starts the processes of a run, notices when one dies, and leaves none behind.

    NEW ──start──▶ STARTING ──healthy──▶ READY ──exit──▶ ENDED   (exit while it should live: restarted
                    │  ▲ └──exit──▶ failed start: everything is stopped        within the budget, or failure)
                    └──┘ killed: restarted within the budget

A server that has answered /health and then does not for `health_seconds` is killed, and so mended. `child`
wraps every process. Order of calls: start, ready, watch beside the work, stop. This process adopts what a
killed guardian leaves behind, and kills it before the role is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from distill.aio import cancel, until_stalled
from distill.launch.guardian import adopt_orphans, children_of, kill_adopted
from sync.endings import how_it_ended
from sync.errors import DistillError
from sync.transport import Peer

log = logging.getLogger(__name__)

GUARDIAN = "distill.launch.guardian"
GUARDIAN_SECONDS = 10.0
"""Time for a guardian to kill all that is below it; after it the guardian's group is killed."""
POLL_SECONDS, LAST_LINES = 0.1, 20
_ERROR = re.compile(r"^(?:.*[\s\]])??((?:\w+\.)*[A-Z]\w*(?:Error|Exception): .+)$", re.MULTILINE)
"""The last line of a traceback, whatever a logger put before it."""
_SIGNALLED = re.compile(r"\w+ was ended by SIG.+$", re.MULTILINE)
"""What a process says of one below it, such as a replica of its engine core."""
_PORT_TAKEN = re.compile("EADDRINUSE|address already in use", re.IGNORECASE)
_MOST_LOG, LONGEST_PAUSE_SECONDS = 1 << 24, 30.0
KILLED = {-signal.SIGKILL, 128 + signal.SIGKILL, 256 - signal.SIGKILL}
"""Exit statuses after SIGKILL: of a guardian, of its command, and the deepspeed launcher's for a rank's."""


@dataclass(frozen=True)
class ChildSpec:
    """One process to keep alive."""

    name: str
    """Such as "student-0"; names the log."""
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """Over this process's environment."""
    url: str | None = None
    """Healthy when GET /health answers 200; None: see `joined`."""
    joined: Callable[[], bool] | None = None
    """For a child without a server: whether it has reported for work; None: healthy once it runs."""
    prepare: Callable[[], None] = lambda: None
    """Called before every start."""
    died: Callable[[], None] = lambda: None
    """Called after every death, before the pause."""
    ends: bool = False
    """Exit status 0 is its orderly end; else any exit is a death."""


class Phase(Enum):
    """Where a child is in its life; see the module's text."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    ENDED = "ended"


class ChildFailed(DistillError):
    """A child process died and was not, or no longer, to be restarted."""


class Child:
    """One process, through all its restarts."""

    def __init__(self, spec: ChildSpec, log_path: Path) -> None:
        self.spec, self.log_path = spec, log_path
        self.phase = Phase.NEW
        self.deaths = 0
        """One soon after the other."""
        self.ready_since = math.inf
        """Monotonic time since which it is healthy."""
        self.pause: float | None = None
        """Seconds before its next start, once its death is taken from the budget."""
        self.process: asyncio.subprocess.Process | None = None
        self._log_begins = 0
        """Byte of the log at which its last start begins."""

    async def start(self, pipe: int) -> None:
        """Start it; its output is appended to its log."""
        self.phase, self.pause = Phase.STARTING, None
        self.spec.prepare()
        guardian = [sys.executable, "-P", "-m", GUARDIAN, self.spec.name, str(pipe)]
        with self.log_path.open("ab") as output:
            self._log_begins = output.tell()
            self.process = await asyncio.create_subprocess_exec(
                *guardian,
                *self.spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.spec.env},
                pass_fds=(pipe,),
                start_new_session=True,
            )

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs or before it started."""
        return None if self.process is None else self.process.returncode

    @property
    def failed(self) -> bool:
        """Whether it ended by itself, and not as it may: no kill from outside."""
        orderly = self.spec.ends and self.status == 0
        return self.status is not None and not orderly and self.status not in KILLED

    @property
    def port_taken(self) -> bool:
        """Whether it failed because a port was taken that had been free; another start may choose another."""
        return self.failed and _PORT_TAKEN.search(_text(self.log_path, self._log_begins)) is not None

    def signal(self, number: signal.Signals) -> None:
        """Send to its whole group; nothing when it is gone."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def describe_end(self) -> str:
        """How it ended, with the last lines it wrote, and the first error when that is above them."""
        lines = last_lines(self.log_path)
        said = "\n".join(f"    {line}" for line in lines) or "    (nothing)"
        text = f"{self.spec.name} {how_it_ended(self.status)}; the end of {self.log_path}:\n{said}"
        error = first_error(self.log_path, self._log_begins)
        return text if error is None or error in said else f"{text}\nthe first error above it: {error}"


class Supervisor:
    """All child processes of a launcher.

    `restarts`: deaths that are mended, all children together. `first_pause`: seconds between a child's first
    death and its restart; doubles with every further one, up to LONGEST_PAUSE_SECONDS; a child that was
    healthy for longer than that begins anew. `health_seconds`: of /health without an answer, after which a
    server that answered before counts as hung; 0: never.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        logs: Path,
        restarts: int,
        first_pause: float = 1.0,
        health_seconds: float = 0.0,
    ) -> None:
        self.children = {spec.name: Child(spec, logs / f"{spec.name}.log") for spec in specs}
        self._restarts_left, self._first_pause = restarts, first_pause
        self._health_seconds = health_seconds
        self._listening: list[asyncio.Task[None]] = []
        self._read_end, self._write_end = os.pipe()
        self._own: set[int] | None = None
        """Children of this process that were there before; None: nothing was started."""
        logs.mkdir(parents=True, exist_ok=True)

    async def start(self) -> None:
        """Start every child at the same time."""
        self._own = set(children_of(os.getpid()))
        adopt_orphans()
        await asyncio.gather(*(child.start(self._read_end) for child in self.children.values()))
        self._listening = [
            asyncio.create_task(self._listen(child, child.spec.url), name=f"health of {name}")
            for name, child in self.children.items()
            if child.spec.url
        ]

    async def ready(self, seconds: float) -> None:
        """Return when every child is healthy. Raises ChildFailed when one fails or takes longer."""
        deadline = time.monotonic() + seconds
        waiting = [
            asyncio.create_task(self._until_ready(child, deadline, mended=True))
            for child in self.children.values()
        ]
        alarm = asyncio.create_task(self._first_failure())
        try:
            pending: set[asyncio.Task[None]] = {*waiting, alarm}
            while pending - {alarm}:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in (*waiting, alarm):
                task.cancel()

    async def watch(self, seconds: float, left: Callable[[str], None] = lambda name: None) -> None:
        """Mend deaths until cancelled; returns when every child has come to an orderly end.

        `left` is called with the name of each that has. A restarted child that is not up after `seconds` is
        killed, and so mended. Raises ChildFailed when the budget is spent.
        """
        tasks = [asyncio.create_task(self._tend(child, seconds, left)) for child in self.children.values()]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def ended(self, name: str) -> int:
        """Wait for the orderly end of a child; its exit status."""
        child = self.children[name]
        assert child.process is not None, "ended is called after start"
        return await child.process.wait()

    async def stop(self, grace: float) -> None:
        """End every child: TERM, at most `grace` seconds, then KILL. Safe to call twice."""
        await cancel(self._listening)
        for child in self.children.values():
            child.phase = Phase.ENDED
            if child.status is None:
                child.signal(signal.SIGTERM)
        alive = [c for c in self.children.values() if c.process is not None and c.status is None]
        waits = [asyncio.create_task(c.process.wait()) for c in alive if c.process is not None]
        if waits:
            await asyncio.wait(waits, timeout=max(0.0, grace))
        for child in alive:
            if child.status is None:
                log.warning("%s did not end within %.0f s: killed", child.spec.name, grace)
        self.kill()
        if waits:
            await asyncio.wait(waits, timeout=GUARDIAN_SECONDS)
        for child in alive:
            child.signal(signal.SIGKILL)
        await asyncio.gather(*waits)
        self._kill_orphans()
        if self._own is not None:
            adopt_orphans(False)
        self._close()

    def kill_child(self, name: str) -> None:
        """Kill a child that hangs, to be mended like any death; nothing when it is none of ours, or ended."""
        child = self.children.get(name)
        if child is None:
            log.error("%s was not started here: it is left to whoever did", name)
        elif child.phase is not Phase.ENDED and child.process is not None and child.status is None:
            log.error("%s is killed, to be started again", name)
            child.signal(signal.SIGKILL)

    def kill(self) -> None:
        """Have the guardians kill all that is below them, now, without waiting."""
        for child in self.children.values():
            child.phase = Phase.ENDED
        if self._write_end >= 0:
            os.write(self._write_end, b"k")

    def _kill_orphans(self) -> None:
        """Kill what killed guardians left, whatever its session; nothing when none was killed."""
        if self._own is None or all(c.status != -signal.SIGKILL for c in self.children.values()):
            return
        guardians = {c.process.pid for c in self.children.values() if c.process is not None}
        if count := kill_adopted(self._own | guardians, GUARDIAN):
            log.warning("killed %d processes that a killed guardian left behind", count)

    def _close(self) -> None:
        for end in (self._read_end, self._write_end):
            if end >= 0:
                os.close(end)
        self._read_end = self._write_end = -1

    async def _listen(self, child: Child, url: str) -> None:
        """Kill a server whenever it hangs, until cancelled; one that starts has another limit of time."""

        async def answers() -> bool:
            return child.ready_since == math.inf or await peer.alive()

        async with Peer(url) as peer:
            while True:
                await until_stalled(answers, self._health_seconds)
                log.error(
                    "%s: /health has not answered for run.health_timeout_seconds = %g s, it is hung",
                    child.spec.name,
                    self._health_seconds,
                )
                self.kill_child(child.spec.name)

    async def _first_failure(self) -> None:
        """Raise ChildFailed when a child fails, healthy before or not; start a killed one again.

        One that has reported for work is started again too, as long as the budget lasts: a trainer may have
        died on a batch.
        """
        while True:
            for child in self.children.values():
                joined = child.spec.joined is not None and child.spec.joined()
                if child.failed and not child.port_taken and not joined:
                    raise ChildFailed(f"{child.describe_end()}\nit died while the run was starting")
                if child.failed or child.status in KILLED:
                    await self._start_again(child)
            await asyncio.sleep(POLL_SECONDS)

    async def _until_ready(self, child: Child, deadline: float, mended: bool = False) -> None:
        """Wait until a child is healthy. Raises ChildFailed when it ends first, or at the deadline.

        `mended`: somebody else starts it again when it is killed or had no port, which is no end then.
        """
        spec = child.spec
        peer = Peer(spec.url) if spec.url else None
        try:
            while not (await peer.alive() if peer else spec.joined is None or spec.joined()):
                if child.status is not None and not (mended and (child.status in KILLED or child.port_taken)):
                    raise ChildFailed(f"{child.describe_end()}\nit died while starting")
                if time.monotonic() > deadline:
                    raise ChildFailed(
                        f"{spec.name} did not come up in time; see {child.log_path}, "
                        "or allow more with run.start_seconds"
                    )
                await asyncio.sleep(POLL_SECONDS)
            child.phase, child.ready_since = Phase.READY, time.monotonic()
        finally:
            if peer is not None:
                await peer.aclose()

    async def _tend(self, child: Child, seconds: float, left: Callable[[str], None]) -> None:
        while True:
            if child.phase is Phase.STARTING:
                try:
                    await self._until_ready(child, time.monotonic() + seconds)
                except ChildFailed as error:
                    if child.status is None:
                        log.error("%s", error)
                        self.kill_child(child.spec.name)
            await self.ended(child.spec.name)
            if child.phase is Phase.ENDED or (child.spec.ends and child.status == 0):
                child.phase = Phase.ENDED
                left(child.spec.name)
                return
            await self._start_again(child)

    async def _start_again(self, child: Child) -> None:
        """Pause and start; when cancelled in its pause it can be called again, and costs no second death."""
        if child.pause is None:
            child.pause = self._spend(child)
            child.spec.died()
            log.warning("%s\nstarted again in %.0f s", child.describe_end(), child.pause)
        await asyncio.sleep(child.pause)
        await child.start(self._read_end)

    def _spend(self, child: Child) -> float:
        """Take one death from the budget; seconds to wait before the restart."""
        child.signal(signal.SIGKILL)
        self._kill_orphans()
        if self._restarts_left == 0:
            raise ChildFailed(f"{child.describe_end()}\nrun.restarts is used up: see above what ended it")
        self._restarts_left -= 1
        calm = time.monotonic() - child.ready_since > LONGEST_PAUSE_SECONDS
        child.deaths = 1 if calm else child.deaths + 1
        child.ready_since = math.inf
        return min(self._first_pause * 2 ** (child.deaths - 1), LONGEST_PAUSE_SECONDS)


def first_error(path: Path, begin: int) -> str | None:
    """The first end by a signal, else "SomeError: text", in a log from byte `begin` on; None: there is none.

    An engine's own error is often followed by hundreds of lines about those that waited for it.
    """
    text = _text(path, begin)
    if signalled := _SIGNALLED.search(text):
        return signalled[0].rstrip()
    found = _ERROR.search(text)
    return found[1].rstrip() if found else None


def _text(path: Path, begin: int) -> str:
    """A log from byte `begin` on, as much as is ever searched; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(_MOST_LOG).decode(errors="replace")
    except OSError:
        return ""


def last_lines(path: Path, count: int = LAST_LINES) -> list[str]:
    """The last lines of a log, without blank ones; empty when there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]
