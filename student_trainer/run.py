"""A rank from start to end.

process group → model → checkpoint → hello → first version → heads → loop → last version, digests, folder
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

from student_trainer import checkpoint, schedule
from student_trainer.batch_client import HttpSource
from student_trainer.config import TrainerConfig
from student_trainer.controller_client import LAST_WORDS_SECONDS, Controller, HttpController, beat
from student_trainer.engine import Loaded, load
from student_trainer.head import HeadShape, HeadWeights
from student_trainer.launch import TITLE
from student_trainer.ledger import Ledger
from student_trainer.loop import Outcome, Trainer, arrived, publish, train
from student_trainer.meeting import meeting_point
from student_trainer.model import check_head
from student_trainer.objectives.needs import needs, teacher_temperature
from student_trainer.objectives.registry import build, coefficients, discount
from student_trainer.ranks import Ranks
from student_trainer.signals import StopSignals, die_with_parent
from student_trainer.step import LossSpec, train_step
from student_trainer.transports import BroadcastTransport, SnapshotTransport, WeightTransport
from student_trainer.weights import Weights
from sync.broadcast import BroadcastSender, own_address
from sync.claims import Claim
from sync.client import BlockingPeer, token_from_environment
from sync.errors import DataError, StoreError
from sync.publish import Publisher
from sync.snapshots.admin import gc
from sync.stores import open_store
from sync.wire import (
    FinalDigests,
    Head,
    Heartbeat,
    TrainBatch,
    TrainerHello,
    TrainerWelcome,
    Version,
    decode,
    encode,
    unpack,
)

log = logging.getLogger(__name__)
_POLL_SECONDS = 120.0
"""Longest time that the controller may stay silent, long polls (20 s) and a restart included."""


def run(config: TrainerConfig) -> None:
    """Train as the controller says; returns when all is saved. Raises DistillError."""
    die_with_parent()
    ranks = join(config)
    loaded = load(config)
    check_head(loaded.student, loaded.engine, ranks.device)
    weights = Weights(loaded.student, ranks)
    hello = resume(config, loaded.engine, weights.fingerprint, ranks)

    claim, stopping = Claim(), threading.Event()
    url, token = config.controller_url, token_from_environment()
    peer = BlockingPeer(url, token, _POLL_SECONDS, claim)
    controller = HttpController(peer, config.trainer.init_timeout_seconds, stopping)
    welcome = introduce(controller, hello, ranks)
    claim.run = welcome.run
    if config.heartbeat_seconds:
        pulse = BlockingPeer(url, token, config.heartbeat_seconds, claim)
        beat(pulse, Heartbeat(version=welcome.version, rank=ranks.rank), config.heartbeat_seconds)
    source = HttpSource(BlockingPeer(url, token, _POLL_SECONDS, claim), ranks.rank, ranks.world_size)
    source.expect(welcome.version)
    export = partial(weights.save_folder, tokenizer=loaded.tokenizer)
    transport = open_transport(config, weights, export, controller, welcome.run.id, ranks, stopping.is_set)
    transport.start(welcome.version, welcome.parent)
    signals = StopSignals(int(os.environ.get("LOCAL_SIZE", "1")), stopping)
    trainer = Trainer(
        version=welcome.version,
        step=step_function(config, loaded, controller, welcome, ranks),
        save=partial(save, config, loaded.engine, hello.fingerprint, welcome.run.id, ranks, stopping.is_set),
        shown=weights.shown,
        source=source,
        controller=controller,
        transport=transport,
        ledger=Ledger(config.run_dir / "ledger", welcome.version, welcome.parent, ranks.rank),
        ranks=ranks,
        interrupted=stopping,
        publish_every=config.weights.publish_every,
        checkpoint_every=config.trainer.checkpoint_every,
        checkpoint_seconds=60 * config.trainer.checkpoint_minutes,
    )
    outcome = train(trainer)
    finish(config, trainer, weights, export, outcome)
    signals.finished()
    leave(ranks)


def join(config: TrainerConfig) -> Ranks:
    """Meet the other ranks; seeds and threads of this one."""
    import deepspeed
    from setproctitle import setproctitle

    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    # DeepSpeed's shared-memory kernel serves inference alone; training would compile it for half a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        timeout=timedelta(seconds=config.trainer.init_timeout_seconds), verbose=False, **meeting_point()
    )
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    setproctitle(f"{TITLE} {config.run} rank {rank}")
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(config.seed + rank)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    return Ranks(rank, world_size, device)


def resume(config: TrainerConfig, engine: Any, fingerprint: str, ranks: Ranks) -> TrainerHello:
    """Load the checkpoint to start from, or start from the model's folder; what to say of it. Collective."""
    path = checkpoint.find(config.run_dir / "checkpoints", config.checkpoint, ranks)
    if path is not None:
        log.info("resuming from %s", path)
    return TrainerHello(
        world_size=ranks.world_size,
        checkpoint=None if path is None else checkpoint.load(engine, path, fingerprint, ranks),
        fingerprint=fingerprint,
        run=config.run,
        run_id=checkpoint.run_of(path),
    )


def introduce(controller: Controller, hello: TrainerHello, ranks: Ranks) -> TrainerWelcome:
    """Rank 0 says hello; every rank learns the answer. Collective."""
    body = encode(controller.hello(hello)) if ranks.rank == 0 else None
    welcome = decode(ranks.broadcast(body), TrainerWelcome)
    expected = 0 if hello.checkpoint is None else hello.checkpoint.step
    if welcome.version.step != expected:
        raise DataError(
            f"the controller expects training to start at step {welcome.version.step}, the trainer stands at "
            f"{expected}: they must use the same run folder"
        )
    return welcome


def step_function(
    config: TrainerConfig, loaded: Loaded, controller: Controller, welcome: TrainerWelcome, ranks: Ranks
) -> Any:
    """What trains on one batch, with the teachers' heads when the objective needs them."""
    vocab = loaded.student.head.shape.vocab
    heads: tuple[HeadWeights, ...] = ()
    if needs(config.objective).hidden:
        temperature = teacher_temperature(config.objective, config.temperature)
        sent = [controller.head(name) for name in welcome.teachers]
        heads = tuple(teacher_head(head, vocab, ranks.device, temperature) for head in sent)
    objective = config.objective
    spec = LossSpec(
        build(objective),
        discount(objective),
        heads,
        vocab,
        tuple(welcome.teachers),
        coefficients(objective, welcome.teachers),
        objective.task is not None,
    )

    def step(batch: TrainBatch) -> dict[str, float]:
        now = schedule.share(config.trainer, batch.version.step, config.steps)
        for optimizer in loaded.optimizers:
            schedule.apply(optimizer.param_groups, loaded.hyperparameters, now)
        return train_step(loaded.engine, batch, spec, ranks)

    return step


def teacher_head(head: Head, vocab: int, device: torch.device, temperature: float = 1.0) -> HeadWeights:
    """A teacher's head on this rank's device: fp32 on CPUs, as sent on GPUs. Raises DataError."""
    rows = head.weight.shape[0]
    if rows < vocab:
        raise DataError(
            f"teacher {head.teacher} has a head of {rows} rows, the student's tokenizer has {vocab} ids"
        )
    array = torch.tensor(unpack(head.weight))
    weight_VH = array.view(torch.bfloat16) if head.weight.dtype == "bf16" else array
    bias_V = None if head.bias is None else torch.tensor(unpack(head.bias)).to(device)
    weight_VH = weight_VH.to(device)
    shape = HeadShape(vocab, head.scale, head.soft_cap, temperature)
    return HeadWeights(weight_VH if device.type == "cuda" else weight_VH.float(), bias_V, shape)


def open_transport(
    config: TrainerConfig,
    weights: Weights,
    export: Any,
    controller: Controller,
    run_id: str | None,
    ranks: Ranks,
    stopping: Callable[[], bool],
) -> WeightTransport:
    """The configured way for new versions."""
    settings = config.weights
    if settings.transport == "broadcast":
        sender = None
        if ranks.rank == 0:
            controller_at = urlsplit(config.controller_url)
            host = own_address(controller_at.hostname or "127.0.0.1", controller_at.port or 80)
            token = token_from_environment()
            sender = BroadcastSender(host, 0, settings.timeout_seconds, ranks.device, token)
        return BroadcastTransport(sender, weights, controller, stopping)
    store = open_store(settings.store, config.run_dir / "store")
    publisher = Publisher(
        store,
        config.run,
        weights.fingerprint,
        weights.slices,
        rank=ranks.rank,
        world_size=ranks.world_size,
        codec=settings.codec,
        anchor_share=settings.anchor_share,
        timeout=settings.timeout_seconds,
        run_id=run_id,
    )
    scratch, collect = config.run_dir / "anchors", partial(gc, store, config.run, settings.keep_anchors)
    return SnapshotTransport(publisher, weights, export, scratch, controller, ranks.rank, collect)


def save(
    config: TrainerConfig,
    engine: Any,
    fingerprint: str,
    run_id: str | None,
    ranks: Ranks,
    stopping: Callable[[], bool],
    version: Version,
) -> Path | None:
    """Write a checkpoint of `version`; None: the disk is full and the run is `stopping`. Collective."""
    keep, folder = config.trainer.keep_checkpoints, config.run_dir / "checkpoints"
    return checkpoint.save(engine, folder, version, fingerprint, ranks, keep, stopping, run_id)


def finish(config: TrainerConfig, trainer: Trainer, weights: Weights, export: Any, outcome: Outcome) -> None:
    """Publish what is not yet out, prove what it is, and leave a model folder. Collective.

    When the last version could not be published, nothing is claimed of it, and StoreError is raised behind
    all that unless the run was interrupted: another start publishes it from its checkpoint, newly named.
    """
    trainer.source.close()
    if trainer.transport.newest != trainer.version:
        publish(trainer)
    is_out = arrived(trainer)
    trainer.transport.close()
    digests = weights.digests()
    if is_out and trainer.ranks.rank == 0:
        trainer.controller.tell(FinalDigests(version=trainer.version, digests=digests))
    if outcome is not Outcome.INTERRUPTED:
        leave_folder(config.run_dir / "final", export, trainer.ranks)
    trainer.controller.close(LAST_WORDS_SECONDS if outcome is Outcome.INTERRUPTED else None)
    if not is_out:
        problem = (
            f"the last version {trainer.version} was not published, so no replica can be compared with it: "
            "mend what its publication met and start the trainer again"
        )
        if outcome is not Outcome.INTERRUPTED:
            raise StoreError(problem)
        log.error("%s", problem)
    log.info("finished at %s", trainer.version)


def leave_folder(folder: Path, export: Any, ranks: Ranks) -> None:
    """Export to `folder`, whole or not at all. Collective."""
    partial = folder.with_name(f".partial-{folder.name}")
    if ranks.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    export(partial)
    if ranks.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)


def leave(ranks: Ranks) -> None:
    """Take the process group down when every rank has finished."""
    ranks.barrier()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
