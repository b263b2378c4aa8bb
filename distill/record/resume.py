"""What a start of a run goes on from: one function of its rows and of the checkpoint the trainer begins with.

rows ──▶ RunState ─┐
checkpoints/latest ┴▶ resume ──▶ `distill run CONFIG --resume --dry-run`, Record.open_lineage
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from distill.buffer import Rules
from distill.prompts.stream import Cursor
from distill.record.load import load
from distill.record.rollout import Block
from distill.record.state import RunState
from distill.record.store import RECORD, open_read_only, reader
from student_trainer.checkpoint_files import CHECKPOINTS, choose
from sync.wire import Version


@dataclass(frozen=True)
class Resume:
    """Where the next trainer begins, and what becomes of prompts and rollouts."""

    cursor: Cursor
    """Of the next prompt that is issued."""
    pending: int
    """Prompts that are sent to a generator again."""
    buffered: int
    """Scored rollouts that wait for a batch."""
    checkpoint: Version | None
    """What the trainer begins from; None: the model folder."""
    origin: int | None
    """Lineage whose batches it takes over; None: it takes over none."""
    branch: int
    """First step whose batch is formed anew; those from the checkpoint on are trained again."""
    target: Version | None
    """What replicas follow until the trainer publishes; None: the model folder, or a broadcast."""
    blocks: frozenset[Block]
    """Of arrays and prompts: those that are read."""

    @property
    def files(self) -> set[int]:
        """Of arrays: those that are read."""
        return {block.file for block in self.blocks}

    @property
    def start(self) -> int:
        """Step of the checkpoint."""
        return self.checkpoint.step if self.checkpoint else 0


def resume(state: RunState, checkpoint: Version | None, *, rolled_back: bool = False) -> Resume:
    """What a trainer that starts from `checkpoint` goes on from; `rolled_back`: no batch is used again."""
    start, origin = checkpoint.step if checkpoint else 0, state.lineages.origin_of(checkpoint)
    branch = start
    while origin is not None and not rolled_back and _is_handed_out_again(state, origin, branch):
        branch += 1
    blocks = frozenset(location.block for location in state.where.values() if location.block)
    counts = len(state.pending), len(state.buffer)
    target = state.target.version if state.target else None
    return Resume(state.cursor, *counts, checkpoint, origin, branch, target, blocks)


def _is_handed_out_again(state: RunState, origin: int, step: int) -> bool:
    """Not a batch that is gone, or that trainers died on."""
    batch = state.batches.get(Version(state.lineages.owner(origin, step), step))
    return batch is not None and batch is not state.suspect


def resume_of(run_dir: Path, rules: Rules) -> Resume:
    """What `distill run CONFIG --resume` would go on from; changes nothing.

    Raises DataError where the record or every checkpoint is damaged.
    """
    with closing(open_read_only(run_dir / RECORD)) as connection:
        state = load(connection, rules, reader(run_dir))
    state.bisection.handed_out = -1  # as the start of the controller will leave it
    path = choose(run_dir / CHECKPOINTS).path
    checkpoint = Version.parse(path.name) if path else None
    back = state.rolled_back
    return resume(state, back.to if back else checkpoint, rolled_back=back is not None)


def lines(start: Resume) -> Iterator[str]:
    """What people read of it."""
    again = start.branch - start.start
    yield f"goes on from {start.checkpoint or 'the model folder'}"
    yield f"batches that are trained again: {again}" + (
        f", of steps {start.start + 1} to {start.branch}" if again else ""
    )
    yield f"prompts that are generated again: {start.pending}; scored rollouts that wait: {start.buffered}"
    yield f"next prompt: epoch {start.cursor.epoch}, position {start.cursor.position}"
    yield f"replicas serve {start.target or 'the model folder'} until the trainer publishes"
    yield f"files of arrays that are read: {len(start.files)}"
