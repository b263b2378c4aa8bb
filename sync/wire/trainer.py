"""Trainer rank ↔ controller: batches, and what became of them; how servers and machines join a run."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from sync.wire.base import Amount, Array, Count, Message, RunIdentity, Version
from sync.wire.replica import SamplingMask
from sync.wire.teacher import Kept


class TrainerHello(Message, frozen=True):
    """Rank 0 → controller, once per start of the trainer, before its first batch."""

    world_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    checkpoint: Version | None
    """The checkpoint it resumed from; None: it starts from the model folder at step 0."""
    fingerprint: str
    """Fingerprint of the model: `sync.weights.snapshots.checkpoint.model_fingerprint`."""
    run: str
    """Name of the run that it was configured for."""
    run_id: str | None = None
    """`RunIdentity.id` of the run that saved the checkpoint; None: there is none, or it does not say."""
    sequence_parallel: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1
    """Neighbouring ranks that are given the same rows; divides `world_size`."""
    altered: list[str] = []
    """What was found wrong with newer checkpoints when their files were read, and which one is used."""


class TrainerWelcome(Message, frozen=True):
    """Controller → rank 0, answer to TrainerHello: where the trainer begins."""

    version: Version
    """(lineage of this start, step it begins at)."""
    parent: Version | None
    """Where this lineage branched from; None: it is the first."""
    teachers: list[str]
    """Names, in the order that Rows.teacher indexes them; empty: rewards alone are learned."""
    run: RunIdentity
    """What the trainer names from now on, in requests, manifests and checkpoints."""


class BatchRequest(Message, frozen=True):
    """Rank → controller: long poll for its share of the batch of `version.step`; idempotent."""

    version: Version
    rank: int
    world_size: int


class Rows(msgspec.Struct, frozen=True):
    """R rollouts, concatenated by the controller for one micro-batch; C = sum(completion_lens). Flat
    arrays run over rows in order. Optional arrays are None where the objective does not use them."""

    ids: list[str]
    tokens: Array
    """i4 [sum(prompt_lens) + C]: each row's prompt, then its completion"""
    prompt_lens: Array
    """i4 [R]"""
    completion_lens: Array
    """i4 [R]"""
    behavior_logprob: Array
    """f4 [C]: log μ"""
    token_step: Array
    """i4 [C]: step of the version each token was sampled from, mapped into the trainer's lineage; that of the
    batch where the teacher generated"""
    teacher: Array | None = None
    """i4 [R]: index into TrainerWelcome.teachers; None: there are none, nor any of their arrays below"""
    teacher_logprob: Array | None = None
    """f4 [C]: log q(y_t)"""
    teacher_topk_ids: Array | None = None
    """i4 [C, K]"""
    teacher_topk_logprob: Array | None = None
    """f2 or f4 [C, K]"""
    student_topk_ids: Array | None = None
    """i4 [C, K]; -1 where fewer"""
    student_topk_teacher_logprob: Array | None = None
    """f2 or f4 [C, K]: log q at student_topk_ids"""
    teacher_hidden: Array | None = None
    """bf16 or f4 [C, H]"""
    teacher_entropy: Array | None = None
    """f4 [C]"""
    reward: Array | None = None
    """f4 [R]: the task's reward; None: these rows have none"""
    truncated: Array | None = None
    """u1 [R]: 1 where the completion ended at the token or time limit"""
    weight: Array | None = None
    """f4 [R], in (0, 1]: what the row's loss is multiplied by, for its freshness; None: 1 for all"""
    baseline: Array | None = None
    """f4 [R]: b that the row's reward is compared with; None: the mean reward of the step"""
    deviation: Array | None = None
    """f4 [R]: standard deviation of the rewards that `baseline` is the mean of; None: of the step's"""
    by_teacher: Array | None = None
    """u1 [R]: 1 where the teacher generated the completion (loss: cross-entropy); None: no row"""
    kept: list[Kept | None] | None = None
    """R: where each row's other scores are, which the rank fetches into the fields above; None in the list:
    the rank had that row scored again. None: the scores are here."""
    teacher_prompts: list[Array | None] | None = None
    """R, i4 [P'] each: what the teacher of a kept row saw in the prompt's place; None: the prompt itself"""
    own: Array | None = None
    """u1 [C]: 1 where the student sampled the token, 0 where an environment wrote it: no loss; None: all 1"""
    mask: SamplingMask | None = None
    """Mask of the C tokens; None: all were sampled from the whole vocabulary"""
    routes: Array | None = None
    """u1 or i4 [sum(route_lens), layers, K]: experts of the first tokens of each row; None: the trainer's
    routers choose, everywhere"""
    route_lens: Array | None = None
    """i4 [R]: tokens of each row with recorded routes: all but the last, or 0; None with `routes`"""
    earned: Array | None = None
    """f4 [C]: the part of the row's reward that was given for turns before the token's; None: 0 everywhere"""
    parted: Array | None = None
    """u1 [C, PARTED_BYTES]: `Scored.parted`; None: as there, of all rows"""
    segment: Array | None = None
    """u1 [C] of Segment; None: every token is scored by itself"""
    off_path: Array | None = None
    """u1 [C]: 1 where weights sampled the token that the trainer's lineage does not pass through, as after a
    rollback, so that its `token_step` is where that lineage branched; None: nowhere"""


class TeacherServers(Message, frozen=True):
    """Controller → rank, answer to GET /v1/teachers/NAME: where a teacher keeps scores and scores again."""

    urls: list[str]
    """URLs of its processes that are in use."""
    fingerprint: str | None
    """`TeacherInfo.fingerprint` that its answers must name; None: it was not checked."""


class TrainBatch(Message, frozen=True):
    """Controller → rank: its share of one optimizer step."""

    version: Version
    """The weights this batch is trained on top of; the step makes version.step + 1."""
    denominator: Annotated[int, msgspec.Meta(ge=1)]
    """Supervised tokens of the whole step over all ranks and micro-batches: divide loss sums by this."""
    micro_batches: list[Rows]
    """As many on every rank; a rank short of rows gets an empty Rows (R = 0)."""


class Wait(Message, frozen=True):
    """Controller → rank: no batch yet, poll again."""

    publish: bool = False
    """First broadcast the current weights again: a replica waits for them."""


class Stop(Message, frozen=True):
    """Controller → rank: no more batches, save if asked and exit."""

    reason: str
    checkpoint: bool
    """Save a checkpoint before leaving."""


class Heartbeat(Message, frozen=True):
    """Every rank → controller, from a thread, every few seconds: the process is alive."""

    version: Version
    """TrainerWelcome.version of this start."""
    rank: int
    does: dict[str, tuple[str, Amount]] = {}
    """"trainer", "publisher" → what it does now, in words, and for how many seconds; of rank 0 alone."""


class StepReport(Message, frozen=True):
    """Rank 0 → controller, after each optimizer step."""

    version: Version
    """The version after the step."""
    metrics: dict[str, float]
    seconds: dict[str, Amount]
    """wait, train, publish, checkpoint: wall seconds of this step; `publish` only what the step waited for"""
    parts: dict[str, Amount] = {}
    """forward, backward, optimizer: seconds of rank 0 within `train`, each summed over the micro-batches"""


class Published(Message, frozen=True):
    """Rank 0 → controller, when a version can be read by every replica."""

    version: Version
    kind: Literal["full", "delta", "lora", "broadcast"]
    bytes: Count
    full_bytes: Count
    """What a full snapshot of the same weights takes."""
    seconds: Amount
    """Seconds in all; 0 of a broadcast, which comes after this message."""
    rendezvous: str | None = None
    """"host:port" of the broadcast's store for kind "broadcast"; None otherwise."""
    attempt: str | None = None
    """Name of this announcement of a broadcast, so that a repeated request forms no second group; None: every
    request is an announcement."""
    encode_seconds: Amount = 0.0
    """Those of `seconds` in which rank 0 coded its delta; 0 of what is no delta."""
    note: str = ""
    """What people are told of the run: what `weights.codec` "auto" chose for rank 0. Empty: as before."""


class Audience(Message, frozen=True):
    """Controller → rank 0, answer to Published of kind "broadcast": the group that will receive it."""

    group: str
    world_size: int
    """1 + workers of the replicas; 1: none listens, send nothing."""


class BroadcastMembers(Message, frozen=True):
    """Controller → rank 0, answer to GET /v1/broadcasts/GROUP, polled while it sends."""

    lost: dict[str, str]
    """Replica → why it will not receive this broadcast to its end; empty: every replica takes part."""


class CheckpointSaved(Message, frozen=True):
    """Rank 0 → controller, when a checkpoint is whole on disk."""

    version: Version
    path: str


class FinalDigests(Message, frozen=True):
    """Rank 0 → controller, before it exits: what every replica must hold (docs/weight-sync.md, (a))."""

    version: Version
    digests: dict[str, str]
    """Checkpoint tensor name → BLAKE3 hex of its bytes."""


class Ok(Message, frozen=True):
    """Controller → rank, teacher → controller: received and acted on."""


# --- servers and trainer machines register with the controller, and renew it ------------------------------


class ServerRegisters(Message, frozen=True):
    """Role's process, or people → controller: it is there; answered with ServerLease. Sent again before the
    lease ends. A name that no process of the configuration has is a further replica's."""

    run: str | None
    """Name of the run that it is configured for; None: people say that it serves this one."""
    url: str | None
    """Where it answers; of one of the trainer's machines: its address, with a free port for ranks to meet.
    None: it is starting, and asks whether it would be registered."""
    name: str | None = None
    """Such as "teacher-main-1", or "trainer-1" of the trainer's machine 1; None: the next "student-N"."""
    boot: str | None = None
    """Random, made by every start of a process. While another one has the name this is refused with 429, and
    with 410 once that one has shown that it lives, or this one had the name and lost it. None: nobody renews
    this, and it lasts until it is taken back."""


class ServerLease(Message, frozen=True):
    """Controller → role's process: registered under this name."""

    name: str
    seconds: Amount
    """The name is forgotten unless it is registered again within them; 0: it stays."""
    warning: str | None = None
    """What is wrong with a replica that people added, and the remedy; None: it answers."""
    gang: list[str | None] = []
    """To one of the trainer's machines: URL of each, None for one that is missing. All ranks meet at the
    first, once none is."""


class ServerLeaves(Message, frozen=True):
    """Role's process, or people → controller: it serves no more, or its ranks ended well. Answer: Servers."""

    name: str
    boot: str | None = None
    """Leaves only if this one has the name; None: whichever has."""


class ServerStatus(msgspec.Struct, frozen=True):
    """One server as the controller sees it."""

    name: str
    url: str | None
    """Where it is; None: it has not registered, or its lease has ended."""
    phase: str | None = None
    """Phase of a replica: absent, catching_up or serving; None: another server."""
    version: Version | None = None
    """Version of a replica; None: the folder it was started with."""
    in_flight: Count = 0
    """Completions that a replica works on."""


class Servers(Message, frozen=True):
    """Controller → people, evaluator: every server of the run, and the trainer's machines where it has
    several; answer to GET /v1/servers."""

    servers: list[ServerStatus]


class Why(Message, frozen=True):
    """Controller → people: what the run waits for, answer to GET /v1/why."""

    lines: list[str]
