"""The state of a run: the journal's records applied in order, live as well as after a restart. Pure.

Every rollout that was issued is in exactly one place: `pending` (in flight, being scored, or requeued),
`buffer`, a batch of `batches`, or dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import singledispatchmethod

import msgspec

from distill.buffer import Batch, Lineage, Lineages, Rules, capacity
from distill.prompts.stream import Cursor, group_of
from distill.run_log import records as r
from distill.run_log.records import SPENDS_ATTEMPT, LineageOpened, Location, Record, Rollout
from sync.wire import EvalReport, Version, VersionSpan

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
    """See the module's text. Only `apply` and `sent` change it; a snapshot is an encoded copy of it."""

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
    """Generated tokens by step of the current lineage; steps that a checkpoint covers are one sum."""
    trained_by_teacher: dict[int, int] = {}  # those of them that teachers generated
    bisection: Bisection = msgspec.field(default_factory=Bisection)
    target: r.VersionPublished | None = None
    """The version in the store that replicas follow; None: nothing published, or a broadcast is newer."""
    published: list[r.VersionPublished] = []
    newest: dict[int, int] = {}  # lineage → newest step that was published, by any transport
    applied: list[r.VersionApplied] = []
    checkpoints: list[Version] = []  # the newest ones, in the order of their saving
    opened: r.Opened | None = None  # by the newest controller
    evaluations: list[EvalReport] = []
    rollbacks: int = 0
    rolled_back: r.RolledBack | None = None  # the one that no trainer has followed yet
    counters: Counters = msgspec.field(default_factory=Counters)
    where: dict[str, Location] = {}  # journal place of every prompt and rollout that a restart could need
    snapshots: dict[Version, r.Held] = {}
    """Checkpoint → the snapshot that was taken when it was the newest, while a restart may use it."""
    archived: dict[str, Rollout] = {}
    """Of batches that were left, what only the archive holds: a replay meets its later records."""

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
        last = self.next_step - self.rules.bound.hard
        return sum(
            prompt.since is not None and self.step_of(prompt.since) == last
            for prompt in self.pending.values()
        )

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

    def available(self, version: Version) -> bool:
        """Whether the batch formed for `version` can be handed out (again)."""
        batch = self.batches.get(version)
        return batch is not None and all(id in self.where for id in batch.ids)

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
            first, last = (
                Version(lineage, self.lineages[lineage].start),
                Version(lineage, self.newest[lineage]),
            )
            published = f"and this run published {first} to {last} of its lineage"
        return (
            f"tokens {wrong.start} to {wrong.end} are of {wrong.version}, {published}: "
            "the replica serves another run's weights; start it again, for this run alone"
        )

    # --- changes ------------------------------------------------------------------------------------------

    def apply(self, record: Record, location: Location | None = None) -> None:
        """Apply a record; `location` is where the journal holds it."""
        self._change(record)
        if location is None:
            return
        if isinstance(record, r.Issued):
            self.where.update((prompt.id, location) for prompt in record.prompts)
        elif isinstance(record, Rollout):
            self.where[record.id] = location
        elif isinstance(record, r.Snapshot):
            needed = frozenset(place.segment for place in record.where.values())
            self.snapshots[record.checkpoint] = r.Held(location.segment, needed)

    def replay(self, record: Record, location: Location) -> None:
        """As `apply`, of a record that was read back: the arrays of rollouts stay in the journal."""
        if isinstance(record, Rollout):
            self.apply(record.released(), None if record.is_released else location)
        else:
            self.apply(record, location)

    def sent(self, ids: Collection[str], version: Version) -> None:
        """Note what a replica held when it was sent these; on no record: a restart sends them again."""
        for rollout in ids:
            self.pending[rollout] = msgspec.structs.replace(self.pending[rollout], since=version)

    @singledispatchmethod
    def _change(self, record: Record) -> None:
        """Of a kind that changes nothing."""

    @_change.register
    def _opened(self, record: r.Opened) -> None:
        self.opened = record
        self.bisection.handed_out = -1  # a trainer that ends with its controller died of that

    @_change.register
    def _issued(self, record: r.Issued) -> None:
        by_teacher = set(record.by_teacher)
        for place, prompt in enumerate(record.prompts):
            number, self.counters.issued = self.counters.issued, self.counters.issued + 1
            rollout = Rollout(prompt.id, number, by_teacher=place in by_teacher, issued=prompt)
            self.pending[prompt.id] = rollout
        self.cursor = Cursor(record.epoch, record.position)

    @_change.register
    def _requeued(self, record: r.Requeued) -> None:
        spent = record.reason in SPENDS_ATTEMPT
        for rollout in record.ids:
            prompt = self.pending[rollout]
            self.pending[rollout] = msgspec.structs.replace(
                prompt, attempts=prompt.attempts + spent, since=None
            )
        self.counters.requeued[record.reason] += len(record.ids)
        if record.tokens:
            self.counters.generated_tokens += record.tokens
            self.counters.dropped_tokens[record.reason] += record.tokens

    @_change.register
    def _scored(self, record: Rollout) -> None:
        if not record.continues:  # as what follows a rewritten context does, which was not issued
            self.pending.pop(record.id)
            self.where.pop(record.id, None)
        self._admit(record)
        self.counters.scored += 1
        self.counters.generated_tokens += record.own_length
        self.counters.by_teacher_tokens += record.length if record.by_teacher else 0
        self.counters.episodes += bool(record.own) and not record.continues
        self.counters.turns += len(record.own)
        self.counters.environment_tokens += record.length - record.own_length

    def _admit(self, rollout: Rollout) -> None:
        assert rollout.id not in self.buffer, f"rollout {rollout.id} is buffered already"
        self.buffer[rollout.id] = rollout

    @_change.register
    def _dropped(self, record: r.Dropped) -> None:
        tokens = record.tokens
        for rollout in record.ids:
            if scored := self.buffer.pop(rollout, None) or self.archived.pop(rollout, None):
                tokens += scored.own_length
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

    @_change.register
    def _batch_formed(self, record: r.BatchFormed) -> None:
        assert record.version == (self.lineage, self.next_step), f"the next step is {self.next_step}"
        rollouts = [self.archived.pop(i) if i in self.archived else self.buffer.pop(i) for i in record.ids]
        for rollout in record.ids if self.broken else ():
            self.broken.pop(group_of(rollout), None)
        ages = [rollout.age(record.version.step, self.step_of) for rollout in rollouts]
        parts, bisection = self.bisection.parts, self.bisection
        bisection.parts = [part for part in parts if set(part).isdisjoint(record.ids)]
        is_part = len(bisection.parts) < len(parts)
        self.batches[record.version] = Batch(record.version, rollouts, ages, record.weights, is_part)
        self.next_step = record.version.step + 1
        bisection.furthest = max(bisection.furthest, self.next_step)
        self.counters.batched += len(rollouts)
        self.counters.late += sum(weight < 1 for weight in record.weights)
        self.counters.age_sum += sum(ages)
        self.counters.age_max = max([self.counters.age_max, *ages])

    @_change.register
    def _handed_out(self, record: r.HandedOut) -> None:
        if record.version.lineage == self.lineage:
            self.bisection.handed_out = record.version.step

    @_change.register
    def _lineage_opened(self, record: LineageOpened) -> None:
        base = record.checkpoint or Version(-1, 0)
        assert base.lineage < record.lineage, "a checkpoint is older than the trainer that starts from it"
        assert base.step == record.start <= record.branch, "a trainer starts from its checkpoint"
        held_lineage, bisection = self.held_by_last_trainer, self.bisection
        furthest, died_on = (
            max(bisection.furthest, record.start),
            held_lineage.version if held_lineage else bisection.died_on,
        )
        self.bisection = Bisection(furthest, -1, died_on, record.parts)
        self.lineages.add(Lineage(record.lineage, record.start, record.origin, record.branch))
        self.lineage, self.rolled_back = record.lineage, None
        # newer ones are gone or damaged: else the trainer would have started there
        self.checkpoints = [v for v in self.checkpoints if record.checkpoint and v <= record.checkpoint]
        self.fingerprint = record.fingerprint
        self.reached = Version(record.lineage, record.start)
        self.next_step = record.branch
        for tokens in (self.trained_tokens, self.trained_by_teacher):
            for step in [step for step in tokens if step >= record.start]:
                del tokens[step]
        self._take_back_lost_batches(record.lineage)
        if record.without:
            self._dropped(r.Dropped(record.without, "rolled_back", 0))

    def _take_back_lost_batches(self, lineage: int) -> None:
        """Rollouts of batches that are not on the path of `lineage` wait in the buffer again."""
        for version in sorted(v for v in self.batches if self.lineages.owner(lineage, v.step) != v.lineage):
            for rollout in self.batches.pop(version).rollouts:
                if rollout.id in self.where:
                    self._admit(rollout)
                else:
                    self.archived[rollout.id] = rollout
                    self._break_group(rollout.id)

    @_change.register
    def _stepped(self, record: r.Stepped) -> None:
        self.reached = record.version
        step = record.version.step - 1
        if (batch := self.batch_of(step)) is not None:
            batch.trained = True
            self.trained_tokens[step] = sum(rollout.own_length for rollout in batch.rollouts)
            self.trained_by_teacher[step] = sum(
                rollout.length for rollout in batch.rollouts if rollout.by_teacher
            )
            batch.rollouts = [rollout.released() for rollout in batch.rollouts]

    @_change.register
    def _version_published(self, record: r.VersionPublished) -> None:
        told = record.kind != "broadcast" and [earlier.version for earlier in self.published[-1:]] == [
            record.version
        ]
        self.counters.published += not told  # a version that is stored beside its broadcast counts once
        self.published = [*self.published, record][-RECENT:]
        lineage, step = record.version
        self.newest[lineage] = max(step, self.newest.get(lineage, 0))
        before = None if self.target is None else self.target.version
        if record.kind == "broadcast":
            self.target = self.target if before == record.version else None
        elif before is None or self.step_of(record.version) >= self.step_of(before):
            self.target = record

    @_change.register
    def _version_applied(self, record: r.VersionApplied) -> None:
        self.applied = [*self.applied, record][-RECENT:]
        self.counters.applied += 1

    @_change.register
    def _checkpointed(self, record: r.Checkpointed) -> None:
        self.checkpoints = [*self.checkpoints, record.version][-RECENT:]

    @_change.register
    def _rolled_back(self, record: r.RolledBack) -> None:
        self.rollbacks += 1
        self.rolled_back = record

    @_change.register
    def _evaluated(self, record: r.Evaluated) -> None:
        self.evaluations.append(record.report)

    def forget_unavailable(self) -> None:
        """After a replay: forget batches whose rollouts the journal no longer holds whole."""
        for version in [v for v in self.batches if not self.available(v)]:
            self.forget(version)

    def forget(self, version: Version) -> None:
        """No trainer will request this batch again."""
        for rollout in self.batches.pop(version).ids:
            self.where.pop(rollout, None)
