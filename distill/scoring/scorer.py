"""The scores of completions, by the teacher of their source; and their rewards."""

from __future__ import annotations

import msgspec
import numpy as np

from distill.events import ErrorBudget, Events, RolloutScored
from distill.interfaces import Components
from distill.metrics.timeline import REPLICAS
from distill.run_log.records import Rollout
from distill.run_log.validation import Validator
from sync.errors import DistillError
from sync.wire import Array, Scored, ScoreRefused, ScoreSequence, checks, pack, unpack


class Scoring:
    """A job of `TeacherQueue`: completed rollouts in, RolloutScored out.

    A rollout is rejected if its reward function raises.
    """

    what = "score"
    waits_for = REPLICAS

    def __init__(self, parts: Components, validator: Validator, budget: ErrorBudget, events: Events) -> None:
        self._parts, self._validator, self._budget, self._events = parts, validator, budget, events
        self._hidden_sizes: dict[str, int] = {}

    def message(self, rollout: Rollout, seen: Array) -> ScoreSequence:
        return score_sequence(rollout.id, seen, rollout.tokens, rollout.topk_ids)

    async def send(self, teacher: str, messages: list[ScoreSequence]) -> list[Scored | ScoreRefused]:
        want, engine = self._validator.want, self._parts.teachers[teacher]
        if want.hidden and teacher not in self._hidden_sizes:
            self._hidden_sizes[teacher] = (await engine.first_info()).hidden_size
        return await engine.score(messages, want)

    def problem(self, teacher: str, rollout: Rollout, answer: Scored) -> str | None:
        problem = self._validator.scored(answer, rollout.length, self._hidden_sizes.get(teacher))
        return None if problem is None else str(problem)

    def finish(self, teacher: str, rollout: Rollout, answer: Scored) -> None:
        prompt, reward, reward_fn = rollout.source_prompt, None, self._parts.reward_fn
        if reward_fn is not None:
            try:
                reward = float(reward_fn(prompt, unpack(rollout.tokens).tolist()))
            except DistillError as error:
                return self._budget.function_failed("the reward_fn", rollout, error)
            self._budget.good("the reward_fn")
        scored = msgspec.structs.replace(
            rollout,
            prompt=pack(np.asarray(prompt.token_ids, "i4")),
            teacher=teacher,
            scored=checks.without_bad_diagnostics(answer, rollout.length),
            reward=reward,
            since=None,
            issued=None,
        )
        return self._events.emit(RolloutScored(scored))


def score_sequence(id: str, prompt: Array, tokens: Array, gather_ids: Array | None) -> ScoreSequence:
    """Score request for prompt [P] followed by completion [T], both i4."""
    start = prompt.shape[0]
    together = Array("i4", (start + tokens.shape[0],), prompt.data + tokens.data)
    return ScoreSequence(id, together, start, gather_ids)
