"""What a start of a run goes on from: one function of its folder and of the start's configuration.

    run.db, arrays/ ──▶ RunState ──────────────────┐
    checkpoints/latest ──▶ where the trainer begins ┤
    config.json ──▶ what changed, or a refusal ─────┼▶ Resume ──▶ Controller; `distill run --resume --dry-run`
    stream-*.json ──▶ where blocks begin ───────────┤
    metrics.jsonl ──▶ seconds of earlier starts ────┘

Each source has a format number; one that another release wrote is refused. The audit reads the same sources.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distill.buffer import Rules, rules
from distill.config import RunConfig
from distill.metrics.results import Earlier, earlier_starts
from distill.prompts.sources import PromptSplit
from distill.prompts.stream import PromptStream
from distill.prompts.streaming import Starts, saved_starts
from distill.record.changes import Opened
from distill.record.configuration import content, record_of, resumed
from distill.record.journal import JOURNAL
from distill.record.load import load
from distill.record.state import RunState
from distill.record.store import FORMAT, RECORD, last_at, open_read_only, reader
from student_trainer import checkpoint_files
from student_trainer.checkpoint_files import CHECKPOINTS, choose
from sync.base.errors import ConfigError, DataError
from sync.wire import Version


class Handover(NamedTuple):
    """What a trainer that begins from a checkpoint takes over."""

    checkpoint: Version | None
    """None: the model folder."""
    origin: int | None
    """Lineage whose batches it takes over; None: it takes over none."""
    branch: int
    """First step whose batch is formed anew; those from the checkpoint on are trained again."""

    @property
    def start(self) -> int:
        """Step of the checkpoint."""
        return self.checkpoint.step if self.checkpoint else 0


def handover(state: RunState, checkpoint: Version | None, *, rolled_back: bool = False) -> Handover:
    """What a trainer that starts from `checkpoint` takes over; `rolled_back`: no batch is used again."""
    origin = state.lineages.origin_of(checkpoint)
    branch = checkpoint.step if checkpoint else 0
    while origin is not None and not rolled_back and _is_handed_out_again(state, origin, branch):
        branch += 1
    return Handover(checkpoint, origin, branch)


def _is_handed_out_again(state: RunState, origin: int, step: int) -> bool:
    """Not a batch that is gone, or that trainers died on."""
    batch = state.batches.get(Version(state.lineages.owner(origin, step), step))
    return batch is not None and batch is not state.suspect


@dataclass(frozen=True)
class Start:
    """What a start of a controller brings along; it must fit the run that is on record."""

    run: str
    """`run.name`"""
    seed: int
    rules: Rules
    prompts: PromptStream
    config: Mapping[str, Any] | None = None
    """What its config.json holds; None: it has none, and nothing is compared."""

    @classmethod
    def of(cls, config: RunConfig, prompts: PromptStream, split: PromptSplit | None = None) -> Start:
        """`split`: of the prompts; None: nothing is compared."""
        record = None if split is None else record_of(config, content(config, split))
        return cls(config.run.name, config.run.seed, rules(config), prompts, record)


@dataclass(frozen=True)
class Resume:
    """What a start goes on from; of a new run: an empty state, and no checkpoint."""

    state: RunState
    """Cursor, pending prompts, buffered rollouts, batches, lineages, evaluations, counters."""
    at: int
    """Number of the newest change on record."""
    opening: Opened
    """The row of this start; the run's name, seed and identity."""
    trainer: Handover
    """Of a trainer that begins with this start."""
    notes: list[str]
    """For people: a line for every key that has changed since the newest start, and one where checkpoints are
    damaged."""
    config: Mapping[str, Any]
    """What config.json is to hold; empty: there is none."""
    streams: Mapping[str, Starts]
    """Where blocks of streamed prompts begin, by the name of their file."""
    earlier: Earlier
    formats: Mapping[str, int]
    """Format by source, of those that were read."""


def resume(folder: Path, start: Start, connection: sqlite3.Connection | None = None) -> Resume:
    """What `start` goes on from in a run's folder; changes nothing.

    `connection`: of run.db, where it is open already.

    Raises ConfigError when the run must not go on so, DataError for what is damaged, contradicts itself, or
    has a format that this release does not read.
    """
    exists = connection is not None or (folder / RECORD).is_file()
    if not exists and (folder / JOURNAL).is_dir():
        raise DataError(f"{folder} holds a journal and no {RECORD}: leave --dry-run out, and it is made")
    config, notes, formats = start.config, list[str](), dict[str, int]()
    if exists and config is not None:
        config, changes = resumed(folder, config)
        notes += (f"resumed with {line}" for line in changes)
        formats["config.json"] = config["format"]
    state, at = RunState(start.rules), 0
    if exists:
        formats[f"{RECORD} and arrays/"] = FORMAT
        opened = closing(open_read_only(folder / RECORD)) if connection is None else nullcontext(connection)
        with opened as tables:
            state = load(tables, start.rules, reader(folder))
            at = last_at(tables)
    opening = _opening(folder, state, start)
    state.bisection.handed_out = -1  # a trainer that ends with its controller died of that
    choice, back = choose(folder / CHECKPOINTS), state.rolled_back
    if choice.path is not None:
        formats[f"{CHECKPOINTS}/"] = checkpoint_files.FORMAT
    begins = back.to if back else Version.parse(choice.path.name) if choice.path else None
    streams = saved_starts(folder)
    formats |= {name: saved.format for name, saved in streams.items()}
    return Resume(
        state,
        at,
        opening,
        handover(state, begins, rolled_back=back is not None),
        notes + [choice.line] * bool(choice.line),
        config or {},
        streams,
        earlier_starts(folder),
        formats,
    )


def _opening(folder: Path, state: RunState, start: Start) -> Opened:
    """Raises ConfigError when the cursor on record would give out ids that were given out before."""
    before, bound, prompts = state.opened, start.rules.bound, start.prompts
    now = Opened(
        start.run,
        start.seed,
        start.rules.batch,
        bound.limit,
        bound.hard,
        bound.half_life,
        start.rules.group,
        prompts.per_prompt,
        prompts.rows,
        (before.id if before else None) or secrets.token_hex(8),
        start.rules.supervised,
    )
    if before is None:
        return now
    if (before.run, before.seed) != (now.run, now.seed):
        raise ConfigError(
            f"the record in {folder} is of run {before.run!r} with seed {before.seed}, this is {now.run!r} "
            f"with seed {now.seed}: its prompts come in another order; start a new run"
        )
    if (before.per_prompt, before.rows) != (now.per_prompt, now.rows):
        raise ConfigError(
            f"the record in {folder} is of {before.rows or 'endless'} prompts, {before.per_prompt} of each, "
            f"and these are {now.rows or 'endless'} prompts, {now.per_prompt} of each: some would be asked "
            "twice; undo the change of the prompts, rollout.per_prompt, evaluation or evaluation.prompts, or "
            "start a new run"
        )
    return now


def lines(goes_on: Resume) -> Iterator[str]:
    """What people read of it."""
    state, trainer = goes_on.state, goes_on.trainer
    yield from goes_on.notes
    again = trainer.branch - trainer.start
    yield f"goes on from {trainer.checkpoint or 'the model folder'}"
    yield f"batches that are trained again: {again}" + (
        f", of steps {trainer.start + 1} to {trainer.branch}" if again else ""
    )
    waiting = len(state.buffer)
    yield f"prompts that are generated again: {len(state.pending)}; scored rollouts that wait: {waiting}"
    cursor = state.cursor
    yield f"next prompt: epoch {cursor.epoch}, position {cursor.position}; seed {goes_on.opening.seed}"
    target = state.target.version if state.target else "the model folder"
    yield f"replicas serve {target} until the trainer publishes"
    yield f"files of arrays that are read: {len(state.files)}"
    yield "formats: " + ", ".join(f"{source} {number}" for source, number in goes_on.formats.items())
