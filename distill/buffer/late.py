"""What a run's configuration says about late rollouts and groups. Pure.

    asked ─▶ in flight, scored ─▶ buffer ─▶ batch of step s
                                              age ≤ limit          weight 1
                                              age ≤ hard limit     weight 2^(−(age − limit)/half_life)
                                              older                dropped

Under the policy "wait" the batch of step s is held while a rollout is under way that would be too old for
step s + 1. The capacity rule leaves at most one batch of those: whatever comes in time is trained.
"""

from __future__ import annotations

from distill.buffer.staleness import Bound, check_pace
from distill.config import RunConfig, WaitForLate, WeighLate
from distill.run_log.state import Rules
from sync.errors import ConfigError


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
