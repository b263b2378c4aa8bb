"""A rank from start to end.

    join the ranks → student, from its checkpoint → hello → first version
    batch (agreed by all ranks) → step → ledger → publish → checkpoint → report → the same again, until Stop
    last version, digests, folder

Every rank runs the same collectives in the same order; what only one rank can tell (a signal, a Stop, an
anchor that is due) is agreed on by `Ranks.highest` first.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from functools import partial

import torch

from student_trainer.config import TrainerConfig
from student_trainer.controller_client import FINAL_REPORT_SECONDS, Answer, ControllerClient
from student_trainer.engine import Learner, after
from student_trainer.launch import TITLE, catch_stop_signals
from student_trainer.ledger import Ledger
from student_trainer.objectives.config import needs, student_topk
from student_trainer.ranks import Ranks, all_done, meeting_point
from student_trainer.step import Stopwatch, in_loss, loss_of
from student_trainer.teacher_scores import TeacherScores
from student_trainer.transports import Publishing, open_transport
from sync import wire
from sync.base.address import token_from_environment
from sync.base.errors import DataError, StoreError
from sync.base.memory import give_back
from sync.wire import TrainBatch, TrainerWelcome, Version, Wait
from sync.wire.claims import Claim
from sync.wire.client import BlockingPeer
from sync.wire.head import OutputHead

log = logging.getLogger(__name__)
SETTLE_SECONDS = 20.0
"""Time between two exchanges of the ranks about a version that is still on its way."""
_UNSETTLED = 2.0
_PAUSE_SECONDS = 1.0
_POLL_SECONDS = 120.0
"""Longest time that the controller may stay silent, long polls (20 s) and a restart included."""


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
    """The time.monotonic() of that checkpoint, or of the start."""

    @property
    def version(self) -> Version:
        return self.learner.version


def run(config: TrainerConfig) -> None:
    """Train on the controller's batches; returns when all is saved. Raises DistillError."""
    ranks, stopping = join(config), threading.Event()
    learner = Learner(config, ranks)
    claim = Claim()
    peer = BlockingPeer(config.controller_url, token_from_environment(), _POLL_SECONDS, claim)
    client = ControllerClient(peer, ranks.rank, ranks.world_size, stopping)
    hello, seconds = learner.hello, config.trainer.init_timeout_seconds
    answer = wire.encode(client.hello(hello, seconds)) if ranks.rank == 0 else b""
    welcome = wire.decode(ranks.broadcast(answer), TrainerWelcome)
    claim.run = welcome.run
    if config.heartbeat_seconds:
        client.beat(welcome.version, config.heartbeat_seconds)
    want = needs(config.objective, config.temperature)
    client.scores = TeacherScores(
        welcome.teachers,
        want,
        student_topk(config.objective),
        learner.vocab,
        client.teacher,
        lambda url: BlockingPeer(url, token_from_environment(), _POLL_SECONDS, claim),
        stopping,
    )
    client.expect(welcome.version)
    heads: tuple[OutputHead, ...] = ()
    if want.hidden:  # the objective reads whole distributions
        answers = map(client.head, welcome.teachers)
        heads = tuple(OutputHead.of(head, ranks.device, learner.vocab, want.temperature) for head in answers)
    loss = loss_of(config.objective, welcome.teachers, heads, learner.ends, lambda: learner.first_V)
    learner.begin(welcome, loss)
    publishing = Publishing(open_transport(config, learner, client, welcome))
    client.publishing = publishing.words
    publishing.publish(welcome.version, anchor=True)
    settle(publishing, ranks)
    saved = catch_stop_signals(stopping, int(os.environ.get("LOCAL_SIZE", "1")))
    ledger = Ledger(config.run_dir / "ledger", welcome.version, welcome.parent, ranks.rank)
    trainer = Trainer(config, ranks, learner, client, publishing, ledger)
    outcome = train(trainer)
    finish(trainer, outcome)
    saved.set()
    ranks.barrier()
    torch.distributed.destroy_process_group()


def train(trainer: Trainer) -> Outcome:
    """Train until Stop or a signal, and say which. A checkpoint ends it unless Stop asks for none."""
    does = trainer.client.does
    while True:
        does(f"it asks for batch {trainer.version.step}")
        clock = Stopwatch()
        clock.begin("wait")
        outcome, batch = agreed_batch(trainer)
        if batch is None:
            break
        clock.begin("train")
        trainer.client.expect(after(trainer.version))
        does(f"it trains step {trainer.version.step + 1}")
        metrics = trainer.learner.train(batch)
        give_back()
        record(trainer, batch)
        clock.begin("publish")
        if trainer.version.step % trainer.config.weights.publish_every == 0:
            publish(trainer)
        clock.begin("checkpoint")
        if checkpoint_due(trainer):
            checkpoint(trainer)
        clock.begin(None)
        if trainer.ranks.rank == 0:
            parts = trainer.learner.parts
            trainer.client.report(wire.StepReport(trainer.version, metrics, clock.seconds(), parts))
    if outcome is not Outcome.STOP:
        checkpoint(trainer)
    return outcome


def join(config: TrainerConfig) -> Ranks:
    """Meet the other ranks. Collective."""
    import deepspeed
    from setproctitle import setproctitle

    # DeepSpeed's shared-memory kernel serves inference alone; training would compile it for half a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    timeout = timedelta(seconds=config.trainer.init_timeout_seconds)
    deepspeed.init_distributed(timeout=timeout, verbose=False, **meeting_point())
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    setproctitle(f"{TITLE} {config.run} rank {rank}")
    torch.manual_seed(config.seed)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    return Ranks(rank, world_size, device)


def agreed_batch(trainer: Trainer) -> tuple[Outcome, TrainBatch | None]:
    """The next batch, once every rank has its share of it, or None where all stop. Collective. A rank that
    has its share keeps it while the others wait, or all publish what they hold once more: when a replica
    lacks it, or when its publication failed, for then the batch may be waiting for it; rank 0 decides."""
    answer: Answer = Wait()
    while True:
        if isinstance(answer, Wait):
            answer = trainer.client.poll(trainer.version)
        local, first = Outcome.WAIT, trainer.ranks.rank == 0
        if trainer.client.stopping.is_set():
            local = Outcome.INTERRUPTED
        elif isinstance(answer, wire.Stop):
            local = Outcome.STOP_AND_CHECKPOINT if answer.checkpoint else Outcome.STOP
        elif isinstance(answer, TrainBatch):
            local = Outcome.BATCH
        elif first and trainer.publishing.repeats(answer.publish):
            local = Outcome.PUBLISH
        elif first and answer.publish:  # too soon: the controller asks without a pause
            time.sleep(_PAUSE_SECONDS)
        outcome = Outcome(int(trainer.ranks.highest(local)))
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


def record(trainer: Trainer, batch: TrainBatch) -> None:
    """Write the step into the ledger on every rank, before it is reported. Collective.

    Of ranks that train on the same rows the first names them.
    """
    is_first = trainer.ranks.rank % trainer.config.trainer.sequence_parallel == 0
    named = batch.micro_batches if is_first else []
    ids = [id for rows in named for id in rows.ids]
    tokens = sum(int(in_loss(rows).sum()) for rows in named)
    checksum = trainer.learner.weights.checksum()
    write = partial(trainer.ledger.record, trainer.version.step, ids, checksum, tokens)
    all_done(trainer.ranks, "the ledger", write)


def publish(trainer: Trainer, anchor: bool = False) -> None:
    """Start publishing the current weights, once the last publication has finished or failed. Collective.

    `anchor`: as one, whether it is due or not.
    """
    trainer.client.does(
        f"it waits until {trainer.publishing.newest} is published, and copies {trainer.version}"
    )
    due = settle(trainer.publishing, trainer.ranks)
    trainer.publishing.publish(trainer.version, anchor or due)


def settle(publishing: Publishing, ranks: Ranks) -> bool:
    """Wait until nothing is on its way; whether the next version should be an anchor. Collective.

    Ranks vote every SETTLE_SECONDS while one waits for disk space, so that no collective times out.
    """
    while True:
        ready = float(publishing.anchor_due) if publishing.settle(SETTLE_SECONDS) else _UNSETTLED
        if (vote := ranks.highest(ready)) != _UNSETTLED:
            return bool(vote)
        log.info("%s is still on its way", publishing.newest)


def checkpoint_due(trainer: Trainer) -> bool:
    """Whether this step ends with a checkpoint: by its number, or by rank 0's clock. Collective."""
    settings = trainer.config.trainer
    if settings.checkpoint_every and trainer.version.step % settings.checkpoint_every == 0:
        return True
    overdue = time.monotonic() - trainer.saved_at >= 60 * (settings.checkpoint_minutes or math.inf)
    return bool(trainer.ranks.highest(trainer.ranks.rank == 0 and overdue))


def checkpoint(trainer: Trainer) -> None:
    """Save the trainer's state, unless that is done already, and report it. Collective.

    Raises RemoteError on rank 0, and saves nothing, when the run was rolled back meanwhile: the oldest
    checkpoint, which a newer one pushes out, may be where the next trainer begins.
    """
    if trainer.saved == trainer.version:
        return
    if trainer.ranks.rank == 0:
        trainer.client.confirm(trainer.version)
    trainer.client.does(f"it saves the checkpoint of {trainer.version}")
    path = trainer.learner.save()
    trainer.saved, trainer.saved_at = trainer.version, time.monotonic()
    if trainer.ranks.rank == 0:
        trainer.client.report(wire.CheckpointSaved(version=trainer.version, path=str(path)))


def finish(trainer: Trainer, outcome: Outcome) -> None:
    """Publish what is not yet out, leave a model folder, and report the end. Collective.

    When the last version could not be published, no digests are reported and, unless the run was
    interrupted, StoreError is raised at the end; the next start publishes the checkpoint's weights.
    """
    learner, first = trainer.learner, trainer.ranks.rank == 0
    keep = trainer.config.keep_every is not None and trainer.version.step < trainer.config.steps
    if keep or trainer.publishing.newest != trainer.version:
        publish(trainer, anchor=keep)
    settle(trainer.publishing, trainer.ranks)
    is_out = not trainer.ranks.highest(first and trainer.publishing.arrived != trainer.version)
    digests = learner.weights.digests()
    if outcome is not Outcome.INTERRUPTED:
        learner.export(trainer.config.run_dir / "final")
    if is_out and first:  # last: whoever dies before it is started again
        trainer.client.report(wire.FinalDigests(version=trainer.version, digests=digests))
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
