"""What a run's configuration says about late rollouts and groups. Pure.

    asked ─▶ in flight, scored ─▶ buffer ─▶ batch of step s
                                              age ≤ limit          weight 1
                                              age ≤ hard limit     weight 2^(−(age − limit)/half_life)
                                              older                dropped

Under the policy "wait" the batch of step s is held while a rollout is under way that would be too old for
step s + 1. The capacity rule leaves at most one batch of those: whatever comes in time is trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from distill.config import RunConfig, WaitForLate, WeighLate
from distill.control.clock import Bound, check_pace
from distill.control.state import Rules
from sync.errors import ConfigError

LATE_POLL_SECONDS = 0.2
"""Between two looks whether a late rollout that a batch waits for has come to nothing."""


def seconds_of_waiting(config: RunConfig) -> float:
    """For how long a batch waits for late rollouts; 0: not at all."""
    late = config.buffer.late
    return late.seconds if isinstance(late, WaitForLate) else 0.0


def rules(config: RunConfig) -> Rules:
    """How the rollouts of a run become batches. Raises ConfigError for a combination that cannot go on."""
    check_pace(config.weights.publish_every, config.buffer.max_staleness)
    rollout = config.rollout
    return Rules(rollout.batch, _bound(config), config.buffer.order, _group(config), rollout.max_attempts)


def _bound(config: RunConfig) -> Bound:
    limit, late = config.buffer.max_staleness, config.buffer.late
    if not isinstance(late, WeighLate):
        return Bound(limit, limit)
    if late.hard_limit <= limit:
        raise ConfigError(
            f"buffer.late.hard_limit is {late.hard_limit} and buffer.max_staleness {limit}: freshness weighs "
            f'what is older than max_staleness; set hard_limit to at least {limit + 1}, or late.type = "drop"'
        )
    return Bound(limit, late.hard_limit, late.half_life)


def _group(config: RunConfig) -> int:
    """Completions of a prompt that go into a batch together."""
    task, rollout = config.objective.task, config.rollout
    if task is None or task.baseline == "batch":
        return 1
    if rollout.per_prompt < 2 or rollout.batch % rollout.per_prompt:
        raise ConfigError(
            f'objective.task.baseline is "group", rollout.per_prompt {rollout.per_prompt} and rollout.batch '
            f"{rollout.batch}: a group needs at least 2 completions, and a batch whole groups; "
            "set per_prompt to 2 or more and batch to a multiple of it"
        )
    return rollout.per_prompt


class Hold:
    """How long the batch of a step is still held for late rollouts."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`seconds`: for one batch; 0: never held."""
        self._seconds = seconds
        self._clock = clock
        self._step = -1
        self._until = 0.0
        self.holding = False
        """Whether the newest answer was to wait."""

    def left(self, step: int, expiring: int) -> float:
        """Seconds that the batch of `step` may wait from now on; 0: compose it.

        `expiring`: rollouts under way that no later batch may take. The time of a step runs from its first
        question with any.
        """
        if expiring and step != self._step:
            self._step, self._until = step, self._clock() + self._seconds
        left = max(0.0, self._until - self._clock()) if expiring else 0.0
        self.holding = left > 0
        return left
