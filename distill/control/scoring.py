"""Finished completions to their teachers, in batches, and scored rollouts back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from distill.control.lanes import Lanes
from distill.control.records import Rollout
from distill.control.state import Asked
from distill.control.timeline import REPLICAS, Timeline
from distill.prompts.judges import Judge
from distill.prompts.stream import Prompt
from sync.wire import (
    Array,
    Generated,
    Head,
    Scored,
    ScoreRefused,
    ScoreSequence,
    Want,
    WritePrompt,
    Written,
    pack,
    unpack,
)
from teacher_service.client import Counters

Transform = Callable[[Prompt], Sequence[int]]
Answer = Scored | ScoreRefused


class Teacher(Protocol):
    """What the controller needs of a teacher: teacher_service.client has it over HTTP.

    `score` and `write` answer in the order asked; they retry, and raise Unreachable when the teacher is
    really gone, RemoteError when the whole request was refused (as `write` is by a teacher that cannot).
    """

    @property
    def counters(self) -> Counters: ...

    async def score(
        self, sequences: list[ScoreSequence], want: Want, deadline: float | None = None
    ) -> list[Scored | ScoreRefused]: ...
    async def write(
        self,
        prompts: list[WritePrompt],
        max_tokens: int,
        stop_token_ids: Sequence[int],
        *,
        temperature: float = 1.0,
    ) -> list[Written | ScoreRefused]: ...
    async def head(self) -> Head: ...


@dataclass(slots=True)
class Finished:
    """A completion that waits for its marks."""

    asked: Asked
    answer: Generated


class Scoring:
    """Runs for the length of the run; `put` at any time.

    `route` gives the teacher's name of a data source. `transforms`: what a teacher sees instead of the
    prompt. `judge` gives the task's reward. `scored` is awaited with every answered batch, `refused` is
    called with a completion that its teacher cannot score.
    """

    def __init__(
        self,
        teachers: dict[str, Teacher],
        route: Callable[[str], str],
        want: Want,
        batch: int,
        *,
        scored: Callable[[list[Rollout]], Awaitable[None]],
        refused: Callable[[Finished, str], None],
        timeline: Timeline,
        transforms: dict[str, Transform] | None = None,
        judge: Judge | None = None,
        linger: float = 0.005,
    ) -> None:
        """`batch`: completions in one request to a teacher; `linger`: see `Lanes`."""
        self._teachers, self._route, self._want = teachers, route, want
        self._scored, self._refused = scored, refused
        self._transforms, self._judge = transforms or {}, judge
        self._lanes: Lanes[Finished, Answer] = Lanes(
            "score",
            teachers,
            batch,
            ask=self._ask,
            settle=self._settle,
            timeline=timeline,
            linger=linger,
            waits_for=REPLICAS,
        )

    @property
    def open(self) -> int:
        """Completions that wait for a teacher or are with one."""
        return self._lanes.open

    def put(self, finished: Finished) -> None:
        """Queue a completion for its teacher."""
        self._lanes.put(self._route(finished.asked.prompt.source), finished)

    async def run(self) -> None:
        """Score until cancelled."""
        await self._lanes.run()

    async def _ask(self, name: str, work: list[Finished]) -> list[Answer]:
        return await self._teachers[name].score([self._sequence(name, one) for one in work], self._want)

    def _sequence(self, teacher: str, finished: Finished) -> ScoreSequence:
        prompt, answer = finished.asked.prompt, finished.answer
        transform = self._transforms.get(teacher)
        return score_sequence(prompt.token_ids if transform is None else transform(prompt), answer)

    async def _settle(self, name: str, work: list[tuple[Finished, Answer | str]]) -> None:
        rollouts = []
        for finished, answer in work:
            if isinstance(answer, Scored):
                problem = self._fault(finished, answer)
            else:
                problem = answer if isinstance(answer, str) else answer.error
            if problem or not isinstance(answer, Scored):
                self._refused(finished, f"teacher {name}: {problem}")
            else:
                rollouts.append(self._rollout(name, finished, answer))
        await self._scored(rollouts)

    def _rollout(self, teacher: str, finished: Finished, marks: Scored) -> Rollout:
        asked, answer = finished.asked, finished.answer
        reward = None
        if self._judge is not None:
            reward = float(self._judge(asked.prompt, unpack(answer.token_ids).tolist()))
        return Rollout(
            asked.prompt.id,
            asked.number,
            prompt_array(asked.prompt.token_ids),
            answer.token_ids,
            answer.logprob,
            answer.spans,
            answer.finish_reason in ("length", "time"),
            teacher,
            marks,
            answer.topk_ids,
            reward,
            asked.by_teacher,
        )

    def _fault(self, finished: Finished, marks: Scored) -> str | None:
        """What makes a teacher's marks unusable; None: nothing."""
        answer, want = finished.answer, self._want
        asked = {
            "logprob": True,
            "topk_ids": want.topk > 0,
            "topk_logprob": want.topk > 0,
            "hidden": want.hidden,
            "entropy": marks.entropy is not None,  # not every engine can tell it
            "gathered": answer.topk_ids is not None,
        }
        for name in (name for name, wanted in asked.items() if wanted):
            array: Array | None = getattr(marks, name)
            if array is None or array.shape[0] != answer.token_ids.shape[0]:
                got = "nothing" if array is None else f"shape {array.shape}"
                return f"{name} was asked for {answer.token_ids.shape[0]} positions and came as {got}"
        if not np.isfinite(unpack(marks.logprob)).all():
            return "a log-probability is not finite"
        return None


def score_sequence(prompt: Sequence[int], answer: Generated) -> ScoreSequence:
    """A completion behind its prompt, to be scored."""
    seen, written = prompt_array(prompt), answer.token_ids
    start = seen.shape[0]
    tokens = Array("i4", (start + written.shape[0],), seen.data + written.data)
    return ScoreSequence(answer.id, tokens, start, answer.topk_ids)


def prompt_array(token_ids: Sequence[int]) -> Array:
    """i4 [P]"""
    return pack(np.asarray(token_ids, "i4"))
