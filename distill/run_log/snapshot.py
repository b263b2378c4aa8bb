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

import msgspec
from msgspec.structs import replace

from distill.buffer import Rules
from distill.prompts.stream import Prompt
from distill.run_log.records import Held, Issued, Location, Record, Snapshot
from distill.run_log.state import RunState
from sync.base.decoding import msgpack_decoder
from sync.base.errors import DataError
from sync.wire import Version

_decoder = msgpack_decoder(RunState, dec_hook=lambda kind, value: Counter(value))


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
    for version in fits[:-1]:
        del state.snapshots[version]
    return state.snapshots[fits[-1]] if fits else None


def take(state: RunState, base: int | None) -> Snapshot:
    """A snapshot for the newest checkpoint; `base` as in Snapshot. Locations are known once it is written."""
    checkpoint = state.checkpoints[-1]
    batches = {v: batch for v, batch in state.batches.items() if v.step >= checkpoint.step}
    needed = [*state.pending, *state.buffer, *(id for batch in batches.values() for id in batch.ids)]
    saved = msgspec.structs.replace(
        state,
        pending={
            i: msgspec.structs.replace(prompt, issued=None, since=None) for i, prompt in state.pending.items()
        },
        buffer={i: rollout.released() for i, rollout in state.buffer.items()},
        batches={
            version: dataclasses.replace(batch, rollouts=[rollout.released() for rollout in batch.rollouts])
            for version, batch in batches.items()
        },
        where={},
        snapshots={},
        archived={},
    )
    return Snapshot(checkpoint, base, msgspec.msgpack.encode(saved), {id: state.where[id] for id in needed})


def restore(snapshot: Snapshot, rules: Rules, read: Callable[[Location], Record]) -> RunState:
    """The state when the snapshot was taken. Raises DataError when a prompt cannot be `read` back."""
    state = load(snapshot)
    state.rules, state.where = rules, dict(snapshot.where)
    prompts: dict[str, Prompt] = {}
    for issued_prompt in state.pending.values():
        if issued_prompt.id not in prompts:
            issued = read(snapshot.where[issued_prompt.id])
            assert isinstance(issued, Issued), f"{issued_prompt.id} is not where the journal should hold it"
            prompts = {prompt.id: prompt for prompt in issued.prompts}
        state.pending[issued_prompt.id] = replace(issued_prompt, issued=prompts[issued_prompt.id])
    return state


def differs(snapshot: Snapshot, state: RunState) -> bool:
    """Whether a snapshot contradicts the records before it in prompts, rollouts or counts.

    Rollouts that a lineage took back and whose arrays were archived since are `archived` in a replay.
    """
    saved, sure = load(snapshot), state.buffer.keys()
    buffered = sure <= saved.buffer.keys() <= sure | state.archived.keys()
    told, replayed = ([list(side.pending), side.next_step, side.counters] for side in (saved, state))
    return not buffered or told != replayed


def load(snapshot: Snapshot) -> RunState:
    """What it holds. Raises DataError when this release cannot read it."""
    try:
        return _decoder.decode(snapshot.state)
    except msgspec.DecodeError as error:
        raise DataError(
            f"the snapshot of checkpoint {snapshot.checkpoint} cannot be read by this release ({error}): "
            "resume the run with the release that wrote it"
        ) from None
