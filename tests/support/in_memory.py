"""Prompts, replica, teacher, evaluator and trainer in memory: the same protocols without engines.

They obey the contracts of the real ones (frames as each completion ends, versions per token, idempotent
batches), make their numbers from seeds, and fail on demand: they die, refuse, spoil answers and broadcast.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import numpy as np
from blake3 import blake3
from msgspec.structs import replace

from distill.aio import Signal
from distill.config.prompts import TaskPrompts
from distill.evaluation.sets import PromptSet
from distill.prompts.rewards import Reward
from distill.prompts.stream import Prompt
from distill.rollout.replica_client import Answer
from distill.trainer_api.session import TrainerSession
from student_trainer.teacher_scores import TeacherScores
from sync import wire
from sync.base.errors import DistillError, Overloaded, RemoteError, Unreachable
from sync.wire import EvalReport, Generated, Scored, ScoreRefused, Stop, TrainBatch, Version, Wait, pack
from teacher_service.client import Counters, Reply


@dataclass
class MemoryPrompts:
    """Endless prompts without a tokenizer: row i is [i mod 50, 1, 2], of each of the sources in turn."""

    sources: Sequence[str] = ("default",)

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(str(index), [index % 50, 1, 2], self.sources[index % len(self.sources)])


def some_ids(count: int, k: int) -> np.ndarray:
    """i4 [count, k]: in each row different ids."""
    return (np.arange(count)[:, None] + np.arange(k)).astype("i4") % 50


def some_masks(token_ids: list[int], k: int) -> wire.SamplingMask:
    """Of tokens below 50: 1 to `k` ids each, the token itself first."""
    rows = [[(token + i) % 50 for i in range(1 + token % k)] for token in token_ids]
    ids = [id for row in rows for id in row]
    return wire.SamplingMask(pack(np.array([*map(len, rows)], "i4")), pack(np.array(ids, "i4")))


ROUTING: Final = wire.Routing(layers=3, chosen=2, experts=5)


def some_routes(token_ids: Sequence[int]) -> wire.Array:
    """Of all tokens but the last: in layer l those after token + l."""
    first_P = np.array(token_ids[:-1]).reshape(-1, 1, 1) + np.arange(ROUTING.layers).reshape(1, -1, 1)
    return pack(((first_P + np.arange(ROUTING.chosen)) % ROUTING.experts).astype("u1"))


def weights_of(version: Version | None) -> dict[str, str]:
    """Digests of a version's weights."""
    return {"model.weight": f"{version}"}


@dataclass
class MemoryReplica:
    """Completions of 1 to `longest` tokens; those of a request end one after the other.

    `die()` breaks every stream and connection until `revive()`, which starts it on the model folder.
    """

    seed: int = 0
    longest: int = 8
    token_seconds: float = 0.0
    version: Version | None = None
    url: str = "memory"
    generated: int = 0
    """Completions it has finished."""
    tokens: int = 0
    """Tokens of those."""
    served: deque[wire.GenerateRequest] = field(default_factory=lambda: deque(maxlen=64))
    """Its newest requests."""
    updates: list[Version] = field(default_factory=list)
    up: bool = True
    spoil: Callable[[Generated], Answer] = lambda answer: answer
    """Change an answer on its way out."""
    player: Callable[[Sequence[int]], list[int]] | None = None
    """Answers a prompt; None: tokens at random."""
    refusal: Callable[[Version], str] = lambda _: ""
    """Why it does not take a version; empty: it does."""
    workers: int = 1
    closed: bool = False
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

    async def generate(self, request: wire.GenerateRequest) -> AsyncGenerator[Answer, None]:
        self.served.append(request)
        for prompt in request.prompts:
            yield self.spoil(await self._complete(prompt, request))

    async def _complete(self, prompt: wire.GeneratePrompt, request: wire.GenerateRequest) -> Generated:
        rng = np.random.default_rng([self.seed, self.generated])
        sampling = request.sampling
        count = int(rng.integers(1, min(self.longest, sampling.max_tokens) + 1))
        said = rng.integers(0, 50, count).tolist() if self.player is None else self.player(prompt.token_ids)
        count = min(len(said), sampling.max_tokens)
        in_time = int((sampling.max_seconds or 1e9) / max(self.token_seconds, 1e-9))
        reason = "time" if in_time < count else "stop" if count < sampling.max_tokens else "length"
        count = min(count, in_time)
        before, half = self.version, count // 2
        await self.pass_time(self.token_seconds * count)
        spans = [
            wire.VersionSpan(before or Version(0, 0), 0, half),
            wire.VersionSpan(self.version or Version(0, 0), half, count),
        ]
        self.generated += 1
        self.tokens += count
        return Generated(
            id=prompt.id,
            token_ids=pack(np.array(said[:count], "i4")),
            logprob=pack(-rng.random(count).astype("f4")),
            spans=[span for span in spans if span.end > span.start],
            finish_reason=reason,  # type: ignore[arg-type]
            topk_ids=pack(some_ids(count, sampling.student_topk)) if sampling.student_topk else None,
            mask=some_masks(said[:count], sampling.top_k) if sampling.mask else None,
            routes=some_routes([*prompt.token_ids[prompt.routes_from :], *said[:count]])
            if sampling.routes
            else None,
        )

    async def update(self, request: wire.UpdateRequest, timeout: float) -> wire.UpdateReply:
        await self.pass_time()
        if why := self.refusal(request.version):
            raise RemoteError(why)
        self.version = request.version
        self.updates.append(request.version)
        return wire.UpdateReply(
            version=request.version, bytes_read=10, stage_seconds=0.2, pause_seconds=0.1, apply_seconds=0.05
        )

    async def state(self, digests: bool = False) -> wire.ReplicaState:
        await self.pass_time()
        held = weights_of(self.version) if digests else None
        counts = {"requests": 0, "tokens": self.tokens, "workers": self.workers}
        return wire.ReplicaState(version=self.version, digests=held, **counts)

    async def alive(self) -> bool:
        return self.up

    async def aclose(self) -> None:
        self.closed = True


def with_nan(answer: Generated) -> Generated:
    """For `MemoryReplica.spoil`: log-probabilities that are none."""
    return replace(answer, logprob=pack(np.full(answer.logprob.shape, np.nan, "f4")))


def without_tokens(answer: Generated) -> Generated:
    """For `MemoryReplica.spoil`."""
    nothing = pack(np.zeros(0, "f4"))
    topk_ids = answer.topk_ids and pack(np.zeros((0, answer.topk_ids.shape[1]), "i4"))
    return replace(answer, token_ids=pack(np.zeros(0, "i4")), logprob=nothing, spans=[], topk_ids=topk_ids)


@dataclass
class MemoryTeacher:
    """Scores every token with -1; `refuses` names ids it cannot serve."""

    width = 4
    """Of its hidden states."""
    processes = 1
    requests: list[int] = field(default_factory=list)
    """Sequences of each request."""
    counters: Counters = field(default_factory=Counters)
    up: bool = True
    refuses: Callable[[str], bool] = lambda _: False
    rejects: Callable[[str], bool] = lambda _: False
    """Ids whose whole request is refused."""
    completed: list[str] = field(default_factory=list)
    """Ids that it completed."""
    kept: dict[str, bytes] = field(default_factory=dict)
    """Bodies by key; clear it, and they are gone."""
    _numbers: Iterator[int] = field(default_factory=count)

    @property
    def pause(self) -> float:
        return 0.0 if self.up else 0.5

    async def score(
        self, sequences: Sequence[wire.ScoreSequence], want: wire.Want = wire.Want(), limit: float = 0.0
    ) -> Reply[Scored | ScoreRefused]:
        await asyncio.sleep(0)
        if not self.up:
            raise Unreachable("the teacher is dead")
        if any(self.rejects(sequence.id) for sequence in sequences):
            raise RemoteError("one sequence cannot be read")
        self.requests.append(len(sequences))
        self.counters.requests += 1
        self.counters.sequences += len(sequences)
        found = [self._scores(sequence, want) for sequence in sequences]
        return Reply([*map(self._keep, found, sequences)] if want.keep else found, "memory")

    def _keep(self, scored: Scored | ScoreRefused, sequence: wire.ScoreSequence) -> Scored | ScoreRefused:
        if isinstance(scored, ScoreRefused):
            return scored
        scored = replace(scored, gather_ids=sequence.gather_ids)
        body, key = wire.frame(wire.ScoreReply(results=[scored])), f"b007-{next(self._numbers)}"
        self.kept[key] = body
        kept = wire.Kept("memory", key, len(body), blake3(body).digest(wire.DIGEST_BYTES))
        return Scored(scored.id, scored.logprob, kept=kept)

    async def release(self, kept: Sequence[wire.Kept]) -> None:
        for one in kept:
            self.kept.pop(one.key, None)

    def servers(self) -> wire.TeacherServers:
        return wire.TeacherServers(urls=["memory"], fingerprint=None)

    def once(self, path: str, body: bytes | None, timeout: float, model: str | None = None) -> bytes:
        """As `BlockingPeer.once`."""
        if body is not None:
            request = wire.decode(body, wire.ScoreRequest)
            results = [self._scores(sequence, request.want) for sequence in request.sequences]
            return wire.encode(wire.ScoreReply(results=results))
        if (key := path.removeprefix("/v1/scores/")) not in self.kept:
            raise RemoteError(f"{key} is gone")
        return self.kept[key]

    def _scores(self, sequence: wire.ScoreSequence, want: wire.Want) -> Scored | ScoreRefused:
        if self.refuses(sequence.id):
            return ScoreRefused(sequence.id, "too long for this teacher")
        count = sequence.token_ids.shape[0] - sequence.start
        ids = sequence.gather_ids
        return Scored(
            sequence.id,
            logprob=pack(np.full(count, -1.0, "f4")),
            topk_ids=pack(some_ids(count, want.topk)) if want.topk else None,
            topk_logprob=pack(np.full((count, want.topk), -np.log(50), "f2")) if want.topk else None,
            gathered=None if ids is None else pack(np.zeros(ids.shape, "f2")),
            entropy=pack(np.zeros(count, "f4")) if want.entropy else None,
            hidden=wire.Array("bf16", (count, self.width), bytes(2 * self.width * count))
            if want.hidden
            else None,
        )

    async def generate(
        self,
        prompts: Sequence[wire.TeacherPrompt],
        max_tokens: int,
        stop_token_ids: Sequence[int],
        **_: object,
    ) -> Reply[wire.TeacherCompletion | ScoreRefused]:
        """Tokens made from each prompt's seed."""
        await asyncio.sleep(0)
        if not self.up:
            raise Unreachable("the teacher is dead")
        return Reply([self._completion(prompt, max_tokens) for prompt in prompts], "memory")

    def _completion(
        self, prompt: wire.TeacherPrompt, max_tokens: int
    ) -> wire.TeacherCompletion | ScoreRefused:
        if self.refuses(prompt.id):
            return ScoreRefused(prompt.id, "too long for this teacher")
        rng = np.random.default_rng(prompt.seed)
        count = int(rng.integers(1, max_tokens + 1))
        self.completed.append(prompt.id)
        tokens, logprob = pack(rng.integers(0, 50, count).astype("i4")), pack(-rng.random(count).astype("f4"))
        return wire.TeacherCompletion(prompt.id, tokens, logprob, "stop" if count < max_tokens else "length")

    async def head(self) -> wire.Head:
        return wire.Head(weight=pack(np.zeros((50, self.width), "f4")))

    async def first_info(self) -> wire.TeacherInfo:
        return wire.TeacherInfo(
            name="memory", model="memory", revision=None, dtype="float32", engine="memory", vocab_size=50,
            hidden_size=self.width, max_length=4096, max_topk=50, tokenizer_fingerprint="", fingerprint="",
            chat_template_fingerprint=None, can=["topk", "gather", "entropy", "hidden", "generate"],
        )  # fmt: skip

    def leave_out(self, server: str) -> bool:
        return False


def fetching(teacher: MemoryTeacher, want: wire.Want, student_topk: int = 0) -> TeacherScores:
    """What a rank fetches the scores of teacher "t" with."""
    connect, servers = (lambda url: teacher), (lambda name: teacher.servers())
    return TeacherScores(["t"], want, student_topk, 50, servers, connect, threading.Event())


@dataclass
class MemoryRewards:
    """Calls a function; what it raises is raised."""

    function: Callable[[Prompt, list[int]], float]

    async def reward(self, prompt: Prompt, token_ids: Sequence[int]) -> Reward:
        return Reward(float(self.function(prompt, list(token_ids))))


@dataclass
class MemoryEvaluator:
    """Remembers what it compared, and what was the best."""

    seen: list[Version] = field(default_factory=list)
    kl: Callable[[Version], float] = lambda version: 1.0 / (1 + version.step)
    """One below 0 is estimated."""
    best: list[EvalReport] = field(default_factory=list)
    seconds: float = 0.0
    """Of an evaluation."""
    trouble: Callable[[Version], DistillError | None] = lambda version: None
    """What it raises instead."""

    async def evaluate(self, request: wire.EvalRequest) -> wire.EvalReply:
        await asyncio.sleep(self.seconds)
        if error := self.trouble(request.version):
            raise error
        self.seen.append(request.version)
        each = self.kl(request.version)
        teachers = {
            name: wire.Divergence(exact=each >= 0, sums=[each * tokens.count for tokens in sequences])
            for name, sequences in request.teachers.items()
        }
        reply = wire.EvalReply(version=request.version, teachers=teachers)
        return wire.decode(wire.encode(reply), wire.EvalReply)  # with its checks

    async def keep(self, report: EvalReport) -> None:
        self.best.append(report)


HELD_OUT_SET: Final = PromptSet(
    [Prompt(str(i), [i, 1, 2]) for i in range(6)],
    completions=1,
    sampling=wire.Sampling(max_tokens=8),
    rewards=None,
    config=TaskPrompts(type="task", task="sort_letters"),
    decode=str,
)


def rows_in(shares: Sequence[TrainBatch]) -> list[wire.Rows]:
    """The micro-batches of all ranks."""
    return [rows for share in shares for rows in share.micro_batches]


@dataclass
class MemoryTrainer:
    """All ranks in one task; "trains" by remembering what it was given.

    `broadcasts`: its versions go straight to the replicas instead of into a store.
    """

    session: TrainerSession
    ranks: int = 1
    checkpoint_every: int = 0
    step_seconds: float = 0.0
    checkpoint: Version | None = None
    """The newest it has saved; it resumes from there."""
    batches: dict[Version, list[TrainBatch]] = field(default_factory=dict)
    """What it trained on, by the version it was on top of."""
    welcomes: list[wire.TrainerWelcome] = field(default_factory=list)
    record: Callable[[Version, list[TrainBatch]], None] | None = None
    """Takes what it trained on instead of `batches`."""
    stepped: Signal = field(default_factory=Signal)
    broadcasts: bool = False
    scores: TeacherScores | None = None
    """Fetches what teachers keep; None: nothing is kept."""
    waited: float = 0.0
    """Seconds, for its newest batch."""
    metrics: Callable[[Version], dict[str, float]] = lambda version: {"loss": 1.0}
    """Of the step that made a version."""

    @property
    def ledger(self) -> dict[int, dict[int, list[str]]]:
        """Lineage → step after → ids trained, of all ranks."""
        lines: dict[int, dict[int, list[str]]] = {w.version.lineage: {} for w in self.welcomes}
        for version, shares in self.batches.items():
            lines[version.lineage][version.step + 1] = [id for rows in rows_in(shares) for id in rows.ids]
        return lines

    @property
    def trained(self) -> list[str]:
        """Ids of all lineages, in order."""
        return [id for steps in self.ledger.values() for ids in steps.values() for id in ids]

    @property
    def rows(self) -> list[wire.Rows]:
        """Every micro-batch of every rank."""
        return [rows for shares in self.batches.values() for rows in rows_in(shares)]

    async def reached(self, steps: int) -> None:
        """Wait until it has made so many."""
        while len(self.batches) < steps:
            await self.stepped.wait()

    async def run(self) -> Stop:
        """From hello to the last message. Cancel it to kill it."""
        hello = wire.TrainerHello(
            world_size=self.ranks, checkpoint=self.checkpoint, fingerprint="model", run=self.session.run.name
        )
        welcome = await self.session.hello(hello)
        self.welcomes.append(welcome)
        version = welcome.version
        await self._publish(version, "full")
        while True:
            asked = time.monotonic()
            shares = [await self._batch(version, rank) for rank in range(self.ranks)]
            self.waited = time.monotonic() - asked
            stops = [share for share in shares if isinstance(share, Stop)]
            if stops:
                assert len(stops) == self.ranks, "ranks were told different things"
                if stops[0].checkpoint:
                    await self._save(version)
                await self.session.event(wire.FinalDigests(version=version, digests=weights_of(version)))
                return stops[0]
            version = await self._step(version, [s for s in shares if isinstance(s, TrainBatch)])

    async def _batch(self, version: Version, rank: int) -> TrainBatch | Stop:
        request = wire.BatchRequest(version=version, rank=rank, world_size=self.ranks)
        await asyncio.sleep(0)  # a request of its own
        while True:
            body = await self.session.batch(request)
            answer = wire.decode(body, TrainBatch | Wait | Stop)
            if isinstance(answer, TrainBatch) and self.scores is not None:
                return self.scores.filled(answer)
            if not isinstance(answer, Wait):
                return answer
            if answer.publish:
                await self._publish(version, "full")

    async def _step(self, version: Version, shares: list[TrainBatch]) -> Version:
        await asyncio.sleep(self.step_seconds)
        if self.record is None:
            self.batches[version] = shares
        else:
            self.record(version, shares)
        self.stepped.wake()
        after = Version(version.lineage, version.step + 1)
        await self._publish(after, "delta")
        if self.checkpoint_every and after.step % self.checkpoint_every == 0:
            await self._save(after)
        seconds = {"wait": self.waited, "train": self.step_seconds, "publish": 0.0, "checkpoint": 0.0}
        parts = dict.fromkeys(("forward", "backward", "optimizer"), self.step_seconds / 4)
        await self.session.event(wire.StepReport(after, self.metrics(after), seconds, parts))
        return after

    async def _publish(self, version: Version, kind: str) -> None:
        event = wire.Published(version=version, kind=kind, bytes=5, full_bytes=20, seconds=0.1)  # type: ignore[arg-type]
        while self.broadcasts:
            try:
                await self.session.event(replace(event, kind="broadcast", rendezvous="nowhere:1"))
                return
            except Overloaded as error:  # no replica listens yet
                await asyncio.sleep(error.retry_after)
        await self.session.event(event)

    async def _save(self, version: Version) -> None:
        self.checkpoint = version
        await self.session.event(wire.CheckpointSaved(version=version, path=f"checkpoints/{version}"))
