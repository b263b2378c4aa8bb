"""Keep the processes of a run alive, and leave none behind.

    STARTING ──healthy──▶ READY ──exit 0 of a child that ends──▶ ENDED
        │                 │   ▲
        └──────death──────┴─▶ RESTARTING, then healthy

    exit while the run starts     the run fails; after a kill, on a taken port, or at work: restarted
    exit later                    restarted within run.restarts, else the run fails
    not healthy in start_seconds  the run fails while it starts; later: killed, so restarted
    /health silent                killed, so restarted

A guardian (`distill.guardian`) wraps every process. Order of calls: `start`, `ready` before the work or
beside it, `watch` beside it, `stop`. This process adopts what a killed guardian leaves behind, and kills it
before a restart.
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
from typing import IO

import psutil

from distill.aio import cancel, until_stalled
from distill.guardian import MODULE, adopt_orphans, kill_adopted
from sync.base.address import Place
from sync.base.errors import DistillError, how_it_ended
from sync.base.retry import Backoff
from sync.wire.client import Peer

log = logging.getLogger(__name__)

GUARDIAN_SECONDS = 10.0
"""Time for a guardian to kill all that is below it; after it the guardian's group is killed."""
POLL_SECONDS = 0.1
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0
"""Before a restart: doubles with each, and is the first again once a child was healthy for the longest."""
KILLED = {-signal.SIGKILL, 128 + signal.SIGKILL, 256 - signal.SIGKILL}
"""Exit statuses after SIGKILL: of a guardian, of its command, and the deepspeed launcher's for a rank's."""
LAST_LINES, _MOST_LOG = 20, 1 << 24
_FIRST_ERROR = (
    re.compile(r"^.*?(\w+ was ended by SIG.+)$", re.MULTILINE),  # a replica's engine core
    re.compile(r"^(?:.*[\s\]])??((?:\w+\.)*[A-Z]\w*(?:Error|Exception): .+)$", re.MULTILINE),
)
_PORT_TAKEN = re.compile("EADDRINUSE|address already in use", re.IGNORECASE)


@dataclass(frozen=True)
class ChildSpec:
    """One process to keep alive."""

    name: str
    """Such as "student-0"; names the log."""
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """Over this process's environment."""
    url: Place | None = None
    """Healthy when GET /health answers 200 there; None: see `joined`."""
    joined: Callable[[], bool] = lambda: True
    """Whether a child without a server has reported for work."""
    prepare: Callable[[], None] = lambda: None
    """Called before every start."""
    died: Callable[[], None] = lambda: None
    """Called after every death, before the pause."""
    left: Callable[[], None] = lambda: None
    """Called after its orderly end."""
    ends: bool = False
    """Exit status 0 is its orderly end; else any exit is a death."""


class Phase(Enum):
    """Where a child is in its life."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    ENDED = "ended"


class ChildFailed(DistillError):
    """A child process died and was not, or no longer, to be restarted."""


async def guarded(spec: ChildSpec, pipe: int, output: IO[bytes] | None = None) -> asyncio.subprocess.Process:
    """Start a process below a guardian that `pipe` ends; None: it writes where this process does."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", MODULE, spec.name, str(pipe), *spec.argv),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**os.environ, **spec.env},
        pass_fds=(pipe,),
        start_new_session=True,
    )


class Child:
    """One process, through all its restarts. Times are monotonic."""

    def __init__(self, spec: ChildSpec, log_path: Path) -> None:
        self.spec, self.log_path = spec, log_path
        self.phase = Phase.STARTING
        self.came_up = False
        """Whether it was ever healthy."""
        self.restarts = 0
        self.pauses = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        self.started = self.ready_since = math.inf
        self.process: asyncio.subprocess.Process | None = None
        self._log_begins = 0
        """Byte of the log at which its last start begins."""

    async def start(self, pipe: int) -> None:
        self.spec.prepare()
        self.started = time.monotonic()
        with self.log_path.open("ab") as output:
            self._log_begins = output.tell()
            self.process = await guarded(self.spec, pipe, output)

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs or before it started."""
        return None if self.process is None else self.process.returncode

    @property
    def over(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def restartable(self) -> bool:
        """Whether another start may help: after a kill, on a taken port, or when it had reported for work."""
        reported = self.spec.url is None and self.spec.joined()
        taken = _PORT_TAKEN.search(_text(self.log_path, self._log_begins))
        return self.status in KILLED or reported or taken is not None

    def next_pause(self) -> float:
        """Seconds before its restart."""
        if time.monotonic() - self.ready_since > LONGEST_PAUSE_SECONDS:
            self.pauses.reset()
        self.ready_since = math.inf
        return self.pauses.next()

    def signal(self, number: signal.Signals) -> None:
        """Send to its whole group; nothing when it is gone."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    async def exit(self) -> int:
        assert self.process is not None, "it is awaited after its start"
        return await self.process.wait()

    def describe_end(self) -> str:
        """How it ended, with the last lines of its log, and the first error when that is above them."""
        said = "\n".join(f"    {line}" for line in last_lines(self.log_path)) or "    (nothing)"
        text = f"{self.spec.name} {how_it_ended(self.status)}; the end of {self.log_path}:\n{said}"
        error = first_error(self.log_path, self._log_begins)
        return text if error is None or error in said else f"{text}\nthe first error above it: {error}"


class Supervisor:
    """All child processes of a launcher.

    `restarts`: most restarts, all children together. `start_seconds`: time for all to come up, and for each
    that is restarted later. `health_seconds`: /health without an answer for so long means that a server that
    answered before hangs; 0: never.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        logs: Path,
        restarts: int,
        start_seconds: float = math.inf,
        health_seconds: float = 0.0,
    ) -> None:
        self.children = {spec.name: Child(spec, logs / f"{spec.name}.log") for spec in specs}
        self._restarts_left = restarts
        self._start_seconds, self._health_seconds = start_seconds, health_seconds
        self._tending: list[asyncio.Task[None]] = []
        self._deadline: float | None = math.inf
        """Monotonic time at which all must be up; None: they were, each restart has seconds of its own."""
        self._read_end, self._write_end = os.pipe()
        self._own: set[int] | None = None
        """Children of this process that were there before; None: nothing was started."""
        logs.mkdir(parents=True, exist_ok=True)

    async def start(self) -> None:
        self._own = {child.pid for child in psutil.Process().children()}
        adopt_orphans()
        starts = [asyncio.create_task(child.start(self._read_end)) for child in self.children.values()]
        try:
            await asyncio.gather(*starts)
        finally:
            await cancel(starts)
        self._deadline = time.monotonic() + self._start_seconds
        self._tending = [
            asyncio.create_task(self._tend(child), name=f"supervise {name}")
            for name, child in self.children.items()
        ]

    async def ready(self) -> None:
        """Return when every child was healthy. Raises ChildFailed when one fails or takes longer."""
        while not all(child.came_up for child in self.children.values()):
            self._raise_failure()
            await asyncio.sleep(POLL_SECONDS)
        self._deadline = None

    async def watch(self) -> None:
        """Return when every child was healthy and has come to an orderly end. Raises ChildFailed when one
        fails at its start, or the budget is spent."""
        await self.ready()
        if self._tending:
            await asyncio.wait(self._tending, return_when=asyncio.FIRST_EXCEPTION)
            self._raise_failure()

    async def stop(self, grace: float) -> None:
        """End every child: TERM, at most `grace` seconds, then KILL. Safe to call twice."""
        alive = [child for child in self.children.values() if child.process and child.status is None]
        for child in self.children.values():
            child.phase = Phase.ENDED
        await cancel(self._tending)
        for child in alive:
            child.signal(signal.SIGTERM)
        await _ended(alive, grace)
        for child in alive:
            if child.status is None:
                log.warning("%s did not end within %.0f s: killed", child.spec.name, grace)
        self.kill()
        await _ended(alive, GUARDIAN_SECONDS)
        for child in alive:
            child.signal(signal.SIGKILL)
        await _ended(alive, None)
        self._kill_orphans()
        if self._own is not None:
            adopt_orphans(False)
            self._own = None
        for end in (self._read_end, self._write_end):
            if end >= 0:
                os.close(end)
        self._read_end = self._write_end = -1

    def status(self) -> dict[str, tuple[str, int]]:
        """Child → its phase, and how often it was restarted."""
        return {name: (child.phase.value, child.restarts) for name, child in self.children.items()}

    def kill_child(self, name: str) -> None:
        """Kill a child that hangs, so that it is restarted; nothing when it is none of ours, or ended."""
        child = self.children.get(name)
        if child is None:
            log.error("%s hangs and was not started here: restart it where it runs", name)
        elif not child.over and child.process is not None and child.status is None:
            log.error("%s is killed, to be restarted", name)
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
        if count := kill_adopted(self._own | guardians):
            log.warning("killed %d processes that a killed guardian left behind", count)

    # --- one child

    def _raise_failure(self) -> None:
        for task in self._tending:
            if task.done():
                task.result()

    async def _tend(self, child: Child) -> None:
        """Restart a child whenever it exits or hangs, until its orderly end."""
        while not child.over:
            exit_ = asyncio.create_task(child.exit())
            stalled = asyncio.create_task(self._until_stalled(child))
            try:
                await asyncio.wait({exit_, stalled}, return_when=asyncio.FIRST_COMPLETED)
                if not exit_.done():
                    log.error("%s", stalled.result())
                    self.kill_child(child.spec.name)
                    await exit_
            finally:
                await cancel([exit_, stalled])
            if child.spec.ends and child.status == 0 and (child.came_up or self._deadline is None):
                child.phase = Phase.ENDED
                child.spec.left()
            elif not child.over:
                await self._restart(child)

    async def _until_stalled(self, child: Child) -> str:
        """Note when a child becomes healthy; return why it must be killed, once it does not, or is no more.

        Raises ChildFailed when it is late while the run starts.
        """
        spec = child.spec
        async with Peer(spec.url) if spec.url else contextlib.nullcontext() as peer:
            while not (await peer.alive() if peer else spec.joined()):
                if time.monotonic() > (self._deadline or child.started + self._start_seconds):
                    late = f"{spec.name} did not come up in time; see {child.log_path}, or allow more with "
                    late += "run.start_seconds"
                    if self._deadline is not None:
                        raise ChildFailed(late)
                    return late
                await asyncio.sleep(POLL_SECONDS)
            child.phase, child.came_up, child.ready_since = Phase.READY, True, time.monotonic()
            await until_stalled(peer.alive if peer else asyncio.Event().wait, self._health_seconds)
        return (
            f"{spec.name}: /health has not answered for run.health_timeout_seconds = "
            f"{self._health_seconds:g} s, it is stalled"
        )

    async def _restart(self, child: Child) -> None:
        """Pause and start again, on the budget. Raises ChildFailed when the run must end instead."""
        if self._deadline is not None and not child.restartable:
            raise ChildFailed(f"{child.describe_end()}\nit died while the run was starting")
        child.signal(signal.SIGKILL)
        self._kill_orphans()
        if self._restarts_left == 0:
            raise ChildFailed(f"{child.describe_end()}\nrun.restarts is used up: see above what ended it")
        self._restarts_left -= 1
        child.phase, child.restarts, pause = Phase.RESTARTING, child.restarts + 1, child.next_pause()
        child.spec.died()
        log.warning("%s\nrestarted in %.0f s", child.describe_end(), pause)
        await asyncio.sleep(pause)
        if not child.over:
            await child.start(self._read_end)


async def _ended(children: Sequence[Child], seconds: float | None) -> None:
    """Wait until all have ended, at most so long; None: however long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*(child.exit() for child in children))


def first_error(path: Path, begin: int) -> str | None:
    """The first end by a signal, else "SomeError: text", in a log from byte `begin` on; None: there is none.

    An engine's own error is often followed by hundreds of lines about those that waited for it.
    """
    text = _text(path, begin)
    matches = (pattern.search(text) for pattern in _FIRST_ERROR)
    return next((match[1].rstrip() for match in matches if match), None)


def last_lines(path: Path, count: int = LAST_LINES) -> list[str]:
    """The last lines of a log, without blank ones, as far as _MOST_LOG bytes hold them; empty: no file."""
    size = path.stat().st_size if path.exists() else 0
    lines = _text(path, max(0, size - _MOST_LOG)).splitlines()
    return [line.rstrip() for line in lines if line.strip()][-count:]


def _text(path: Path, begin: int) -> str:
    """A log from byte `begin` on, as much as is ever searched; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(_MOST_LOG).decode(errors="replace")
    except OSError:
        return ""
