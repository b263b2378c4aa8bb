"""Dispatches prompts to replicas under the capacity rule, and says when prompts may be issued."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Literal, NamedTuple

from distill import waits
from distill.buffer import depth
from distill.config import RunConfig
from distill.events import AT_FAULT, Events, Quarantined
from distill.metrics.timeline import TRAINER, Timeline
from distill.record.record import Record
from distill.record.rollout import RequeueReason, Rollout
from distill.record.validation import Validator
from distill.rollout.ends import Lost, Unneeded
from distill.rollout.replica_client import Answer
from distill.rollout.replica_pool import Replica, ReplicaPool
from distill.waits import DISPATCHER, GENERATION, PUBLISHER
from sync.base.errors import Overloaded, RemoteError, Unreachable, WireError, WrongServer
from sync.wire import Generated, GenerateFailed, GeneratePrompt, GenerateRequest, Version
from sync.wire.checks import Problem

logger = logging.getLogger(__name__)

PATIENCE = 2.0
"""A request times out after this multiple of rollout.completion_timeout_seconds. The replica ends completions
at 1×, so one that exceeds the multiple is stalled."""
PauseReason = Literal["disk", "guard", "end"]  # a disk that is nearly full, bad steps, the end of the run


class Completion(NamedTuple):
    """What a replica answered."""

    answer: Generated
    replica: Replica


@dataclass
class _Call:
    """A rollout that waits for its completion, or for that of a turn."""

    rollout: Rollout
    last: Replica | None  # that generated its turn before
    completed: asyncio.Future[Completion]


@dataclass
class _Request:
    """A request in progress."""

    replica: Replica
    missing: dict[str, _Call]  # not answered yet
    reason: RequeueReason = "replica_lost"  # why what is missing at the end was lost


class Dispatcher:
    """Runs for the length of the run; `complete` at any time.

    Bounds: `RunState.room` prompts for the replica that is sent them, `rollout.max_in_flight` completions per
    replica, and what the run's steps need in all. `validator` holds the sampling parameters of requests and
    checks responses.

    A turn of an episode is generated like a prompt, before new ones, by the replica that generated the turn
    before if it serves, for its KV cache.
    """

    def __init__(
        self,
        record: Record,
        pool: ReplicaPool,
        config: RunConfig,
        validator: Validator,
        timeline: Timeline,
        events: Events,
    ) -> None:
        self._record, self._pool, self._validator = record, pool, validator
        self._config, self._steps = config.rollout, config.run.steps
        self._timeline, self._events = timeline, events
        self._prompts: deque[_Call] = deque()  # issued, or requeued, and to be sent
        self._turns: deque[_Call] = deque()  # of episodes under way, to be sent
        self.depth = depth(config)
        self._idle: dict[str, waits.Wait] = {}  # of replicas without work, whose room is used up
        self._sent = 0  # rollouts, in all
        self._closing = False
        self.paused: set[PauseReason] = set()  # while there is a reason, no new request is sent

    async def run(self, begin: Callable[[int], None]) -> None:
        """`begin` issues so many prompts and has each of them completed, by whomever."""
        async with asyncio.TaskGroup() as group:
            try:
                while True:
                    while (loading := self._record.loading(self._most_new())) is not None:
                        with waits.on(DISPATCHER, "prompts", lambda: "they are read"):
                            await asyncio.wrap_future(loading)
                    await self._dispatch(group, begin)
                    self._note_idle()
                    with waits.on(DISPATCHER, "room", self._lacking, of=self._blocking, progress=self._sent):
                        await self._events.changed.wait()
            finally:
                self._closing = True
                waits.keep(self._idle, set(), self._idle_wait)

    async def complete(self, rollout: Rollout, last: Replica | None = None) -> Completion:
        """The completion of a rollout, or of the turn of an episode, preferably by the replica `last`.

        Waits for a replica that has room for it. Raises Lost; Unneeded when it was refused.
        """
        call = _Call(rollout, last, asyncio.get_running_loop().create_future())
        (self._turns if rollout.source_prompt.environment else self._prompts).append(call)
        self._events.changed.wake()
        return await call.completed

    @property
    def unsent(self) -> int:
        """Outstanding rollouts that no batch takes before more is sent: they wait to be, or are too old."""
        return len(self._prompts) + len(self._turns) + self._hopeless()

    # --- prompts out --------------------------------------------------------------------------------------

    async def _dispatch(self, group: asyncio.TaskGroup, begin: Callable[[int], None]) -> None:
        """As long as there are prompts and replicas with room; other tasks run between two requests."""
        while self._turns and not self.paused and (replica := self._for_turn(self._turns[0])):
            self._request(group, replica, self._next_turns(replica))
            await asyncio.sleep(0)
        while not self.paused and (request := self._next_request()):
            replica, count = request
            if (waiting := len(self._prompts)) < count:
                begin(count - waiting)  # those for replicas call `complete` before this goes on
            else:
                self._request(group, replica, [self._prompts.popleft() for _ in range(count)])
            await asyncio.sleep(0)

    def _request(self, group: asyncio.TaskGroup, replica: Replica, calls: list[_Call]) -> None:
        request = _Request(replica, {call.rollout.id: call for call in calls})
        begun = [call.rollout.id for call in calls if not call.rollout.own]
        self._record.state.sent(begun, replica.version or Version(0, 0))
        self._load(replica, len(calls))
        self._sent += len(calls)
        task = group.create_task(self._send(request))
        replica.streams.add(task)
        task.add_done_callback(partial(self._ended, request))

    def _for_turn(self, turn: _Call) -> Replica | None:
        """Of those with room the replica of the turn before, else the least busy; None: none has room."""
        able = [
            replica
            for replica in self._pool.able()
            if replica.in_flight < self._config.max_in_flight and self._in_time(turn.rollout, replica)
        ]
        return turn.last if turn.last in able else next(iter(able), None)

    def _in_time(self, turn: Rollout, replica: Replica) -> bool:
        """Whether a turn by `replica` makes its episode no older than the bound allows."""
        state = self._record.state
        begun = state.pending[turn.id].since
        if begun and state.step_of(begun) <= state.step_of(replica.version or Version(0, 0)):
            return True
        return state.room(replica.version, state.rules.bound.limit, self._hopeless() + 1) > 0

    def _next_turns(self, replica: Replica) -> list[_Call]:
        """The first turns that are for `replica`: no more than a request and the replica take."""
        room, turns = self._config.max_in_flight - replica.in_flight, list[_Call]()
        while self._turns and len(turns) < min(self._config.request_size, room):
            if self._for_turn(self._turns[0]) is not replica:
                break
            turns.append(self._turns.popleft())
        return turns

    def _next_request(self) -> tuple[Replica, int] | None:
        """The least busy replica that takes a whole request now, and its prompts; None: none does.

        One with room that is busier than others without, which are behind, is sent up to an even share: the
        first to take a version does not take the work of all.
        """
        able, config, hopeless = self._pool.able(), self._config, self._hopeless()
        in_flight = sum(replica.in_flight for replica in able)
        for place, replica in enumerate(able):
            size = room = self._room(replica, hopeless)
            if place > 0:
                share = ceil((in_flight + room) / len(able))
                size = min(room, max(0, share - replica.in_flight))
            size = min(size, config.request_size, config.max_in_flight)
            if size and replica.in_flight + size <= config.max_in_flight:
                return replica, size
        return None

    def _room(self, replica: Replica, hopeless: int) -> int:
        """Prompts that `replica` may be sent now, with `_hopeless`: those that wait, then new ones.

        A new one is bounded by the depth. One that waits counted when it was new, perhaps at a greater depth
        or for a replica ahead of this one, so that the bound itself holds for it.
        """
        state, waiting = self._record.state, len(self._prompts)
        if waiting:
            room = state.room(replica.version, state.rules.bound.limit, hopeless + waiting)
            if room < waiting:
                return room
        return waiting + self._new(replica, hopeless)

    def _new(self, replica: Replica, hopeless: int) -> int:
        """Prompts that may be issued for `replica` now."""
        state = self._record.state
        needed = (self._steps - state.next_step) * self._config.batch - (state.outstanding - hopeless)
        return max(0, min(needed, state.room(replica.version, self.depth.batches, hopeless)))

    def _most_new(self) -> int:
        """Prompts that may be issued now."""
        hopeless = self._hopeless()
        return max((self._new(replica, hopeless) for replica in self._pool.able()), default=0)

    def _hopeless(self) -> int:
        """Completions in flight with weights that are too old for every batch."""
        too_old, members = self._record.state.is_too_old, self._pool.replicas.values()
        return sum(each.in_flight for each in members if too_old(each.version or Version(0, 0)))

    def _note_idle(self) -> None:
        """An idle replica waits for the trainer when its room is used up, else for nothing."""
        hopeless, able = self._hopeless(), self._pool.able()
        blocked = {each.name for each in able if not each.in_flight and not self._room(each, hopeless)}
        waits.keep(self._idle, blocked, self._idle_wait)

    def _idle_wait(self, name: str) -> waits.Wait:
        return waits.on(name, "room", of=lambda: [DISPATCHER], cause=TRAINER, idle=True)

    def _blocking(self) -> Collection[str]:
        """The parties for which nothing more is sent."""
        able, newest, reached = self._pool.able(), self._record.state.target, self._record.state.reached
        if self.paused:
            return self.paused
        if not able:
            return [replica.name for replica in self._pool.members()]
        if self._all_full():
            return [GENERATION]
        if behind := self._behind():
            return [replica.name for replica in behind]
        return [TRAINER if newest is None or newest.version == reached else PUBLISHER]

    def _lacking(self) -> str:
        """Why nothing more is sent, in words."""
        state, members = self._record.state, self._pool.members()
        if self.paused:
            return f"paused for {', '.join(self.paused)}"
        if not self._pool.able():
            return "; ".join(replica.condition for replica in members) or "there is no replica"
        if self._all_full():
            return f"every replica has rollout.max_in_flight = {self._config.max_in_flight} completions"
        if behind := self._behind():
            return "; ".join(f"{replica.name} is at {replica.version}" for replica in behind)
        newest = state.target and state.target.version
        return f"{state.outstanding} rollouts are under way or buffered, the newest version is {newest}"

    def _all_full(self) -> bool:
        size = self._config.request_size if self._prompts else 1
        return all(replica.in_flight + size > self._config.max_in_flight for replica in self._pool.able())

    def _behind(self) -> list[Replica]:
        """Serving replicas that lack the newest version."""
        target = self._record.state.target
        return [r for r in self._pool.serving() if target and r.version != target.version]

    async def _send(self, request: _Request) -> None:
        """One request from start to end; leaves in it what was not answered, and why."""
        replica, count = request.replica, len(request.missing)
        prompts = [
            GeneratePrompt(id, call.rollout.source_prompt.token_ids, routes_from=call.rollout.routes_from)
            for id, call in request.missing.items()
        ]
        message = GenerateRequest(sampling=self._validator.sampling, prompts=prompts)
        try:
            await self._record.store.commit()
            limit = self._config.completion_timeout_seconds
            left = lambda: f"{len(request.missing)} of {count} completions"  # noqa: E731
            async with asyncio.timeout(None if limit is None else PATIENCE * limit):
                with waits.on(GENERATION, replica.name, left):
                    async with aclosing(replica.engine.generate(message)) as answers:
                        async for answer in answers:
                            self._answered(request, answer)
            if request.missing:
                raise WireError(f"{len(request.missing)} of {count} prompts were not answered: each must be")
        except TimeoutError:
            request.reason = "straggler"
        except (Unreachable, WireError, WrongServer) as error:
            logger.warning("%d completions of %s are lost: %s", len(request.missing), replica.name, error)
            self._pool.report_lost(replica)
            if isinstance(error, WireError):
                request.reason = "unusable"
                self._pool.bad_answer(replica, str(error))
        except RemoteError as error:
            logger.warning("replica %s refused a request: %s", replica.name, error)
            busy = isinstance(error, Overloaded)
            request.reason = "replica_busy" if busy else "replica_lost"
            self._pool.refused(replica, error.retry_after if isinstance(error, Overloaded) else None)
            if not busy:
                self._pool.bad_answer(replica, str(error))

    def _ended(self, request: _Request, task: asyncio.Task[None]) -> None:
        """Called once for every request, also for one that was cancelled before it began."""
        request.replica.streams.discard(task)
        self._load(request.replica, -len(request.missing))
        if not self._closing:
            for call in request.missing.values():
                call.completed.set_exception(Lost(request.reason))

    def _load(self, replica: Replica, change: int) -> None:
        replica.in_flight += change
        self._timeline.level(replica.name, "generate", replica.in_flight)
        if change < 0:
            self._events.changed.wake()

    # --- completions in -----------------------------------------------------------------------------------

    def _answered(self, request: _Request, answer: Answer) -> None:
        replica, call = request.replica, request.missing.pop(answer.id, None)
        if call is None:
            told = f"answered id {answer.id[:80]!r}, which was not requested or was already answered"
            raise WireError(told)
        rollout = call.rollout
        replica.backoff.reset()
        self._load(replica, -1)
        if isinstance(answer, GenerateFailed) and not answer.unusable:
            logger.warning("prompt %s was refused by its replica: %s", rollout.id, answer.error)
            call.completed.set_exception(Unneeded("engine_failed", answer.error))
            refused = f"it refused the prompt: {answer.error} ({AT_FAULT})"
            self._pool.bad_answer(replica, refused, rollout.id)
        elif problem := self._problem(rollout, answer):
            detail = f"replica {replica.name} at {replica.engine.url}: {problem}"
            logger.warning("the completion of %s cannot be used: %s", rollout.id, detail)
            self._events.emit(Quarantined(rollout.source_prompt, "unusable", detail, []))
            call.completed.set_exception(Lost("unusable"))
            self._pool.bad_answer(replica, str(problem), rollout.id)
        elif isinstance(answer, Generated):
            if answer.token_ids.shape[0]:
                self._pool.budget.good(replica.server)
            elif answer.finish_reason not in ("abort", "time"):
                self._pool.bad_answer(
                    replica, f"it completed a prompt without a token ({AT_FAULT})", rollout.id
                )
            call.completed.set_result(Completion(answer, replica))

    def _problem(self, rollout: Rollout, answer: Answer) -> Problem | str | None:
        """Why an answer cannot be used; None: it can."""
        if isinstance(answer, GenerateFailed):
            return answer.error
        return self._validator.generated(answer, len(rollout.source_prompt.token_ids), rollout.routes_from)
