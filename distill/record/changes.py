"""What happens to a prompt, a batch or a version: a type for each, with what it changes.

Each changes the state of the run and its rows (schema.sql) alike: what `load` reads back is the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Final, Literal, TypeVar, get_origin

import msgspec

from distill.buffer import Batch, Bound, Lineage
from distill.prompts.stream import Cursor, Prompt, group_of
from distill.record.rollout import SPENDS_ATTEMPT, DropReason, RequeueReason, Rollout
from distill.record.state import RECENT, Bisection, Counters, RunState
from distill.record.store import Store
from sync.base.decoding import json_decoder
from sync.wire import EvalReport, Version

_ORDER: Final = 1 << 20  # places in the order of the buffer that one record may take
_BUFFERED: Final = "UPDATE rollout_row SET admitted = ? WHERE row = ?"
MEMBERS: Final = "(SELECT json_extract(value, '$[0]') FROM json_each(?))"
_ISSUED: Final = (
    "INSERT INTO rollout_row (row, id, number, source, environment, for_teacher, block, place) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
_SCORED: Final = (
    "UPDATE rollout_row SET (scored, admitted, teacher, by_teacher, tokens, own_tokens, truncated, reward, "
    "reverse_kl, spans, own, kept, block, place) = (?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, "
    "?15) WHERE row = ?1"
)
_CONTINUES: Final = (
    "INSERT INTO rollout_row (row, id, number, continues, block, place) VALUES (?, ?, ?, 1, ?, ?)"
)


class Change(msgspec.Struct, frozen=True, gc=False):
    """Base of all kinds."""

    def apply(self, state: RunState, store: Store) -> None:
        """Change `state`, and queue in `store` what changes the rows; `store.at` is its number."""
        raise NotImplementedError


T = TypeVar("T", bound=Change)
_VERSIONS: Final = (Version, Version | None)


@cache
def _fields(kind: type[Change]) -> list[tuple[str, Any, bool]]:
    """Name and type of each, and whether it has parts."""
    fields = msgspec.structs.fields(kind)
    return [(field.name, field.type, get_origin(field.type) in (list, dict)) for field in fields]


def flat(change: Change) -> list[Any]:
    """The columns of a change whose row holds its fields: two of a version, JSON of what has parts."""
    columns = list[Any]()
    for name, kind, has_parts in _fields(type(change)):
        value = getattr(change, name)
        columns += (value or (None, None)) if kind in _VERSIONS else [json_of(value) if has_parts else value]
    return columns


def from_columns(change: type[T], columns: Sequence[Any]) -> T:
    """The change that has these columns."""
    values, left = list[Any](), [*reversed(columns)]
    for _, kind, has_parts in _fields(change):
        value = left.pop()
        if kind in _VERSIONS:
            step = left.pop()
            value = None if value is None else Version(value, step)
        values.append(json_decoder(kind).decode(value) if has_parts else value)
    return change(*values)


def json_of(value: Any) -> str:
    """As JSON."""
    return msgspec.json.encode(value).decode()


class Opened(Change, frozen=True):
    """A controller started on this run."""

    run: str
    seed: int
    batch: int
    max_staleness: int  # oldest age at full weight
    hard_limit: int | None = None  # oldest age at all; None: max_staleness
    half_life: float = 1.0  # versions beyond max_staleness that halve a rollout's weight
    group: int = 1  # completions of a prompt that go into a batch together
    per_prompt: int = 1  # completions of each prompt
    rows: int | None = None  # prompts of an epoch; None: they have no end
    id: str | None = None  # `RunIdentity.id`: the same at every opening
    supervised: int | None = None  # tokens of each completion that are trained on; None: all

    @property
    def bound(self) -> Bound:
        """Of the ages in its batches."""
        hard = self.max_staleness if self.hard_limit is None else self.hard_limit
        return Bound(self.max_staleness, hard, self.half_life)

    def apply(self, state: RunState, store: Store) -> None:
        state.opened = self
        state.bisection.handed_out = -1  # a trainer that ends with its controller died of that
        store.insert("opening", store.at, *flat(msgspec.structs.replace(self, hard_limit=self.bound.hard)))


class Issued(Change, frozen=True):
    """Prompts left the cursor; a prompt's number is its place in the order of issue."""

    prompts: list[Prompt]
    cursor: Cursor  # after them
    by_teacher: Sequence[int] = ()
    """Places in `prompts` of those that their teacher completes; the student completes the others."""

    def apply(self, state: RunState, store: Store) -> None:
        for place, prompt in enumerate(self.prompts):
            number, by_teacher = state.counters.issued, place in self.by_teacher
            rollout = Rollout(prompt.id, number, by_teacher=by_teacher, issued=prompt)
            state.pending[prompt.id] = rollout
            state.where[prompt.id] = location = store.add_arrays(rollout.on_disk(), store.new_row())
            state.counters.issued += 1
            names = store.name(prompt.source), store.name(prompt.environment)
            order = None if number == location.row else number
            store.execute(_ISSUED, location.row, prompt.id, order, *names, by_teacher, location)
        state.cursor = self.cursor


class Requeued(Change, frozen=True):
    """Prompts whose completion was lost; they wait to be sent again."""

    ids: list[str]
    reason: RequeueReason
    tokens: int = 0  # completion tokens that were generated for nothing, as far as they are known

    def apply(self, state: RunState, store: Store) -> None:
        spent = self.reason in SPENDS_ATTEMPT
        for rollout in self.ids:
            prompt = state.pending[rollout]
            state.pending[rollout] = msgspec.structs.replace(
                prompt, attempts=prompt.attempts + spent, since=None
            )
            store.insert("requeue", store.at, rollout, self.reason)
            if spent:
                sql = "UPDATE rollout_row SET attempts = attempts + 1 WHERE row = ?"
                store.execute(sql, state.where[rollout].row)
        state.counters.requeued[self.reason] += len(self.ids)
        if self.tokens:
            state.counters.generated_tokens += self.tokens
            state.counters.dropped_tokens[self.reason] += self.tokens


class Admitted(Change, frozen=True):
    """A rollout was scored: it waits in the buffer."""

    rollout: Rollout

    def apply(self, state: RunState, store: Store) -> None:
        rollout, counters = self.rollout, state.counters
        assert rollout.id not in state.buffer, f"rollout {rollout.id} is buffered already"
        state.buffer[rollout.id] = rollout
        if not rollout.continues:
            state.pending.pop(rollout.id)
        row = store.new_row() if rollout.continues else state.where[rollout.id].row
        state.where[rollout.id] = location = store.add_arrays(rollout.on_disk(), row)
        if rollout.continues:  # what follows a rewritten context was not issued
            store.execute(_CONTINUES, row, rollout.id, rollout.number, location)
        counters.scored += 1
        counters.generated_tokens += rollout.own_length
        counters.by_teacher_tokens += rollout.length if rollout.by_teacher else 0
        counters.episodes += bool(rollout.own) and not rollout.continues
        counters.turns += len(rollout.own)
        counters.environment_tokens += rollout.length - rollout.own_length
        order, kept = store.at * _ORDER, rollout.kept
        own_tokens = rollout.own_length if rollout.own else None
        sizes = rollout.by_teacher, rollout.length, own_tokens, rollout.truncated
        spans = [(*span.version, span.start) for span in rollout.spans]
        texts = (json_of(ranges) if ranges else None for ranges in (spans, rollout.own))
        values = store.at, order, store.name(rollout.teacher), *sizes, rollout.reward, rollout.reverse_kl
        packed = None
        if kept is not None:
            boot, _, number = kept.key.rpartition("-")
            where = store.name(kept.url), store.name(boot), int(number), kept.size, kept.digest
            packed = msgspec.msgpack.encode(where)
        store.execute(_SCORED, row, *values, *texts, packed, location)


class Dropped(Change, frozen=True):
    """These prompts or rollouts will not be trained on."""

    ids: list[str]
    reason: DropReason
    tokens: int  # that were generated for nothing and are in no rollout on record
    detail: str = ""

    def apply(self, state: RunState, store: Store) -> None:
        tokens, counters = self.tokens, state.counters
        for rollout in self.ids:
            if scored := state.buffer.pop(rollout, None):
                tokens += scored.own_length
            elif state.pending.pop(rollout).by_teacher:
                counters.by_teacher_tokens += self.tokens  # such are dropped one by one
            if state.rules.group > 1:  # members that are not issued yet will be dropped with it
                gone = state.broken.setdefault(group_of(rollout), set())
                gone.add(rollout)
                if len(gone) == state.rules.group:
                    del state.broken[group_of(rollout)]
            sql = "UPDATE rollout_row SET reason = ?, detail = ?, admitted = NULL WHERE row = ?"
            store.execute(sql, self.reason, self.detail or None, state.where.pop(rollout).row)
        counters.generated_tokens += self.tokens
        counters.dropped[self.reason] += len(self.ids)
        counters.dropped_tokens[self.reason] += tokens


class BatchFormed(Change, frozen=True):
    """The batch trained on top of `version`, in order."""

    version: Version
    ids: list[str]
    weights: list[float] = []  # what each counts for (`Bound.weight` of its age); empty: 1 for all

    def apply(self, state: RunState, store: Store) -> None:
        assert self.version == (state.lineage, state.next_step), f"the next step is {state.next_step}"
        rollouts = [state.buffer.pop(rollout) for rollout in self.ids]
        ages = [rollout.age(self.version.step, state.step_of) for rollout in rollouts]
        bisection, counters, bound = state.bisection, state.counters, state.rules.bound
        others = [part for part in bisection.parts if set(part).isdisjoint(self.ids)]
        is_part, bisection.parts = len(others) < len(bisection.parts), others
        state.batches[self.version] = Batch(self.version, rollouts, ages, self.weights, is_part)
        state.next_step = self.version.step + 1
        bisection.furthest = max(bisection.furthest, state.next_step)
        counters.batched += len(rollouts)
        counters.late += sum(weight < 1 for weight in self.weights)
        counters.age_sum += sum(ages)
        counters.age_max = max([counters.age_max, *ages])
        rows = (state.where[rollout].row for rollout in self.ids)
        columns = [rows, ages, self.weights] if self.weights else [rows, ages]
        members = json_of([*zip(*columns, strict=True)])
        bounds = bound.limit, bound.hard, bound.half_life
        store.insert("batch", *self.version, *bounds, is_part, members, 0, "held")
        store.execute(f"UPDATE rollout_row SET admitted = NULL WHERE row IN {MEMBERS}", members)


class LineageOpened(Change, frozen=True):
    """A trainer started; see distill.buffer.Lineage."""

    lineage: int
    checkpoint: Version | None
    start: int
    origin: int | None
    branch: int
    fingerprint: str
    without: list[str] = []  # rollouts of batches that are left for good: dropped, as "rolled_back"
    ranks: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1  # of the trainer
    parts: list[list[str]] = []
    """Of batches that trainers died on: the rollouts of each are a batch of their own from now on."""

    def apply(self, state: RunState, store: Store) -> None:
        base = self.checkpoint or Version(-1, 0)
        assert base.lineage < self.lineage, "a checkpoint is older than the trainer that starts from it"
        assert base.step == self.start <= self.branch, "a trainer starts from its checkpoint"
        batch, before = state.held_by_last_trainer, state.bisection
        died_on = batch.version if batch else before.died_on
        state.bisection = Bisection(max(before.furthest, self.start), -1, died_on, self.parts)
        state.lineages.add(Lineage(self.lineage, self.start, self.origin, self.branch))
        state.lineage, state.rolled_back, state.fingerprint = self.lineage, None, self.fingerprint
        # newer ones are gone or damaged: else the trainer would have started there
        state.checkpoints = [v for v in state.checkpoints if self.checkpoint and v <= self.checkpoint]
        state.reached, state.next_step = Version(self.lineage, self.start), self.branch
        for tokens in (state.trained_tokens, state.trained_by_teacher):
            for step in [step for step in tokens if step >= self.start]:
                del tokens[step]
        begins = self.checkpoint or (None, None)
        row = self.start, self.origin, self.branch, self.ranks, self.fingerprint
        store.insert("lineage", self.lineage, store.at, *begins, *row)
        store.execute("UPDATE step SET undone = 1 WHERE step > ?", self.start)
        sql = "UPDATE checkpoint SET gone = 1 WHERE (lineage, step) > (?, ?)"
        store.execute(sql, *(self.checkpoint or (-1, -1)))
        self._take_back(state, store)
        if self.without:
            Dropped(self.without, "rolled_back", 0).apply(state, store)

    def _take_back(self, state: RunState, store: Store) -> None:
        """Rollouts of batches that are not on the path of this lineage wait in the buffer again."""
        owner, order = state.lineages.owner, store.at * _ORDER
        for version in sorted(v for v in state.batches if owner(self.lineage, v.step) != v.lineage):
            store.execute("UPDATE batch SET status = 'left' WHERE lineage = ? AND step = ?", *version)
            for rollout in state.batches.pop(version).rollouts:
                assert rollout.id not in state.buffer, f"rollout {rollout.id} is buffered already"
                state.buffer[rollout.id] = rollout
                store.execute(_BUFFERED, order, state.where[rollout.id].row)
                order += 1


class HandedOut(Change, frozen=True):
    """A rank of the current trainer has the batch of `version`."""

    version: Version

    def apply(self, state: RunState, store: Store) -> None:
        if self.version.lineage == state.lineage:
            state.bisection.handed_out = self.version.step


class Stepped(Change, frozen=True):
    """The trainer reached `version`."""

    version: Version

    def apply(self, state: RunState, store: Store) -> None:
        state.reached = self.version
        step = self.version.step - 1
        if (batch := state.batch_of(step)) is None:  # covered
            store.insert("step", *self.version, None, None, 0)
            return
        tokens = state.trained_tokens[step] = sum(rollout.own_length for rollout in batch.rollouts)
        by_teacher = sum(rollout.length for rollout in batch.rollouts if rollout.by_teacher)
        state.trained_by_teacher[step] = by_teacher
        batch.rollouts = [rollout.released() for rollout in batch.rollouts]
        store.insert("step", *self.version, tokens, by_teacher, 0)
        store.execute("UPDATE batch SET trained = 1 WHERE lineage = ? AND step = ?", *batch.version)


class VersionPublished(Change, frozen=True):
    """The trainer published a version; fields as in sync.wire.Published."""

    version: Version
    kind: Literal["full", "delta", "lora", "broadcast"]
    bytes: int
    full_bytes: int
    seconds: float

    def apply(self, state: RunState, store: Store) -> None:
        last = state.published[-1].version if state.published else None
        # a version that is stored beside its broadcast counts once
        state.counters.published += self.kind == "broadcast" or last != self.version
        state.published = [*state.published, self][-RECENT:]
        lineage, step = self.version
        state.newest[lineage] = max(step, state.newest.get(lineage, 0))
        before = None if state.target is None else state.target.version
        if self.kind == "broadcast":
            state.target = state.target if before == self.version else None
        elif before is None or state.step_of(self.version) >= state.step_of(before):
            state.target = self
        store.insert("version", store.at, *flat(self))


class VersionApplied(Change, frozen=True):
    """A replica serves `version` now; fields as in UpdateReply, `seconds` from request to reply."""

    replica: str
    version: Version
    bytes: int
    stage_seconds: float
    pause_seconds: float
    apply_seconds: float
    seconds: float

    def apply(self, state: RunState, store: Store) -> None:
        state.applied = [*state.applied, self][-RECENT:]
        state.counters.applied += 1
        store.insert("applied", store.at, *flat(self))


class Checkpointed(Change, frozen=True):
    """The trainer's checkpoint of `version` is whole."""

    version: Version
    path: str

    def apply(self, state: RunState, store: Store) -> None:
        state.checkpoints = [*state.checkpoints, self.version][-RECENT:]
        store.insert("checkpoint", store.at, *flat(self), 0)


class RolledBack(Change, frozen=True):
    """The guard sent the trainer away: the next lineage begins at `to`, and never sees these rollouts."""

    to: Version | None  # a checkpoint; None: the model folder
    without: list[str]
    problem: str

    def apply(self, state: RunState, store: Store) -> None:
        state.rollbacks += 1
        state.rolled_back = self
        store.insert("rolled_back", store.at, *flat(self))


class Evaluated(Change, frozen=True):
    """A version was evaluated."""

    report: EvalReport

    def apply(self, state: RunState, store: Store) -> None:
        report = self.report
        state.evaluations.append(report)
        figures = report.reverse_kl, report.pass_rate, report.reward
        store.insert("evaluation", store.at, *report.version, *figures, json_of(report))


class Concluded(Change, frozen=True):
    """The trainer has left and what can be shown of the last version was shown."""

    version: Version | None  # the trainer's last word; None: it gave none
    weights: dict[str, bool | None]
    """Replica → whether it held the trainer's weights; None: it was not compared."""
    problems: list[str]  # what is wrong with the end of the run; empty: nothing

    def apply(self, state: RunState, store: Store) -> None:
        store.insert("conclusion", store.at, *flat(self))


class Covered(Change, frozen=True):
    """No trainer will request a batch before this step: the oldest kept checkpoint holds them. What is before
    it is removed, and a trainer that began there would miss them."""

    step: int

    def apply(self, state: RunState, store: Store) -> None:
        state.checkpoints = [version for version in state.checkpoints if version.step >= self.step]
        store.execute("UPDATE checkpoint SET gone = 1 WHERE step < ?", self.step)
        for version in [version for version in state.batches if version.step < self.step]:
            for rollout in state.batches.pop(version).ids:
                state.where.pop(rollout, None)
        sql = "UPDATE batch SET status = 'covered' WHERE status = 'held' AND step < ?"
        store.execute(sql, self.step)


FACTS: Final[dict[str, Any]] = {
    "cursor": Cursor,
    "bisection": Bisection,
    "target": VersionPublished | None,
    "counters": Counters,
}
"""Fields of the state that are small facts (table `fact`), and their types."""


def facts(state: RunState) -> dict[str, Any]:
    """The small facts that a commit writes anew."""
    return {name: getattr(state, name) for name in FACTS}
