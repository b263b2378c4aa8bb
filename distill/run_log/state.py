"""The state of a run: the journal's records applied in order, live as well as after a restart. Pure.

Every rollout that was issued is in exactly one place: `pending` (in flight, being scored, or requeued),
`buffer`, a batch of `batches`, or dropped.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import msgspec

from distill.buffer.buffer import Buffer
from distill.buffer.staleness import Lineage, Lineages, Rules, capacity
from distill.prompts.stream import Cursor, group_of
from distill.run_log.records import (
    SPENDS_ATTEMPT,
    AnyRecord,
    BatchFormed,
    Bisection,
    Checkpointed,
    Concluded,
    Dropped,
    Evaluated,
    HandedOut,
    Held,
    Issued,
    LineageOpened,
    Location,
    Opened,
    Record,
    Requeued,
    RolledBack,
    Rollout,
    Snapshot,
    Stepped,
    VersionApplied,
    VersionPublished,
)
from sync.wire import EvalReport, Version

RECENT = 256
"""Newest publications, updates of replicas and checkpoints that are remembered one by one."""


@dataclass(slots=True)
class Batch:
    """A batch, from its forming (RunLog.form_batch) to the checkpoint that covers it; rows: `packing`."""

    version: Version
    """The weights it is trained on top of, under the lineage that formed it."""
    rollouts: list[Rollout]
    """In order; released once a step has trained on them."""
    ages: list[int]
    """Of each rollout, in versions."""
    weights: list[float]
    """Loss weight of each rollout; empty: 1 for all."""
    is_part: bool = False
    """It is a part of a batch that trainers died on."""
    trained: bool = False
    """A trainer has made its step."""

    @property
    def tokens(self) -> int:
        """Completion tokens."""
        return sum(rollout.length for rollout in self.rollouts)

    @property
    def tokens_by_teacher(self) -> int:
        """Those of them that teachers generated."""
        return sum(rollout.length for rollout in self.rollouts if rollout.by_teacher)


@dataclass
class Counters:
    """Sums over the whole run, restarts included."""

    issued: int = 0
    generated_tokens: int = 0
    """Completion tokens of scored and of dropped rollouts."""
    by_teacher_tokens: int = 0
    """Those of them that teachers generated."""
    scored: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Rollouts by reason."""
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    requeued: Counter[str] = field(default_factory=Counter)
    age_sum: int = 0
    """Over rollouts of batches."""
    age_max: int = 0
    composed: int = 0
    """Rollouts that went into batches."""
    late: int = 0
    """Of them, those older than the limit, at a weight below 1."""
    published: int = 0
    """Versions."""
    applied: int = 0
    """Updates of replicas."""


class RunState:
    """See the module's text. Only `apply` changes it."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.cursor = Cursor(0, 0)
        self.pending: dict[str, Rollout] = {}
        """Not scored yet."""
        self.buffer = Buffer(rules.bound, rules.group)
        self.broken: dict[str, set[str]] = {}
        """Groups that can no longer be whole → members that are gone; forgotten when all are."""
        self.batches: dict[Version, Batch] = {}
        """By the version they were formed for."""
        self.lineages = Lineages()
        self.lineage: int | None = None
        """The current one; None: no trainer has started."""
        self.fingerprint: str | None = None
        self.next_step = 0
        """First step of the current lineage without a batch."""
        self.reached: Version | None = None
        """What the trainer has reached; None: it has not started."""
        self.trained_tokens: dict[int, int] = {}
        """Completion tokens by step of the current lineage; steps that a checkpoint covers are one sum."""
        self.trained_by_teacher: dict[int, int] = {}
        """Those of them that teachers generated."""
        self.bisection = Bisection()
        self.target: VersionPublished | None = None
        """The version in the store that replicas follow; None: nothing published."""
        self.published: deque[VersionPublished] = deque(maxlen=RECENT)
        self.newest: dict[int, int] = {}  # newest step that was published of each lineage, by any transport
        self.applied: deque[VersionApplied] = deque(maxlen=RECENT)
        self.checkpoints: list[Version] = []
        """The newest ones, in the order of their saving."""
        self.snapshots: dict[Version, Held] = {}
        """Checkpoint → the snapshot that was taken when it was the newest, while a restart may use it."""
        self.opened: Opened | None = None  # by the newest controller
        self.evaluations: list[EvalReport] = []
        self.rollbacks = 0  # of the guard, over the whole run
        self.rolled_back: RolledBack | None = None  # the one that no trainer has followed yet
        self.counters = Counters()
        self.where: dict[str, Location] = {}
        """Journal place of every prompt and rollout that a restart could need."""
        self.archived: dict[str, Rollout] = {}
        """Of batches that were left, what only the archive holds: a replay meets its later records."""
        self._apply: dict[type[Record], Callable] = {
            Opened: self._opened,
            Issued: self._issued,
            Requeued: self._requeued,
            Rollout: self._scored,
            Dropped: self._dropped,
            BatchFormed: self._batch_formed,
            LineageOpened: self._lineage_opened,
            HandedOut: self._handed_out,
            Stepped: self._stepped,
            VersionPublished: self._version_published,
            VersionApplied: self._version_applied,
            Checkpointed: self._checkpointed,
            RolledBack: self._rolled_back,
            Evaluated: self._evaluated,
            Concluded: lambda record, _: None,
            Snapshot: self._snapshot,
        }

    # --- questions ----------------------------------------------------------------------------------------

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

    def room(self, applied: Version | None) -> int:
        """Rollouts that may be started when the slowest replica holds `applied` (None: the folder)."""
        step = 0 if applied is None else self.step_of(applied)
        batch, limit = self.rules.batch, self.rules.bound.limit
        return capacity(step, limit, batch, self.next_step * batch, self.outstanding)

    def is_broken(self, rollout: str) -> bool:
        """Whether a member of its group is gone, so that no batch will take it."""
        return self.rules.group > 1 and group_of(rollout) in self.broken

    def expiring(self) -> int:
        """Rollouts in flight that the next batch may still take, and none after it."""
        last = self.next_step - self.rules.bound.hard
        return sum(one.since is not None and self.step_of(one.since) == last for one in self.pending.values())

    def batch_of(self, step: int) -> Batch | None:
        """The batch of `step` on the path of the current lineage; None: not formed, or forgotten."""
        if self.lineage is None:
            return None
        return self.batches.get(Version(self.lineages.owner(self.lineage, step), step))

    @property
    def held_by_last_trainer(self) -> Batch | None:
        """The batch that the last trainer had and did not finish; None: it had none, or was sent away."""
        if self.reached is None or self.rolled_back or self.bisection.handed_out < self.reached.step:
            return None
        return self.batch_of(self.reached.step)

    def available(self, version: Version) -> bool:
        """Whether the batch formed for `version` can be handed out (again)."""
        batch = self.batches.get(version)
        return batch is not None and all(one.id in self.where for one in batch.rollouts)

    # --- records ------------------------------------------------------------------------------------------

    def apply(self, record: AnyRecord, location: Location | None = None) -> None:
        """Change the state as `record` says; `location` is where the journal holds it."""
        self._apply[type(record)](record, location)

    def replay(self, record: AnyRecord, location: Location) -> None:
        """As `apply`, of a record that was read back: the arrays of rollouts stay in the journal."""
        if isinstance(record, Rollout):
            self.apply(record.released(), None if record.is_released else location)
        else:
            self.apply(record, location)

    def sent(self, ids: Collection[str], version: Version) -> None:
        """Note what a replica held when it was sent these; on no record: a restart sends them again."""
        for rollout in ids:
            self.pending[rollout] = msgspec.structs.replace(self.pending[rollout], since=version)

    def _opened(self, record: Opened, _: Location | None) -> None:
        self.opened = record
        self.bisection.handed_out = -1  # a trainer that ends with its controller died of that

    def _issued(self, record: Issued, location: Location | None) -> None:
        by_teacher = set(record.by_teacher)
        for place, prompt in enumerate(record.prompts):
            self.pending[prompt.id] = Rollout(
                prompt.id, self.counters.issued, by_teacher=place in by_teacher, issued=prompt
            )
            self.counters.issued += 1
            if location:
                self.where[prompt.id] = location
        self.cursor = Cursor(record.epoch, record.position)

    def _requeued(self, record: Requeued, _: Location | None) -> None:
        spent = record.reason in SPENDS_ATTEMPT
        for rollout in record.ids:
            one = self.pending[rollout]
            self.pending[rollout] = msgspec.structs.replace(one, attempts=one.attempts + spent, since=None)
        self.counters.requeued[record.reason] += len(record.ids)
        if record.tokens:
            self.counters.generated_tokens += record.tokens
            self.counters.dropped_tokens[record.reason] += record.tokens

    def _scored(self, record: Rollout, location: Location | None) -> None:
        self.pending.pop(record.id)
        self.where.pop(record.id, None)
        self.buffer.admit(record)
        self.counters.scored += 1
        self.counters.generated_tokens += record.length
        self.counters.by_teacher_tokens += record.length if record.by_teacher else 0
        if location:
            self.where[record.id] = location

    def _dropped(self, record: Dropped, _: Location | None) -> None:
        tokens = record.tokens
        for rollout in record.ids:
            if rollout in self.buffer:
                tokens += self.buffer.remove([rollout])[0].length
            elif rollout in self.archived:
                tokens += self.archived.pop(rollout).length
            elif self.pending.pop(rollout).by_teacher:
                self.counters.by_teacher_tokens += record.tokens  # such are dropped one by one
            self.where.pop(rollout, None)
            self._break_group(rollout)
        self.counters.generated_tokens += record.tokens
        self.counters.dropped[record.reason] += len(record.ids)
        self.counters.dropped_tokens[record.reason] += tokens

    def _break_group(self, rollout: str) -> None:
        """A member of a group is gone."""
        if self.rules.group > 1:
            gone = self.broken.setdefault(group_of(rollout), set())
            gone.add(rollout)
            if len(gone) == self.rules.group:
                del self.broken[group_of(rollout)]

    def _batch_formed(self, record: BatchFormed, _: Location | None) -> None:
        buffered = self.buffer.remove([i for i in record.ids if i not in self.archived])
        found = {rollout.id: rollout for rollout in buffered}
        rollouts = [found.get(i) or self.archived.pop(i) for i in record.ids]
        for rollout in record.ids if self.broken else ():
            self.broken.pop(group_of(rollout), None)
        ages = [rollout.age(record.version.step, self.step_of) for rollout in rollouts]
        is_part = self.bisection.take(record.ids)
        self.batches[record.version] = Batch(record.version, rollouts, ages, record.weights, is_part)
        self.next_step = record.version.step + 1
        self.bisection.furthest = max(self.bisection.furthest, self.next_step)
        self.counters.composed += len(rollouts)
        self.counters.late += sum(weight < 1 for weight in record.weights)
        self.counters.age_sum += sum(ages)
        self.counters.age_max = max([self.counters.age_max, *ages])

    def _handed_out(self, record: HandedOut, _: Location | None) -> None:
        if record.version.lineage == self.lineage:
            self.bisection.handed_out = record.version.step

    def _lineage_opened(self, record: LineageOpened, _: Location | None) -> None:
        held = self.held_by_last_trainer
        self.bisection.trainer_gone(None if held is None else held.version)
        self.bisection.parts = record.parts
        self.bisection.furthest = max(self.bisection.furthest, record.start)
        self.lineages.add(Lineage(record.lineage, record.start, record.origin, record.branch))
        self.lineage, self.rolled_back = record.lineage, None
        self.fingerprint = record.fingerprint
        self.reached = Version(record.lineage, record.start)
        self.next_step = record.branch
        for tokens in (self.trained_tokens, self.trained_by_teacher):
            for step in [step for step in tokens if step >= record.start]:
                del tokens[step]
        self._take_back_lost_batches(record.lineage)
        if record.without:
            self._dropped(Dropped(record.without, "rolled_back", 0), None)

    def _take_back_lost_batches(self, lineage: int) -> None:
        """Rollouts of batches that are not on the path of `lineage` wait in the buffer again."""
        for version in sorted(v for v in self.batches if self.lineages.owner(lineage, v.step) != v.lineage):
            for rollout in self.batches.pop(version).rollouts:
                if rollout.id in self.where:
                    self.buffer.admit(rollout)
                else:
                    self.archived[rollout.id] = rollout
                    self._break_group(rollout.id)

    def _stepped(self, record: Stepped, _: Location | None) -> None:
        self.reached = record.version
        batch = self.batch_of(record.version.step - 1)
        if batch is not None:
            batch.trained = True
            self.trained_tokens[record.version.step - 1] = batch.tokens
            self.trained_by_teacher[record.version.step - 1] = batch.tokens_by_teacher
            batch.rollouts = [rollout.released() for rollout in batch.rollouts]

    def _version_published(self, record: VersionPublished, _: Location | None) -> None:
        self.published.append(record)
        self.counters.published += 1
        lineage, step = record.version
        self.newest[lineage] = max(step, self.newest.get(lineage, 0))
        if record.kind == "broadcast":
            return
        if self.target is None or self.step_of(record.version) >= self.step_of(self.target.version):
            self.target = record

    def _version_applied(self, record: VersionApplied, _: Location | None) -> None:
        self.applied.append(record)
        self.counters.applied += 1

    def _checkpointed(self, record: Checkpointed, _: Location | None) -> None:
        self.checkpoints.append(record.version)
        del self.checkpoints[:-RECENT]

    def _snapshot(self, record: Snapshot, location: Location | None) -> None:
        if location:
            needed = frozenset(place.segment for place in record.where.values())
            self.snapshots[record.checkpoint] = Held(location.segment, needed)

    def _rolled_back(self, record: RolledBack, _: Location | None) -> None:
        self.rollbacks += 1
        self.rolled_back = record

    def _evaluated(self, record: Evaluated, _: Location | None) -> None:
        self.evaluations.append(record.report)

    def forget_unavailable(self) -> None:
        """After a replay: forget batches whose rollouts the journal no longer holds whole."""
        for version in [v for v in self.batches if not self.available(v)]:
            self.forget(version)

    def forget(self, version: Version) -> None:
        """No trainer will request this batch again."""
        for rollout in self.batches.pop(version).rollouts:
            self.where.pop(rollout.id, None)
