"""A rank from start to end.

process group → student, from its checkpoint → hello → first version → loop → last version, digests, folder
"""

from __future__ import annotations

import os
import random
import threading
from datetime import timedelta
from functools import partial
from urllib.parse import urlsplit

import numpy as np
import torch

from student_trainer.config import TrainerConfig
from student_trainer.controller_client import ControllerClient
from student_trainer.engine import Learner
from student_trainer.head import HeadShape, HeadWeights
from student_trainer.launch import TITLE
from student_trainer.ledger import Ledger
from student_trainer.loop import Trainer, finish, train
from student_trainer.objectives.config import needs, teacher_temperature
from student_trainer.ranks import Ranks, meeting_point
from student_trainer.signals import StopSignals, die_with_parent
from student_trainer.step import loss_of
from student_trainer.transports import BroadcastTransport, Publishing, SnapshotTransport, WeightTransport
from sync.broadcast import BroadcastSender, own_address
from sync.claims import Claim
from sync.client import BlockingPeer, token_from_environment
from sync.errors import DataError
from sync.publish import Publisher
from sync.snapshots.admin import gc
from sync.stores import open_store
from sync.wire import Head, RunIdentity, TrainerHello, TrainerWelcome, decode, encode, unpack

_POLL_SECONDS = 120.0
"""Longest time that the controller may stay silent, long polls (20 s) and a restart included."""


def run(config: TrainerConfig) -> None:
    """Train on the controller's batches; returns when all is saved. Raises DistillError."""
    die_with_parent()
    ranks, stopping = join(config), threading.Event()
    learner = Learner(config, ranks, stopping.is_set)
    claim = Claim()
    peer = BlockingPeer(config.controller_url, token_from_environment(), _POLL_SECONDS, claim)
    client = ControllerClient(peer, ranks.rank, ranks.world_size, stopping)
    welcome = introduce(client, learner.hello, config.trainer.init_timeout_seconds, ranks)
    claim.run = welcome.run
    if config.heartbeat_seconds:
        client.beat(welcome.version, config.heartbeat_seconds)
    client.expect(welcome.version)
    heads = teacher_heads(config, client, welcome, learner)
    learner.begin(welcome, loss_of(config.objective, welcome.teachers, heads))
    publishing = Publishing(open_transport(config, learner, client, welcome))
    publishing.start(welcome.version)
    signals = StopSignals(int(os.environ.get("LOCAL_SIZE", "1")), stopping)
    ledger = Ledger(config.run_dir / "ledger", welcome.version, welcome.parent, ranks.rank)
    trainer = Trainer(config, ranks, learner, client, publishing, ledger)
    outcome = train(trainer)
    finish(trainer, outcome)
    signals.finished()
    ranks.barrier()
    torch.distributed.destroy_process_group()


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


def introduce(client: ControllerClient, hello: TrainerHello, seconds: float, ranks: Ranks) -> TrainerWelcome:
    """Rank 0 says hello, within `seconds`; every rank learns the answer. Collective."""
    body = encode(client.hello(hello, seconds)) if ranks.rank == 0 else b""
    welcome = decode(ranks.broadcast(body), TrainerWelcome)
    expected = 0 if hello.checkpoint is None else hello.checkpoint.step
    if welcome.version.step != expected:
        raise DataError(
            f"the controller expects training to start at step {welcome.version.step}, the trainer is at "
            f"{expected}: they must use the same run folder"
        )
    return welcome


def teacher_heads(
    config: TrainerConfig, client: ControllerClient, welcome: TrainerWelcome, learner: Learner
) -> tuple[HeadWeights, ...]:
    """Heads of the teachers; none unless the objective reads whole distributions. Raises DataError."""
    if not needs(config.objective).hidden:
        return ()
    temperature = teacher_temperature(config.objective, config.temperature)
    heads, vocab = [client.head(name) for name in welcome.teachers], learner.vocab
    for head in heads:
        if (rows := head.weight.shape[0]) < vocab:
            raise DataError(
                f"teacher {head.teacher} has a head of {rows} rows, the student's tokenizer has {vocab} ids"
            )
    return tuple(_on_device(head, vocab, temperature, learner.ranks.device) for head in heads)


def _on_device(head: Head, vocab: int, temperature: float, device: torch.device) -> HeadWeights:
    """A teacher's head: fp32 on CPUs, as sent on GPUs."""
    array = torch.tensor(unpack(head.weight))
    weight_VH = (array.view(torch.bfloat16) if head.weight.dtype == "bf16" else array).to(device)
    bias_V = None if head.bias is None else torch.tensor(unpack(head.bias)).to(device)
    shape = HeadShape(vocab, head.scale, head.soft_cap, temperature)
    return HeadWeights(weight_VH if device.type == "cuda" else weight_VH.float(), bias_V, shape)


def open_transport(
    config: TrainerConfig, learner: Learner, client: ControllerClient, welcome: TrainerWelcome
) -> WeightTransport:
    """The configured way for new versions."""
    settings, ranks, weights = config.weights, learner.ranks, learner.weights
    if settings.transport == "broadcast":
        sender = None
        if ranks.rank == 0:
            controller = urlsplit(config.controller_url)
            host = own_address(controller.hostname or "127.0.0.1", controller.port or 80)
            token = token_from_environment()
            sender = BroadcastSender(host, 0, settings.timeout_seconds, ranks.device, token)
        return BroadcastTransport(sender, learner, client)
    store = open_store(settings.store, config.run_dir / "store")
    run = RunIdentity(config.run, welcome.run.id, weights.fingerprint)
    publisher = Publisher(
        store, run, weights.slices, rank=ranks.rank, world_size=ranks.world_size, weights=settings
    )
    scratch, collect = config.run_dir / "anchors", partial(gc, store, config.run, settings.keep_anchors)
    return SnapshotTransport(publisher, learner, client, scratch, welcome.parent, collect)
