"""What crosses a process: every message, its lengths, its units, and what None means.

Producer → consumer
    controller → student replica   GenerateRequest, UpdateRequest
    student replica → controller   Generated | GenerateFailed (one frame each), UpdateReply, ReplicaState
    controller → teacher           ScoreRequest, WriteRequest
    teacher → controller           ScoreReply, WriteReply, TeacherInfo, Head
    trainer rank → controller      TrainerHello, BatchRequest, StepReport, Published, CheckpointSaved
    controller → trainer rank      TrainerWelcome, TrainBatch | Wait | Stop, Audience, Seats
    people → controller            ReplicaJoins, ReplicaLeaves;  controller → people  Replicas
    controller → evaluator         EvalRequest, ProbeRequest;  evaluator → controller  EvalReport, ProbeReply

Bodies are msgpack. Every message carries its tag and `schema`; a reader refuses another schema.
Arrays are little-endian, row-major bytes with dtype and shape. Nothing here imports torch.

Letters in shapes: T completion tokens of one rollout, L prompt + completion tokens, K ids per position,
H teacher's hidden size, V vocabulary, R rows of a batch, C completion tokens of a batch (sum of T).
"""

from __future__ import annotations

import math
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from sync.errors import WireError

SCHEMA: Final = 1
CONTENT_TYPE: Final = "application/x-msgpack"
DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "u1": np.dtype("u1"),
    "i4": np.dtype("<i4"),
    "i8": np.dtype("<i8"),
    "f2": np.dtype("<f2"),
    "f4": np.dtype("<f4"),
    "bf16": np.dtype("<u2"),  # numpy has no bfloat16: its bits travel and live as uint16
}


class Array(msgspec.Struct, frozen=True, array_like=True):
    """An n-dimensional array; `data` is row-major, little-endian, exactly prod(shape) elements."""

    dtype: Literal["u1", "i4", "i8", "f2", "f4", "bf16"]
    shape: tuple[int, ...]
    data: bytes


def pack(array: np.ndarray, dtype: str | None = None) -> Array:
    """Array message of a numpy array. `dtype` names a wire type to convert to; "bf16" expects uint16 bits."""
    name = dtype or f"{array.dtype.kind}{array.dtype.itemsize}"
    if name not in DTYPES:
        raise WireError(f"array dtype {array.dtype} cannot be sent: use one of {', '.join(DTYPES)}")
    return Array(name, array.shape, np.ascontiguousarray(array, DTYPES[name]).tobytes())  # type: ignore[arg-type]


def unpack(array: Array) -> np.ndarray:
    """Read-only numpy view of an Array message; "bf16" comes back as uint16 bits.

    Raises WireError when the bytes do not fill the shape.
    """
    dtype = DTYPES[array.dtype]
    expected = math.prod(array.shape) * dtype.itemsize
    if min(array.shape, default=0) < 0 or expected != len(array.data):
        raise WireError(
            f"array of dtype {array.dtype} and shape {array.shape} needs {expected} bytes, "
            f"got {len(array.data)}: the message was cut or built wrongly"
        )
    try:
        return np.frombuffer(array.data, dtype).reshape(array.shape)
    except (ValueError, OverflowError) as error:  # an empty array with a dimension beyond any machine
        raise WireError(f"array shape {array.shape} cannot be: {error}") from None


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of everything that is a whole body or frame."""

    schema: int = SCHEMA


# --- versions ---------------------------------------------------------------------------------------------


class Version(NamedTuple):
    """Name of one state of the student's weights within a run.

    `step` is the optimizer step whose weights it holds (0: before training). `lineage` counts the trainer's
    starts in this run: resuming or rolling back opens a new lineage, so no name is ever published twice.
    """

    lineage: int
    step: int

    def __str__(self) -> str:
        return f"L{self.lineage:03d}-v{self.step:08d}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """Inverse of str(). Raises WireError on anything else."""
        try:
            lineage, step = text.split("-")
            if lineage[0] != "L" or step[0] != "v":
                raise IndexError
            return cls(int(lineage[1:]), int(step[1:]))
        except (ValueError, IndexError):
            raise WireError(f"{text!r} is not a version: expected the form L000-v00000012") from None


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Completion tokens [start, end) were sampled from `version`'s weights."""

    version: Version
    start: int
    end: int


# --- controller ↔ student replica -------------------------------------------------------------------------


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
    """One completion to sample. `id` is unique within the run and comes back with the answer."""

    id: str
    token_ids: list[int]
    seed: int | None = None
    """None: the engine's own randomness."""


class GenerateRequest(Message, frozen=True):
    """Complete every prompt; the answers come one by one, as each ends."""

    sampling: Sampling
    prompts: list[GeneratePrompt]


class Generated(Message, frozen=True):
    """One finished completion. T may be 0 only when `finish_reason` is "abort" or "time"."""

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
    """One prompt that the engine refused; the others of its request are not affected."""

    id: str
    error: str


class BroadcastTicket(msgspec.Struct, frozen=True):
    """A replica's seat in one broadcast of weights straight from the trainer (rank 0 of the group)."""

    address: str
    """"host:port" of the TCP store that the trainer serves."""
    group: str
    """Name of the group's keys in that store; a new one for every broadcast."""
    rank: int
    """1 … world_size - 1."""
    world_size: int


class UpdateRequest(Message, frozen=True):
    """Bring the replica to `version`: stage while generating, then pause, swap, stamp, resume."""

    version: Version
    kv_on_swap: Literal["recompute", "keep"] = "recompute"
    broadcast: BroadcastTicket | None = None
    """None: the version is read from the store."""


class UpdateReply(Message, frozen=True):
    """What an update cost."""

    version: Version
    """What the replica now serves."""
    bytes_read: int
    """Bytes fetched from the store, or received by broadcast, for this update."""
    stage_seconds: float
    """Download, decode, verify; generation went on."""
    pause_seconds: float
    """No token was generated: from the call to pause until resumed."""
    apply_seconds: float
    """The part of the pause that loaded weights."""


class ReplicaState(Message, frozen=True):
    """What a replica serves right now."""

    version: Version | None
    """None: still the folder the engine was started with, no published version yet."""
    requests: int
    """Completions in flight."""
    digests: dict[str, str] | None = None
    """Checkpoint tensor name → BLAKE3 hex of the bytes last given to the loader; None: not asked for."""
    tokens: int | None = None
    """Tokens generated since the engine started, unfinished completions included; None: nobody counts."""


# --- controller ↔ teacher ---------------------------------------------------------------------------------


class Want(msgspec.Struct, frozen=True):
    """What a teacher returns per completion position; the sampled token's log-probability always comes."""

    topk: int = 0
    """Ids and log-probabilities of the teacher's `topk` most likely tokens; 0: none."""
    entropy: bool = False
    """Where the engine can tell it: no objective needs it."""
    hidden: bool = False
    """Last hidden states after the final norm, for exact objectives with `Head`."""
    prompt: bool = False
    """Score prompt positions too, from the second token on (T then counts them)."""


class ScoreSequence(msgspec.Struct, frozen=True):
    """One sequence to mark."""

    id: str
    token_ids: Array
    """i4 [L]"""
    start: int
    """First completion token, 1 <= start < L; positions start … L-1 are scored, T = L - start."""
    gather_ids: Array | None = None
    """i4 [T, K] ids to score at each position, -1: skip (answered with 0); None: no gather"""


class ScoreRequest(Message, frozen=True):
    """Mark these sequences."""

    sequences: list[ScoreSequence]
    want: Want = Want()
    deadline: float | None = None
    """Seconds from arrival after which nobody waits for the answer; None: no deadline."""


class Scored(msgspec.Struct, frozen=True, tag=True):
    """A teacher's marks on one sequence, temperature 1, nats, full support."""

    id: str
    logprob: Array
    """f4 [T]: log q(y_t)"""
    topk_ids: Array | None = None
    """i4 [T, K], most likely first"""
    topk_logprob: Array | None = None
    """f2 or f4 [T, K]"""
    tail: Array | None = None
    """f4 [T]: probability mass outside topk_ids, in [0, 1]"""
    gathered: Array | None = None
    """f2 or f4 [T, K]: log q at gather_ids"""
    entropy: Array | None = None
    """f4 [T]; None: not asked for, or the engine cannot tell"""
    hidden: Array | None = None
    """bf16 or f4 [T, H]"""


class ScoreRefused(msgspec.Struct, frozen=True, tag=True):
    """One sequence or prompt that the teacher cannot serve; the others of its request are not affected."""

    id: str
    error: str


class ScoreReply(Message, frozen=True):
    """The marks, or why there are none, one for each sequence asked."""

    teacher: str
    results: list[Scored | ScoreRefused]
    """In the order asked."""


class WritePrompt(msgspec.Struct, frozen=True):
    """One completion for the teacher to write."""

    id: str
    token_ids: Array
    """i4 [P], P >= 1"""
    seed: int
    """0 … 2^32 - 1; the same seed and prompt give the same completion, whatever else is written beside it."""


class WriteRequest(Message, frozen=True):
    """Complete every prompt by sampling from the teacher's whole vocabulary."""

    prompts: list[WritePrompt]
    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: list[int] = []
    """Ids that end a completion besides the teacher's own EOS; the ending id is part of the completion."""
    deadline: float | None = None
    """Seconds from arrival after which nobody waits for the answer; None: no deadline."""


class Written(msgspec.Struct, frozen=True, tag=True):
    """One completion by the teacher."""

    id: str
    token_ids: Array
    """i4 [T], T >= 1"""
    logprob: Array
    """f4 [T]: log-probability of each token at the temperature of the request, nats"""
    finish_reason: Literal["stop", "length"]


class WriteReply(Message, frozen=True):
    """The completions, or why there are none, one for each prompt asked."""

    teacher: str
    results: list[Written | ScoreRefused]
    """In the order asked."""


class TeacherInfo(Message, frozen=True):
    """What a teacher is and what it can be asked for."""

    name: str
    model: str
    revision: str | None
    """None: a local folder."""
    dtype: str
    engine: str
    vocab_size: int
    """Rows of the tokenizer that may be scored; rows of the model beyond it are masked out."""
    hidden_size: int
    max_length: int
    """Longest sequence (L) that can be scored."""
    tokenizer_fingerprint: str
    """BLAKE3 hex over vocabulary, merges and special ids (`sync.tokenizers.fingerprint`)."""
    chat_template_fingerprint: str | None
    """None: the tokenizer has no chat template."""
    can: list[str]
    """Of: topk, gather, entropy, hidden, prompt, write."""


class Head(Message, frozen=True):
    """Output head of a teacher: logits = cap(scale · (hidden · weightᵀ + bias))."""

    teacher: str
    weight: Array
    """bf16 or f4 [V, H], only rows below vocab_size"""
    bias: Array | None = None
    """[V]"""
    scale: float = 1.0
    soft_cap: float | None = None
    """cap(x) = soft_cap · tanh(x / soft_cap); None: no cap"""


# --- people ↔ controller ----------------------------------------------------------------------------------


class ReplicaJoins(Message, frozen=True):
    """A student replica that is to serve this run from now on; answered with the Replicas there are then."""

    url: str
    name: str | None = None
    """None: the next free "student-N"."""


class ReplicaLeaves(Message, frozen=True):
    """A replica that is to serve this run no more; answered with the Replicas that remain."""

    name: str


class ReplicaSeat(msgspec.Struct, frozen=True):
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

    replicas: list[ReplicaSeat]


# --- trainer ↔ controller ---------------------------------------------------------------------------------


class TrainerHello(Message, frozen=True):
    """Rank 0, once per start of the trainer, before its first batch."""

    world_size: int
    checkpoint: Version | None
    """The checkpoint it resumed from; None: it starts from the model folder at step 0."""
    fingerprint: str
    """Of the model: `sync.weights.manifest.model_fingerprint`."""


class TrainerWelcome(Message, frozen=True):
    """Where the trainer begins."""

    version: Version
    """(lineage of this start, step it begins at)."""
    parent: Version | None
    """Where this lineage branched from; None: it is the first."""
    teachers: list[str]
    """Names, in the order that Rows.teacher indexes them."""


class BatchRequest(Message, frozen=True):
    """Long poll of one rank for its share of the batch of `version.step`; asking again gives the same."""

    version: Version
    rank: int
    world_size: int


class Rows(msgspec.Struct, frozen=True):
    """R scored rollouts, concatenated. Flat arrays run over rows in order; C = sum(completion_lens)."""

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
    batch where the teacher wrote"""
    teacher: Array
    """i4 [R]: index into TrainerWelcome.teachers"""
    teacher_logprob: Array
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
    by_teacher: Array | None = None
    """u1 [R]: 1 where the teacher wrote the completion, to be learned by cross-entropy; None: nowhere"""


class TrainBatch(Message, frozen=True):
    """One rank's share of one optimizer step."""

    version: Version
    """The weights this batch is trained on top of; the step makes version.step + 1."""
    denominator: int
    """Supervised tokens of the whole step over all ranks and micro-batches: divide loss sums by this."""
    micro_batches: list[Rows]
    """As many on every rank; a rank short of rows gets an empty Rows (R = 0)."""


class Wait(Message, frozen=True):
    """No batch yet; ask again."""

    publish: bool = False
    """First broadcast the current weights again: a replica waits for them."""


class Stop(Message, frozen=True):
    """No more batches: save what is asked and leave."""

    reason: str
    checkpoint: bool
    """Save a checkpoint before leaving."""


class StepReport(Message, frozen=True):
    """Rank 0, after each optimizer step."""

    version: Version
    """After the step."""
    metrics: dict[str, float]
    seconds: dict[str, float]
    """wait, train, publish, checkpoint: wall seconds of this step; `publish` only what the step waited for"""


class Published(Message, frozen=True):
    """Rank 0, when a version can be read by every replica."""

    version: Version
    kind: Literal["full", "delta", "lora", "broadcast"]
    bytes: int
    full_bytes: int
    """What a full snapshot of the same weights takes."""
    seconds: float
    rendezvous: str | None = None
    """"host:port" of the broadcast's store for kind "broadcast"; None otherwise."""


class Audience(Message, frozen=True):
    """Controller's answer to Published of kind "broadcast": who is being told to receive it."""

    group: str
    world_size: int
    """1 + replicas; 1: nobody listens, send nothing."""


class Seats(Message, frozen=True):
    """Controller's answer to GET /v1/broadcasts/GROUP, while rank 0 sends."""

    lost: dict[str, str]
    """Replica → why it will not receive this broadcast to its end; empty: all seats are taken."""


class CheckpointSaved(Message, frozen=True):
    """Rank 0, when a checkpoint is whole on disk."""

    version: Version
    path: str


class FinalDigests(Message, frozen=True):
    """Rank 0, before leaving: what every replica must hold (proof (a) of docs/weight-sync.md)."""

    version: Version
    digests: dict[str, str]
    """Checkpoint tensor name → BLAKE3 hex of its bytes."""


class Ok(Message, frozen=True):
    """Received and acted on."""


# --- controller ↔ evaluator -------------------------------------------------------------------------------


class EvalRequest(Message, frozen=True):
    """Evaluate a published version on the held-out prompts."""

    version: Version


class EvalReport(Message, frozen=True):
    """How good one version is."""

    version: Version
    reverse_kl: float
    """Nats per token: full vocabulary, fp32, over the student's own temperature-1 completions, with EOS."""
    pass_rate: float | None
    """Share of completions that the judge accepts; None: nobody judges."""
    completions: int
    tokens: int
    truncated: float
    """Share of completions that ended at the token limit."""
    seconds: float


class ProbeRequest(Message, frozen=True):
    """What plain forward passes give for these sequences, before the first step; `gather_ids` are ignored."""

    student: list[ScoreSequence]
    """Completions of the student itself; may be empty."""
    teachers: dict[str, list[ScoreSequence]]
    """Teacher's name → what it was asked to mark."""


class PlainMarks(msgspec.Struct, frozen=True):
    """One teacher by a plain forward pass, and what the run's objective makes of it."""

    logprob: list[Array]
    """f4 [T] for each sequence: log q(y_t), temperature 1"""
    self_loss: float | None
    """|loss| per token with the student in the teacher's place; None: the objective is `sft`."""
    self_gradient: float | None
    """Norm of the gradient in the logits, per token, of the same."""
    teacher_gradient: float | None
    """Norm of how much that gradient changes when the teacher takes its place."""


class ProbeReply(Message, frozen=True):
    """Figures of fp32 forward passes of the folders that the configuration names."""

    student: list[Array]
    """f4 [T] for each of `ProbeRequest.student`: log p(y_t) at the rollouts' temperature"""
    teachers: dict[str, PlainMarks]


# --- encoding ---------------------------------------------------------------------------------------------

M = TypeVar("M", bound=Message)
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder] = {}


def encode(message: Message) -> bytes:
    """Body of a message."""
    return _encoder.encode(message)


def decode(body: bytes, kind: type[M]) -> M:
    """The message in `body`, validated; `kind` may be a union of message types.

    Raises WireError when it is another message, another schema, or no message.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        message = decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        name = getattr(kind, "__name__", str(kind))
        raise WireError(f"body of {len(body)} bytes is not a {name}: {error}") from None
    if message.schema != SCHEMA:
        raise WireError(
            f"message has schema {message.schema}, this side speaks {SCHEMA}: run the same release everywhere"
        )
    return message


def frame(message: Message) -> bytes:
    """One frame of a streamed body: 4-byte little-endian length, then the message."""
    body = encode(message)
    return len(body).to_bytes(4, "little") + body
