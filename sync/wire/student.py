"""Controller ↔ student replica: prompts, completions, weights; people ↔ controller: replicas of a run."""

from __future__ import annotations

from typing import Literal

import msgspec

from sync.wire.base import Amount, Array, Count, Message, Version, VersionSpan


class Sampling(msgspec.Struct, frozen=True):
    """How completions are sampled; the same for every prompt of a request."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: list[int] = []
    """Ids that end a completion besides the model's own EOS; the ending id is part of the completion."""
    student_topk: int = 0
    """Return the student's own top-k ids per position (0: none); every id has rank <= k, sampled or not."""
    max_seconds: float | None = None
    """Wall seconds from its arrival after which a completion is answered as it is then; None: no limit."""


class GeneratePrompt(msgspec.Struct, frozen=True):
    """One prompt to complete. `id` is unique within the run and comes back with the answer."""

    id: str
    token_ids: list[int]
    seed: int | None = None
    """None: the engine's own randomness."""


class GenerateRequest(Message, frozen=True):
    """Complete every prompt. Controller → replica; answered by one frame per prompt, as each ends."""

    sampling: Sampling
    prompts: list[GeneratePrompt]


class Generated(Message, frozen=True):
    """Replica → controller: one completion. T may be 0 only when `finish_reason` is "abort" or "time"."""

    id: str
    token_ids: Array
    """i4 [T]"""
    logprob: Array
    """f4 [T]: log μ(y_t), nats, of the distribution that was really sampled (temperature, top-p applied)"""
    spans: list[VersionSpan]
    """Contiguous, from 0 to T."""
    finish_reason: Literal["stop", "length", "abort", "time"]
    """length: `Sampling.max_tokens` or the context ended it; time: `Sampling.max_seconds` did."""
    topk_ids: Array | None = None
    """i4 [T, K]: the student's K most likely ids at sampling time, -1 where fewer; None: not asked for"""


class GenerateFailed(Message, frozen=True):
    """Replica → controller: a prompt that the engine refused; the others of its request are not affected."""

    id: str
    error: str


class BroadcastTicket(msgspec.Struct, frozen=True):
    """A replica's rank in one broadcast of weights from the trainer, which is rank 0 of the group."""

    address: str
    """"host:port" of the store of keys that the trainer serves."""
    group: str
    """Name of the group's keys in that store; a new one for every broadcast."""
    rank: int
    """1 … world_size - 1."""
    world_size: int


class UpdateRequest(Message, frozen=True):
    """Controller → replica: stage `version` while generating, then pause, swap, stamp, resume."""

    version: Version
    kv_on_swap: Literal["recompute", "keep"] = "recompute"
    broadcast: BroadcastTicket | None = None
    """None: the version is read from the store."""


class UpdateReply(Message, frozen=True):
    """Replica → controller: what an update cost."""

    version: Version
    """What the replica now serves."""
    bytes_read: Count
    """Bytes fetched from the store, or received by broadcast, for this update."""
    stage_seconds: Amount
    """Download, decode, verify; generation went on."""
    pause_seconds: Amount
    """No token was generated: from the call to pause until resumed."""
    apply_seconds: Amount
    """The part of the pause that loaded weights."""


class ReplicaState(Message, frozen=True):
    """Replica → controller, answer to GET /distill/v1/state: what it serves now."""

    version: Version | None
    """None: still the folder the engine was started with, no published version yet."""
    requests: Count
    """Completions in flight."""
    digests: dict[str, str] | None = None
    """Checkpoint tensor name → BLAKE3 hex of the bytes last given to the loader; None: not asked for."""
    tokens: Count | None = None
    """Tokens generated since the engine started, unfinished completions included; None: no statistics."""


# --- people: replicas that join and leave ---------------------------------------------------------------


class ReplicaJoins(Message, frozen=True):
    """A student replica that is to serve this run from now on; answered with the Replicas there are then."""

    url: str
    name: str | None = None
    """None: the next free "student-N"."""


class ReplicaLeaves(Message, frozen=True):
    """A replica that is to serve this run no more; answered with the Replicas that remain."""

    name: str


class ReplicaStatus(msgspec.Struct, frozen=True):
    """One replica as the controller sees it."""

    name: str
    url: str
    phase: Literal["absent", "catching_up", "serving"]
    version: Version | None
    """None: the folder it was started with."""
    in_flight: int
    """Completions it works on."""


class Replicas(Message, frozen=True):
    """The student replicas of a run."""

    replicas: list[ReplicaStatus]
