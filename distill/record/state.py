"""The state of a run in memory: the cache of its rows, which `load` reads after a restart. Pure.

Every rollout that was issued is in exactly one place: `pending` (in flight, being scored, or requeued),
`buffer`, a batch of `batches`, or dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from distill.buffer import Batch, Lineages, Rules, capacity
from distill.prompts.stream import Cursor, group_of
from distill.record.rollout import Block, Location, Rollout
from sync.wire import EvalReport, Version, VersionSpan

if TYPE_CHECKING:
    from distill.record.changes import Opened, RolledBack, VersionApplied, VersionPublished

RECENT = 256  # newest publications, updates of replicas and checkpoints that are remembered one by one


@dataclass
class Counters:
    """Sums over the whole run, restarts included. By teacher: those of them that teachers generated."""

    issued: int = 0
    generated_tokens: int = 0  # of scored and of dropped rollouts; those of environments do not count
    by_teacher_tokens: int = 0
    episodes: int = 0  # scored
    turns: int = 0  # of them
    environment_tokens: int = 0  # in them, behind the first prompt
    scored: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # rollouts by reason
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    requeued: Counter[str] = field(default_factory=Counter)
    age_sum: int = 0  # over rollouts of batches
    age_max: int = 0
    batched: int = 0  # rollouts that went into batches
    late: int = 0  # of them, those older than the limit, at a weight below 1
    published: int = 0  # versions
    applied: int = 0  # updates of replicas


@dataclass
class Bisection:
    """What trainers died on, until the rollouts that cannot be trained on are found.

        batch ──a trainer dies with it──▶ handed out again ──the next one dies too──▶ two parts
        part  ──trained──▶ done
          └────a trainer dies with it──▶ two parts … ──▶ one rollout: quarantined, the rest is one part

    Each part is a batch. While there are parts, the next batch is formed only when the one before it was
    trained, so that a death is the fault of one part. A group of completions of one prompt is never split.
    """

    furthest: int = 0  # highest step that any lineage could have reached
    handed_out: int = -1  # newest step whose batch the current trainer has
    died_on: Version | None = None  # the batch that the last trainer died on
    parts: list[list[str]] = field(default_factory=list)
    """Buffered rollouts that each go into a batch of their own, before all others."""


class RunState(msgspec.Struct):
    """See the module's text. Only records and `sent` change it."""

    rules: Rules
    cursor: Cursor = Cursor(0, 0)
    pending: dict[str, Rollout] = {}  # not scored yet, in the order of issue
    buffer: dict[str, Rollout] = {}
    """Scored and in no batch yet, in the order of admission. The capacity rule bounds it."""
    broken: dict[str, set[str]] = {}
    """Groups that can no longer be whole → members that are gone; forgotten when all are."""
    batches: dict[Version, Batch] = {}  # by the version they were formed for
    lineages: Lineages = msgspec.field(default_factory=Lineages)
    lineage: int | None = None  # the current one; None: no trainer has started
    fingerprint: str | None = None
    next_step: int = 0  # first step of the current lineage without a batch
    reached: Version | None = None  # by the trainer; None: it has not started
    trained_tokens: dict[int, int] = {}
    """Generated tokens by step of the current lineage."""
    trained_by_teacher: dict[int, int] = {}  # those of them that teachers generated
    bisection: Bisection = msgspec.field(default_factory=Bisection)
    target: VersionPublished | None = None
    """The version in the store that replicas follow; None: nothing published, or a broadcast is newer."""
    published: list[VersionPublished] = []
    newest: dict[int, int] = {}  # lineage → newest step that was published, by any transport
    applied: list[VersionApplied] = []
    checkpoints: list[Version] = []  # the newest ones, in the order of their saving
    opened: Opened | None = None  # by the newest controller
    evaluations: list[EvalReport] = []
    rollbacks: int = 0
    rolled_back: RolledBack | None = None  # the one that no trainer has followed yet
    counters: Counters = msgspec.field(default_factory=Counters)
    where: dict[str, Location] = {}
    """Where the arrays of every prompt and rollout are that a restart could need."""

    # --- questions ----------------------------------------------------------------------------------------

    @property
    def blocks(self) -> frozenset[Block]:
        """Of arrays and prompts that a restart could need."""
        return frozenset(location.block for location in self.where.values() if location.block)

    @property
    def files(self) -> set[int]:
        """Of arrays, which have these blocks."""
        return {block.file for block in self.blocks}

    @property
    def outstanding(self) -> int:
        """Rollouts in flight, being scored or buffered."""
        return len(self.pending) + len(self.buffer)

    def step_of(self, version: Version) -> int:
        """A token's version as a step of the current lineage."""
        return version.step if self.lineage is None else self.lineages.step_in(version, self.lineage)

    def passed(self, version: Version) -> bool:
        """Whether a version lies on the path of the current lineage."""
        return self.lineage is not None and self.step_of(version) == version.step

    def kept(self, count: int) -> list[Version]:
        """The newest `count` checkpoints on the path of the current lineage: those that are not removed."""
        return [version for version in self.checkpoints if self.passed(version)][-count:]

    def room(self, applied: Version | None, depth: float, without: int = 0) -> int:
        """Rollouts that a replica which holds `applied` (None: the folder) may be sent.

        `without`: outstanding ones that no batch will take before them.
        """
        step, batch = 0 if applied is None else self.step_of(applied), self.rules.batch
        return capacity(step, depth, batch, self.next_step * batch, self.outstanding - without)

    def is_broken(self, rollout: str) -> bool:
        """Whether a member of its group is gone, so that no batch will take it."""
        return self.rules.group > 1 and group_of(rollout) in self.broken

    def is_too_old(self, version: Version) -> bool:
        """Whether no batch will take a rollout with a token that this version sampled."""
        return self.next_step - self.step_of(version) > self.rules.bound.hard

    def expiring(self) -> int:
        """Rollouts in flight that the next batch may still take, and none after it."""
        steps = {each.id: self.step_of(each.since) for each in self.pending.values() if each.since}
        oldest = dict(steps)
        if self.rules.group > 1:  # a group is as old as its oldest member
            ages = {each.id: each.age(self.next_step, self.step_of) for each in self.buffer.values()}
            by_group = dict[str, int]()
            for id, step in (steps | {id: self.next_step - age for id, age in ages.items()}).items():
                by_group[group_of(id)] = min(step, by_group.get(group_of(id), step))
            oldest = {id: by_group[group_of(id)] for id in steps}
        last = self.next_step - self.rules.bound.hard
        return sum(step == last and not self.is_broken(id) for id, step in oldest.items())

    def batch_of(self, step: int) -> Batch | None:
        """The batch of `step` on the path of the current lineage; None: not formed, or forgotten."""
        if self.lineage is None:
            return None
        return self.batches.get(Version(self.lineages.owner(self.lineage, step), step))

    def next_part(self) -> list[str]:
        """What is left of the next part of a batch that trainers died on; empty: there is none."""
        parts = ([id for id in part if id in self.buffer] for part in self.bisection.parts)
        return next((part for part in parts if part), [])

    @property
    def held_by_last_trainer(self) -> Batch | None:
        """The batch that the last trainer had and did not finish; None: it had none, or was sent away."""
        if self.reached is None or self.rolled_back or self.bisection.handed_out < self.reached.step:
            return None
        return self.batch_of(self.reached.step)

    @property
    def suspect(self) -> Batch | None:
        """What the last trainer died on, where it was not the first to, or where that is a part already."""
        batch = self.held_by_last_trainer
        again = batch is not None and (batch.is_part or batch.version == self.bisection.died_on)
        return batch if again else None

    def may_exist(self, version: Version) -> bool:
        """Whether a replica can hold `version`: the folder it was started with, or one that was published."""
        lineage, step = version
        if version == Version(0, 0):
            return True
        return lineage in self.newest and self.lineages[lineage].start <= step <= self.newest[lineage]

    def span_problem(self, spans: Iterable[VersionSpan]) -> str | None:
        """Why a token cannot have been sampled from the version that its span names; None: every one can."""
        wrong = next((span for span in spans if not self.may_exist(span.version)), None)
        if wrong is None:
            return None
        lineage = wrong.version.lineage
        published = f"and this run published nothing of lineage {lineage}"
        if lineage in self.newest:
            start, newest = self.lineages[lineage].start, self.newest[lineage]
            first, last = Version(lineage, start), Version(lineage, newest)
            published = f"and this run published {first} to {last} of its lineage"
        return (
            f"tokens {wrong.start} to {wrong.end} are of {wrong.version}, {published}: "
            "the replica serves another run's weights; start it again, for this run alone"
        )

    def sent(self, ids: Collection[str], version: Version) -> None:
        """Note what a replica held when it was sent these; on no record: a restart sends them again."""
        for rollout in ids:
            self.pending[rollout] = msgspec.structs.replace(self.pending[rollout], since=version)
