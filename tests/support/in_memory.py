"""The roles of `distill.bench.in_memory`, with faults: they die, refuse, spoil answers and broadcast."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from distill.bench import in_memory as plain
from distill.bench.in_memory import MemoryPrompts, weights_of
from distill.rollout.replica_client import Answer
from sync.errors import Overloaded, RemoteError, Unreachable
from sync.wire import (
    EvalReport,
    Generated,
    GenerateRequest,
    Published,
    Scored,
    ScoreRefused,
    ScoreSequence,
    TeacherCompletion,
    TeacherPrompt,
    Version,
    Want,
    decode,
    encode,
    pack,
)

__all__ = [
    "MemoryEvaluator",
    "MemoryPrompts",
    "MemoryReplica",
    "MemoryTeacher",
    "MemoryTrainer",
    "weights_of",
]


@dataclass
class MemoryReplica(plain.MemoryReplica):
    """`die()` breaks every stream and connection until `revive()`, which starts it on the model folder."""

    up: bool = True
    spoil: Callable[[Generated], Answer] = lambda answer: answer
    """Change an answer on its way out."""
    _broken: asyncio.Event = field(default_factory=asyncio.Event)

    def die(self) -> None:
        self.up = False
        self._broken.set()
        self._broken = asyncio.Event()

    def revive(self) -> None:
        self.up, self.version = True, None

    async def pass_time(self, seconds: float = 0.0) -> None:
        """Raises Unreachable when it dies meanwhile."""
        broken = self._broken
        if self.up:
            await asyncio.sleep(seconds)
        if broken.is_set() or not self.up:
            raise Unreachable("the replica is dead")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Answer, None]:
        async for answer in super().generate(request):
            yield self.spoil(answer) if isinstance(answer, Generated) else answer

    async def alive(self) -> bool:
        return self.up


@dataclass
class MemoryTeacher(plain.MemoryTeacher):
    """Also generates; `refuses` names ids it cannot serve."""

    up: bool = True
    refuses: Callable[[str], bool] = lambda _: False
    rejects: Callable[[str], bool] = lambda _: False
    """Ids whose whole request is refused."""
    completed: list[str] = field(default_factory=list)
    """Ids that it completed."""

    async def score(
        self, sequences: list[ScoreSequence], want: Want, deadline: float | None = None
    ) -> list[Scored | ScoreRefused]:
        if not self.up:
            await asyncio.sleep(0)
            raise Unreachable("the teacher is dead")
        if any(self.rejects(sequence.id) for sequence in sequences):
            raise RemoteError("one sequence cannot be read")
        return await super().score(sequences, want)

    def _scores(self, sequence: ScoreSequence, want: Want) -> Scored | ScoreRefused:
        if self.refuses(sequence.id):
            return ScoreRefused(sequence.id, "too long for this teacher")
        return super()._scores(sequence, want)

    async def generate(
        self,
        prompts: list[TeacherPrompt],
        max_tokens: int,
        stop_token_ids: Sequence[int],
        *,
        temperature: float = 1.0,
    ) -> list[TeacherCompletion | ScoreRefused]:
        """Tokens made from each prompt's seed."""
        await asyncio.sleep(0)
        if not self.up:
            raise Unreachable("the teacher is dead")
        return [self._completion(prompt, max_tokens) for prompt in prompts]

    def _completion(self, prompt: TeacherPrompt, max_tokens: int) -> TeacherCompletion | ScoreRefused:
        if self.refuses(prompt.id):
            return ScoreRefused(prompt.id, "too long for this teacher")
        rng = np.random.default_rng(prompt.seed)
        count = int(rng.integers(1, max_tokens + 1))
        self.completed.append(prompt.id)
        tokens, logprob = pack(rng.integers(0, 50, count).astype("i4")), pack(-rng.random(count).astype("f4"))
        return TeacherCompletion(prompt.id, tokens, logprob, "stop" if count < max_tokens else "length")


@dataclass
class MemoryEvaluator(plain.MemoryEvaluator):
    """Remembers what it evaluated; `kl` by step."""

    seen: list[Version] = field(default_factory=list)
    kl: Callable[[int], float] = lambda step: 1.0 / (1 + step)

    async def evaluate(self, version: Version) -> EvalReport:
        self.seen.append(version)
        await asyncio.sleep(0)
        report = EvalReport(
            version=version, reverse_kl=self.kl(version.step), pass_rate=None, completions=1, tokens=1,
            truncated=0.0, seconds=0.0,
        )  # fmt: skip
        return decode(encode(report), EvalReport)


@dataclass
class MemoryTrainer(plain.MemoryTrainer):
    """`broadcasts`: its versions go straight to the replicas instead of into a store."""

    broadcasts: bool = False

    @property
    def ledger(self) -> dict[int, dict[int, list[str]]]:
        """Lineage → step after → ids trained, of all ranks."""
        lines: dict[int, dict[int, list[str]]] = {w.version.lineage: {} for w in self.welcomes}
        for version, shares in self.batches.items():
            ids = [i for share in shares for rows in share.micro_batches for i in rows.ids]
            lines[version.lineage][version.step + 1] = ids
        return lines

    async def _publish(self, version: Version, kind: str) -> None:
        if not self.broadcasts:
            return await super()._publish(version, kind)
        event = Published(
            version=version, kind="broadcast", bytes=5, full_bytes=20, seconds=0.1, rendezvous="nowhere:1"
        )
        while True:
            try:
                await self.session.event(event)
                return None
            except Overloaded as error:  # no replica listens yet
                await asyncio.sleep(error.retry_after)
