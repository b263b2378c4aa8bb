"""What the journal holds: one type for everything that happens to a prompt, a batch or a version.

The state of a run is these records applied in order (see `state`), live as well as after a restart. Every
subclass of Record is a kind of entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from distill.prompts.stream import Prompt
from sync.base.errors import DataError
from sync.wire import Array, EvalReport, Generated, Kept, SamplingMask, Scored, Version, VersionSpan

DropReason = Literal[
    "too_old",
    "teacher_refused",
    "empty",
    "engine_failed",
    "straggler",
    "repetitive",
    "over_long",
    "rolled_back",
    "group_broken",
    "unusable",
    "function_failed",
    "poisoned",
    "impossible_version",
    "environment_failed",
]
RequeueReason = Literal[
    "replica_lost",
    "replica_busy",
    "aborted",
    "straggler",
    "over_long",
    "unusable",
    "controller_restarted",
    "environment_lost",
]

SPENDS_ATTEMPT: Final = ("aborted", "straggler", "over_long", "unusable")
"""Reasons that count towards `rollout.max_attempts`: the others are not the fault of the prompt."""


class Record(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of every journal entry."""


class Location(msgspec.Struct, array_like=True, order=True):
    """Where a record stands in the journal: known once it is committed, -1 until then."""

    segment: int = -1
    offset: int = -1  # of the record's block
    index: int = 0  # of the record in it


class Opened(Record, frozen=True):
    """A controller started on this journal."""

    run: str
    seed: int
    batch: int
    max_staleness: int  # oldest age at full weight
    hard_limit: int | None = None  # oldest age at all; None: max_staleness
    half_life: float = 1.0  # versions beyond max_staleness that halve a rollout's weight
    group: int = 1  # completions of a prompt that go into a batch together
    per_prompt: int = 1  # completions of each prompt
    rows: int | None = None  # prompts of an epoch; None: they have no end
    id: str | None = None  # `RunIdentity.id`: the same at every opening
    supervised: int | None = None  # tokens of each completion that are trained on; None: all


class Issued(Record, frozen=True):
    """Prompts left the cursor; a prompt's number is its place in the order of issue."""

    prompts: list[Prompt]  # token ids are emptied once no restart can need them
    epoch: int
    position: int  # the cursor after them
    by_teacher: list[int] = []
    """Places in `prompts` of those that their teacher completes; the student completes the others."""


class Requeued(Record, frozen=True):
    """Prompts whose completion was lost; they wait to be sent again."""

    ids: list[str]
    reason: RequeueReason
    tokens: int = 0  # completion tokens that were generated for nothing, as far as they are known


NO_TOKENS: Final = Array("i4", (0,), b"")
NO_VALUES: Final = Array("f4", (0,), b"")


class Rollout(Record, frozen=True):
    """One rollout, from the issue of its prompt to the step that trains on it: every stage adds its part.

        RunLog.issue ─▶ completed: Dispatcher, TeacherGeneration ─▶ scored: Scoring ─▶ journal, buffer, batch

    The journal holds it once it is scored. In memory, and in the archive, it is `released` when nothing needs
    its arrays there. Letters as in sync.wire: P prompt tokens, T completion tokens, K ids. Without lists: a
    buffer holds thousands, and what is made of tuples alone costs no garbage collection anything.
    """

    id: str
    number: int  # of its prompt, in the order of issue
    prompt: Array = NO_TOKENS  # i4 [P]; empty until it is scored
    tokens: Array = NO_TOKENS  # i4 [T] of the completion; without its bytes when released
    logprob: Array = NO_VALUES  # f4 [T]: log μ
    spans: tuple[VersionSpan, ...] = ()  # which version sampled which tokens; empty: the teacher did
    truncated: bool = False  # the completion was ended by a limit
    teacher: str = ""  # whose scores it has
    scored: Scored | None = None  # None: not scored yet; released: `Scored.kept` alone, if it is kept
    topk_ids: Array | None = None  # i4 [T, K]: the student's own; None: not used, or kept with the scores
    reward: float | None = None  # None: neither reward_fn nor environment gives one
    by_teacher: bool = False
    """The teacher generates it: `logprob` is its own, `spans` is empty, and it has no age."""
    attempts: int = 0  # completions of it that were broken off, or reached a limit and were requeued
    since: Version | None = None  # what its replica held when it was sent; None: not in flight
    issued: Prompt | None = None  # the prompt as the stream gave it; None once it is scored
    teacher_prompt: Array | None = None
    """i4 [P']: what the teacher of kept scores saw instead of `prompt`; None: the same, or they are here"""
    own: tuple[tuple[int, int], ...] = ()
    """Start and end, in T, of the tokens that the student sampled in each turn of an episode; the others are
    the environment's. Empty: all T."""
    earned: tuple[float, ...] = ()
    """What the turns before each of `own` added to `reward`: no merit of its tokens. Empty: nothing."""
    continues: bool = False
    """What an episode said behind a context that its environment rewrote: "ID+N" beside rollout ID. It is on
    no record until it is scored, and is lost with what holds it until then."""
    mask: SamplingMask | None = None  # of the T tokens; None: sampled from the whole vocabulary
    routes: Array | None = None
    """u1 or i4 [P + T - 1, layers, experts of a token], as in Generated; None: not recorded"""
    routes_from: int = 0  # of the turn of an episode that is generated, as in GeneratePrompt; else 0

    @property
    def length(self) -> int:
        """T"""
        return self.tokens.shape[0]

    @property
    def own_length(self) -> int:
        """Tokens of T that student or teacher generated: those of `own`."""
        return sum(end - start for start, end in self.own) if self.own else self.length

    @property
    def source_prompt(self) -> Prompt:
        """`issued`, of a rollout that is not scored yet."""
        assert self.issued is not None, f"{self.id} is scored already"
        return self.issued

    @property
    def is_released(self) -> bool:
        """Whether its arrays are only in the journal, or nowhere any more."""
        return self.length > 0 and not self.tokens.data

    @property
    def kept(self) -> Kept | None:
        """Where its teacher keeps its scores, also when it is released; None: nowhere."""
        return self.scored.kept if self.scored is not None else None

    def age(self, step: int, step_of: Callable[[Version], int]) -> int:
        """Versions between the oldest token and `step`; 0 for a teacher's completion, which does not age."""
        return 0 if self.by_teacher else step - min(step_of(span.version) for span in self.spans)

    def completed(self, answer: Generated) -> Rollout:
        """With the student's completion."""
        return msgspec.structs.replace(
            self,
            tokens=answer.token_ids,
            logprob=answer.logprob,
            spans=tuple(answer.spans),
            truncated=answer.finish_reason in ("length", "time"),
            topk_ids=answer.topk_ids,
            mask=answer.mask,
            routes=answer.routes,
        )

    def released(self) -> Rollout:
        """Without arrays: what accounts, ages, audit and the release of kept scores need."""
        if self.is_released:
            return self
        return Rollout(
            self.id,
            self.number,
            tokens=Array("i4", self.tokens.shape, b""),
            spans=self.spans,
            teacher=self.teacher,
            scored=None if self.kept is None else Scored(self.id, NO_VALUES, kept=self.kept),
            by_teacher=self.by_teacher,
            own=self.own,
            continues=self.continues,
        )


class Dropped(Record, frozen=True):
    """These prompts or rollouts will not be trained on."""

    ids: list[str]
    reason: DropReason
    tokens: int  # that were generated for nothing and are in no Rollout record
    detail: str = ""


class BatchFormed(Record, frozen=True):
    """The batch trained on top of `version`, in order."""

    version: Version
    ids: list[str]
    weights: list[float] = []  # what each counts for (`Bound.weight` of its age); empty: 1 for all


class LineageOpened(Record, frozen=True):
    """A trainer started; see distill.buffer.Lineage."""

    lineage: int
    checkpoint: Version | None
    start: int
    origin: int | None
    branch: int
    fingerprint: str
    without: list[str] = []  # rollouts of batches that are left for good: dropped, as "rolled_back"
    ranks: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1  # of the trainer
    parts: list[list[str]] = []
    """Of batches that trainers died on: the rollouts of each are a batch of their own from now on."""


class HandedOut(Record, frozen=True):
    """A rank of the current trainer has the batch of `version`."""

    version: Version


class Stepped(Record, frozen=True):
    """The trainer reached `version`."""

    version: Version


class VersionPublished(Record, frozen=True):
    """The trainer published a version; fields as in sync.wire.Published."""

    version: Version
    kind: Literal["full", "delta", "lora", "broadcast"]
    bytes: int
    full_bytes: int
    seconds: float


class VersionApplied(Record, frozen=True):
    """A replica serves `version` now; fields as in UpdateReply, `seconds` from request to reply."""

    replica: str
    version: Version
    bytes: int
    stage_seconds: float
    pause_seconds: float
    apply_seconds: float
    seconds: float


class Checkpointed(Record, frozen=True):
    """The trainer's checkpoint of `version` is whole."""

    version: Version
    path: str


class RolledBack(Record, frozen=True):
    """The guard sent the trainer away: the next lineage begins at `to`, and never sees these rollouts."""

    to: Version | None  # a checkpoint; None: the model folder
    without: list[str]
    problem: str


class Evaluated(Record, frozen=True):
    """A version was evaluated."""

    report: EvalReport


class Concluded(Record, frozen=True):
    """The trainer has left and what can be shown of the last version was shown."""

    version: Version | None  # the trainer's last word; None: it gave none
    weights: dict[str, bool | None]
    """Replica → whether it held the trainer's weights; None: it was not compared."""
    problems: list[str]  # what is wrong with the end of the run; empty: nothing


class Held(NamedTuple):
    """What a snapshot holds on to."""

    segment: int  # the one that it heads
    needed: frozenset[int]  # those that hold its prompts and rollouts


class Snapshot(Record, frozen=True):
    """The state of the run, at the head of a segment: a restart replays from one of these."""

    checkpoint: Version  # the newest when it was taken; batches of earlier steps are left out
    base: int | None
    """Segment that a restart replays from, headed by the snapshot of the oldest kept checkpoint; None: this
    one."""
    state: bytes  # msgpack of a RunState, without the arrays of its rollouts
    where: dict[str, Location]  # places of its prompts and rollouts


def compacted(record: Record) -> Record:
    """The record without what only a restart would need."""
    if isinstance(record, Rollout):
        return msgspec.structs.replace(record.released(), scored=None)
    if isinstance(record, Issued):
        prompts = [Prompt(prompt.id, [], prompt.source) for prompt in record.prompts]
        return Issued(prompts, record.epoch, record.position, record.by_teacher)
    return record


@contextmanager
def contradictions(record: Record, at: Location) -> Iterator[None]:
    """Turn what applying a record raises, whose bytes are whole, into a DataError that names its place."""
    try:
        yield
    except (LookupError, ValueError, AssertionError, ArithmeticError) as error:
        raise DataError(
            f"segment {at.segment}, byte {at.offset} of the journal: {type(record).__name__} contradicts the "
            f"records before it ({type(error).__name__}: {error}): restore it from a copy, or start a new run"
        ) from None
