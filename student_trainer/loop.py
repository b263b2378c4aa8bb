"""The main loop of every rank.

    batch (agreed by all ranks) → step → ledger → publish → checkpoint → report → the same again, until Stop

Every rank runs the same collectives in the same order; what only one rank knows (a signal, a Stop, an anchor
that is due) is agreed on by `Ranks.highest` first.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from enum import IntEnum

from student_trainer.config import TrainerConfig
from student_trainer.controller_client import FINAL_REPORT_SECONDS, ControllerClient
from student_trainer.engine import Learner, after
from student_trainer.ledger import Ledger
from student_trainer.ranks import Ranks, all_done
from student_trainer.transports import Publishing
from sync.errors import DataError, StoreError
from sync.wire import CheckpointSaved, FinalDigests, StepReport, Stop, TrainBatch, Version, Wait

log = logging.getLogger(__name__)
SETTLE_SECONDS = 20.0
"""Between two exchanges of the ranks about a version that is still on its way."""
_UNSETTLED = 2.0


class Outcome(IntEnum):
    """What a rank's poll returned; the highest one counts for all."""

    BATCH = 0
    WAIT = 1
    PUBLISH = 2
    STOP = 3
    STOP_AND_CHECKPOINT = 4
    INTERRUPTED = 5


@dataclass
class Trainer:
    """One rank of a running trainer."""

    config: TrainerConfig
    ranks: Ranks
    learner: Learner
    client: ControllerClient
    publishing: Publishing
    ledger: Ledger
    saved: Version | None = field(default=None, init=False)
    """The newest checkpoint of this start: the same version is not written over it."""
    saved_at: float = field(default_factory=time.monotonic, init=False)
    """Monotonic time of that, or of the start."""

    @property
    def version(self) -> Version:
        """Of the weights; every step makes the next one."""
        return self.learner.version


def train(trainer: Trainer) -> Outcome:
    """Train until Stop or a signal; which of them. A checkpoint ends it unless Stop asks for none."""
    while True:
        watch = Stopwatch()
        outcome, batch = agreed_batch(trainer)
        watch.lap("wait")
        if batch is None:
            break
        trainer.client.expect(after(trainer.version))
        metrics = trainer.learner.train(batch)
        record(trainer, batch)
        watch.lap("train")
        if trainer.version.step % trainer.config.weights.publish_every == 0:
            publish(trainer)
        watch.lap("publish")
        if checkpoint_due(trainer):
            checkpoint(trainer)
        watch.lap("checkpoint")
        if trainer.ranks.rank == 0:
            report = StepReport(version=trainer.version, metrics=metrics, seconds=watch.seconds)
            trainer.client.report(report)
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
            answer = trainer.client.poll(trainer.version)
        own = Outcome.INTERRUPTED if trainer.client.stopping.is_set() else outcome_of(answer)
        outcome = Outcome(int(trainer.ranks.highest(own)))
        if outcome is Outcome.BATCH:
            assert isinstance(answer, TrainBatch)
            if answer.version != trainer.version:  # its ages would be wrong
                raise DataError(
                    f"batch is for {answer.version}, the trainer is at {trainer.version}: controller and "
                    "trainer disagree"
                )
            return outcome, answer
        if outcome is Outcome.PUBLISH:
            publish(trainer)
        elif outcome is not Outcome.WAIT:
            log.info("stopping at %s: %s", trainer.version, outcome.name.lower().replace("_", " "))
            return outcome, None


def outcome_of(answer: TrainBatch | Wait | Stop) -> Outcome:
    """What the controller's answer asks for."""
    if isinstance(answer, Stop):
        return Outcome.STOP_AND_CHECKPOINT if answer.checkpoint else Outcome.STOP
    if isinstance(answer, Wait):
        return Outcome.PUBLISH if answer.publish else Outcome.WAIT
    return Outcome.BATCH


def record(trainer: Trainer, batch: TrainBatch) -> None:
    """Write the step into the ledger on every rank, before it is reported. Collective."""
    step, weights = trainer.version.step, trainer.learner.weights.checksum()
    ids = [id for rows in batch.micro_batches for id in rows.ids]
    all_done(trainer.ranks, "the ledger", lambda: trainer.ledger.record(step, ids, weights))


def publish(trainer: Trainer) -> None:
    """Start publishing the current weights, once the last publication has finished or failed. Collective."""
    anchor = settle(trainer)
    trainer.publishing.publish(trainer.version, anchor)


def settle(trainer: Trainer) -> bool:
    """Wait until nothing is on its way; whether the next version should be an anchor. Collective.

    Ranks vote every SETTLE_SECONDS while one waits for disk space, so that no collective times out.
    """
    publishing = trainer.publishing
    while True:
        own = float(publishing.anchor_due) if publishing.settle(SETTLE_SECONDS) else _UNSETTLED
        if (vote := trainer.ranks.highest(own)) != _UNSETTLED:
            return bool(vote)
        log.info("a version up to %s is still on its way", trainer.version)


def checkpoint_due(trainer: Trainer) -> bool:
    """Whether this step ends with a checkpoint: by its number, or by rank 0's clock. Collective."""
    settings = trainer.config.trainer
    if settings.checkpoint_every and trainer.version.step % settings.checkpoint_every == 0:
        return True
    if not settings.checkpoint_minutes:
        return False
    overdue = time.monotonic() - trainer.saved_at >= 60 * settings.checkpoint_minutes
    return bool(trainer.ranks.highest(trainer.ranks.rank == 0 and overdue))


def checkpoint(trainer: Trainer) -> None:
    """Save the trainer's state, unless that is done already, and report it. Collective."""
    if trainer.saved == trainer.version:
        return
    path = trainer.learner.save()
    if path is None:
        return
    trainer.saved, trainer.saved_at = trainer.version, time.monotonic()
    if trainer.ranks.rank == 0:
        trainer.client.report(CheckpointSaved(version=trainer.version, path=str(path)))


def finish(trainer: Trainer, outcome: Outcome) -> None:
    """Publish what is not yet out, report its digests, and leave a model folder. Collective.

    When the last version could not be published, no digests are reported and, unless the run was
    interrupted, StoreError is raised at the end. The next start publishes the weights of the checkpoint
    under a new version.
    """
    learner, first = trainer.learner, trainer.ranks.rank == 0
    if trainer.publishing.newest != trainer.version:
        publish(trainer)
    settle(trainer)
    is_out = not trainer.ranks.highest(first and trainer.publishing.arrived != trainer.version)
    trainer.publishing.close()
    digests = learner.weights.digests()
    if is_out and first:
        trainer.client.report(FinalDigests(version=trainer.version, digests=digests))
    if outcome is not Outcome.INTERRUPTED:
        learner.export(trainer.config.run_dir / "final")
    trainer.client.close(FINAL_REPORT_SECONDS if outcome is Outcome.INTERRUPTED else None)
    if not is_out:
        problem = (
            f"the last version {trainer.version} was not published, so no replica can be compared with it: "
            "fix the publication error logged above and restart the trainer"
        )
        if outcome is not Outcome.INTERRUPTED:
            raise StoreError(problem)
        log.error("%s", problem)
    log.info("finished at %s", trainer.version)


class Stopwatch:
    """Wall seconds of the parts of a step, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """Give the time since the last lap to `name`."""
        now = time.monotonic()
        self.seconds[name], self._last = now - self._last, now
