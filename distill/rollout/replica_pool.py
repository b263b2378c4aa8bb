"""The student replicas of a run: a fleet that follows the newest version.

    ABSENT ──answers /health──▶ CATCHING_UP ──holds a published version──▶ SERVING
      ▲                              │                                        │
      └───────────── a connection is lost, or it came back with other weights ┘

A serving replica is updated at its own pace while it generates. A replica that is lost gives its unfinished
prompts back (the tasks that stream from it are cancelled) and joins again when it answers. One that has work
and writes no token is lost too. One that serves another run is taken out; the run ends when it has no other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Literal

from distill.aio import Signal, cancel, unless
from distill.rollout.bad_answers import Trust
from distill.rollout.replica_client import ReplicaEngine, state_of, updated
from distill.run_log.records import VersionApplied
from sync.errors import DistillError, RemoteError, Unreachable, WireError, WrongServer
from sync.wire import BroadcastTicket, UpdateReply, UpdateRequest, Version

logger = logging.getLogger(__name__)


class Phase(Enum):
    """Lifecycle of a replica; see the module's text."""

    ABSENT = "absent"
    CATCHING_UP = "catching_up"
    SERVING = "serving"


class Replica:
    """One replica as the controller sees it."""

    def __init__(self, name: str, engine: ReplicaEngine, founding: bool = False) -> None:
        self.name = name
        self.engine = engine
        self.founding = founding
        """It belongs to the run's configuration."""
        self.phase = Phase.ABSENT
        self.version: Version | None = None
        """What it serves; None: the folder it was started with."""
        self.in_flight = 0
        """Completions it works on."""
        self.joined = 0  # how often it has begun to serve
        self.streams: set[asyncio.Task[None]] = set()
        """Tasks that read completions from it."""
        self.refusals = 0  # requests that it refused one after the other
        self.rests_until = 0.0  # monotonic time before which it is asked nothing
        self.lost = asyncio.Event()
        self.left_out = False  # it gave too many unusable answers: it is asked nothing any more
        self.server = f"replica {name} at {engine.url}"
        self.busy = asyncio.Lock()
        """Held during an update."""


class ReplicaPool:
    """The replicas of a run. `run()` for its whole length; `add` and `remove` at any time.

    `target`: the newest version in the store. `step_of`: a version as a step of the current lineage.
    `may_exist`: whether a version is on record; a replica that holds another one is brought to the target.
    `applied` is called after every update, `stranded` when a replica begins to wait for a broadcast, `stuck`
    with a replica that has work and has generated nothing for `stall_timeout_seconds` (0: never). `wake` is
    woken by every change.
    """

    def __init__(
        self,
        *,
        target: Callable[[], Version | None],
        step_of: Callable[[Version], int],
        applied: Callable[[VersionApplied], None],
        wake: Signal,
        kv_on_swap: Literal["recompute", "keep"] = "recompute",
        update_seconds: float = 300.0,
        poll_seconds: float = 2.0,
        retry_seconds: float = 1.0,
        may_exist: Callable[[Version], bool] = lambda version: True,
        stranded: Callable[[], None] = lambda: None,
        stall_timeout_seconds: float = 0.0,
        stuck: Callable[[str], None] = lambda name: None,
        trust: Trust = Trust(1 << 30, lambda reason: None),
    ) -> None:
        self.replicas: dict[str, Replica] = {}
        self.wake, self._target = wake, target
        self._step_of, self._may_exist = step_of, may_exist
        self._applied, self._stranded, self.trust = applied, stranded, trust
        self._stall_timeout_seconds, self._stuck = stall_timeout_seconds, stuck
        self._kv_on_swap, self._update_seconds = kv_on_swap, update_seconds
        self.poll_seconds = poll_seconds
        self._retry_seconds = retry_seconds
        self._published = Signal()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running = False
        self.by_broadcast = False
        """Versions come by broadcast: a replica without one waits for the next."""

    # --- members ------------------------------------------------------------------------------------------

    def add(self, name: str, engine: ReplicaEngine) -> Replica:
        """Let a replica join; it serves as soon as it answers and holds a published version."""
        assert name not in self.replicas, f"replica {name} is a member already"
        replica = self.replicas[name] = Replica(name, engine, founding=not self._running)
        if self._running:
            self._tasks[name] = asyncio.create_task(self._follow(replica), name=f"follow {name}")
        return replica

    async def remove(self, name: str) -> None:
        """Let a replica go; its unfinished prompts are asked elsewhere."""
        replica = self.replicas.pop(name)
        await cancel([self._tasks.pop(name, None)])
        self._lose(replica)
        await replica.engine.aclose()

    def serving(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.phase is Phase.SERVING]

    def least_busy(self) -> Replica | None:
        """The serving replica with the fewest completions in flight; None: nobody can be asked now."""
        now = time.monotonic()
        able = [replica for replica in self.serving() if replica.rests_until <= now]
        return min(able, key=lambda replica: replica.in_flight, default=None)

    def slowest(self) -> Version | None:
        """The oldest version that a serving replica holds; None: the model folder, or nobody serves."""
        versions = [replica.version for replica in self.serving()]
        if None in versions:
            return None
        return min((v for v in versions if v), key=self._step_of, default=None)

    def report_lost(self, replica: Replica) -> None:
        """A connection to it broke: it is out until it has joined again."""
        replica.lost.set()
        replica.phase = Phase.ABSENT
        self._published.wake()

    def distrust(self, replica: Replica, problem: str, prompt: str | None = None) -> None:
        """An answer of it cannot be used: see Trust. `prompt`: what it was an answer to; None: no prompt."""
        self.trust.bad(replica.server, prompt or object(), problem, lambda: self._leave_out(replica))

    def _leave_out(self, replica: Replica) -> bool:
        replica.left_out = True
        self.report_lost(replica)
        return not all(one.left_out for one in self.replicas.values())

    def refused(self, replica: Replica, retry_after: float | None) -> None:
        """It refused a request: ask it nothing for `retry_after` seconds (None: longer each time)."""
        replica.refusals += 1
        seconds = min(30.0, 2.0**replica.refusals / 2) if retry_after is None else retry_after
        replica.rests_until = time.monotonic() + seconds
        asyncio.get_running_loop().call_later(seconds, self.wake.wake)

    # --- following ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow until cancelled. An error of the controller's own is raised."""
        self._running = True
        self._tasks |= {
            name: asyncio.create_task(self._follow(replica), name=f"follow {name}")
            for name, replica in self.replicas.items()
        }
        try:
            while True:
                self._raise_failure()
                await asyncio.sleep(0.5)
        finally:
            self._running = False
            await cancel(self._tasks.values())

    def _raise_failure(self) -> None:
        """Raise the error that a replica's task ended with, if one did."""
        for task in [task for task in self._tasks.values() if task.done()]:
            task.result()

    def published(self) -> None:
        """A newer version is there, or another lineage has begun."""
        self._published.wake()

    async def _follow(self, replica: Replica) -> None:
        listening = asyncio.create_task(self._listen(replica))
        try:
            while not replica.left_out:
                await self._join(replica)
                try:
                    await self._serve(replica)
                except DistillError as error:
                    logger.warning("replica %s is lost: %s", replica.name, error)
                    if isinstance(error, WireError):
                        self.distrust(replica, str(error))
                finally:
                    self._lose(replica)
        except WrongServer as error:
            await self._expel(replica, error)
        finally:
            await cancel([listening])

    async def _expel(self, replica: Replica, error: WrongServer) -> None:
        """Take out a replica of another run. Raises its error when it was to begin with, or is the last."""
        if (replica.founding and replica.joined == 0) or len(self.replicas) == 1:
            raise WrongServer(f"replica {replica.name}: {error}") from error
        logger.error("replica %s is taken out of this run: %s", replica.name, error)
        del self.replicas[replica.name]
        await replica.engine.aclose()

    async def _listen(self, replica: Replica) -> None:
        """Report each time that a replica with work answers, but writes nothing and is not updated.

        One that does not answer may be starting again: its launcher and `_check` look after that.
        """
        seen: tuple[int | None, Version | None] = None, None

        async def progresses() -> bool:
            nonlocal seen
            before = seen
            try:
                tokens = None if replica.phase is Phase.ABSENT else (await replica.engine.state()).tokens
            except DistillError:
                return True
            seen = tokens, replica.version
            works = replica.in_flight > 0 or replica.busy.locked()
            return not works or tokens is None or seen != before

        while True:
            await until_stalled(progresses, self._stall_timeout_seconds)
            logger.error(
                "replica %s answers, has %d completions to write or weights to load, and wrote no token for "
                "rollout.stall_timeout_seconds = %g s: it is hung, its prompts are asked elsewhere",
                replica.name,
                replica.in_flight,
                self._stall_timeout_seconds,
            )
            self.report_lost(replica)
            self._stuck(replica.name)

    async def _join(self, replica: Replica) -> None:
        """Until the replica answers and holds what it must hold."""
        pause = self._retry_seconds / 10
        while not replica.left_out:
            try:
                if await replica.engine.alive():
                    replica.version = (await state_of(replica.engine)).version
                    replica.lost.clear()
                    replica.phase = Phase.CATCHING_UP
                    await self._catch_up(replica)
                    break
            except WrongServer:
                raise
            except DistillError as error:
                logger.warning("replica %s cannot join yet: %s", replica.name, error)
                if isinstance(error, WireError):
                    self.distrust(replica, str(error))
                replica.phase = Phase.ABSENT
            await asyncio.sleep(pause)
            pause = min(pause * 2, self._retry_seconds)
        else:
            return
        replica.phase = Phase.SERVING
        replica.joined += 1
        logger.info("replica %s serves %s", replica.name, replica.version or "the model folder")
        self.wake.wake()

    async def _catch_up(self, replica: Replica) -> None:
        while True:
            if (target := self._due(replica)) is not None:
                await self.update(replica, self.request_for(target))
                continue
            held = replica.version
            stranded = self.by_broadcast and held is None
            if not stranded and (held is None or self._may_exist(held)):
                return
            if stranded:
                self._stranded()
            await self._published.wait(self.poll_seconds)
            if replica.lost.is_set():
                raise Unreachable(f"replica {replica.name} was lost while it waited for a version")

    def _due(self, replica: Replica) -> Version | None:
        """The version to bring the replica to; None: it holds the newest.

        After a restart of the trainer the newest published version may be behind what the replica holds: it
        stays where it is until the trainer has caught up.
        """
        target = self._target()
        if target is None or replica.version == target:
            return None
        held = replica.version
        if held is None or not self._may_exist(held) or self._step_of(target) >= self._step_of(held):
            return target
        return None

    async def _serve(self, replica: Replica) -> None:
        """Until the replica is lost."""
        while not replica.lost.is_set():
            target = self._due(replica)
            if target is not None:
                try:
                    await self.update(replica, self.request_for(target))
                    continue
                except WrongServer:
                    raise
                except RemoteError as error:
                    logger.warning("replica %s stays at %s: %s", replica.name, replica.version, error)
            if not await self._published.wait(self.poll_seconds):
                await self._check(replica)

    async def _check(self, replica: Replica) -> None:
        """Raises Unreachable when it does not answer, or came back with other weights."""
        async with replica.busy:
            state = await unless(replica.lost, state_of(replica.engine), replica.name)
            if state.version != replica.version:
                raise Unreachable(
                    f"it serves {state.version} and should serve {replica.version}: it restarted"
                )

    def request_for(self, version: Version, broadcast: BroadcastTicket | None = None) -> UpdateRequest:
        """The request that brings a replica to `version`, from the store or with a seat in a broadcast."""
        return UpdateRequest(version=version, kv_on_swap=self._kv_on_swap, broadcast=broadcast)

    async def update(self, replica: Replica, request: UpdateRequest) -> UpdateReply | None:
        """Bring a replica to a version: what it cost; None: another task had done it."""
        async with replica.busy:
            if replica.version == request.version and request.broadcast is None:
                return None
            began = time.monotonic()
            reply = await unless(
                replica.lost, updated(replica.engine, request, self._update_seconds), replica.name
            )
            replica.version = reply.version
            self._applied(
                VersionApplied(
                    replica.name,
                    reply.version,
                    reply.bytes_read,
                    reply.stage_seconds,
                    reply.pause_seconds,
                    reply.apply_seconds,
                    time.monotonic() - began,
                )
            )
        self.wake.wake()
        return reply

    def _lose(self, replica: Replica) -> None:
        replica.phase = Phase.ABSENT
        replica.lost.set()
        for task in replica.streams:
            task.cancel()
        self.wake.wake()

    # --- the end ------------------------------------------------------------------------------------------

    async def hold_exactly(
        self, version: Version, digests: dict[str, str], seconds: float = 0.0
    ) -> dict[str, bool | None]:
        """Bring every replica to `version` and compare its weights; name → whether they are equal.

        One that is away or catching up is waited for, `seconds` at most. None: it was not compared.
        """
        deadline, members = time.monotonic() + seconds, list(self.replicas.values())
        compared = await asyncio.gather(*(self._shown(one, version, digests, deadline) for one in members))
        found = zip(members, compared, strict=True)
        return {one.name: equal for one, equal in found if self._has(one)}

    def _has(self, replica: Replica) -> bool:
        return self.replicas.get(replica.name) is replica and not replica.left_out

    async def _shown(
        self, replica: Replica, version: Version, digests: dict[str, str], deadline: float
    ) -> bool | None:
        while self._has(replica):
            self._raise_failure()
            equal = None
            if replica.phase is Phase.SERVING:
                equal = await self._equal(replica, version, digests)
            left = deadline - time.monotonic()
            unable = self.by_broadcast and replica.version != version  # nobody broadcasts any more
            if equal is not None or left <= 0 or unable:
                return equal
            await self.wake.wait(min(left, self._retry_seconds))
        return None

    async def _equal(self, replica: Replica, version: Version, digests: dict[str, str]) -> bool | None:
        """Whether a serving replica holds exactly these weights; None: it cannot show them now."""
        try:
            if replica.version != version:
                await self.update(replica, self.request_for(version))
            state = await replica.engine.state(digests=True)
        except DistillError as error:
            logger.warning("replica %s cannot show its weights: %s", replica.name, error)
            return None
        return state.digests == digests if state.version == version else None


logger = logging.getLogger(__name__)
LOOK_SECONDS = 5.0
"""Longest pause between two looks; of a short limit a quarter."""


def look_seconds(limit: float) -> float:
    """Pause between two looks for silence of `limit` seconds."""
    return min(LOOK_SECONDS, limit / 4)


async def until_stalled(sign: Callable[[], Awaitable[bool]], seconds: float) -> None:
    """Return when `sign`, asked again and again, has said no for `seconds` without a break; 0: never.

    The time that it takes to say no counts, up to as much as a pause: a time-out is silence, a stop is not.
    """
    if seconds == 0:
        await asyncio.Event().wait()
    loop, pause, silent = asyncio.get_running_loop(), look_seconds(seconds), 0.0
    while silent < seconds:
        await asyncio.sleep(pause)
        began = loop.time()
        silent = 0.0 if await sign() else silent + pause + min(pause, loop.time() - began)


class Heartbeats:
    """Those of the trainer's ranks, each watched from its first one on. `run()` for the length of the run.

    `hung` is called with the ranks that sent none for `seconds` (0: never), which are then forgotten.
    """

    def __init__(self, seconds: float, hung: Callable[[list[int]], None]) -> None:
        self._seconds, self._hung = seconds, hung
        self._silent: dict[int, float] = {}
        """Rank → seconds since its last heartbeat."""

    def heard(self, rank: int) -> None:
        """A rank lives."""
        self._silent[rank] = 0.0

    @property
    def watched(self) -> list[int]:
        """Ranks whose next heartbeat is waited for."""
        return sorted(self._silent)

    def forget(self) -> None:
        """These ranks are gone, or may leave: others are watched once they are heard."""
        self._silent.clear()

    async def run(self) -> None:
        """Watch until cancelled."""
        if self._seconds == 0:
            await asyncio.Event().wait()
        pause = look_seconds(self._seconds)
        while True:
            await asyncio.sleep(pause)
            for rank in self._silent:
                self._silent[rank] += pause
            late = sorted(rank for rank, silent in self._silent.items() if silent >= self._seconds)
            if late:
                self.forget()
                self._hung(late)
