"""Keeps the replicas fed: prompts out under the capacity rule, completions in as each ends."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Literal

from distill.config import AtLimit, RolloutConfig
from distill.interfaces import Quarantined
from distill.metrics.timeline import TRAINER, Timeline
from distill.rollout.replica_client import Answer
from distill.rollout.replica_pool import Replica, ReplicaPool
from distill.run_log.records import DropReason, RequeueReason
from distill.run_log.run_log import RunLog
from distill.run_log.state import PendingPrompt
from distill.run_log.validation import Validator, span_problem
from distill.scoring.scorer import PendingScore, Refused
from sync.errors import Overloaded, RemoteError, Unreachable, WireError, WrongServer
from sync.wire import Generated, GenerateFailed, GeneratePrompt, GenerateRequest, Version

logger = logging.getLogger(__name__)

PATIENCE = 2.0
"""Times rollout.completion_timeout_seconds within which a replica must have answered a request. It ends
completions at that time itself, so one that has not is stuck."""
Holder = Literal["disk", "guard", "end"]
"""Who holds rollouts back: a disk that is nearly full, bad steps, the end of the run."""


@dataclass
class _Request:
    """A request under way."""

    replica: Replica
    prompts: list[PendingPrompt]
    missing: dict[str, PendingPrompt]
    """Not answered yet."""
    reason: RequeueReason = "replica_lost"
    """Why what is missing at the end was lost."""


class Dispatcher:
    """Runs for the length of the run. `finished` takes every completion that is worth scoring, at once.

    Bounds: `RunState.room` new prompts, `max_in_flight` completions per replica. `steps`: what the run needs
    in all; nothing is started beyond it.
    """

    def __init__(
        self,
        run_log: RunLog,
        pool: ReplicaPool,
        config: RolloutConfig,
        steps: int,
        finished: Callable[[PendingScore], None],
        timeline: Timeline,
        sound: Validator,
        unusable: Callable[[Generated], tuple[DropReason, str] | None] = lambda answer: None,
        quarantine: Refused | None = None,
        write: Callable[[PendingPrompt], None] | None = None,
        quarantined: Callable[[Quarantined], None] = lambda one: None,
    ) -> None:
        """`sound`: what is asked of the replicas, and the checks of what they answer; `quarantined` hears of
        answers that cannot be used. `unusable`: why a sound completion is not worth scoring; `quarantine`
        takes such ones (None: dropped). `write` takes the prompts that a teacher completes
        (None: there are none).
        """
        self._write = write
        self._run_log = run_log
        self._unusable, self._quarantine = unusable, quarantine or self._drop
        self._pool = pool
        self._config = config
        self._steps = steps
        self._finished = finished
        self._timeline = timeline
        self._sound, self._quarantined = sound, quarantined
        self._again: deque[PendingPrompt] = deque()
        self._waiting: set[str] = set()
        """Replicas that wait for the trainer."""
        self._closing = False
        self.holders: set[Holder] = set()
        """Who wants no new request to be sent."""

    async def run(self) -> None:
        """Feed until cancelled."""
        waiting = list(self._run_log.state.asked.values())
        self._again.extend(self._run_log.requeue(waiting, "controller_restarted"))
        async with asyncio.TaskGroup() as group:
            try:
                while True:
                    self._feed(group)
                    self._note_waiting()
                    await self._pool.wake.wait()
            finally:
                self._closing = True

    def _feed(self, group: asyncio.TaskGroup) -> None:
        while not self.holders and (replica := self._pool.least_busy()) and (count := self._count(replica)):
            prompts = self._for_student(self._next(count))
            if not prompts:
                continue
            for asked in prompts:
                asked.since = replica.version or Version(0, 0)
            request = _Request(replica, prompts, {asked.prompt.id: asked for asked in prompts})
            self._load(replica, len(prompts))
            task = group.create_task(self._ask(request))
            replica.streams.add(task)
            task.add_done_callback(partial(self._ended, request))

    def _note_waiting(self) -> None:
        """A replica without work waits for the trainer when the bound is reached, for nobody else."""
        idle = {replica.name for replica in self._pool.serving() if replica.in_flight == 0}
        full = not self._again and not self._run_log.state.room(self._pool.slowest())
        before, self._waiting = self._waiting, idle if full else set()
        for name in before | self._waiting:  # one that waited may have been removed
            self._timeline.waits(name, TRAINER if name in self._waiting else None)

    def _for_student(self, prompts: list[PendingPrompt]) -> list[PendingPrompt]:
        """`prompts` without those that a teacher completes, which are handed on."""
        for asked in prompts:
            if asked.by_teacher:
                assert self._write is not None, "somebody writes what the teacher is to write"
                self._write(asked)
        return [asked for asked in prompts if not asked.by_teacher]

    def _count(self, replica: Replica) -> int:
        """Prompts of the next request to `replica`; 0: it has no room for a whole request."""
        config, state = self._config, self._run_log.state
        needed = (self._steps - state.next_step) * config.batch - state.outstanding
        new = max(0, min(needed, state.room(self._pool.slowest())))
        size = min(config.request_size, config.max_in_flight, len(self._again) + new)
        return size if replica.in_flight + size <= config.max_in_flight else 0

    def _next(self, count: int) -> list[PendingPrompt]:
        again = [self._again.popleft() for _ in range(min(count, len(self._again)))]
        return again + (self._run_log.issue(count - len(again)) if count > len(again) else [])

    async def _ask(self, request: _Request) -> None:
        """One request from its sending to its end; leaves in it what was not answered, and why."""
        replica = request.replica
        try:
            await self._run_log.journal.commit()
            limit = self._config.completion_timeout_seconds
            async with asyncio.timeout(None if limit is None else PATIENCE * limit):
                async with aclosing(replica.engine.generate(self._message(request.prompts))) as answers:
                    async for answer in answers:
                        self._answered(request, answer)
            if request.missing:
                count = len(request.prompts)
                raise WireError(f"{len(request.missing)} of {count} prompts were not answered: each must be")
        except TimeoutError:
            request.reason = "straggler"
        except (Unreachable, WireError, WrongServer) as error:
            logger.warning("%d completions of %s are lost: %s", len(request.missing), replica.name, error)
            self._pool.report_lost(replica)
            if isinstance(error, WireError):
                request.reason = "unusable"
                self._pool.distrust(replica, str(error))
        except RemoteError as error:
            request.reason = "replica_busy" if isinstance(error, Overloaded) else "aborted"
            logger.warning("replica %s refused a request: %s", replica.name, error)
            self._pool.refused(replica, error.retry_after if isinstance(error, Overloaded) else None)

    def _ended(self, request: _Request, task: asyncio.Task[None]) -> None:
        """Called once for every request, also for one that was cancelled before it began."""
        request.replica.streams.discard(task)
        self._load(request.replica, -len(request.missing))
        if not self._closing:
            self._put_back(list(request.missing.values()), request.reason)

    def _load(self, replica: Replica, change: int) -> None:
        replica.in_flight += change
        self._timeline.level(replica.name, "generate", replica.in_flight)
        if change < 0:
            self._pool.wake.wake()

    def _message(self, prompts: list[PendingPrompt]) -> GenerateRequest:
        return GenerateRequest(
            sampling=self._sound.sampling,
            prompts=[GeneratePrompt(asked.prompt.id, asked.prompt.token_ids) for asked in prompts],
        )

    def _put_back(self, prompts: list[PendingPrompt], reason: RequeueReason, tokens: int = 0) -> None:
        self._again.extend(self._run_log.requeue(prompts, reason, tokens))
        self._pool.wake.wake()

    def _answered(self, request: _Request, answer: Answer) -> None:
        replica, asked = request.replica, request.missing.pop(answer.id, None)
        if asked is None:
            raise WireError(f"answered id {answer.id[:80]!r}, which must be one that it was asked, once")
        replica.refusals = 0
        self._load(replica, -1)
        problem = self._sound.generated(answer) if isinstance(answer, Generated) else None
        if problem is None:
            self._pool.trust.good(replica.server)
            self._take(asked, answer)
            return
        detail = f"replica {replica.name} at {replica.engine.url}: {problem}"
        logger.warning("the completion of %s cannot be used: %s", asked.prompt.id, detail)
        self._quarantined(Quarantined(asked.prompt, "unusable", detail, []))
        self._put_back([asked], "unusable")
        self._pool.distrust(replica, str(problem), asked.prompt.id)

    def _take(self, asked: PendingPrompt, answer: Answer) -> None:
        prompt = asked.prompt.id
        if isinstance(answer, GenerateFailed):
            logger.warning("prompt %s was refused by its replica: %s", prompt, answer.error)
            self._run_log.drop([prompt], "engine_failed", answer.error)
        elif answer.finish_reason == "abort":
            self._put_back([asked], "aborted", answer.token_ids.shape[0])
        elif not self._at_limit(asked, answer):
            self.take(PendingScore(asked, answer))

    def take(self, finished: PendingScore) -> None:
        """A completion, of the student or of a teacher: on to its marks, unless it cannot be trained on."""
        answer, prompt = finished.answer, finished.asked.prompt.id
        if self._run_log.state.is_broken(prompt):
            self._drop(finished, "group_broken", "another completion of its prompt was dropped")
        elif answer.token_ids.shape[0] == 0:
            self._quarantine(finished, "empty", "a completion without tokens")
        elif problem := span_problem(answer.spans, self._run_log.state):
            self._quarantine(finished, "impossible_version", problem)
        elif why := self._unusable(answer):
            self._quarantine(finished, *why)
        else:
            self._finished(finished)

    def _at_limit(self, asked: PendingPrompt, answer: Generated) -> bool:
        """Drop or ask again what a limit ended, as its policy says; whether that was done."""
        timed_out, count = answer.finish_reason == "time", answer.token_ids.shape[0]
        if not timed_out and answer.finish_reason != "length":
            return False
        policy: AtLimit = self._config.on_timeout if timed_out else self._config.on_max_tokens
        reason: Literal["straggler", "over_long"] = "straggler" if timed_out else "over_long"
        if policy == "drop":
            limit = "completion_timeout_seconds" if timed_out else "max_tokens"
            self._quarantine(
                PendingScore(asked, answer), reason, f"ended after {count} tokens by rollout.{limit}"
            )
        elif policy == "requeue" or count == 0:
            self._put_back([asked], reason, count)
        return policy != "keep" or count == 0

    def _drop(self, finished: PendingScore, reason: DropReason, detail: str) -> None:
        tokens = finished.answer.token_ids.shape[0]
        self._run_log.drop([finished.asked.prompt.id], reason, detail, tokens)
