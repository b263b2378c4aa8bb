"""The completions of an evaluation: rollouts pinned to a version, each with a life of its own.

    a replica is held at the version ─▶ completed by it │ turn by turn against an environment
                                     ─▶ all of a set ─▶ rewarded ─▶ its file, while it completes the next set

    Lost ─▶ completed again, max_attempts times             its replica is lost ─▶ the rest by another
    its environment fails ─▶ begins again, max_attempts times ─▶ an error, without a reward

what it waits for                                unblocked by
a replica that can be held                       its joining, within `weights.timeout_seconds` (Unreachable)
a completion: room at the replica, its tokens    the dispatcher: an answer, Lost, or the stall of the replica
an environment, between two turns                its answer; time-outs of its client
a reward worker                                  its outcome; `reward_timeout_seconds`

Completions go through the dispatcher as those that are trained on, with its limits and its error budget, and
end in a file instead of the buffer: they are on no record, have no age, and count for no room. A set whose
file is there, with its prompts, is not generated again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from msgspec.structs import replace

from distill import waits
from distill.aio import cancel
from distill.config.evaluation import HELD_OUT
from distill.environments.episode import EnvironmentLost, Episode, play
from distill.evaluation.completions import (
    TEACHER,
    Completion,
    Tokens,
    file_of,
    read_completions,
    write_completions,
)
from distill.evaluation.sets import PromptSet
from distill.interfaces import Common
from distill.prompts.reward_pool import RewardPool
from distill.record.rollout import SPENDS_ATTEMPT, Rollout
from distill.rollout.dispatcher import Dispatcher, Pin
from distill.rollout.ends import Lost, Unneeded, Unusable
from distill.rollout.replica_pool import Replica, ReplicaPool
from distill.scoring import ask, until_answered
from distill.waits import EVALUATION, GENERATION, PLAY
from sync.base.errors import DataError, DistillError, RemoteError, Unreachable
from sync.base.retry import Backoff
from sync.wire import EVALUATION_ID, Generated, TeacherCompletion, TeacherPrompt, Version, checks, pack

log = logging.getLogger(__name__)
GONE_SECONDS: Final = 600.0
"""Within which an environment must be back, after a restart too."""
PARTIES: Final = (GENERATION, PLAY)
"""Who waits for what a completion needs next."""
LOST_REPLICAS: Final = 5
"""Replicas lost while they generated for one evaluation, after which it is given up."""


class Generation:
    """Generates for one evaluation at a time; `close` ends its reward workers."""

    def __init__(self, common: Common, pool: ReplicaPool, dispatcher: Dispatcher) -> None:
        self._parts, self._config, self._sets = common.parts, common.config, common.parts.sets
        self._pool, self._dispatcher = pool, dispatcher
        self._timeline, self._limits = common.timeline, common.limits
        self._playing = asyncio.Semaphore(common.config.rollout.max_in_flight)
        self._rewards: dict[str, RewardPool] = {}
        """Set → its pool, kept for the next evaluation, since workers take a second to start."""

    async def close(self) -> None:
        for pool in self._rewards.values():
            await pool.close()

    async def completions(self, version: Version, names: Sequence[str]) -> dict[str, list[Completion]]:
        """All completions of these sets, from their files, which are made where there are none.

        Raises Unreachable when no replica is left to generate them, RemoteError for a prompt without a usable
        completion, or an environment that stays away, DataError when a function or an environment of the
        user's fails `guard.bad_answers` times in a row, or always.
        """
        completions, missing = dict[str, list[Completion]](), dict[str, dict[str, Completion]]()
        for name in names:
            path, prompt_set = file_of(self._config.run_dir, version, name), self._sets[name]
            if (made := await asyncio.to_thread(read_completions, path, prompt_set)) is None:
                missing[name] = {}
            else:
                completions[name] = made
        ending: dict[str, asyncio.Task[list[Completion]]] = {}
        try:
            if missing:
                await self._generate(version, missing, ending)
            return completions | {name: await task for name, task in ending.items()}
        except Unusable as end:
            raise RemoteError(f"a completion of the evaluation cannot be had: {end}") from end
        finally:
            await cancel(ending.values())

    async def _generate(
        self,
        version: Version,
        missing: dict[str, dict[str, Completion]],
        ending: dict[str, asyncio.Task[list[Completion]]],
    ) -> None:
        """Complete the sets `missing`, which hold what is there of each, by replicas held at `version`.

        What rewards and writes a set is put into `ending`.
        """

        async def generate(replica: Replica) -> None:
            for name, done in [*missing.items()]:
                prompt_set = self._sets[name]
                rollouts = [
                    Rollout(f"{EVALUATION_ID}{version}:{name}:{index}:{copy}", index, issued=prompt)
                    for index, prompt in enumerate(prompt_set.prompts)
                    for copy in range(prompt_set.completions)
                ]
                await self._complete(rollouts, Pin(replica, version, prompt_set.sampling), done)
                completions = [done[rollout.id] for rollout in rollouts]
                ending[name] = asyncio.create_task(self._end(version, name, completions))
                del missing[name]

        lost: Unreachable | None = None
        for _ in range(LOST_REPLICAS):
            async with self._pool.hold(version, self._config.weights.timeout_seconds) as replica:
                self._timeline.level(replica.name, "evaluate", 1)
                try:
                    what = lambda: f"completions of {version}"  # noqa: E731
                    with waits.on(EVALUATION, replica.name, what, of=lambda: PARTIES):
                        return await replica.unless_lost(generate(replica))
                except Unreachable as error:
                    lost = error
                    log.warning("completions of %s are generated by another replica: %s", version, lost)
                finally:
                    self._timeline.level(replica.name, "evaluate", 0)
        raise Unreachable(f"{LOST_REPLICAS} replicas were lost while they generated with {version}: {lost}")

    async def _complete(self, rollouts: list[Rollout], pin: Pin, done: dict[str, Completion]) -> None:
        """Fill `done` in, by rollout."""
        tasks = sum(rollout.source_prompt.environment is not None for rollout in rollouts)
        failures = _InARow(self._config.guard.bad_answers, tasks, "tasks in a row: mend the environment")

        async def life(rollout: Rollout) -> None:
            prompt = rollout.source_prompt
            if prompt.environment:
                async with self._playing:
                    done[rollout.id] = await self._played(rollout, pin)
                failures.note(done[rollout.id].error)
            else:
                answer = await self._completed(rollout, pin)
                ids, reason = answer.token_ids, answer.finish_reason
                done[rollout.id] = Completion.of(rollout.number, prompt.token_ids, ids, reason)

        lives = [asyncio.create_task(life(rollout)) for rollout in rollouts if rollout.id not in done]
        try:
            await asyncio.gather(*lives)
        finally:
            await cancel(lives)

    # --- one completion -----------------------------------------------------------------------------------

    async def _completed(self, rollout: Rollout, pin: Pin) -> Generated:
        """What the replica says. Raises Unneeded when it refuses the prompt, or was lost too often."""
        spent = 0
        while True:
            try:
                answer, _ = await self._dispatcher.complete(rollout, pin=pin)
                if answer.finish_reason not in ("stop", "length"):
                    raise Lost("aborted", answer.token_ids.shape[0])
                return answer
            except Lost as lost:
                spent += lost.reason in SPENDS_ATTEMPT
                if spent >= self._config.rollout.max_attempts:
                    detail = f"{spent} completions of {rollout.id} were lost ({lost.reason})"
                    raise Unneeded("engine_failed", detail) from lost

    async def _played(self, rollout: Rollout, pin: Pin) -> Completion:
        """The episode of a prompt."""
        prompt, name = rollout.source_prompt, rollout.source_prompt.environment
        assert name is not None, "a prompt that is completed once is not played"
        backoff, failures, until = Backoff(0.5, 10.0), 0, time.monotonic() + GONE_SECONDS

        async def answer(episode: Episode) -> Generated:
            nonlocal until
            until = time.monotonic() + GONE_SECONDS  # the environment has just spoken
            issued = replace(prompt, token_ids=episode.context)
            return await self._completed(replace(rollout, issued=issued), pin)

        while True:
            episode, error = Episode(rollout.id), None
            try:
                environment = self._parts.environments[name]
                await play(environment, episode, prompt.task, answer, self._limits[name])
                break
            except DistillError as failure:
                error = f"environment {name} failed task {prompt.task}: {failure}"
                log.warning("%s", error)
                if not isinstance(failure, Unreachable | EnvironmentLost):
                    failures += 1
                    if failures >= self._config.rollout.max_attempts:
                        break
                elif time.monotonic() > until:
                    away = f"environment {name} was not up for {GONE_SECONDS:.0f} s: {failure}"
                    raise RemoteError(away) from failure
            await asyncio.sleep(backoff.next())
        return Completion(
            rollout.number,
            [Tokens(part.prompt, np.array(part.token_ids, np.int32), part.own) for part in episode.sequences],
            "failed" if error else episode.finish_reason,
            reward=episode.reward,
            error=error,
            metrics=episode.metrics,
        )

    # --- a set --------------------------------------------------------------------------------------------

    async def _end(self, version: Version, name: str, completions: list[Completion]) -> list[Completion]:
        """A set's completions with their rewards, once they are in its file; episodes have theirs already."""
        prompt_set, path = self._sets[name], file_of(self._config.run_dir, version, name)
        if prompt_set.rewards is not None:
            pool = self._rewards[name] = self._rewards.get(name) or RewardPool(prompt_set.rewards)
            unrewarded = [made for made in completions if made.metrics is None]
            in_a_row = "completions in a row: mend the reward function"
            failures = _InARow(self._config.guard.bad_answers, len(unrewarded), in_a_row)
            tasks = [
                asyncio.create_task(pool.reward(prompt_set.prompts[made.index], made.sequences[0].token_ids))
                for made in unrewarded
            ]
            try:
                for made, task in zip(unrewarded, tasks, strict=True):
                    try:
                        made.reward, made.answer = await task
                    except DataError as error:
                        made.error = str(error)
                    failures.note(made.error)
            finally:
                await cancel(tasks)
        return await _written(path, completions, prompt_set)

    # --- the teachers' completions ------------------------------------------------------------------------

    async def reference(self) -> list[Completion] | None:
        """The teachers' own completions of the held-out prompts, each made once for the run.

        None: there is no teacher, or it generates none, is no single distribution (it follows the student, or
        sees a prompt of its own), or the prompts are an environment's.
        """
        path, prompt_set = file_of(self._config.run_dir, TEACHER, HELD_OUT), self._sets[HELD_OUT]
        if (made := await asyncio.to_thread(read_completions, path, prompt_set)) is not None:
            return made
        if not self._parts.teachers or any(prompt.environment for prompt in prompt_set.prompts):
            return None
        asked: dict[str, list[TeacherPrompt]] = {}
        for index, prompt in enumerate(prompt_set.prompts):
            message = TeacherPrompt(str(index), pack(np.array(prompt.token_ids, np.int32)), seed=index)
            asked.setdefault(self._parts.route(prompt.source), []).append(message)
        for name in asked:
            settings, teacher = self._config.teachers[name], self._parts.teachers[name]
            info = await until_answered(teacher, teacher.first_info)
            changes = settings.follow_student_every is not None or settings.prompt_transform is not None
            changes |= settings.tokenizer == "own"
            if changes or "generate" not in info.can:
                return None
        completions = [made for name in asked for made in await self._by_teacher(name, asked[name])]
        completions.sort(key=lambda completion: completion.index)
        return await _written(path, completions, prompt_set)

    async def _by_teacher(self, name: str, messages: list[TeacherPrompt]) -> list[Completion]:
        """Sampled like the student's. Raises RemoteError for a refusal, and for one of no use."""
        prompts, sampling = self._sets[HELD_OUT].prompts, self._sets[HELD_OUT].sampling
        teacher, limit = self._parts.teachers[name], sampling.max_tokens
        request = partial(teacher.generate, max_tokens=limit, stop_token_ids=sampling.stop_token_ids)
        completions = []
        for answer, _ in await ask(teacher, messages, request, math.inf, extra=limit):
            if not isinstance(answer, TeacherCompletion):
                raise RemoteError(f"teacher {name} refuses a prompt of the evaluation: {answer.error}")
            if problem := checks.teacher_completion(answer, limit, self._parts.vocab_size):
                raise RemoteError(f"a completion of teacher {name} cannot be used: {problem}")
            index = int(answer.id)
            ids, reason = prompts[index].token_ids, answer.finish_reason
            completions.append(Completion.of(index, ids, answer.token_ids, reason))
        return completions


async def _written(path: Path, completions: list[Completion], prompt_set: PromptSet) -> list[Completion]:
    """`completions`, once they are in their file."""
    write = partial(asyncio.to_thread, write_completions, path, completions, prompt_set)
    await waits.for_space(EVALUATION, str(path), write, "the evaluation")
    return completions


class _InARow:
    """Failures in a row of what a user wrote."""

    def __init__(self, limit: int, tried: int, what: str) -> None:
        """`tried`: how often in all. `what`: is in a row, and what to do."""
        self._limit, self._what, self._count = min(limit, tried), what, 0

    def note(self, error: str | None) -> None:
        """Count a failure, or a success. Raises DataError for the last of too many failures, or of all."""
        self._count = self._count + 1 if error else 0
        if error and self._count >= self._limit:
            raise DataError(f"{error}; the last of {self._count} {self._what}")
