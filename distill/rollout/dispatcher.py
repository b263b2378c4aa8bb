"""Dispatches prompts to replicas under the capacity rule, and screens completions as each ends."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Literal

from distill.buffer import depth
from distill.config import AtLimit, RunConfig
from distill.events import (
    AT_FAULT,
    CompletionReady,
    EpisodeBroken,
    EpisodeIssued,
    EpisodePlayed,
    EpisodeTooOld,
    Events,
    Quarantined,
    RolloutRejected,
    TeacherIssued,
    TurnGenerated,
)
from distill.metrics.timeline import TRAINER, Timeline
from distill.record.record import GROUP_BROKEN, RunLog
from distill.record.rollout import DropReason, RequeueReason, Rollout
from distill.record.validation import Validator, repetitive
from distill.rollout.replica_client import Answer
from distill.rollout.replica_pool import Replica, ReplicaPool
from sync.base.errors import Overloaded, RemoteError, Unreachable, WireError, WrongServer
from sync.wire import Generated, GenerateFailed, GeneratePrompt, GenerateRequest, Version
from sync.wire.checks import Problem

logger = logging.getLogger(__name__)

PATIENCE = 2.0
"""A request times out after this multiple of rollout.completion_timeout_seconds. The replica ends completions
at 1×, so one that exceeds the multiple is stalled."""
PauseReason = Literal["disk", "guard", "end"]  # a disk that is nearly full, bad steps, the end of the run


@dataclass
class _Request:
    """A request in progress."""

    replica: Replica
    missing: dict[str, Rollout]  # not answered yet
    reason: RequeueReason = "replica_lost"  # why what is missing at the end was lost


class Dispatcher:
    """Runs for the length of the run. Out: CompletionReady, RolloutRejected, Quarantined; TeacherIssued;
    EpisodeIssued, TurnGenerated, EpisodeBroken.

    Bounds: `RunState.room` prompts for the replica that is sent them, `rollout.max_in_flight` completions per
    replica, and what the run's steps need in all. `validator` holds the sampling parameters of requests and
    checks responses.

    A turn of an episode is generated like a prompt, before new ones, by the replica that generated the turn
    before if it serves, for its KV cache. A turn that is lost is sent again; the episode goes on.
    """

    def __init__(
        self,
        run_log: RunLog,
        pool: ReplicaPool,
        config: RunConfig,
        validator: Validator,
        timeline: Timeline,
        events: Events,
    ) -> None:
        self._run_log, self._pool, self._validator = run_log, pool, validator
        self._config, self._steps, self._guard = config.rollout, config.run.steps, config.guard
        self._timeline, self._events = timeline, events
        self._requeued: deque[Rollout] = deque()
        self._turns: deque[Rollout] = deque()  # of episodes under way, to be completed
        self._last: dict[str, Replica] = {}  # episode → the replica of its newest turn
        self.depth = depth(config)
        self._blocked: set[str] = set()  # replicas that are blocked on the trainer
        self._closing = False
        self.paused: set[PauseReason] = set()  # while there is a reason, no new request is sent

    async def run(self) -> None:
        lost = list(self._run_log.state.pending.values())
        self._requeued.extend(self._run_log.requeue(lost, "controller_restarted"))
        async with asyncio.TaskGroup() as group:
            try:
                while True:
                    while (loading := self._run_log.loading(self._most_new())) is not None:
                        await asyncio.wrap_future(loading)
                    await self._dispatch(group)
                    self._note_blocked()
                    await self._events.changed.wait()
            finally:
                self._closing = True

    # --- prompts out --------------------------------------------------------------------------------------

    async def _dispatch(self, group: asyncio.TaskGroup) -> None:
        """As long as there are prompts and replicas with room; other tasks run between two requests."""
        while self._turns and not self.paused and (replica := self._for_turn(self._turns[0])):
            self._request(group, replica, self._next_turns(replica))
            await asyncio.sleep(0)
        while not self.paused and (request := self._next_request()):
            replica, count = request
            if rollouts := self._next(count):
                self._request(group, replica, rollouts)
                await asyncio.sleep(0)

    def _request(self, group: asyncio.TaskGroup, replica: Replica, rollouts: list[Rollout]) -> None:
        request = _Request(replica, {rollout.id: rollout for rollout in rollouts})
        begun = [rollout.id for rollout in rollouts if not rollout.own]
        self._run_log.state.sent(begun, replica.version or Version(0, 0))
        self._load(replica, len(rollouts))
        task = group.create_task(self._send(request))
        replica.streams.add(task)
        task.add_done_callback(partial(self._ended, request))

    def _for_turn(self, rollout: Rollout) -> Replica | None:
        """Of those with room the replica of the turn before, else the least busy; None: none has room."""
        able = [
            replica
            for replica in self._pool.able()
            if replica.in_flight < self._config.max_in_flight and self._in_time(rollout, replica)
        ]
        last = self._last.get(rollout.id)
        return last if last in able else next(iter(able), None)

    def _in_time(self, turn: Rollout, replica: Replica) -> bool:
        """Whether a turn by `replica` makes its episode no older than the bound allows."""
        state = self._run_log.state
        begun = state.pending[turn.id].since
        if begun and state.step_of(begun) <= state.step_of(replica.version or Version(0, 0)):
            return True
        return state.room(replica.version, state.rules.bound.limit, self._hopeless() + 1) > 0

    def _next_turns(self, replica: Replica) -> list[Rollout]:
        """The first turns that are for `replica`: no more than a request and the replica take."""
        room, turns = self._config.max_in_flight - replica.in_flight, list[Rollout]()
        while self._turns and len(turns) < min(self._config.request_size, room):
            if self._for_turn(self._turns[0]) is not replica:
                break
            turns.append(self._turns.popleft())
            self._last[turns[-1].id] = replica
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
        """Prompts that `replica` may be sent now, with `_hopeless`: those that were requeued, then new ones.

        A new one is bounded by the depth. One that was requeued counted when it was new, perhaps at a greater
        depth or for a replica ahead of this one, so that the bound itself holds for it.
        """
        state, again = self._run_log.state, len(self._requeued)
        if again:
            room = state.room(replica.version, state.rules.bound.limit, hopeless + again)
            if room < again:
                return room
        return again + self._new(replica, hopeless)

    def _new(self, replica: Replica, hopeless: int) -> int:
        """Prompts that may be issued for `replica` now."""
        state = self._run_log.state
        needed = (self._steps - state.next_step) * self._config.batch - (state.outstanding - hopeless)
        return max(0, min(needed, state.room(replica.version, self.depth.batches, hopeless)))

    def _most_new(self) -> int:
        """Prompts that may be issued now."""
        hopeless = self._hopeless()
        return max((self._new(replica, hopeless) for replica in self._pool.able()), default=0)

    def _hopeless(self) -> int:
        """Completions in flight with weights that are too old for every batch."""
        too_old, members = self._run_log.state.is_too_old, self._pool.replicas.values()
        return sum(each.in_flight for each in members if too_old(each.version or Version(0, 0)))

    def _next(self, count: int) -> list[Rollout]:
        """The next `count` rollouts, without those of teachers and environments, which are passed on."""
        again = [self._requeued.popleft() for _ in range(min(count, len(self._requeued)))]
        rollouts = again + (self._run_log.issue(count - len(again)) if count > len(again) else [])
        mine = []
        for rollout in rollouts:
            if rollout.by_teacher:
                self._events.emit(TeacherIssued(rollout))
            elif rollout.source_prompt.environment:
                self._events.emit(EpisodeIssued(rollout))
            else:
                mine.append(rollout)
        return mine

    def _note_blocked(self) -> None:
        """An idle replica is blocked on the trainer when its room is used up, else on nothing."""
        idle = [replica for replica in self._pool.able() if replica.in_flight == 0]
        before, hopeless = self._blocked, self._hopeless()
        self._blocked = {replica.name for replica in idle if not self._room(replica, hopeless)}
        for name in before | self._blocked:  # one that was blocked may have been removed
            self._timeline.waits(name, TRAINER if name in self._blocked else None)

    async def _send(self, request: _Request) -> None:
        """One request from start to end; leaves in it what was not answered, and why."""
        replica, count = request.replica, len(request.missing)
        prompts = [
            GeneratePrompt(rollout.id, rollout.source_prompt.token_ids, routes_from=rollout.routes_from)
            for rollout in request.missing.values()
        ]
        message = GenerateRequest(sampling=self._validator.sampling, prompts=prompts)
        try:
            await self._run_log.store.commit()
            limit = self._config.completion_timeout_seconds
            async with asyncio.timeout(None if limit is None else PATIENCE * limit):
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
            self._send_again(list(request.missing.values()), request.reason)

    def _load(self, replica: Replica, change: int) -> None:
        replica.in_flight += change
        self._timeline.level(replica.name, "generate", replica.in_flight)
        if change < 0:
            self._events.changed.wake()

    def _requeue(self, rollouts: list[Rollout], reason: RequeueReason, tokens: int = 0) -> None:
        self._requeued.extend(self._run_log.requeue(rollouts, reason, tokens))
        self._events.changed.wake()

    def _send_again(self, rollouts: list[Rollout], reason: RequeueReason, tokens: int = 0) -> None:
        """As `_requeue`; turns are generated again, and their episodes go on."""
        turns = {rollout.id: rollout for rollout in rollouts if rollout.source_prompt.environment}
        state = self._run_log.state
        since = {id: state.pending[id].since for id, turn in turns.items() if turn.own}
        again = self._run_log.requeue(rollouts, reason, tokens)
        self._requeued.extend(rollout for rollout in again if rollout.id not in turns)
        kept = {rollout.id for rollout in again}
        for id, turn in turns.items():
            if id in kept:
                self._turns.append(turn)
                if (version := since.get(id)) is not None:
                    state.sent([id], version)  # of its first turn
            else:
                self._broken(id)
        self._events.changed.wake()

    def _broken(self, episode: str) -> None:
        self._last.pop(episode, None)
        self._events.emit(EpisodeBroken(episode))

    # --- episodes -----------------------------------------------------------------------------------------

    def put_turn(self, rollout: Rollout) -> None:
        """Have a replica complete the context of an episode. Out: TurnGenerated or EpisodeBroken."""
        self._turns.append(rollout)
        self._events.changed.wake()

    def played(self, event: EpisodePlayed) -> None:
        """Take an episode that has ended as a completion of its first prompt."""
        self._last.pop(event.rollout.id, None)
        if self._completed(event.rollout, event.answer) and self._run_log.state.rules.group == 1:
            for rollout in event.more:
                self.screen(rollout)

    def forget(self, episode: str) -> None:
        """An episode that is over, and was not played."""
        self._last.pop(episode, None)

    def too_old(self, event: EpisodeTooOld) -> None:
        """Drop an episode that is left, and make room for another."""
        self._last.pop(event.rollout.id, None)
        bound = self._run_log.state.rules.bound
        detail = f"older than {bound.hard} versions while its environment was playing"
        self._run_log.drop([event.rollout.id], "too_old", detail, event.tokens)
        self._events.changed.wake()

    def play_again(self, rollout: Rollout) -> None:
        """Have an episode whose environment is gone begin again."""
        self._last.pop(rollout.id, None)
        self._requeue([rollout], "environment_lost")

    # --- completions in -----------------------------------------------------------------------------------

    def _answered(self, request: _Request, answer: Answer) -> None:
        replica, rollout = request.replica, request.missing.pop(answer.id, None)
        if rollout is None:
            told = f"answered id {answer.id[:80]!r}, which was not requested or was already answered"
            raise WireError(told)
        replica.backoff.reset()
        self._load(replica, -1)
        if isinstance(answer, GenerateFailed) and not answer.unusable:
            logger.warning("prompt %s was refused by its replica: %s", rollout.id, answer.error)
            self._run_log.drop([rollout.id], "engine_failed", answer.error)
            refused = f"it refused the prompt: {answer.error} ({AT_FAULT})"
            self._pool.bad_answer(replica, refused, rollout.id)
            if rollout.source_prompt.environment:
                self._broken(rollout.id)
        elif problem := self._problem(rollout, answer):
            detail = f"replica {replica.name} at {replica.engine.url}: {problem}"
            logger.warning("the completion of %s cannot be used: %s", rollout.id, detail)
            self._events.emit(Quarantined(rollout.source_prompt, "unusable", detail, []))
            self._send_again([rollout], "unusable")
            self._pool.bad_answer(replica, str(problem), rollout.id)
        elif isinstance(answer, Generated):
            if answer.token_ids.shape[0]:
                self._pool.budget.good(replica.server)
            elif answer.finish_reason not in ("abort", "time"):
                self._pool.bad_answer(
                    replica, f"it completed a prompt without a token ({AT_FAULT})", rollout.id
                )
            if not rollout.source_prompt.environment:
                self._completed(rollout, answer)
            elif answer.finish_reason == "abort" or answer.token_ids.shape[0] == 0:
                self._send_again([rollout], "aborted", answer.token_ids.shape[0])
            else:
                self._events.emit(TurnGenerated(answer))

    def _problem(self, rollout: Rollout, answer: Answer) -> Problem | str | None:
        """Why an answer cannot be used; None: it can."""
        if isinstance(answer, GenerateFailed):
            return answer.error
        return self._validator.generated(answer, len(rollout.source_prompt.token_ids), rollout.routes_from)

    def _completed(self, rollout: Rollout, answer: Generated) -> bool:
        """Requeue or reject what was broken off or ended by a limit, by its policy; else screen it: true."""
        whole = rollout.completed(answer)
        count = whole.own_length
        policy: AtLimit = "keep"
        reason: Literal["straggler", "over_long"] = "over_long"
        limit = "rollout.max_tokens"
        if answer.finish_reason == "abort":
            self._requeue([rollout], "aborted", count)
            return False
        if answer.finish_reason == "length":
            policy = self._config.on_max_tokens
        elif answer.finish_reason == "time":
            policy, reason, limit = self._config.on_timeout, "straggler", "rollout.completion_timeout_seconds"
        if policy == "drop":
            named = (
                f"a limit of environments.{environment}"
                if (environment := rollout.source_prompt.environment)
                else limit
            )
            self._reject(whole, reason, f"ended after {count} tokens by {named}")
        elif policy == "requeue" or (count == 0 and answer.finish_reason != "stop"):
            self._requeue([rollout], reason, count)
        else:
            self.screen(whole)
            return True
        return False

    def screen(self, rollout: Rollout) -> None:
        """Pass a completion, of student or teacher, on to be scored, unless it must not be trained on."""
        state = self._run_log.state
        if state.is_broken(rollout.id):
            self._run_log.drop([rollout.id], "group_broken", GROUP_BROKEN, rollout.own_length)
        elif rollout.length == 0:
            self._reject(rollout, "empty", "a completion without tokens")
        elif problem := state.span_problem(rollout.spans):
            self._reject(rollout, "impossible_version", problem)
        elif problem := repetitive(rollout.tokens, self._guard.repeats):
            self._reject(rollout, "repetitive", problem)
        else:
            self._events.emit(CompletionReady(rollout))

    def _reject(self, rollout: Rollout, reason: DropReason, detail: str) -> None:
        self._events.emit(RolloutRejected(rollout, reason, detail))
