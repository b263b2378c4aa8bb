"""How old a rollout may be: versions, lineages, the capacity rule, and the policies for late rollouts. Pure.

A lineage is one start of the trainer. A new one takes over the batches of an older one (its `origin`) up to
its `branch`, the first step whose batch it forms anew; up to that step both hold the same weights, because
they were trained on the same batches in the same order:

    L0  0 ────────── 40 ───── 47      killed at 45, batches formed up to step 47
    L1            40 ════════ 47 ── … resumes from the checkpoint of step 40, origin 0, branch 47

A batch of step s takes a rollout by its age, the versions between its oldest token and s:

    age ≤ limit          weight 1
    age ≤ hard limit     weight 2^(−(age − limit) / half_life)
    older                dropped

Under the policy "wait" the batch of step s is held while a rollout is in flight that would be too old for
step s + 1. The capacity rule leaves at most one batch of those: whatever comes in time is trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from distill.config import RunConfig, WaitForLate, WeighLate
from sync.errors import ConfigError
from sync.wire import Version

_NEVER = 1 << 62
_REMEMBERED = 1 << 14
"""Entries of the cache of `step_in`: more than the versions of a buffer."""


class Lineage(NamedTuple):
    """One start of the trainer."""

    id: int
    start: int
    """Step it begins at: its checkpoint's, or 0."""
    origin: int | None
    """The lineage whose batches it takes over; None: the first."""
    branch: int
    """First step whose batch is its own."""


class Lineages:
    """The tree of lineages of a run, in the order in which they were opened."""

    def __init__(self) -> None:
        self._nodes: dict[int, Lineage] = {}
        self._shared: dict[int, dict[int, int]] = {}
        self._steps: dict[tuple[Version, int], int] = {}

    def __contains__(self, lineage: int) -> bool:
        return lineage in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, lineage: int) -> Lineage:
        return self._nodes[lineage]

    def add(self, lineage: Lineage) -> None:
        """Add the newest lineage; its id is the number of those before it."""
        assert lineage.id == len(self._nodes), "lineages are numbered in the order of their opening"
        shared = {lineage.id: _NEVER}
        if lineage.origin is not None:
            for ancestor, until in self._shared[lineage.origin].items():
                shared[ancestor] = min(until, lineage.branch)
        self._nodes[lineage.id] = lineage
        self._shared[lineage.id] = shared

    def step_in(self, version: Version, lineage: int) -> int:
        """Step that `version` counts as in `lineage`: its own up to where they branch, that point after it.

        Versions of a lineage that is not known count as the model folder, step 0.
        """
        key = version, lineage
        if (found := self._steps.get(key)) is None:
            if len(self._steps) > _REMEMBERED:
                self._steps.clear()
            ours, theirs = self._shared[lineage], self._shared.get(version.lineage, {})
            common = [min(until, theirs[other]) for other, until in ours.items() if other in theirs]
            found = self._steps[key] = min(version.step, max(common, default=0))
        return found

    def holds(self, version: Version, lineage: int) -> bool:
        """Whether `version` lies on the path of `lineage` (the same batches led to it)."""
        return self.step_in(version, lineage) == version.step

    def owner(self, lineage: int, step: int) -> int:
        """The lineage that formed the batch of `step` on the path of `lineage`."""
        node = self._nodes[lineage]
        while node.origin is not None and step < node.branch:
            node = self._nodes[node.origin]
        return node.id

    def origin_of(self, checkpoint: Version | None) -> int | None:
        """The newest lineage that a trainer starting from `checkpoint` can take over; None: none yet."""
        at = checkpoint or Version(0, 0)
        fits = [lineage for lineage in self._nodes if checkpoint is None or self.holds(at, lineage)]
        return max(fits, default=None)


@dataclass(frozen=True)
class Bound:
    """How old a rollout may be at the start of the step that trains on it, in versions."""

    limit: int
    """Oldest age at full weight; the capacity rule keeps to it."""
    hard: int
    """Oldest age at all; `limit` unless late rollouts are weighted by their freshness."""
    half_life: float = 1.0
    """Versions beyond `limit` that halve the weight."""

    def weight(self, age: int) -> float:
        """What a rollout of this age counts for: 1 up to `limit`, 2^(−(age − limit) / half_life) after it."""
        return 1.0 if age <= self.limit else 2.0 ** ((self.limit - age) / self.half_life)


def capacity(applied_step: int, max_staleness: int, batch: int, handed_out: int, outstanding: int) -> int:
    """Rollouts that may be started now.

    `applied_step`: what the slowest serving replica has applied (not what the trainer has reached: a replica
    behind it would make rollouts that are too old). `handed_out`: rollouts in batches on the path of the
    current lineage. `outstanding`: in flight, being scored or buffered.
    """
    return max(0, (applied_step + max_staleness + 1) * batch - handed_out - outstanding)


@dataclass(frozen=True)
class Rules:
    """What decides how a run's rollouts are made and become batches."""

    batch: int
    """Rollouts of a batch."""
    bound: Bound
    group: int = 1
    """Completions of a prompt that go into a batch together; `batch` is a multiple of it."""
    max_attempts: int = 5
    """Completions of one prompt that may be broken off or reach a limit before it is dropped."""
    on_policy: float = 1.0
    """Share of the prompts that the student completes; the teacher completes the others."""


def seconds_of_waiting(config: RunConfig) -> float:
    """How long a batch waits for late rollouts; 0: not at all."""
    late = config.buffer.late
    return late.seconds if isinstance(late, WaitForLate) else 0.0


def rules(config: RunConfig) -> Rules:
    """The rules of a run. Raises ConfigError for a combination with which it would stall."""
    rollout, behind = config.rollout, config.weights.publish_every - 1
    if behind > config.buffer.max_staleness:
        raise ConfigError(
            f"weights.publish_every is {behind + 1} and buffer.max_staleness {config.buffer.max_staleness}: "
            f"the replicas fall {behind} steps behind between two versions, too far for any rollout; "
            f"set max_staleness to at least {behind}, or publish more often"
        )
    return Rules(
        rollout.batch,
        _bound(config),
        _group(config),
        rollout.max_attempts,
        config.objective.on_policy,
    )


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
