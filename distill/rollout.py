"""Keeps the replicas fed: prompts out under the capacity rule, completions in as each ends."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

import numpy as np

from distill.books import Books
from distill.config import RolloutConfig
from distill.records import AgainReason
from distill.replicas import Answer, Fleet, Replica
from distill.scoring import Finished
from distill.state import Asked
from distill.timeline import Timeline
from sync.errors import Overloaded, RemoteError, Unreachable, WireError
from sync.wire import Generated, GenerateFailed, GeneratePrompt, GenerateRequest, Sampling, unpack

logger = logging.getLogger(__name__)


class Feeder:
    """Runs for the length of the run. `finished` takes every completion that is worth scoring, at once.

    Bounds: `RunState.room` new prompts, `max_in_flight` completions per replica. `steps`: what the run needs
    in all; nothing is started beyond it.
    """

    def __init__(
        self,
        books: Books,
        fleet: Fleet,
        config: RolloutConfig,
        steps: int,
        finished: Callable[[Finished], None],
        timeline: Timeline,
        student_topk: int = 0,
    ) -> None:
        self._books = books
        self._fleet = fleet
        self._config = config
        self._steps = steps
        self._finished = finished
        self._timeline = timeline
        self._sampling = Sampling(
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            stop_token_ids=config.stop_token_ids,
            student_topk=student_topk,
        )
        self._again: deque[Asked] = deque()
        self._closing = False
        self.held = False
        """No new request is sent while set."""

    async def run(self) -> None:
        """Feed until cancelled."""
        waiting = list(self._books.state.asked.values())
        self._again.extend(self._books.ask_again(waiting, "controller_restarted"))
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    self._feed(group)
                    await self._fleet.wake.wait()
        finally:
            self._closing = True

    def _feed(self, group: asyncio.TaskGroup) -> None:
        while not self.held and (replica := self._fleet.least_busy()) and (count := self._count(replica)):
            task = group.create_task(self._ask(replica, self._next(count)))
            replica.streams.add(task)
            task.add_done_callback(replica.streams.discard)

    def _count(self, replica: Replica) -> int:
        """Prompts of the next request to `replica`; 0: it has no room for a whole request."""
        config, state = self._config, self._books.state
        needed = (self._steps - state.next_step) * config.batch - state.outstanding
        new = max(0, min(needed, state.room(self._fleet.slowest())))
        size = min(config.request_size, config.max_in_flight, len(self._again) + new)
        return size if replica.in_flight + size <= config.max_in_flight else 0

    def _next(self, count: int) -> list[Asked]:
        again = [self._again.popleft() for _ in range(min(count, len(self._again)))]
        return again + (self._books.issue(count - len(again)) if count > len(again) else [])

    async def _ask(self, replica: Replica, prompts: list[Asked]) -> None:
        """One request from its sending to its end; whatever is not answered is asked again."""
        missing = {asked.prompt.id: asked for asked in prompts}
        self._load(replica, len(missing))
        reason: AgainReason = "replica_lost"
        try:
            await self._books.journal.commit()
            async with asyncio.timeout(self._config.straggler_seconds):
                async for answer in replica.engine.generate(self._request(prompts)):
                    asked = missing.pop(answer.id, None)
                    if asked is None:
                        raise WireError(f"replica {replica.name} answered {answer.id!r}, which was not asked")
                    self._load(replica, -1)
                    self._answered(asked, answer)
        except TimeoutError:
            reason = "straggler"
        except (Unreachable, WireError) as error:
            logger.warning("%d completions of %s are asked again: %s", len(missing), replica.name, error)
            self._fleet.report_lost(replica)
        except RemoteError as error:
            reason = "replica_lost" if isinstance(error, Overloaded) else "aborted"
            logger.warning("replica %s refused a request: %s", replica.name, error)
            self._fleet.rest(replica, error.retry_after if isinstance(error, Overloaded) else 1.0)
        finally:
            self._load(replica, -len(missing))
            if not self._closing:
                self._put_back(list(missing.values()), reason)

    def _load(self, replica: Replica, change: int) -> None:
        replica.in_flight += change
        self._timeline.level(replica.name, "generate", replica.in_flight)
        if change < 0:
            self._fleet.wake.wake()

    def _request(self, prompts: list[Asked]) -> GenerateRequest:
        return GenerateRequest(
            sampling=self._sampling,
            prompts=[GeneratePrompt(asked.prompt.id, asked.prompt.token_ids) for asked in prompts],
        )

    def _put_back(self, prompts: list[Asked], reason: AgainReason) -> None:
        self._again.extend(self._books.ask_again(prompts, reason))
        self._fleet.wake.wake()

    def _answered(self, asked: Asked, answer: Answer) -> None:
        prompt = asked.prompt.id
        if isinstance(answer, GenerateFailed):
            logger.warning("prompt %s was refused by its replica: %s", prompt, answer.error)
            self._books.drop([prompt], "engine_failed", answer.error)
        elif answer.finish_reason == "abort":
            self._put_back([asked], "aborted")
        elif answer.token_ids.shape[0] == 0:
            self._books.drop([prompt], "empty", "a completion without tokens")
        elif problem := fault(answer):
            logger.warning("completion of %s cannot be used: %s", prompt, problem)
            self._books.drop([prompt], "engine_failed", problem, answer.token_ids.shape[0])
        else:
            self._finished(Finished(asked, answer))


def fault(answer: Generated) -> str | None:
    """What makes a completion unusable; None: nothing."""
    count = answer.token_ids.shape[0]
    if answer.logprob.shape != (count,):
        return f"{answer.logprob.shape} log-probabilities for {count} tokens"
    if not np.isfinite(unpack(answer.logprob)).all():
        return "a log-probability is not finite"
    ends = [0, *(span.end for span in answer.spans)]
    if [span.start for span in answer.spans] != ends[:-1] or ends[-1] != count:
        return f"version spans do not cover the {count} tokens one after the other"
    return None
