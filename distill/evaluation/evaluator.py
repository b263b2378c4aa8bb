"""Evaluates versions: completions by a replica, scores by the teachers, one forward pass of the student.

    complete(version)   replica ─▶ completions ─▶ files         (episodes: replica ◀─▶ environment)
    evaluate(version)   files ─▶ rewards (worker processes)
                              ─▶ teacher's hidden states or log-probabilities ─┐
                              ─▶ student's hidden states, fp32, here ──────────┴─▶ reverse KL

No teacher is loaded; the student is, for the length of an evaluation. `evaluate` after `complete` of the same
version, also in another process of the same run; each at most once at a time, the two side by side.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch

from distill.aio import cancel, unless, until_stalled
from distill.config import RunConfig
from distill.config.evaluation import HELD_OUT, EvaluationConfig
from distill.environments.episode import Environment
from distill.evaluation import statistics
from distill.evaluation.completions import (
    TEACHER,
    Completion,
    Generation,
    Tokens,
    behaviour,
    file_of,
    read_completions,
    remove_old,
    write_completions,
)
from distill.evaluation.models import load_student
from distill.evaluation.reverse_kl import ReverseKL, exact, head_of, parts, tensor_of, total
from distill.evaluation.sets import PromptSet, open_sets
from distill.prompts.reward_pool import RewardPool
from distill.prompts.rewards import VOTING
from distill.prompts.sources import longest_sequence, open_prompts
from distill.prompts.stream import Prompt
from distill.rollout.replica_client import ReplicaEngine
from distill.scoring import ask, until_answered
from distill.translation import TextTeacher
from sync import wire
from sync.base.errors import DataError, DistillError, RemoteError, Unreachable, WireError
from sync.base.tokenizers import load_tokenizer, vocab_size
from sync.weights.subscribe import Subscriber
from sync.wire import checks
from teacher_service.client import TeacherClient
from teacher_service.config import TeacherConfig
from teacher_service.engines.base import EngineScores, Item, ScoreOptions
from teacher_service.engines.transformers import TransformersEngine, find_device
from teacher_service.router import Router

log = logging.getLogger(__name__)
T = TypeVar("T")
HIDDEN_BYTES: Final = 1 << 28
"""Bytes of the hidden states of one request to a teacher, and of the student's beside it."""
SCORE_SECONDS: Final = 3600.0
"""Within which a teacher that is busy with the run's rollouts, or restarting, must answer one request."""


class Evaluator:
    """Made once for a run; reads tokenizer and prompts when it is made (ConfigError, DataError)."""

    def __init__(
        self,
        config: RunConfig,
        weights: Subscriber,
        teachers: Mapping[str, TeacherClient],
        connect: Callable[[str], ReplicaEngine],
        environments: Mapping[str, Environment] = MappingProxyType({}),
    ) -> None:
        """`connect`: a client of the replica at a URL. Step 0 is the student that `config` names."""
        self._config, self._weights, self._teachers, self._connect = config, weights, teachers, connect
        self._settings = config.evaluation or EvaluationConfig()
        if self._settings.threads is not None:
            torch.set_num_threads(self._settings.threads)
        self._tokenizer = load_tokenizer(config.student)
        self._vocab = vocab_size(self._tokenizer, config.student.known_ids)
        context = longest_sequence(config)
        self._sets = open_sets(config, open_prompts(config, self._tokenizer, context), self._tokenizer)
        self._generation = Generation(config, environments, context, self._vocab)
        self._route = Router(config.teachers).route
        self._pools: dict[str, RewardPool] = {}
        """Set → its pool, kept for the next evaluation, since workers take a second to start."""
        self._spent: dict[wire.Version, float] = {}

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    # --- completions --------------------------------------------------------------------------------------

    async def complete(self, request: wire.CompletionsRequest) -> wire.CompletionsReply:
        """Generate what is not on disk yet."""
        began, version = time.monotonic(), request.version
        replica = self._connect(request.replica)
        try:
            for name in (HELD_OUT, *request.sets):
                path, prompt_set = file_of(self._config.run_dir, version, name), self._sets[name]
                if not path.is_file():
                    completions = await self._watched(
                        replica, self._generation.run(replica, version, prompt_set)
                    )
                    await asyncio.to_thread(write_completions, path, completions, prompt_set, self._tokenizer)
        except Unreachable as error:
            return wire.CompletionsReply(version=version, lost=str(error))
        finally:
            await replica.aclose()
        self._spent = {version: time.monotonic() - began}
        return wire.CompletionsReply(version=version)

    async def _watched(self, replica: ReplicaEngine, work: Coroutine[Any, Any, T]) -> T:
        """`work`. Raises Unreachable when the replica, with requests, has no new token for the time limit."""
        limit, seen = self._config.rollout.stall_timeout_seconds, -1

        async def progresses() -> bool:
            nonlocal seen
            before = seen
            with contextlib.suppress(DistillError):
                seen = (await replica.state()).tokens or 0
            return seen != before or self._generation.requests == 0

        told = f"{replica.url} generated no token for rollout.stall_timeout_seconds = {limit:g} s"
        return await unless(until_stalled(progresses, limit), work, f"{told}: it is stalled")

    # --- evaluation ---------------------------------------------------------------------------------------

    async def evaluate(self, version: wire.Version) -> wire.EvalReport:
        """The report of a version whose completions are on disk. Raises DistillError."""
        began, run_dir = time.monotonic(), self._config.run_dir
        path = file_of(run_dir, version, HELD_OUT)
        if not path.is_file():
            raise RemoteError(f"the completions of {version} are not in {path}: request them first")
        prompt_set = self._sets[HELD_OUT]
        completions = await asyncio.to_thread(lambda: list(read_completions(path, prompt_set)))
        rewarding = asyncio.ensure_future(self._reward(HELD_OUT, path, completions))
        try:
            compared_with = await self._reverse_kl(version, completions)
            compared = time.monotonic()
        finally:
            await asyncio.wait([rewarding])
        rewarding.result()
        passed = [prompt_set.passes(completion.index, completion.reward) for completion in completions]
        of_all = _figures(compared_with, completions, passed, range(len(completions)))
        estimate = (
            None
            if of_all.pass_rate is None
            else statistics.share(_per_prompt(passed, prompt_set.completions), 1)
        )
        sources = [prompt_set.prompts[completion.index].source for completion in completions]
        sets = {
            name: await self._set_report(name, file_of(run_dir, version, name))
            for name in self._sets
            if name != HELD_OUT and file_of(run_dir, version, name).is_file()
        }
        reference = await self._reference()
        await asyncio.to_thread(remove_old, run_dir)
        generated, ended = self._spent.get(version, 0.0), time.monotonic()
        parts_of = generated, compared - began, ended - compared
        log.info("%s: completions %.1f s, reverse KL %.1f s, rewards and sets %.1f s", version, *parts_of)
        return wire.EvalReport(
            version=version,
            **msgspec.structs.asdict(of_all),
            pass_rate_interval=None if estimate is None else (estimate.low, estimate.high),
            truncated=sum(completion.finish_reason == "length" for completion in completions)
            / len(completions),
            seconds=ended - began + generated,
            sets=sets,
            behaviour=behaviour(completions),
            reference=reference,
            sources=_by_name(sources, compared_with, completions, passed),
            teachers=_by_name(
                [self._route(source) for source in sources], compared_with, completions, passed
            ),
        )

    async def _set_report(self, name: str, path: Path) -> wire.SetReport:
        prompt_set = self._sets[name]
        completions = await asyncio.to_thread(lambda: list(read_completions(path, prompt_set)))
        await self._reward(name, path, completions)
        k, votes = prompt_set.completions, None
        passed = [prompt_set.passes(completion.index, completion.reward) for completion in completions]
        function = getattr(prompt_set.config, "reward_fn", None)
        if function in VOTING or any(completion.answer is not None for completion in completions):
            rows = [slice(start, start + k) for start in range(0, len(completions), k)]
            votes = [statistics.majority([o.answer for o in completions[row]], passed[row]) for row in rows]
        return wire.SetReport(
            prompts=len(prompt_set.prompts),
            completions=len(completions),
            tokens=sum(completion.tokens for completion in completions),
            truncated=sum(completion.finish_reason == "length" for completion in completions)
            / len(completions),
            failed=sum(completion.error is not None for completion in completions),
            pass_at_1=statistics.share(_per_prompt(passed, k), k),
            average=statistics.mean(_per_prompt([completion.reward or 0.0 for completion in completions], k)),
            majority=None if votes is None else statistics.share(np.array(votes), 1),
        )

    async def _reward(self, name: str, path: Path, completions: list[Completion]) -> None:
        """Fill rewards in, and write them beside the texts; nothing where the run has none.

        Those of episodes are there already. Raises DataError when the function fails for `guard.bad_answers`
        completions in a row, or for all.
        """
        prompt_set = self._sets[name]
        if prompt_set.rewards is None:
            return
        pool = self._pools[name] = self._pools.get(name) or RewardPool(prompt_set.rewards)
        in_a_row, limit = 0, self._config.guard.bad_answers
        rewarded = [completion for completion in completions if completion.metrics is None]
        work = [
            pool.reward(prompt_set.prompts[completion.index], completion.sequences[0].token_ids)
            for completion in rewarded
        ]
        tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
        try:
            for candidate, task in zip(rewarded, tasks, strict=True):
                try:
                    candidate.reward, candidate.answer = await task
                    in_a_row = 0
                except DataError as error:
                    candidate.error, in_a_row = str(error), in_a_row + 1
                    if in_a_row >= min(limit, len(rewarded)):
                        raise
        finally:
            await cancel(tasks)
        await asyncio.to_thread(write_completions, path, completions, prompt_set, self._tokenizer)

    async def _reference(self) -> wire.Behaviour | None:
        """How the teachers' own completions of the held-out prompts read, each made once for the run.

        None: a teacher generates none, is no single distribution (it follows the student, or sees a prompt of
        its own), or the prompts are an environment's.
        """
        path, prompt_set = file_of(self._config.run_dir, TEACHER, HELD_OUT), self._sets[HELD_OUT]
        if path.is_file():
            return behaviour(await asyncio.to_thread(lambda: list(read_completions(path, prompt_set))))
        routed: dict[str, list[wire.TeacherPrompt]] = {}
        for index, prompt in enumerate(prompt_set.prompts):
            if prompt.environment:
                return None
            asked = wire.TeacherPrompt(
                str(index), wire.pack(np.array(prompt.token_ids, np.int32)), seed=index
            )
            routed.setdefault(self._route(prompt.source), []).append(asked)
        for name in routed:
            settings, teacher = self._config.teachers[name], self._teachers[name]
            info = await until_answered(teacher, teacher.first_info)
            changes = settings.follow_student_every is not None or settings.prompt_transform is not None
            changes |= settings.tokenizer == "own"
            if changes or "generate" not in info.can:
                return None
        completions = [
            completion
            for name, prompts in routed.items()
            for completion in await self._by_teacher(name, prompts, prompt_set)
        ]
        completions.sort(key=lambda completion: completion.index)
        await asyncio.to_thread(write_completions, path, completions, prompt_set, self._tokenizer)
        return behaviour(completions)

    async def _by_teacher(
        self, name: str, prompts: list[wire.TeacherPrompt], prompt_set: PromptSet
    ) -> list[Completion]:
        """Its completions, sampled like the student's. Raises RemoteError for a refusal, WireError for one
        that cannot be used."""
        limit, stop = prompt_set.sampling.max_tokens, prompt_set.sampling.stop_token_ids
        completions = []
        teacher = self._teachers[name]
        request = partial(teacher.generate, max_tokens=limit, stop_token_ids=stop)
        for answer, _ in await ask(teacher, prompts, request, math.inf, extra=limit):
            if not isinstance(answer, wire.TeacherCompletion):
                raise RemoteError(f"teacher {name} refuses a prompt of the evaluation: {answer.error}")
            if problem := checks.teacher_completion(answer, limit, self._vocab):
                raise WireError(f"a completion of teacher {name} cannot be used: {problem}")
            index, token_ids = int(answer.id), wire.unpack(answer.token_ids).copy()
            tokens = Tokens(prompt_set.prompts[index].token_ids, token_ids, [(0, len(token_ids))])
            completions.append(Completion(index, [tokens], answer.finish_reason))
        return completions

    # --- reverse KL ---------------------------------------------------------------------------------------

    async def _reverse_kl(self, version: wire.Version, completions: list[Completion]) -> list[ReverseKL]:
        def loaded() -> TransformersEngine:
            source, settings = self._config.student, self._settings
            folder = self._weights.folder(version) if version.step > 0 else None
            model = load_student(source, folder, settings.device)
            limits = TeacherConfig(path=source.path, batch_tokens=settings.batch_tokens)
            return TransformersEngine(model, self._vocab, limits)

        student = await asyncio.to_thread(loaded)
        prompts = self._sets[HELD_OUT].prompts
        by_teacher: dict[str, list[_Routed]] = {}
        for number, completion in enumerate(completions):
            routed = by_teacher.setdefault(self._route(prompts[completion.index].source), [])
            prompt = prompts[completion.index]
            routed += [_Routed.of(number, prompt, part) for part in completion.sequences if part.own]
        return [await self._compare(student, name, routed) for name, routed in by_teacher.items()]

    async def _compare(self, student: TransformersEngine, name: str, routed: list[_Routed]) -> ReverseKL:
        """Compare the student with one teacher on completions that are routed to it."""
        teacher = self._teachers[name]
        info = await until_answered(teacher, teacher.first_info)
        follows = self._config.teachers[name].follow_student_every is not None  # its head is soon another
        kl = ReverseKL("hidden" in info.can and not follows and not isinstance(teacher, TextTeacher))
        want, options = wire.Want(hidden=kl.is_exact), ScoreOptions(hidden=kl.is_exact)
        device = find_device(self._settings.device)
        student_head = await asyncio.to_thread(head_of, student.head(), device)
        other = (
            await asyncio.to_thread(head_of, await until_answered(teacher, teacher.head), device)
            if kl.is_exact
            else student_head
        )

        def values_of(
            part: list[Item], answers: Sequence[wire.Scored | wire.ScoreRefused], mine: EngineScores
        ) -> Any:
            """f4 [N]: the divergence, or log p − log q, at every scored position."""
            size = info.hidden_size if kl.is_exact else None
            both = zip(answers, part, strict=True)
            scored = [_usable(name, answer, item, want, self._vocab, size) for answer, item in both]
            if not kl.is_exact:
                theirs = np.concatenate([wire.unpack(score.logprob) for score in scored])
                return np.where(_unscored(scored), 0.0, mine.logprob_C - theirs).astype("f4")
            assert mine.hidden_CH is not None, "it was asked for"
            hidden = [tensor_of(score.hidden, device) for score in scored if score.hidden is not None]
            return exact(student_head, torch.from_numpy(mine.hidden_CH).to(device), other, torch.cat(hidden))

        width = max(info.hidden_size, student.engine_info.hidden_size) if kl.is_exact else 1
        for numbers, part in parts([route.item for route in routed], HIDDEN_BYTES // (4 * width)):
            sequences = [
                _sequence(str(i), item, routed[number].prompt, teacher)
                for i, (number, item) in enumerate(zip(numbers, part, strict=True))
            ]
            asked, mine = await asyncio.gather(
                ask(teacher, sequences, partial(teacher.score, want=want), SCORE_SECONDS),
                asyncio.to_thread(student.score, part, options),
            )
            values_N = await asyncio.to_thread(values_of, part, [answer for answer, _ in asked], mine)
            ends = np.cumsum([item.positions for item in part])[:-1]
            for number, item, values in zip(numbers, part, np.split(values_N, ends), strict=True):
                counted = values[routed[number].own_L[item.first : len(item.token_ids_L)]]
                kl.add(routed[number].completion, float(counted.astype(np.float64).sum()), len(counted))
        return kl


class _Routed(NamedTuple):
    """A sequence of a completion, for its teacher."""

    completion: int
    prompt: Prompt
    item: Item
    own_L: np.ndarray
    """bool: the student sampled the token; no other counts."""

    @classmethod
    def of(cls, completion: int, prompt: Prompt, tokens: Tokens) -> _Routed:
        token_ids_L = np.concatenate([np.array(tokens.prompt_ids, np.int32), tokens.token_ids])
        own_L, first = np.zeros(len(token_ids_L), bool), len(tokens.prompt_ids)
        for start, end in tokens.own:
            own_L[first + start : first + end] = True
        return cls(completion, prompt, Item(token_ids_L, first), own_L)


def _sequence(id: str, item: Item, prompt: Prompt, teacher: TeacherClient) -> wire.ScoreSequence:
    """What the teacher is sent: behind the prompt as it is shown to it, the student's completion."""
    token_ids_L, first = item.token_ids_L, item.first
    if isinstance(teacher, TextTeacher):
        shown = teacher.translation.prompt(prompt)
        token_ids_L, first = np.concatenate([np.array(shown, np.int32), token_ids_L[first:]]), len(shown)
    return wire.ScoreSequence(id, wire.pack(token_ids_L), first)


def _unscored(scores: Sequence[wire.Scored]) -> np.ndarray:
    """bool [N]: the teacher says nothing of the token."""
    none = [wire.Segment.BEGINS]
    return (
        np.concatenate(
            [
                np.repeat(none, score.logprob.shape[0])
                if score.segment is None
                else wire.unpack(score.segment)
                for score in scores
            ]
        )
        == wire.Segment.UNSCORED
    )


def _usable(
    name: str, answer: Any, item: Item, want: wire.Want, vocab: int, hidden_size: int | None
) -> wire.Scored:
    """Raises RemoteError for a refusal, WireError for scores that cannot be used."""
    if not isinstance(answer, wire.Scored):
        raise RemoteError(f"teacher {name} refuses a completion of the evaluation: {answer.error}")
    if problem := checks.scored(answer, item.positions, 0, want, vocab, hidden_size):
        raise WireError(f"a score of teacher {name} cannot be used: {problem}")
    return answer


def _by_name(
    names: Sequence[str], compared: list[ReverseKL], completions: Sequence[Completion], passed: Sequence[bool]
) -> dict[str, wire.PartReport]:
    """Figures by name; `names`: one of each completion. Empty: they have one name."""
    members: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        members.setdefault(name, []).append(number)
    return {
        n: _figures(compared, completions, passed, indices)
        for n, indices in sorted(members.items())
        if len(members) > 1
    }


def _figures(
    compared: list[ReverseKL],
    completions: Sequence[Completion],
    passed: Sequence[bool],
    members: Sequence[int],
) -> wire.PartReport:
    """Figures of some completions; `compared`: with each teacher. Without rewards where one has none."""
    chosen = [completions[number] for number in members]
    value, error = total([part for kl in compared if (part := kl.among(set(members))).sums])
    rewarded = all(completion.reward is not None or completion.error for completion in chosen)
    rewards = [completion.reward or 0.0 for completion in chosen]
    return wire.PartReport(
        completions=len(chosen),
        tokens=sum(completion.tokens for completion in chosen),
        reverse_kl=value,
        reverse_kl_error=error,
        pass_rate=sum(passed[number] for number in members) / len(members) if rewarded else None,
        reward=sum(rewards) / len(rewards) if rewarded else None,
    )


def _per_prompt(values: Sequence[float], k: int) -> np.ndarray:
    """f8 [P]: mean of each prompt's k completions, which stand together."""
    return np.array(values, float).reshape(-1, k).mean(1)
