"""What crosses a process: every message, its lengths, its units, and what None means.

Producer → consumer
    controller → student replica   GenerateRequest, UpdateRequest
    student replica → controller   Generated | GenerateFailed (one frame each), UpdateReply, ReplicaState
    controller → teacher           ScoreRequest, TeacherGenerateRequest
    teacher → controller           ScoreReply, TeacherGenerateReply, TeacherInfo, Head
    trainer rank → controller      TrainerHello, BatchRequest, Heartbeat, StepReport, Published,
                                   CheckpointSaved, FinalDigests
    controller → trainer rank      TrainerWelcome, TrainBatch | Wait | Stop, Audience, BroadcastMembers
    people → controller            ReplicaJoins, ReplicaLeaves;  controller → people  Replicas
    controller → evaluator         EvalRequest, ProbeRequest;  evaluator → controller  EvalReport, ProbeReply

Bodies are msgpack. Every message carries its tag and `schema`; a reader refuses another schema.
Arrays are little-endian, row-major bytes with dtype and shape. Nothing here imports torch.

Letters in shapes: T completion tokens of one rollout, L prompt + completion tokens, K ids per position,
H teacher's hidden size, V vocabulary, R rows of a batch, C completion tokens of a batch (sum of T).
"""

# ruff: noqa: F401
# mypy: implicit-reexport
from __future__ import annotations

from sync.wire.base import (
    CONTENT_TYPE,
    DTYPES,
    SCHEMA,
    Array,
    Message,
    RunIdentity,
    Version,
    VersionSpan,
    decode,
    encode,
    frame,
    pack,
    unpack,
)
from sync.wire.student import (
    BroadcastTicket,
    Generated,
    GenerateFailed,
    GeneratePrompt,
    GenerateRequest,
    ReplicaJoins,
    ReplicaLeaves,
    Replicas,
    ReplicaState,
    ReplicaStatus,
    Sampling,
    UpdateReply,
    UpdateRequest,
)
from sync.wire.teacher import (
    EvalReport,
    EvalRequest,
    Head,
    ProbeReply,
    ProbeRequest,
    ReferenceScores,
    Scored,
    ScoreRefused,
    ScoreReply,
    ScoreRequest,
    ScoreSequence,
    TeacherCompletion,
    TeacherGenerateReply,
    TeacherGenerateRequest,
    TeacherInfo,
    TeacherPrompt,
    Want,
)
from sync.wire.trainer import (
    Audience,
    BatchRequest,
    BroadcastMembers,
    CheckpointSaved,
    FinalDigests,
    Heartbeat,
    Ok,
    Published,
    Rows,
    StepReport,
    Stop,
    TrainBatch,
    TrainerHello,
    TrainerWelcome,
    Wait,
)
