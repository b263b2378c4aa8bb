"""The student replicas of a run, each kept at the newest version.

    ABSENT ──answers /health──▶ CATCHING_UP ──holds a published version──▶ SERVING
      ▲                              │                                        │
      └────── a connection is lost, or it came back with other weights ──────┘

A serving replica is updated at its own pace while it generates. One that refuses an update ends what it has
in flight and is sent nothing until it takes one. A lost one gives its unfinished prompts back and joins again
when it answers. One that generates no token of its work is lost too. One of another run is removed; the run
ends when it has no other.

An evaluation holds a replica at its version:

    serving ─▶ held: it gets no new prompts and swaps no weights
            ─▶ drained, if it must go back: completions never mix a version with an earlier one
            ─▶ at the version, until the block ends ─▶ brought to the newest version ─▶ serving

What it has in flight goes on beside the evaluation. The other replicas go on; with one replica rollouts wait.
`evaluation.replica`, where there is one, is held instead of one that others need: it completes nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from enum import Enum
from typing import Any, TypeVar

from distill import waits
from distill.aio import Signal, cancel, unless, until_stalled
from distill.events import Membership, Stalled, Stranded
from distill.interfaces import Common
from distill.record.changes import VersionApplied
from distill.rollout.replica_client import ReplicaEngine
from distill.waits import EVALUATION, GENERATION, PUBLISHER, STORE
from sync.base.errors import DistillError, RemoteError, Unreachable, WireError, WrongServer
from sync.base.retry import Backoff
from sync.wire import BroadcastTicket, UpdateReply, UpdateRequest, Version, checks

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Phase(Enum):
    """Lifecycle of a replica; see the module's text."""

    ABSENT = "absent"
    CATCHING_UP = "catching_up"
    SERVING = "serving"


class Replica:
    """One replica as the controller sees it."""

    def __init__(
        self, name: str, engine: ReplicaEngine, founding: bool = False, for_evaluations: bool = False
    ) -> None:
        self.name, self.engine = name, engine
        self.for_evaluations = for_evaluations  # alone: it completes no prompts to train on
        self.founding = founding  # it belongs to the run's configuration
        self.phase = Phase.ABSENT
        self.version: Version | None = None  # what it serves; None: the folder it was started with
        self.workers = 1  # processes that share the model
        self.in_flight = 0  # completions it works on
        self.evaluating = 0  # of those, an evaluation's
        self.joined = 0  # how often it has begun to serve
        self.streams: set[asyncio.Task[None]] = set()  # tasks that read completions from it
        self.backoff = Backoff(1.0, 30.0)  # after requests that it refused
        self.rests_until = 0.0  # monotonic time before which it is sent nothing
        self.lost = asyncio.Event()
        self.held = False  # out of dispatch for an evaluation
        self.refusal: str | None = None  # of its newest update: it is sent nothing until it takes one
        self.excluded = False  # it gave too many bad answers: it is sent nothing any more
        self.busy = asyncio.Lock()  # held during an update, and while the replica is held
        self.updating = False

    @property
    def server(self) -> str:
        """It, for people and for the count of its bad answers."""
        return f"replica {self.name} at {self.engine.url}"

    @property
    def condition(self) -> str:
        """It, and why it takes no requests, in words."""
        refuses = {f"refuses updates ({self.refusal})": self.refusal is not None}
        rests = {"refused a request and is asked again soon": self.rests_until > time.monotonic()}
        states = {"is excluded": self.excluded, "is held": self.held, **refuses, **rests}
        phase = f"is {self.phase.value.replace('_', ' ')}"
        return f"{self.name} {next((words for words, holds in states.items() if holds), phase)}"

    @property
    def takes_work(self) -> bool:
        """Whether it is neither held nor refuses updates."""
        return not self.held and self.refusal is None

    async def unless_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """`work`, cancelled when the replica is lost first (Unreachable)."""
        return await unless(self.lost.wait(), work, f"replica {self.name} was lost")


class ReplicaPool:
    """The replicas of a run. `run()` for its whole length; `add` and `remove` at any time.

    Follows `state.target`, the newest version in the store. Out: VersionApplied, Membership, Stalled.
    """

    poll_seconds = 2.0  # between two checks of a serving replica
    retry_seconds = 1.0  # longest pause before an absent replica is tried again

    def __init__(self, common: Common) -> None:
        self.replicas: dict[str, Replica] = {}
        self.budget, self.changed = common.budget, common.events.changed
        self._state, self._write = common.record.state, common.record.write
        self._events, config = common.events, common.config
        self._weights, self._stall_timeout_seconds = config.weights, config.rollout.stall_timeout_seconds
        self._published = Signal()
        self._tasks = dict[str, asyncio.Task[None]]()
        self._group: asyncio.TaskGroup | None = None  # of them, while it runs
        self.keeps_cache = config.keeps_cache  # of running completions, at a swap

    @property
    def newest_broadcast(self) -> Version | None:
        """The newest version, where it was broadcast, whether it is in the store too or not."""
        last = self._state.published[-2:]
        newest = (each for each in last if each.version == last[-1].version)
        return next((each.version for each in newest if each.kind == "broadcast"), None)

    def is_stored(self, version: Version) -> bool:
        """Whether `version` is in the store: not one that was broadcast alone."""
        return any(
            snapshot.version == version and snapshot.kind != "broadcast" for snapshot in self._state.published
        )

    # --- members ------------------------------------------------------------------------------------------

    def add(self, name: str, engine: ReplicaEngine, for_evaluations: bool = False) -> None:
        """Let a replica join; it serves as soon as it answers and holds a published version.

        `for_evaluations`: for them alone; it serves whatever it holds.
        """
        assert name not in self.replicas, f"replica {name} is a member already"
        self.replicas[name] = Replica(name, engine, self._group is None, for_evaluations)
        self._start(name)

    def _start(self, name: str) -> None:
        """Once the pool runs."""
        if self._group is not None:
            follow = self._follow(self.replicas[name])
            self._tasks[name] = self._group.create_task(follow, name=f"follow {name}")

    async def remove(self, name: str) -> None:
        """Let a replica leave; its unfinished prompts are requeued. Raises RemoteError: there is none."""
        if name not in self.replicas:
            raise RemoteError(f"no replica {name!r}: there are {', '.join(self.replicas) or 'none'}")
        replica = self.replicas.pop(name)
        await cancel([self._tasks.pop(name, None)])
        self._lose(replica)  # its task has done so only if it served
        self._events.emit(Membership(name, "has left"))
        await replica.engine.aclose()

    async def join(self, engine: ReplicaEngine, name: str) -> bool:
        """Let a replica join by request, whether it answers already, which is returned, or not.

        Nothing of it is on record: a controller that starts again has the replicas of its configuration.
        Raises RemoteError for a name or URL that is taken, and for a replica of another run.
        """
        answers = False
        try:
            with suppress(Unreachable):
                if await engine.alive():
                    await engine.state()
                    answers = True
            for member in self.replicas.values():
                if member.engine.url == engine.url or member.name == name:
                    raise RemoteError(f"replica {member.name} is a member already: remove it first")
        except RemoteError:
            await engine.aclose()
            raise
        self.add(name, engine)
        return answers

    def has(self, replica: Replica) -> bool:
        """Whether it is a member that was not excluded."""
        return self.replicas.get(replica.name) is replica and not replica.excluded

    def members(self, for_evaluations: bool = False) -> list[Replica]:
        """Those that prompts to train on are for, or those that evaluations alone use."""
        return [replica for replica in self.replicas.values() if replica.for_evaluations == for_evaluations]

    def serving(self, for_evaluations: bool = False) -> list[Replica]:
        return [replica for replica in self.members(for_evaluations) if replica.phase is Phase.SERVING]

    def able(self) -> list[Replica]:
        """Those that take requests now, the least busy first: not held, refusing updates or at rest."""
        now = time.monotonic()
        able = [each for each in self.serving() if each.rests_until <= now and each.takes_work]
        return sorted(able, key=lambda replica: replica.in_flight)

    def _is_ahead(self, replica: Replica, version: Version) -> bool:
        step_of = self._state.step_of
        return replica.version is not None and step_of(replica.version) > step_of(version)

    def report_lost(self, replica: Replica) -> None:
        """A connection to it broke: it is out until it has joined again."""
        replica.lost.set()
        replica.phase = Phase.ABSENT
        self._published.wake()

    def bad_answer(self, replica: Replica, problem: str, prompt: str | None = None) -> None:
        """An answer of it cannot be used: see ErrorBudget. `prompt`: of a completion; None: no prompt's."""
        self.budget.bad(replica.server, prompt or object(), problem, lambda: self._exclude(replica))

    def _exclude(self, replica: Replica) -> bool:
        replica.excluded = True
        self.report_lost(replica)
        return not all(member.excluded for member in self.members(replica.for_evaluations))

    def refused(self, replica: Replica, retry_after: float | None) -> None:
        """It refused a request: send it nothing for `retry_after` seconds (None: with backoff)."""
        seconds = replica.backoff.next() if retry_after is None else retry_after
        replica.rests_until = time.monotonic() + seconds
        asyncio.get_running_loop().call_later(seconds, self.changed.wake)

    # --- following ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow until cancelled. An error of the controller's own is raised."""
        async with asyncio.TaskGroup() as self._group:
            for name in self.replicas:
                self._start(name)
            try:
                await asyncio.Event().wait()
            finally:
                self._group = None

    def published(self) -> None:
        """A newer version is there, or another lineage has begun."""
        self._published.wake()

    async def _follow(self, replica: Replica) -> None:
        watchdog = asyncio.create_task(self._watch_stalls(replica))
        try:
            while not replica.excluded:
                await self._join(replica)
                try:
                    await self._serve(replica)
                except DistillError as error:
                    self._failed(replica, "is lost", error)
                finally:
                    self._lose(replica)
        except WrongServer as error:
            await self._expel(replica, error)
        finally:
            await cancel([watchdog])

    def _failed(self, replica: Replica, what: str, error: DistillError) -> None:
        logger.warning("replica %s %s: %s", replica.name, what, error)
        if isinstance(error, WireError):
            self.bad_answer(replica, str(error))

    async def _expel(self, replica: Replica, error: WrongServer) -> None:
        """Remove a replica of another run. Raises its error when it was to begin with, or is the last."""
        if (replica.founding and replica.joined == 0) or self.members() == [replica]:
            raise WrongServer(f"replica {replica.name}: {error}") from error
        logger.error("replica %s is taken out of this run: %s", replica.name, error)
        del self.replicas[replica.name]
        await replica.engine.aclose()

    async def _watch_stalls(self, replica: Replica) -> None:
        """Stall watchdog: /health is OK, there is work, but no token is generated and no update made.

        A replica that does not answer may be starting again: its launcher and `_serve` handle that.
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
            generates = replica.in_flight > 0 and tokens is not None  # None: its engine keeps no count
            return not (generates or replica.updating) or seen != before

        while True:
            await until_stalled(progresses, self._stall_timeout_seconds)
            logger.error(
                "replica %s answers, has %d completions to generate or weights to load, and generated no "
                "token for rollout.stall_timeout_seconds = %g s: it is stalled, its prompts are requeued",
                replica.name, replica.in_flight, self._stall_timeout_seconds,
            )  # fmt: skip
            self.report_lost(replica)
            self._events.emit(Stalled(replica.name))

    async def _join(self, replica: Replica) -> None:
        """Until the replica answers and holds what it must hold."""
        backoff = Backoff(self.retry_seconds / 10, self.retry_seconds)
        while not replica.excluded:
            try:
                if await replica.engine.alive():
                    state = await replica.engine.state()
                    replica.version, replica.workers = state.version, state.workers
                    replica.lost.clear()
                    replica.refusal = None
                    replica.phase = Phase.CATCHING_UP
                    await self._catch_up(replica)
                    replica.phase = Phase.SERVING
                    replica.joined += 1
                    serves = f"serves {replica.version or 'the model folder'}"
                    self._events.emit(Membership(replica.name, serves))
                    return
            except WrongServer:
                raise
            except DistillError as error:
                self._failed(replica, "cannot join yet", error)
                replica.phase = Phase.ABSENT
            with waits.on(replica.name, f"the process at {replica.engine.url}", progress=replica.joined):
                await asyncio.sleep(backoff.next())

    async def _catch_up(self, replica: Replica) -> None:
        while True:
            if (target := self._due(replica)) is not None:
                await self.update(replica, target)
                continue
            version = replica.version
            stranded = version is None and self.newest_broadcast is not None
            if replica.for_evaluations or (
                not stranded and (version is None or self._state.may_exist(version))
            ):
                return
            if stranded:
                self._events.emit(Stranded(replica.name))
            with waits.on(replica.name, "a version", of=lambda: [PUBLISHER], progress=version or False):
                await self._published.wait(self.poll_seconds)
            if replica.lost.is_set():
                raise Unreachable(f"replica {replica.name} was lost while it waited for a version")

    def _due(self, replica: Replica) -> Version | None:
        """The version to bring the replica to; None: it holds the newest.

        After a restart of the trainer the newest published version may be behind what the replica holds: it
        stays where it is until the trainer has caught up.
        """
        newest = self._state.target
        if replica.for_evaluations or newest is None or replica.version == newest.version:
            return None
        target, version, step_of = newest.version, replica.version, self._state.step_of
        if version is None or not self._state.may_exist(version) or step_of(target) >= step_of(version):
            return target
        return None

    async def _serve(self, replica: Replica) -> None:
        """Until the replica is lost, or raises why it is."""
        while not replica.lost.is_set():
            target = self._due(replica)
            if target is not None:
                try:
                    await self.update(replica, target)
                    continue
                except WrongServer:
                    raise
                except RemoteError as error:
                    self.refused_update(replica, error)
            if await self._published.wait(self.poll_seconds):
                continue
            async with replica.busy:  # it may have come back with other weights
                state = await replica.unless_lost(replica.engine.state())
                if state.version != replica.version:
                    told = f"it serves {state.version} and should serve {replica.version}: it restarted"
                    raise Unreachable(told)

    def refused_update(self, replica: Replica, error: DistillError) -> None:
        """It stays at its version: send it nothing until an update succeeds."""
        known, replica.refusal = replica.refusal is not None, str(error)
        if not known:
            stays = f"stays at {replica.version or 'the model folder'}"
            remedy = "gets no prompts until it takes the newest version: see its log, or restart it"
            self._events.emit(Membership(replica.name, f"{stays} and {remedy}; {error}"))

    async def update(
        self, replica: Replica, version: Version, ticket: BroadcastTicket | None = None
    ) -> UpdateReply | None:
        """Bring a replica to a version, from the store or as member of a broadcast: what it cost; None:
        another task had done it."""
        async with replica.busy:
            return await self._update_locked(replica, version, ticket)

    async def _update_locked(
        self, replica: Replica, version: Version, ticket: BroadcastTicket | None = None
    ) -> UpdateReply | None:
        """The same, by a task that holds `replica.busy`."""
        if replica.version == version and ticket is None:
            return None
        request = UpdateRequest(version, "keep" if self.keeps_cache else "recompute", ticket)
        began, source = time.monotonic(), STORE if ticket is None else PUBLISHER
        replica.updating = True
        try:
            with waits.on(replica.name, source, lambda: f"it loads {version}"):
                update = replica.engine.update(request, self._weights.timeout_seconds)
                reply = await replica.unless_lost(update)
        finally:
            replica.updating = False
        if problem := checks.same_version(reply, version):
            raise WireError(f"its answer to an update cannot be used: {problem}")
        replica.version, replica.refusal = reply.version, None
        parts = reply.stage_seconds, reply.pause_seconds, reply.apply_seconds
        seconds = time.monotonic() - began
        applied = VersionApplied(replica.name, reply.version, reply.bytes_read, *parts, seconds)
        self._write(applied)
        self._events.emit(applied)
        return reply

    def _lose(self, replica: Replica) -> None:
        replica.phase = Phase.ABSENT
        replica.lost.set()
        for task in replica.streams:
            task.cancel()
        self.changed.wake()

    # --- held for an evaluation ---------------------------------------------------------------------------

    @asynccontextmanager
    async def hold(self, version: Version, seconds: float) -> AsyncIterator[Replica]:
        """A serving replica that holds exactly `version`, or for step 0 the model folder, while the block
        runs.

        Raises Unreachable when none serves within `seconds`, or when it is lost before it is there;
        RemoteError when the version cannot be loaded. The caller watches `Replica.lost`.
        """
        replica = await self._choose(version, seconds)
        replica.held = True
        try:
            with waits.on(EVALUATION, replica.name, lambda: "its update ends first, or its loss"):
                await replica.busy.acquire()
            try:
                if not (version.step == 0 and (replica.version is None or replica.version.step == 0)):
                    await replica.unless_lost(self._bring(replica, version))
                with waits.on(replica.name, EVALUATION, lambda: f"it is held at {version}"):
                    yield replica
            finally:
                replica.busy.release()
            with suppress(DistillError):  # its own task retries
                if (target := self._due(replica)) is not None:
                    await replica.unless_lost(self.update(replica, target))
        finally:
            replica.held = False
            self.published()
            self.changed.wake()

    async def _choose(self, version: Version, seconds: float) -> Replica:
        """The serving replica that need not go back, with the fewest completions in flight."""
        loop, alone = asyncio.get_running_loop(), bool(self.members(for_evaluations=True))
        deadline = loop.time() + seconds
        while True:
            if willing := [replica for replica in self.serving(alone) if replica.takes_work]:
                return min(willing, key=lambda replica: (self._is_ahead(replica, version), replica.in_flight))
            if (left := deadline - loop.time()) <= 0:
                of = "evaluation.replica does not serve, which" if alone else "no replica serves that"
                raise Unreachable(f"{of} could generate with {version}: see the logs of replicas")
            state = lambda: "; ".join(replica.condition for replica in self.members(alone))  # noqa: E731
            with waits.on(EVALUATION, "a replica", state, of=lambda: [*self.replicas], progress=version):
                await self.changed.wait(min(left, self.retry_seconds))

    async def _bring(self, replica: Replica, version: Version) -> None:
        while replica.in_flight and self._is_ahead(replica, version):
            old = lambda: f"{replica.in_flight} completions of {replica.version}"  # noqa: E731
            with waits.on(EVALUATION, replica.name, old, of=lambda: [GENERATION], progress=replica.in_flight):
                await self.changed.wait()
        await self._update_locked(replica, version)
