"""A rollout, and where its arrays are. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import msgspec
import numpy as np

from distill.prompts.stream import Prompt
from sync import wire
from sync.wire import Array, Generated, Kept, SamplingMask, Scored, Version, VersionSpan, pack, unpack

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

NO_TOKENS: Final = Array("i4", (0,), b"")
NO_VALUES: Final = Array("f4", (0,), b"")


class Block(msgspec.Struct, frozen=True, order=True, gc=False):
    """A row of the table `block`: arrays that lie together in a file of `arrays/`."""

    number: int
    file: int
    start: int  # its first byte
    size: int  # in bytes
    crc: int  # crc32


class Location(msgspec.Struct, order=True, gc=False):
    """Where the record has a rollout."""

    block: Block | None  # of its arrays, before it is scored of its prompt; None: it is not committed yet
    place: int  # in the block
    row: int


class Rollout(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """One rollout, from the issue of its prompt to the step that trains on it: every stage adds its part.

        Record.issue ─▶ completed: Dispatcher, TeacherGeneration ─▶ scored: Scoring ─▶ record, buffer, batch

    The record holds it once it is scored, without a teacher once it is rewarded. In memory it is `released`
    when nothing needs its arrays there.
    Letters as in sync.wire: P prompt tokens, T completion tokens, K ids. Without lists: a buffer holds
    thousands, and what is made of tuples alone costs no garbage collection anything.
    """

    id: str
    number: int  # of its prompt, in the order of issue
    prompt: Array = NO_TOKENS  # i4 [P]; empty until it is scored
    tokens: Array = NO_TOKENS  # i4 [T] of the completion; without its bytes when released
    logprob: Array = NO_VALUES  # f4 [T]: log μ
    spans: tuple[VersionSpan, ...] = ()  # which version sampled which tokens; empty: the teacher did
    truncated: bool = False  # the completion was ended by a limit
    teacher: str = ""  # whose scores it has; empty: nobody's
    scored: Scored | None = None
    """None: not scored yet, or there is no teacher; released: `Scored.kept` alone, if it is kept"""
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
        """Whether its arrays are only on record, or nowhere any more."""
        return self.length > 0 and not self.tokens.data

    @property
    def reverse_kl(self) -> float | None:
        """Mean of log μ − log q over its own tokens, nats; None: not both are given for every token."""
        if self.scored is None or not self.own_length:
            return None
        if self.logprob.shape != self.tokens.shape or self.scored.logprob.shape != self.tokens.shape:
            return None  # kept by its teacher, or wrong: whoever reads it back says what
        excess = unpack(self.logprob) - unpack(self.scored.logprob)
        if not self.own:
            return float(excess.mean(dtype="f8"))
        return float(sum(excess[start:end].sum(dtype="f8") for start, end in self.own)) / self.own_length

    @property
    def kept(self) -> Kept | None:
        """Where its teacher keeps its scores, also when it is released; None: nowhere."""
        return self.scored.kept if self.scored is not None else None

    def age(self, step: int, step_of: Callable[[Version], int]) -> int:
        """Versions between the oldest token and `step`; 0 for a teacher's completion, which does not age."""
        return 0 if self.by_teacher else step - min([step_of(span.version) for span in self.spans])

    def completed(self, answer: Generated) -> Rollout:
        """With the student's completion."""
        return msgspec.structs.replace(
            self,
            tokens=answer.token_ids,
            spans=tuple(answer.spans),
            truncated=answer.finish_reason in ("length", "time"),
            routes=answer.routes,
            **{name: getattr(answer, name) for name in wire.TOKEN_PARTS},
        )

    def ended(self) -> Rollout:
        """With its prompt in tokens, and without what was needed on the way: ready for record and buffer."""
        prompt = pack(np.asarray(self.source_prompt.token_ids, "i4"))
        return msgspec.structs.replace(self, prompt=prompt, since=None, issued=None)

    def on_disk(self) -> Rollout:
        """What a block holds of it: what its row does not say."""
        if self.issued is not None:
            return Rollout("", 0, issued=msgspec.structs.replace(self.issued, id=""))
        scored = self.scored and msgspec.structs.replace(self.scored, id="", kept=None)
        return msgspec.structs.replace(self, id="", number=0, spans=(), teacher="", scored=scored)

    def whole(self, block: Rollout) -> Rollout:
        """With its arrays; `block`: what a block holds of it."""
        scored = block.scored and msgspec.structs.replace(block.scored, id=self.id, kept=self.kept)
        facts = {"id": self.id, "number": self.number, "spans": self.spans, "teacher": self.teacher}
        return msgspec.structs.replace(block, **facts, scored=scored)

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
