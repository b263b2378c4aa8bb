"""Snapshots of a run's state: they bound the controller's memory and the journal that a restart replays.

    checkpoint ──▶ forget the batches that the oldest kept checkpoint covers
               ──▶ snapshot of what is left, at the head of a segment
               ──▶ archive the segments before the snapshot of the oldest kept checkpoint

A snapshot holds the journal locations of prompts and rollouts instead of their tokens and arrays: these are
read back from their segments, which are kept as long as a location is in use.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from distill.buffer.staleness import Lineage, Rules
from distill.prompts.stream import Cursor, Prompt
from distill.run_log.records import (
    AnyRecord,
    Bisection,
    Held,
    Issued,
    Location,
    Opened,
    RolledBack,
    Rollout,
    Snapshot,
    VersionApplied,
    VersionPublished,
)
from distill.run_log.state import Batch, Counters, RunState
from sync.errors import DataError
from sync.wire import EvalReport, Version


class Saved(msgspec.Struct):
    """Content of a snapshot. `take` produces it, `restore` consumes it; names and meanings as in RunState."""

    cursor: Cursor
    lineage: int | None
    fingerprint: str | None
    next_step: int
    reached: Version | None
    trained_tokens: dict[int, int]
    trained_by_teacher: dict[int, int]
    target: VersionPublished | None
    checkpoints: list[Version]
    evaluations: list[EvalReport]
    rollbacks: int
    rolled_back: RolledBack | None
    counters: Counters
    opened: Opened | None
    broken: dict[str, set[str]]
    newest: dict[int, int]
    lineages: list[Lineage]
    published: list[VersionPublished]
    applied: list[VersionApplied]
    pending: list[Rollout]
    """Without their prompts."""
    buffer: list[Rollout]
    """Released, in the order of admission."""
    batches: list[Batch]
    """Their rollouts are released."""
    bisection: Bisection


CONVERTED: Final = ("lineages", "published", "applied", "pending", "buffer", "batches")
"""Fields of Saved that are not saved as RunState holds them."""
PLAIN: Final = [name for name in Saved.__struct_fields__ if name not in CONVERTED]


def cover(state: RunState, keep_checkpoints: int) -> Version | None:
    """Forget what the oldest kept checkpoint covers; returns that checkpoint.

    None: the current lineage's ancestry has fewer than `keep_checkpoints` yet; nothing is forgotten.
    """
    kept = [version for version in state.checkpoints if state.passed(version)][-keep_checkpoints:]
    if len(kept) < keep_checkpoints:
        return None
    covered = min(kept, key=lambda version: version.step)
    for version in [version for version in state.batches if version.step < covered.step]:
        state.forget(version)
    for tokens in (state.trained_tokens, state.trained_by_teacher):
        if old := [step for step in tokens if step < covered.step]:
            tokens[max(old)] = sum(tokens.pop(step) for step in old)
    return covered


def base(state: RunState, covered: Version | None) -> Held | None:
    """The newest snapshot that serves a trainer from `covered` or any later checkpoint; forgets older ones.

    None: a restart replays the whole journal.
    """
    fits = [v for v in state.snapshots if covered and state.passed(v) and v.step <= covered.step]
    if not fits:
        return None
    for version in fits[:-1]:
        del state.snapshots[version]
    return state.snapshots[fits[-1]]


def take(state: RunState, base: int | None) -> Snapshot:
    """A snapshot for the newest checkpoint; `base` as in Snapshot. Locations are known once it is written."""
    checkpoint = state.checkpoints[-1]
    batches = [batch for batch in state.batches.values() if batch.version.step >= checkpoint.step]
    buffered = [state.buffer[rollout] for rollout in state.buffer.ids()]
    saved = Saved(
        **{name: getattr(state, name) for name in PLAIN},
        lineages=[state.lineages[number] for number in range(len(state.lineages))],
        published=list(state.published),
        applied=list(state.applied),
        pending=[replace(one, issued=None, since=None) for one in state.pending.values()],
        buffer=[one.released() for one in buffered],
        batches=[
            dataclasses.replace(batch, rollouts=[one.released() for one in batch.rollouts])
            for batch in batches
        ],
    )
    rollouts = [*buffered, *(one for batch in batches for one in batch.rollouts)]
    places = {rollout: state.where[rollout] for rollout in [*state.pending, *(one.id for one in rollouts)]}
    return Snapshot(checkpoint, base, _encoder.encode(saved), places)


def restore(snapshot: Snapshot, rules: Rules, read: Callable[[Location], AnyRecord]) -> RunState:
    """The state when the snapshot was taken. Raises DataError when a prompt cannot be `read` back."""
    state, saved = RunState(rules), load(snapshot)
    for name in PLAIN:
        setattr(state, name, getattr(saved, name))
    for lineage in saved.lineages:
        state.lineages.add(lineage)
    state.published.extend(saved.published)
    state.applied.extend(saved.applied)
    prompts: dict[str, Prompt] = {}
    for one in saved.pending:
        if one.id not in prompts:
            issued = read(snapshot.where[one.id])
            assert isinstance(issued, Issued), f"{one.id} is not where the journal should hold it"
            prompts = {prompt.id: prompt for prompt in issued.prompts}
        state.pending[one.id] = replace(one, issued=prompts[one.id])
    for rollout in saved.buffer:
        state.buffer.admit(rollout)
    state.batches = {batch.version: batch for batch in saved.batches}
    state.where = dict(snapshot.where)
    return state


def differs(snapshot: Snapshot, state: RunState) -> bool:
    """Whether a snapshot contradicts the records before it in prompts, rollouts or counts.

    Rollouts that a lineage took back and whose arrays were archived since are `archived` in a replay.
    """
    saved, sure = load(snapshot), set(state.buffer.ids())
    told = [one.id for one in saved.pending], saved.next_step, saved.counters
    buffered = sure <= {one.id for one in saved.buffer} <= sure | state.archived.keys()
    return not buffered or told != (list(state.pending), state.next_step, state.counters)


def load(snapshot: Snapshot) -> Saved:
    """What it holds. Raises DataError when this release cannot read it."""
    try:
        return _decoder.decode(snapshot.state)
    except msgspec.DecodeError as error:
        raise DataError(
            f"the snapshot of checkpoint {snapshot.checkpoint} cannot be read by this release ({error}): "
            "resume the run with the release that wrote it"
        ) from None


def _counter(kind: type, value: Any) -> Any:
    """msgspec's hook for the one type that it does not know."""
    return Counter(value)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Saved, dec_hook=_counter)
