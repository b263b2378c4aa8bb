"""Controller ↔ student replicas, and the environments that the student plays against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
import numpy as np

from sync.wire.base import DTYPES, Amount, Array, Count, Message, Number, Share, Version, VersionSpan, unpack


class Sampling(msgspec.Struct, frozen=True):
    """How completions are sampled; the same for every prompt of a request."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    temperature: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    top_k: Count = 0
    """Sample among the k most likely tokens; 0: all."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """Sample among the most likely tokens that have this share of the probability mass together."""
    min_p: Share = 0.0
    """Sample among the tokens that have at least this share of the most likely one's probability."""
    stop_token_ids: list[int] = []
    """Ids that end a completion besides the model's own EOS; the ending id is part of the completion."""
    student_topk: Count = 0
    """Return the student's own top-k ids per position (0: none); every id has rank <= k, sampled or not."""
    max_seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Wall seconds from its arrival after which a completion is answered as it is then; None: no limit."""
    mask: bool = False
    """Return the sampling mask of every token, which `top_k` must bound."""
    routes: bool = False
    """Return the experts of every token, of a student with experts."""

    def __post_init__(self) -> None:
        if self.mask and not self.top_k:
            raise ValueError("the sampling mask is asked for and top_k is 0: set it, for it bounds the mask")

    @property
    def cuts(self) -> bool:
        """Whether some tokens of the vocabulary are never sampled."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class Routing(NamedTuple):
    """What the routes of a student with experts look like."""

    layers: int
    """Layers that have experts."""
    chosen: int
    """Experts of a token in one of them."""
    experts: int
    """Experts of a layer."""

    @property
    def dtype(self) -> Literal["u1", "i4"]:
        """The dtype of an expert's number on the wire."""
        return "u1" if self.experts <= 256 else "i4"

    @property
    def bytes_per_token(self) -> int:
        """384 of Qwen3-30B-A3B: 48 layers, 8 of 128 experts."""
        return self.layers * self.chosen * DTYPES[self.dtype].itemsize


MASK_TIES: Final = 32
"""Ids beyond `Sampling.top_k` that a mask may have: in bf16 a few often share the least logit left."""


class SamplingMask(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The ids that each of T tokens was sampled from: what top_k, top_p and min_p left of the vocabulary."""

    sizes: Array
    """i4 [T]: ids of each token; 0: the whole vocabulary, or nothing was sampled there"""
    ids: Array
    """i4 [sum(sizes)]: most likely first, the sampled token among them"""

    @classmethod
    def joined(cls, masks: Sequence[SamplingMask]) -> SamplingMask:
        """The mask of the tokens of one after the other; there must be one."""
        return cls(Array.joined([mask.sizes for mask in masks]), Array.joined([mask.ids for mask in masks]))

    @classmethod
    def none(cls, count: int) -> SamplingMask:
        """The mask of `count` tokens that have none."""
        return cls(Array("i4", (count,), bytes(4 * count)), Array("i4", (0,), b""))

    def padded(self) -> np.ndarray:
        """i8 [T, K], K of the largest: the ids of each token, then -1."""
        sizes_T = unpack(self.sizes)
        ids_TK = np.full((sizes_T.size, max(1, int(sizes_T.max(initial=0)))), -1, np.int64)
        ids_TK[np.arange(ids_TK.shape[1]) < sizes_T[:, None]] = unpack(self.ids)
        return ids_TK

    def cut(self, count: int) -> SamplingMask:
        """The mask of the first `count` tokens."""
        sizes = self.sizes.cut(count)
        return SamplingMask(sizes, self.ids.cut(int(unpack(sizes).sum())))


class GeneratePrompt(msgspec.Struct, frozen=True):
    """One prompt to complete. `id` is unique within the run and comes back with the answer."""

    id: str
    token_ids: list[int]
    seed: int | None = None
    """None: the engine draws its own. On a CPU vLLM 0.32 ends when it prefills such a prompt in parts."""
    routes_from: int = 0
    """First position whose route is wanted, with `Sampling.routes`: those before it are known from an earlier
    turn; less than the tokens of the prompt."""


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
    mask: SamplingMask | None = None
    """What its tokens were sampled from; None: not asked for."""
    routes: Array | None = None
    """u1 or i4 [P + T - 1 - R, layers, K] of `Routing`, R of `GeneratePrompt.routes_from`: experts of every
    token from there on but the last, the prompt's too, as they were when it was first computed; None: not
    asked for"""


TOKEN_PARTS: Final = ("logprob", "topk_ids", "mask")
"""Fields of Generated, and of a rollout, that say something of each of its T tokens: an Array or a
SamplingMask, which are cut and joined alike, with `none` for an environment's tokens."""


class GenerateFailed(Message, frozen=True):
    """Replica → controller: a prompt that the engine refused; the others of its request are not affected."""

    id: str
    error: str
    unusable: bool = False
    """What the engine gave cannot be used: it is at fault, not the prompt."""


class BroadcastTicket(msgspec.Struct, frozen=True):
    """A replica's ranks in one broadcast of weights from the trainer, which is rank 0 of the group."""

    address: str
    """"host:port" of the store of keys that the trainer serves."""
    group: str
    """Name of the group's keys in that store; a new one for every broadcast."""
    rank: int
    """1 … world_size - 1: of the replica's first worker; the others have the following ones."""
    world_size: int


class KeyRequest(Message, frozen=True):
    """Receiver → sender of a broadcast: set, read or delete a key of its group."""

    do: Literal["set", "get", "delete"]
    key: str
    value: bytes = b""
    seconds: float = 0.0
    """Of "get": how long to wait until the key is set, at most a slice."""
    nonce: bytes = b""
    """Random, of this request alone: the answer is sealed with it."""


class KeyReply(Message, frozen=True):
    """Sender → receiver, answer to KeyRequest."""

    value: bytes | None
    """Of the key; None: it is not set."""
    seal: bytes
    """What only a holder of the run's token can say of nonce and value."""


class UpdateRequest(Message, frozen=True):
    """Controller → replica: stage `version` while generating, then pause, swap, stamp, resume."""

    version: Version
    kv_on_swap: Literal["recompute", "keep"] = "recompute"
    broadcast: BroadcastTicket | None = None
    """Its place in a broadcast; None: the version is read from the store."""


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
    """What it serves; None: still the folder that the engine was started with."""
    requests: Count
    """Completions in flight."""
    digests: dict[str, str] | None = None
    """Checkpoint tensor name → BLAKE3 hex of the bytes last given to the loader; None: not asked for."""
    tokens: Count | None = None
    """Tokens generated since the engine started, unfinished completions included; None: no statistics."""
    workers: Annotated[int, msgspec.Meta(ge=1, le=1 << 10)] = 1
    """Processes that share the model, each a member of a broadcast."""


# --- controller ↔ environment service: episodes, turn by turn ----------------------------------------------
#
#     EpisodeBegin ─▶ Turn ─▶ EpisodeContinue ─▶ Turn ─▶ … ─▶ EpisodeOver | EpisodeFailed
#
# The sequence of an episode grows by turns. A Turn carries the tokens that the environment adds,
# EpisodeContinue those that the student sampled behind them: nothing is tokenized twice.

EVALUATION_ID: Final = "eval:"
"""The ids of an evaluation's episodes begin so."""


class EpisodeBegin(Message, frozen=True):
    """Begin an episode. Client → environment; answered with its first Turn, EpisodeOver or EpisodeFailed. One
    of the same id that is under way ends: nothing of it is kept."""

    id: str
    """Unique within the run; an evaluation's begins with EVALUATION_ID."""
    task: Count
    """Which task: the same one always begins, and answers the same tokens, in the same way."""


class EpisodeContinue(Message, frozen=True):
    """What the student answered to a Turn. Client → environment; answered as EpisodeBegin is. Sending it
    again gives the same answer: a lost connection costs nothing."""

    id: str
    turn: Count
    """`Turn.turn` that is answered."""
    token_ids: Array
    """i4 [T], T >= 1: as sampled, the end token included"""
    finish_reason: Literal["stop", "length", "time"]


class EpisodeEnd(Message, frozen=True):
    """These episodes are given up, as far as they are under way. Client → environment; answered with Ok."""

    ids: list[str]


class Turn(Message, frozen=True):
    """Environment → client: it is the student's turn."""

    id: str
    turn: Count
    """0, 1, …"""
    token_ids: Array
    """i4 [E], E >= 1: what comes behind the first `keep` tokens of the sequence; of turn 0 the prompt"""
    keep: Count
    """Tokens of the context that stay. Fewer than it has: the environment rewrote it, and what follows is
    trained as a sequence of its own."""


class EpisodeOver(Message, frozen=True):
    """Environment → client: the episode has ended."""

    id: str
    reward: Number | None = None
    """Reward of the whole episode, `turn_rewards` included; None: the environment gives none."""
    turn_rewards: list[Number] = []
    """The part of each of the student's turns, in order; empty: the episode is rewarded as a whole."""
    metrics: dict[str, Number] = {}
    """Further figures, by name."""


class EpisodeFailed(Message, frozen=True):
    """Environment → client: the episode cannot go on, and is over."""

    id: str
    error: str
    lost: bool = False
    """The service does not know the episode: it was restarted, and the episode may begin again."""


class EnvironmentInfo(Message, frozen=True):
    """What an environment serves. Environment → client; answer to GET /v1/info."""

    name: str
    environment: str
    """What is played, such as "verifiers: guess" or "package.module:function"."""
    tasks: Count | None
    """How many there are; None: they have no end."""
    tokenizer_fingerprint: str
    """Fingerprint of the tokenizer that makes its tokens (`sync.base.tokenizers.fingerprint`)."""
