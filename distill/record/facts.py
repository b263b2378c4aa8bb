"""What a run knows, as tables in memory (schema.sql): from its journal, and from the ranks' ledgers.

journal ─▶ state of the run, record by record ─▶ rows ─┐
ledgers ───────────────────────────────────────────────┴▶ questions of the audit and of `distill sql`
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files

import msgspec

from distill.buffer import Bound, Rules
from distill.run_log import records as r
from distill.run_log.records import Location, Record, Rollout, contradictions
from distill.run_log.snapshot import differs
from distill.run_log.state import RunState
from student_trainer.ledger import Lineage
from sync.base.errors import DataError
from sync.wire import Version, unpack

Records = Iterable[tuple[Location, Record]]
Ledger = Mapping[int, Lineage]  # lineage → what its ranks trained on


class Facts:
    """The tables of a run, filled from the records of its journal up to the first damage."""

    def __init__(self, records: Records) -> None:
        self.tables = sqlite3.connect(":memory:", isolation_level=None)
        self.tables.executescript((files("distill.record") / "schema.sql").read_text())
        self.tables.create_function("weight", 4, _weight, deterministic=True)
        self.tables.create_function("version_name", 2, lambda *version: str(Version(*version)))
        self.damage: list[str] = []
        self.state, self._count = RunState(Rules(1, Bound(0, 0))), 0
        try:
            for location, record in records:
                self._take(record, location)
        except DataError as error:
            self.damage.append(str(error))
        if self.state.opened is None and not self.damage:
            self.damage.append("the journal is empty or missing")
        self._settle()

    def _take(self, record: Record, at: Location) -> None:
        """Apply a record and write its rows. Raises DataError when it contradicts those before it."""
        if self.state.opened is None and not isinstance(record, r.Opened):
            raise DataError("the journal does not begin with the opening of a run: it is not whole")
        self._count += 1
        with contradictions(record, at), _integrity():
            if isinstance(record, r.Opened):
                hard = record.max_staleness if record.hard_limit is None else record.hard_limit
                bound = Bound(record.max_staleness, hard, record.half_life)
                bound.weight(hard + 1)
                self.state.rules = Rules(record.batch, bound, record.group, supervised=record.supervised)
            if isinstance(record, r.Snapshot) and differs(record, self.state):
                raise ValueError(f"{record.checkpoint} has other prompts, rollouts or counts")
            self.state.replay(record, at)
            self._note(record)

    def _note(self, record: Record) -> None:
        match record:
            case r.Opened():
                hard, bound = self.state.rules.bound.hard, record.max_staleness
                sizes = record.batch, bound, hard, record.half_life, record.group, record.supervised
                self.add("opening", (self._count, record.run, record.id, record.seed, *sizes))
            case r.Issued():
                for place, prompt in enumerate(record.prompts):
                    number, for_teacher = self.state.counters.issued - len(record.prompts) + place, place
                    row = prompt.id, number, prompt.source, prompt.environment
                    self.tables.execute(
                        "INSERT INTO rollout (id, number, source, environment, for_teacher, issues, status) "
                        "VALUES (?, ?, ?, ?, ?, 1, 'pending') "
                        "ON CONFLICT (id) DO UPDATE SET issues = issues + 1",
                        (*row, for_teacher in record.by_teacher),
                    )
            case r.Requeued():
                self.add("requeue", *((self._count, rollout, record.reason) for rollout in record.ids))
            case Rollout():
                self._note_scored(record)
            case r.Dropped():
                self._drop(record.ids, record.reason, record.detail)
            case r.BatchFormed():
                self._note_batch(record)
            case r.LineageOpened():
                start = record.start, record.origin, record.branch, record.ranks, record.fingerprint
                self.add(
                    "lineage", (record.lineage, self._count, *(record.checkpoint or (None, None)), *start)
                )
                self._drop(record.without, "rolled_back", "")
            case r.Stepped():
                self.add("step", record.version)
            case r.VersionPublished():
                self.add(
                    "version",
                    (self._count, *record.version, record.kind, record.bytes, record.seconds),
                )
            case r.VersionApplied():
                seconds = record.stage_seconds, record.pause_seconds, record.apply_seconds, record.seconds
                self.add("applied", (record.replica, *record.version, record.bytes, *seconds))
            case r.Checkpointed():
                self.add("checkpoint", (self._count, *record.version))
            case r.RolledBack():
                self.add("rolled_back", (self._count, *(record.to or (None, None)), record.problem))
            case r.Evaluated(report):
                figures = report.reverse_kl, report.pass_rate, report.reward
                self.add("evaluation", (*report.version, *figures, msgspec.json.encode(report).decode()))
            case r.Concluded():
                said = json.dumps(record.weights), json.dumps(record.problems)
                self.add("conclusion", (self._count, *(record.version or (None, None)), *said))

    def add(self, table: str, *rows: Iterable[object]) -> None:
        """Add rows to a table."""
        for row in map(tuple, rows):
            self.tables.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)

    def _note_scored(self, record: Rollout) -> None:
        if record.continues:
            self.tables.execute(
                "INSERT INTO rollout (id, number, issues, for_teacher) VALUES (?, ?, 0, 0)",
                (record.id, record.number),
            )
        self.tables.execute(
            "UPDATE rollout SET scored = ?, teacher = ?, by_teacher = ?, tokens = ?, own_tokens = ?, "
            "truncated = ?, reward = ?, reverse_kl = ? WHERE id = ?",
            (self._count, record.teacher, record.by_teacher, record.length, record.own_length)
            + (record.truncated, record.reward, _reverse_kl(record), record.id),
        )
        self.add("sampled", *((record.id, *span.version, span.start, span.end) for span in record.spans))

    def _note_batch(self, record: r.BatchFormed) -> None:
        bound, ages = self.state.rules.bound, self.state.batches[record.version].ages
        weights = record.weights or [1.0] * len(record.ids)
        self.add("batch", (*record.version, bound.limit, bound.hard, bound.half_life))
        members = enumerate(zip(record.ids, ages, weights, strict=True))
        self.add("member", *((*record.version, place, *member) for place, member in members))

    def _drop(self, rollouts: Iterable[str], reason: str, detail: str) -> None:
        rows = [(reason, detail, rollout) for rollout in rollouts]
        self.tables.executemany("UPDATE rollout SET reason = ?, detail = ? WHERE id = ?", rows)

    def _settle(self) -> None:
        """Write where each rollout is at the end of the journal."""
        self.tables.executescript(
            "UPDATE rollout SET status = "
            "iif(reason IS NOT NULL, 'dropped', iif(scored, 'batched', 'pending'))"
        )
        buffered = [(rollout,) for rollout in self.state.buffer]
        self.tables.executemany("UPDATE rollout SET status = 'buffered' WHERE id = ?", buffered)

    def add_ledgers(self, before: Ledger, after: Ledger) -> None:
        """Add what the ranks trained on, as read before and after the records."""
        for number, lineage in before.items():
            self.add("ledger", (number, *(lineage.parent or (None, None)), lineage.start))
            for step, ranks in lineage.shown.items():
                self.add("trained_step", (number, step, lineage.tokens.get(step)))
                for rank, (ids, _) in ranks.items():
                    self.add("trained", *((number, step, rank, rollout) for rollout in ids))
        for number, lineage in after.items():
            for step, ranks in lineage.shown.items():
                self.add("line", *((number, step, rank) for rank in ranks))


@contextmanager
def _integrity() -> Iterator[None]:
    """Turn what the tables refuse into a ValueError."""
    try:
        yield
    except sqlite3.Error as error:
        raise ValueError(str(error)) from None


def _reverse_kl(rollout: Rollout) -> float | None:
    """Mean of log μ − log q over the rollout's own tokens, nats; None: not both are in the record."""
    scores = None if rollout.scored is None else rollout.scored.logprob
    if scores is None or not scores.data or not rollout.length:
        return None
    if not rollout.logprob.shape == scores.shape == (rollout.length,):  # of an answer that is quarantined
        return None
    excess = unpack(rollout.logprob).astype("f8") - unpack(scores)
    parts = rollout.own or ((0, rollout.length),)
    return float(sum(excess[start:end].sum() for start, end in parts) / max(1, rollout.own_length))


def _weight(age: int, limit: int, hard: int, half_life: float) -> float:
    return Bound(limit, hard, half_life).weight(age)
