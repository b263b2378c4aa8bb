"""The state of a run from its rows: what a restart begins with."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from distill.buffer import Batch, Bound, Lineage, Lineages, Rules
from distill.prompts.stream import group_of
from distill.record import changes as r
from distill.record.rollout import NO_VALUES, Block, Location, Rollout
from distill.record.state import RECENT, RunState
from sync.base.decoding import json_decoder, msgpack_decoder
from sync.base.errors import DataError
from sync.wire import Array, EvalReport, Kept, Scored, Version, VersionSpan

Read = Callable[[Location], Rollout]
C = TypeVar("C", bound=r.Change)
_NUMBER = "coalesce(rollout_row.number, row)"
_ROLLOUT = f"row, id, {_NUMBER}, tokens, spans, teacher, kept, by_teacher, own, continues"
_PLACE = "place, block.number, file, start, size, crc"
_ROWS = "rollout_row JOIN block ON block.number = block"
_KEPT: Any = tuple[int, int, int, int, bytes]


def load(connection: sqlite3.Connection, rules: Rules | None, read: Read) -> RunState:
    """The state as of the last commit.

    `rules`: None: those of the newest start. `read`: gives the prompts that are pending.

    Raises DataError where these are damaged, and where rows contradict each other.
    """
    state = RunState(rules or Rules(1, Bound(0, 0)))
    try:
        for opening in _newest(connection, r.Opened, "opening"):
            state.opened = opening
            state.rules = rules or Rules(opening.batch, opening.bound, opening.group)
        known = dict(connection.execute("SELECT key, value FROM fact"))
        for name, kind in r.FACTS.items() if known else ():
            setattr(state, name, _decoded(known[name], kind))
        _load_trainer(connection, state)
        state.published = _newest(connection, r.VersionPublished, "version")
        state.newest = dict(connection.execute("SELECT lineage, max(step) FROM version GROUP BY lineage"))
        state.applied = _newest(connection, r.VersionApplied, "applied")
        _load_pending(connection, state, read)
        for rollout, location in scored_rollouts(connection, "WHERE admitted IS NOT NULL ORDER BY admitted"):
            state.buffer[rollout.id], state.where[rollout.id] = rollout, location
        _load_batches(connection, state)
        if state.rules.group > 1:
            _load_broken(connection, state)
    except DataError:
        raise
    except (msgspec.MsgspecError, sqlite3.DatabaseError, LookupError, ValueError, TypeError) as error:
        raise DataError(
            f"the rows of the run contradict each other ({error!r}): restore run.db from a copy, or start a "
            "new run"
        ) from None
    return state


def _decoded(text: str, kind: Any) -> Any:
    return json_decoder(kind, _counter).decode(text)


def _counter(_: type, value: Any) -> Counter[str]:
    return Counter(value)


def _load_trainer(connection: sqlite3.Connection, state: RunState) -> None:
    rows = connection.execute(
        "SELECT number, start, origin, branch, fingerprint, at FROM lineage ORDER BY number"
    ).fetchall()
    state.lineages = Lineages([Lineage(*row[:4]) for row in rows])
    opened_at = 0
    if rows:
        state.lineage, start, _, branch, state.fingerprint, opened_at = rows[-1]
        newest = "SELECT coalesce(max(step), ?) FROM {} WHERE lineage = ?"
        (reached,) = connection.execute(newest.format("step"), (start, state.lineage)).fetchone()
        (formed,) = connection.execute(newest.format("batch"), (branch - 1, state.lineage)).fetchone()
        state.reached, state.next_step = Version(rows[-1][0], reached), formed + 1
    for step, tokens, by_teacher in connection.execute(
        "SELECT step - 1, tokens, tokens_by_teacher FROM step WHERE NOT undone AND tokens IS NOT NULL"
    ):
        state.trained_tokens[step], state.trained_by_teacher[step] = tokens, by_teacher
    saved = _newest(connection, r.Checkpointed, "checkpoint", "NOT gone")
    state.checkpoints = [change.version for change in saved]
    state.rollbacks = connection.execute("SELECT count(*) FROM rolled_back").fetchone()[0]
    backs = _newest(connection, r.RolledBack, "rolled_back", f"at > {opened_at}")
    state.rolled_back = backs[-1] if backs else None
    state.evaluations = [
        _decoded(text, EvalReport)
        for (text,) in connection.execute("SELECT report FROM evaluation ORDER BY at")
    ]


def _newest(connection: sqlite3.Connection, kind: type[C], table: str, where: str = "at") -> list[C]:
    """The newest rows of a table that holds changes, oldest first; their first column is `at`."""
    rows = connection.execute(f"SELECT * FROM {table} WHERE {where} ORDER BY at DESC LIMIT {RECENT}")
    return [r.from_columns(kind, row[1:]) for row in reversed(rows.fetchall())]


def _location(row: tuple[Any, ...]) -> Location:
    """`row`: begins with its number and ends with the columns _PLACE."""
    place, *block = row[-6:]
    return Location(Block(*block), place, row[0])


def _load_pending(connection: sqlite3.Connection, state: RunState, read: Read) -> None:
    for row in connection.execute(
        f"SELECT row, id, {_NUMBER}, for_teacher, attempts, {_PLACE} FROM {_ROWS} "
        "WHERE scored IS NULL AND reason IS NULL ORDER BY rollout_row.row"
    ):
        _, id, number, for_teacher, attempts, *_ = row
        state.where[id] = location = _location(row)
        prompt = read(location).issued
        if prompt is None:
            raise DataError(f"the prompt of {id} is not where the record has it: restore the run from a copy")
        prompt = msgspec.structs.replace(prompt, id=id)
        state.pending[id] = Rollout(
            id, number, by_teacher=bool(for_teacher), attempts=attempts, issued=prompt
        )


def scored_rollouts(
    connection: sqlite3.Connection, where: str, *parameters: Any
) -> Iterator[tuple[Rollout, Location]]:
    """Rollouts that were scored, without their arrays, and where these are. `where`: which, in what order."""
    names: dict[int | None, str] = {None: "", **dict(connection.execute("SELECT number, name FROM name"))}
    for row in connection.execute(f"SELECT {_ROLLOUT}, {_PLACE} FROM {_ROWS} {where}", parameters):
        _, id, number, tokens, spans, teacher, kept, by_teacher, turns, continues, *_ = row
        scores, begins, ends = None, list[tuple[int, int, int]](), list[int]()
        if kept is not None:
            url, boot, place, size, digest = msgpack_decoder(_KEPT).decode(kept)
            scores = Scored(id, NO_VALUES, kept=Kept(names[url], f"{names[boot]}-{place}", size, digest))
        if spans is not None:
            begins = _decoded(spans, list[tuple[int, int, int]])
            ends = [*(first for *_, first in begins[1:]), tokens]
        rollout = Rollout(
            id,
            number,
            tokens=Array("i4", (tokens,), b""),
            spans=tuple(
                VersionSpan(Version(lineage, step), first, end)
                for (lineage, step, first), end in zip(begins, ends, strict=True)
            ),
            teacher=names[teacher],
            scored=scores,
            by_teacher=bool(by_teacher),
            own=() if turns is None else _decoded(turns, tuple[tuple[int, int], ...]),
            continues=bool(continues),
        )
        yield rollout, _location(row)


def _load_batches(connection: sqlite3.Connection, state: RunState) -> None:
    question = "SELECT lineage, step, is_part, members FROM batch WHERE status = 'held' ORDER BY rowid"
    for lineage, step, is_part, text in connection.execute(question).fetchall():
        batch = Batch(Version(lineage, step), [], [], [], bool(is_part))
        members = json.loads(text)
        pairs = scored_rollouts(connection, f"WHERE row IN {r.MEMBERS}", text)
        by_row = {location.row: (rollout, location) for rollout, location in pairs}
        for number, age, *weight in members:
            rollout, state.where[rollout.id] = by_row[number]
            batch.rollouts.append(rollout)
            batch.ages.append(age)
            batch.weights += weight
        state.batches[batch.version] = batch


def _load_broken(connection: sqlite3.Connection, state: RunState) -> None:
    """Groups of which a member was dropped and another is waiting, or is not issued yet.

    Members are issued one after the other, and nothing continues one: its row is its number.
    """
    group, newest = state.rules.group, connection.execute("SELECT max(row) FROM rollout_row").fetchone()[0]
    numbers = {rollout.number for rollouts in (state.pending, state.buffer) for rollout in rollouts.values()}
    for first in {number - number % group for number in numbers | ({newest} - {None})}:
        sql = "SELECT id FROM rollout_row WHERE row BETWEEN ? AND ? AND reason IS NOT NULL"
        gone = {id for (id,) in connection.execute(sql, (first, first + group - 1))}
        if 0 < len(gone) < group:
            state.broken[group_of(next(iter(gone)))] = gone
