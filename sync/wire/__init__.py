"""What crosses a process: every message, its lengths, its units, and what None means.

Producer → consumer
    controller → student replica   GenerateRequest, UpdateRequest
    student replica → controller   Generated | GenerateFailed (one frame each), UpdateReply, ReplicaState
    controller → teacher           ScoreRequest, ScoresRelease, TeacherGenerateRequest
    trainer rank → teacher         ScoreRequest, for scores that it no longer keeps
    teacher → controller           ScoreReply, TeacherGenerateReply, TeacherInfo, Head
    teacher → trainer rank         ScoreReply, kept or computed again
    trainer rank → controller      TrainerHello, BatchRequest, Heartbeat, StepReport, Published,
                                   CheckpointSaved, FinalDigests
    controller → trainer rank      TrainerWelcome, TrainBatch | Wait | Stop, TeacherServers, Audience,
                                   BroadcastMembers
    student replica → trainer rank KeyRequest;  trainer rank → student replica  KeyReply
    role, people → controller      ServerRegisters, ServerLeaves
    controller → role              ServerLease;  → people, evaluator  Servers;  → people  Why
    controller → evaluator         EvalRequest, EvalReport (the best so far), ProbeRequest
    evaluator → controller         EvalReply, ProbeReply
    controller → environment       EpisodeBegin, EpisodeContinue, EpisodeEnd
    environment → controller       Turn | EpisodeOver | EpisodeFailed, EnvironmentInfo

Bodies are msgpack. Every message carries its tag and `schema`; a reader refuses another schema.
Arrays are little-endian, row-major bytes with dtype and shape. Nothing here imports torch.

Letters in shapes: T completion tokens of one rollout, L prompt + completion tokens, K ids per position,
H teacher's hidden size, V vocabulary, R rows of a batch, C completion tokens of a batch (sum of T).
"""

from sync.wire.base import *  # noqa: F403
from sync.wire.evaluator import *  # noqa: F403
from sync.wire.replica import *  # noqa: F403
from sync.wire.teacher import *  # noqa: F403
from sync.wire.trainer import *  # noqa: F403
