"""Prompts that a teacher completes instead of the student (objective.on_policy below 1)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from distill.config import RunConfig
from distill.control.authors import seed_of
from distill.control.lanes import Lanes
from distill.control.parts import Parts
from distill.control.scoring import Finished, prompt_array
from distill.control.state import Asked
from distill.control.timeline import Timeline
from sync.wire import Generated, ScoreRefused, WritePrompt, Written, pack

Answer = Written | ScoreRefused


class Writing:
    """Runs for the length of the run; `put` at any time.

    The teacher samples from its whole distribution, at the temperature of its scores, with the prompt that
    it sees when it scores. What it wrote goes to `finished`, looks like a student's completion without
    versions, and is scored like one; `refused` is called with an empty completion and the reason.
    """

    def __init__(
        self,
        parts: Parts,
        config: RunConfig,
        finished: Callable[[Finished], None],
        refused: Callable[[Finished, str], None],
        timeline: Timeline,
    ) -> None:
        self._parts, self._config = parts, config
        self._finished, self._refused = finished, refused
        self._lanes: Lanes[Asked, Answer] = Lanes(
            "write",
            parts.teachers,
            config.buffer.score_batch,
            ask=self._ask,
            settle=self._settle,
            timeline=timeline,
        )

    def put(self, asked: Asked) -> None:
        """Queue a prompt for its teacher."""
        self._lanes.put(self._parts.route(asked.prompt.source), asked)

    async def run(self) -> None:
        """Let teachers write until cancelled."""
        await self._lanes.run()

    async def _ask(self, name: str, work: list[Asked]) -> list[Answer]:
        prompts = [self._prompt(name, asked) for asked in work]
        rollout, teacher = self._config.rollout, self._parts.teachers[name]
        temperature = self._parts.want.temperature
        return await teacher.write(
            prompts, rollout.max_tokens, rollout.stop_token_ids, temperature=temperature
        )

    def _prompt(self, name: str, asked: Asked) -> WritePrompt:
        transform, prompt = (self._parts.transforms or {}).get(name), asked.prompt
        seen = prompt_array(prompt.token_ids if transform is None else transform(prompt))
        return WritePrompt(prompt.id, seen, seed_of(self._config.run.seed, asked.number))

    async def _settle(self, name: str, work: list[tuple[Asked, Answer | str]]) -> None:
        for asked, answer in work:
            if isinstance(answer, Written):
                self._finished(Finished(asked, self._completion(answer)))
            else:
                problem = answer if isinstance(answer, str) else answer.error
                nothing = Written(asked.prompt.id, pack(np.empty(0, "i4")), pack(np.empty(0, "f4")), "length")
                self._refused(Finished(asked, self._completion(nothing)), f"teacher {name}: {problem}")

    def _completion(self, answer: Written) -> Generated:
        count, k = answer.token_ids.shape[0], self._parts.student_topk
        return Generated(
            id=answer.id,
            token_ids=answer.token_ids,
            logprob=answer.logprob,
            spans=[],
            finish_reason=answer.finish_reason,
            topk_ids=pack(np.full((count, k), -1, "i4")) if k else None,
        )
