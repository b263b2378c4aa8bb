"""The main loop of every rank.

    batch (agreed by all ranks) → step → ledger → publish → checkpoint → report → the same again, until Stop

Every rank goes through the same collectives in the same order; whatever only one rank knows (a signal, a
Stop, an anchor that is due) goes through `Ranks.highest` first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from student_trainer.batch_client import BatchSource
from student_trainer.controller_client import Controller
from student_trainer.disk_full import all_done
from student_trainer.ledger import Ledger
from student_trainer.ranks import Ranks
from student_trainer.transports import WeightTransport
from sync.errors import DataError
from sync.wire import CheckpointSaved, StepReport, Stop, TrainBatch, Version, Wait

log = logging.getLogger(__name__)
SETTLE_SECONDS = 20.0
"""Between two times that the ranks tell each other that a version is still on its way."""
_UNSETTLED = 2.0


class Outcome(IntEnum):
    """What a rank got for its poll; the highest one counts for all."""

    BATCH = 0
    WAIT = 1
    PUBLISH = 2
    STOP = 3
    STOP_AND_CHECKPOINT = 4
    INTERRUPTED = 5


@dataclass
class Trainer:
    """One rank of a running trainer; `version` moves with every step, the rest stays."""

    version: Version
    step: Callable[[TrainBatch], dict[str, float]]
    """Train on a batch; metrics. Collective."""
    save: Callable[[Version], Path | None]
    """Write a checkpoint; its folder. None: the disk is full, and the run was asked to stop. Collective."""
    shown: Callable[[], str]
    """Checksum of this rank's shards as they are now."""
    source: BatchSource
    controller: Controller
    transport: WeightTransport
    ledger: Ledger
    ranks: Ranks
    interrupted: threading.Event
    publish_every: int
    checkpoint_every: int
    """Steps; 0: not by their number."""
    checkpoint_seconds: float
    """By rank 0's clock; 0: not by time."""
    saved: Version | None = None
    """The newest checkpoint of this start: the same version is not written over it."""
    saved_at: float = field(default_factory=time.monotonic)
    """Monotonic time of that, or of the start."""


def train(trainer: Trainer) -> Outcome:
    """Train until told to stop; why it stopped. A checkpoint is saved when the ending asks for one."""
    while True:
        with Stopwatch() as clock:
            outcome, batch = agreed_batch(trainer)
            clock.lap("wait")
            if batch is None:
                break
            trainer.source.expect(after(trainer.version))
            metrics = trainer.step(batch)
            trainer.version = after(trainer.version)
            record(trainer, [id for rows in batch.micro_batches for id in rows.ids])
            clock.lap("train")
            if trainer.version.step % trainer.publish_every == 0:
                publish(trainer)
            clock.lap("publish")
            if checkpoint_due(trainer):
                checkpoint(trainer)
            clock.lap("checkpoint")
        if trainer.ranks.rank == 0:
            trainer.controller.tell(
                StepReport(version=trainer.version, metrics=metrics, seconds=clock.seconds)
            )
    if outcome is not Outcome.STOP:
        checkpoint(trainer)
    return outcome


def agreed_batch(trainer: Trainer) -> tuple[Outcome, TrainBatch | None]:
    """The next batch, once every rank has its share of it; None: all stop. Collective.

    A rank that has its share keeps it while the others wait, or all publish what they hold once more.
    """
    answer: TrainBatch | Wait | Stop = Wait()
    while True:
        if isinstance(answer, Wait):
            answer = trainer.source.poll(trainer.version, trainer.interrupted)
        own = outcome_of(answer, trainer.interrupted.is_set())
        outcome = Outcome(int(trainer.ranks.highest(own)))
        if outcome is Outcome.BATCH:
            assert isinstance(answer, TrainBatch)
            check_version(answer, trainer.version)
            return outcome, answer
        if outcome is Outcome.PUBLISH:
            publish(trainer)
        elif outcome is not Outcome.WAIT:
            log.info("stopping at %s: %s", trainer.version, outcome.name.lower().replace("_", " "))
            return outcome, None


def outcome_of(answer: TrainBatch | Wait | Stop, interrupted: bool) -> Outcome:
    """What this rank brings to the agreement."""
    if interrupted:
        return Outcome.INTERRUPTED
    if isinstance(answer, Stop):
        return Outcome.STOP_AND_CHECKPOINT if answer.checkpoint else Outcome.STOP
    if isinstance(answer, Wait):
        return Outcome.PUBLISH if answer.publish else Outcome.WAIT
    return Outcome.BATCH


def check_version(batch: TrainBatch, version: Version) -> None:
    """Refuse a batch made for other weights: its ages would be wrong."""
    if batch.version != version:
        raise DataError(
            f"batch is for {batch.version}, the trainer is at {version}: controller and trainer disagree"
        )


def record(trainer: Trainer, ids: list[str]) -> None:
    """Put the step into the ledger on every rank, before anybody hears of it. Collective."""
    step, weights = trainer.version.step, trainer.shown()
    all_done(trainer.ranks, "the ledger", lambda: trainer.ledger.record(step, ids, weights))


def publish(trainer: Trainer) -> None:
    """Send the weights on their way once the version before has arrived or failed. Collective."""
    trainer.transport.publish(trainer.version, settle(trainer))


def arrived(trainer: Trainer) -> bool:
    """Whether the newest version is out, once all that was sent has arrived or failed. Collective."""
    settle(trainer)
    missing = trainer.ranks.rank == 0 and trainer.transport.arrived != trainer.version
    return not trainer.ranks.highest(missing)


def settle(trainer: Trainer) -> bool:
    """Wait until nothing is on its way; whether the next version should be an anchor. Collective.

    Ranks that wait for one whose disk is full stay in touch: no collective runs into its time-out.
    """
    while (vote := trainer.ranks.highest(_settled(trainer.transport))) == _UNSETTLED:
        log.info("a version up to %s is still on its way", trainer.version)
    return bool(vote)


def _settled(transport: WeightTransport) -> float:
    """Whether an anchor is due, or that a version is still on its way."""
    return float(transport.anchor_due) if transport.settle(SETTLE_SECONDS) else _UNSETTLED


def checkpoint_due(trainer: Trainer) -> bool:
    """Whether this step ends with a checkpoint: by its number, or by rank 0's clock. Collective."""
    if trainer.checkpoint_every and trainer.version.step % trainer.checkpoint_every == 0:
        return True
    if not trainer.checkpoint_seconds:
        return False
    overdue = time.monotonic() - trainer.saved_at >= trainer.checkpoint_seconds
    return bool(trainer.ranks.highest(trainer.ranks.rank == 0 and overdue))


def checkpoint(trainer: Trainer) -> None:
    """Save where the trainer stands, unless that is done already, and say so. Collective."""
    if trainer.saved == trainer.version:
        return
    path = trainer.save(trainer.version)
    if path is None:
        return
    trainer.saved, trainer.saved_at = trainer.version, time.monotonic()
    if trainer.ranks.rank == 0:
        trainer.controller.tell(CheckpointSaved(version=trainer.version, path=str(path)))


def after(version: Version) -> Version:
    """The version that the next step makes."""
    return Version(version.lineage, version.step + 1)


class Stopwatch:
    """Wall seconds of the parts of a step, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __enter__(self) -> Stopwatch:
        self._last = time.monotonic()
        return self

    def __exit__(self, *_: Any) -> None:
        """Nothing to release."""

    def lap(self, name: str) -> None:
        """Give the time since the last lap to `name`."""
        now = time.monotonic()
        self.seconds[name], self._last = now - self._last, now
