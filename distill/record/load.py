"""The state of a run from its rows: what a restart begins with."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from distill.buffer import Batch, Lineage, Lineages, Rules
from distill.prompts.stream import Cursor, group_of
from distill.record import changes as r
from distill.record.rollout import NO_VALUES, Location, Prompts, Rollout
from distill.record.state import RECENT, Bisection, Counters, RunState
from sync.base.decoding import json_decoder
from sync.base.errors import DataError
from sync.wire import Array, EvalReport, Kept, Scored, Version, VersionSpan

Read = Callable[[Location], Prompts | Rollout]
T = TypeVar("T")
_ROLLOUT = "id, number, tokens, spans, teacher, kept, by_teacher, own, issues, file, start, size, crc, place"


def load(connection: sqlite3.Connection, rules: Rules, read: Read) -> RunState:
    """The state as of the last commit. `read`: gives a record with arrays, for the prompts that are pending.

    Raises DataError where these are damaged, and where rows contradict each other.
    """
    state = RunState(rules)
    try:
        _load(connection, state, read)
    except DataError:
        raise
    except (msgspec.MsgspecError, sqlite3.DatabaseError, LookupError, ValueError, TypeError) as error:
        raise DataError(
            f"the rows of the run contradict each other ({error!r}): restore run.db from a copy, or start a "
            "new run"
        ) from None
    return state


def _load(connection: sqlite3.Connection, state: RunState, read: Read) -> None:
    _load_facts(connection, state)
    _load_trainer(connection, state)
    _load_replicas(connection, state)
    _load_pending(connection, state, read)
    for row in connection.execute(
        f"SELECT {_ROLLOUT} FROM rollout WHERE status = 'buffered' ORDER BY admitted"
    ):
        rollout, state.where[row[0]] = _released(row)
        state.buffer[rollout.id] = rollout
    _load_batches(connection, state)
    if state.rules.group > 1:
        _load_broken(connection, state)


def _decoded(text: str, kind: Any) -> Any:
    return json_decoder(kind, _counter).decode(text)


def _counter(_: type, value: Any) -> Counter[str]:
    return Counter(value)


def _load_facts(connection: sqlite3.Connection, state: RunState) -> None:
    known = dict(connection.execute("SELECT key, value FROM fact"))
    if known:
        state.cursor = _decoded(known["cursor"], Cursor)
        state.bisection = _decoded(known["bisection"], Bisection)
        state.target = _decoded(known["target"], r.VersionPublished | None)
        state.counters = _decoded(known["counters"], Counters)
    opening = connection.execute(
        "SELECT run, seed, batch, max_staleness, hard_limit, half_life, completions, per_prompt, prompts, "
        "id, supervised FROM opening ORDER BY at DESC LIMIT 1"
    ).fetchone()
    state.opened = None if opening is None else r.Opened(*opening)


def _load_trainer(connection: sqlite3.Connection, state: RunState) -> None:
    rows = connection.execute(
        "SELECT number, start, origin, branch, fingerprint, at FROM lineage ORDER BY number"
    ).fetchall()
    state.lineages = Lineages([Lineage(*row[:4]) for row in rows])
    opened_at = 0
    if rows:
        state.lineage, start, _, state.next_step, state.fingerprint, opened_at = rows[-1]
        reached, formed = (
            connection.execute(
                f"SELECT max(step) FROM {table} WHERE lineage = ?", (state.lineage,)
            ).fetchone()[0]
            for table in ("step", "batch")
        )
        state.reached = Version(rows[-1][0], start if reached is None else reached)
        state.next_step = state.next_step if formed is None else formed + 1
    for step, tokens, by_teacher in connection.execute(
        "SELECT step - 1, tokens, tokens_by_teacher FROM step WHERE NOT undone AND tokens IS NOT NULL"
    ):
        state.trained_tokens[step], state.trained_by_teacher[step] = tokens, by_teacher
    state.checkpoints = _newest(
        connection, "SELECT at, lineage, step FROM checkpoint WHERE NOT gone", lambda row: Version(*row)
    )
    backs = connection.execute(
        "SELECT lineage, step, problem, without, at FROM rolled_back ORDER BY at"
    ).fetchall()
    state.rollbacks = len(backs)
    if backs and backs[-1][4] > opened_at:
        lineage, step, problem, without, _ = backs[-1]
        to = None if lineage is None else Version(lineage, step)
        state.rolled_back = r.RolledBack(to, json.loads(without), problem)
    state.evaluations = [
        _decoded(text, EvalReport)
        for (text,) in connection.execute("SELECT report FROM evaluation ORDER BY at")
    ]


def _newest(connection: sqlite3.Connection, select: str, make: Callable[[tuple[Any, ...]], T]) -> list[T]:
    """The newest RECENT rows, oldest first; their first column is `at`."""
    rows = connection.execute(f"{select} ORDER BY at DESC LIMIT {RECENT}").fetchall()
    return [make(row[1:]) for row in reversed(rows)]


def _load_replicas(connection: sqlite3.Connection, state: RunState) -> None:
    state.published = _newest(
        connection,
        "SELECT at, lineage, step, kind, bytes, full_bytes, seconds FROM version",
        lambda row: r.VersionPublished(Version(*row[:2]), *row[2:]),
    )
    state.newest = dict(connection.execute("SELECT lineage, max(step) FROM version GROUP BY lineage"))
    state.applied = _newest(
        connection,
        "SELECT at, replica, lineage, step, bytes, stage_seconds, pause_seconds, apply_seconds, seconds "
        "FROM applied",
        lambda row: r.VersionApplied(row[0], Version(*row[1:3]), *row[3:]),
    )


def _load_pending(connection: sqlite3.Connection, state: RunState, read: Read) -> None:
    for id, number, for_teacher, attempts, *place in connection.execute(
        "SELECT id, number, for_teacher, attempts, file, start, size, crc, place FROM rollout "
        "WHERE status = 'pending' ORDER BY number"
    ):
        location = state.where[id] = Location(*place)
        issued = read(location)
        prompts = issued.prompts if isinstance(issued, Prompts) else []
        prompt = next((prompt for prompt in prompts if prompt.id == id), None)
        if prompt is None:
            raise DataError(f"the prompt of {id} is not where the record has it: restore the run from a copy")
        state.pending[id] = Rollout(
            id, number, by_teacher=bool(for_teacher), attempts=attempts, issued=prompt
        )


def _released(row: tuple[Any, ...]) -> tuple[Rollout, Location]:
    """A scored rollout without its arrays, and where they are. `row`: of the columns _ROLLOUT."""
    id, number, tokens, spans, teacher, kept, by_teacher, turns, issues, *place = row
    scores = None if kept is None else Scored(id, NO_VALUES, kept=_decoded(kept, Kept))
    rollout = Rollout(
        id,
        number,
        tokens=Array("i4", (tokens,), b""),
        spans=() if spans is None else _decoded(spans, tuple[VersionSpan, ...]),
        teacher=teacher,
        scored=scores,
        by_teacher=bool(by_teacher),
        own=() if turns is None else _decoded(turns, tuple[tuple[int, int], ...]),
        continues=not issues,
    )
    return rollout, Location(*place)


def _load_batches(connection: sqlite3.Connection, state: RunState) -> None:
    columns = ", ".join(f"rollout.{name.strip()}" for name in _ROLLOUT.split(","))
    for lineage, step, is_part, trained in connection.execute(
        "SELECT batch.lineage, batch.step, is_part, trained FROM batch WHERE status = 'held' ORDER BY rowid"
    ).fetchall():
        batch = Batch(Version(lineage, step), [], [], [], bool(is_part), bool(trained))
        for age, weight, *row in connection.execute(
            f"SELECT age, weight, {columns} FROM member JOIN rollout ON id = member.rollout "
            "WHERE lineage = ? AND step = ? ORDER BY member.place",
            (lineage, step),
        ):
            rollout, state.where[row[0]] = _released(tuple(row))
            batch.rollouts.append(rollout)
            batch.ages.append(age)
            batch.weights.append(weight)
        batch.weights = batch.weights if min(batch.weights, default=1.0) < 1 else []
        state.batches[batch.version] = batch


def _load_broken(connection: sqlite3.Connection, state: RunState) -> None:
    """Groups of which a member was dropped and another is waiting, or is not issued yet."""
    newest = connection.execute("SELECT id FROM rollout WHERE issues ORDER BY rowid DESC LIMIT 1").fetchall()
    sql = "SELECT count(*) FROM rollout WHERE status = 'dropped' AND id = ?"
    for name in {group_of(id) for id in (*state.pending, *state.buffer, *(id for (id,) in newest))}:
        members = [f"{name}:{copy}" for copy in range(state.rules.group)]
        gone = {id for id in members if connection.execute(sql, (id,)).fetchone()[0]}
        if 0 < len(gone) < state.rules.group:
            state.broken[name] = gone
