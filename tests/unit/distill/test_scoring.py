"""Completions to teachers and scores back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from in_memory import MemoryTeacher
from small_config import make_config
from started import common_of
from virtual_time import LONG

from distill.aio import cancel
from distill.events import ErrorBudget, Events, NoServerLeft
from distill.prompts.stream import Prompt
from distill.record.rollout import Rollout
from distill.rollout.ends import Unusable
from distill.scoring import Scoring, TeacherQueue
from sync import wire
from sync.base.errors import Overloaded, RemoteError
from sync.wire import Generated, Kept, Scored, ScoreRefused, ScoreReply, Want, pack, unpack
from teacher_service.client import Reply

pytestmark = pytest.mark.virtual_time


def completed(number: int, source: str = "default", topk: int = 0, length: int = 2) -> Rollout:
    prompt = Prompt(f"p{number}", [7, number], source, "gold")
    answer = Generated(
        id=prompt.id,
        token_ids=pack(np.arange(length, dtype="i4")),
        logprob=pack(np.full(length, -0.5, "f4")),
        spans=[wire.VersionSpan(wire.Version(0, 0), 0, length)],
        finish_reason="length",
        topk_ids=pack(np.full((length, topk), 3, "i4")) if topk else None,
    )
    return Rollout(prompt.id, number, issued=prompt).completed(answer)


class Bench:
    """Scoring with teachers in memory, and what came out of it."""

    def __init__(
        self,
        teachers: dict[str, Any],
        want: Want = Want(),
        batch: int = 4,
        scores: str = "auto",
        topk: int = 0,
        **parts: Any,
    ) -> None:
        self.rollouts, self.refused = list[Rollout](), dict[str, Unusable]()
        config = make_config(buffer={"score_batch": batch, "scores": scores})
        common = common_of(config, None, want=want, student_topk=topk, teachers=teachers, **parts)
        self.scoring = TeacherQueue(Scoring(common), common)
        self.scoring.linger = 0.005

    @property
    def reasons(self) -> list[str]:
        return [end.reason for end in self.refused.values()]

    async def ask(self, rollout: Rollout) -> None:
        """Until it is scored or refused."""
        try:
            self.rollouts.append(await self.scoring.answer(rollout))
        except Unusable as end:
            self.refused[rollout.id] = end

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.scoring.run())
        yield
        await cancel([task])

    async def score(self, *work: Rollout) -> None:
        async with self.running(), asyncio.timeout(600):
            await asyncio.gather(*map(self.ask, work))


@dataclass
class Asked(MemoryTeacher):
    """What it is asked for, what it does before each answer, and what becomes of that."""

    asked: list[Sequence[wire.ScoreSequence]] = field(default_factory=list)
    first: Callable[[Sequence[wire.ScoreSequence]], Awaitable[object]] = lambda _: asyncio.sleep(0)
    says: Callable[[Scored | ScoreRefused], Scored | ScoreRefused] = lambda result: result

    async def score(self, sequences, want, limit):
        self.asked.append(sequences)
        await self.first(sequences)
        reply = await super().score(sequences, want, limit)
        return Reply([self.says(result) for result in reply.results], reply.server)


async def test_completions_travel_in_batches_and_come_back_as_rollouts() -> None:
    teacher = MemoryTeacher()
    bench = Bench({"t": teacher}, Want(topk=2, entropy=True))
    await bench.score(*(completed(i) for i in range(10)))
    assert teacher.requests == [4, 4, 2]
    first = bench.rollouts[0]
    assert (first.id, first.number, first.teacher, first.truncated) == ("p0", 0, "t", True)
    assert unpack(first.prompt).tolist() == [7, 0]
    assert first.scored.topk_ids.shape == (2, 2)
    assert {one.id for one in bench.rollouts} == {f"p{i}" for i in range(10)}


async def test_samples_go_to_the_teacher_of_their_source() -> None:
    teachers = {"math": MemoryTeacher(), "code": MemoryTeacher()}
    bench = Bench(teachers, route=lambda source: source)
    await bench.score(completed(0, "math"), completed(1, "code"), completed(2, "math"))
    assert {one.id: one.teacher for one in bench.rollouts} == {"p0": "math", "p1": "code", "p2": "math"}


async def test_text_that_a_teacher_cannot_write_is_no_fault_of_its_server() -> None:
    """Too much of it in a row ends the run, by the name of the tokenizer."""

    def says(result: Scored) -> Scored | ScoreRefused:
        return result if result.id == "p0" else ScoreRefused(result.id, "no such character", no_text=True)

    bench, events, ended = Bench({"t": Asked(says=says)}), Events(), list[str]()
    events.on(NoServerLeft, lambda event: ended.append(event.problem))
    bench.scoring._budget = ErrorBudget(2, events)
    for number in (1, 0, 2):
        await bench.score(completed(number))
    assert [rollout.id for rollout in bench.rollouts] == ["p0"]
    assert bench.reasons == ["function_failed"] * 2
    assert not ended, "a completion that was scored stands between them"
    await bench.score(completed(3))
    (problem,) = ended
    assert problem.startswith("the tokenizer of teacher t gave 2 unusable answers")


@pytest.mark.parametrize("transformed", [False, True])
async def test_kept_scores_leave_a_reference_and_the_prompt_that_the_teacher_saw(transformed: bool) -> None:
    transforms = {"t": lambda prompt: [9, *prompt.token_ids]} if transformed else {}
    teacher = Asked()
    bench = Bench({"t": teacher}, Want(topk=2, entropy=True), scores="reference", transforms=transforms)
    await bench.score(completed(5))
    (rollout,), ((asked,),) = bench.rollouts, teacher.asked
    assert unpack(asked.token_ids).tolist() == [*[9] * transformed, 7, 5, 0, 1]
    assert unpack(rollout.prompt).tolist() == [7, 5]
    assert rollout.scored.topk_ids is rollout.scored.entropy is None
    assert unpack(rollout.scored.logprob).tolist() == [-1.0, -1.0]
    (reply,) = wire.frames(teacher.kept[rollout.kept.key], ScoreReply)
    assert reply.results[0].topk_ids.shape == (2, 2)
    seen = None if rollout.teacher_prompt is None else unpack(rollout.teacher_prompt).tolist()
    assert seen == ([9, 7, 5] if transformed else None)
    assert rollout.released().kept == rollout.kept
    assert rollout.released().is_released


@pytest.mark.parametrize(
    ("scores", "want", "topk", "kept"),
    [
        ("auto", Want(hidden=True), 0, False),  # 8 bytes a token
        ("auto", Want(topk=50, entropy=True), 3, False),  # 6 · 53
        ("auto", Want(topk=50, entropy=True), 4, True),
        ("inline", Want(topk=50), 4, False),
        ("reference", Want(hidden=True), 0, True),
        ("reference", Want(entropy=True), 1, True),
        ("reference", Want(entropy=True), 0, False),  # the log-probability of the token alone
    ],
)
async def test_scores_go_by_reference_where_they_take_many_bytes_a_token(
    scores: str, want: Want, topk: int, kept: bool
) -> None:
    bench = Bench({"t": MemoryTeacher()}, want, scores=scores, topk=topk)
    await bench.score(completed(0, topk=topk))
    assert (bench.rollouts[0].kept is not None) == kept
    assert (bench.rollouts[0].topk_ids is not None) == (topk > 0 and not kept)


@pytest.mark.parametrize(
    ("how", "why"),
    [("refuses", "too long for this teacher"), ("rejects", "one sequence cannot be read")],
    ids=["alone", "with its whole request, which is halved down to it"],
)
async def test_one_refused_sequence_does_not_cost_the_others(how: str, why: str) -> None:
    bench = Bench({"t": MemoryTeacher(**{how: lambda name: name == "p2"})})
    await bench.score(*(completed(i) for i in range(4)))
    assert {id: end.detail for id, end in bench.refused.items()} == {"p2": f"teacher t: {why}"}
    assert {one.id for one in bench.rollouts} == {"p0", "p1", "p3"}


async def test_a_teacher_that_is_full_or_dead_is_asked_until_it_answers() -> None:
    async def full_at_first(_: Sequence[wire.ScoreSequence]) -> None:
        if len(teacher.asked) == 1:
            raise Overloaded("full", 0.01)

    teacher = Asked(up=False, first=full_at_first)
    bench = Bench({"t": teacher})
    async with bench.running():
        asked = asyncio.create_task(bench.ask(completed(0)))
        await asyncio.sleep(LONG)
        assert bench.rollouts == []
        teacher.up = True
        await asyncio.wait_for(asked, 600)
        assert len(bench.rollouts) == 1


LOGP = pack(np.zeros(2, "f4"))


@pytest.mark.parametrize(
    ("scores", "problem"),
    [
        ({"logprob": pack(np.zeros(1, "f4"))}, "logprob is of shape [1], and must be of shape [2]"),
        ({"logprob": pack(np.array([0, np.nan], "f4"))}, "logprob is nan in one place or more"),
        ({"logprob": LOGP}, "hidden is missing, and must be bf16 or f4 [2, 4]"),
        ({"logprob": LOGP}, "kept is missing"),
        ({"logprob": LOGP, "kept": Kept("u", "../head", 1, bytes(16))}, "kept.key is '../head', and must be"),
        ({"logprob": LOGP, "kept": Kept("u", "a-1", 1, b"")}, "kept.digest is 0 bytes, and must be 16 bytes"),
    ],
)
async def test_scores_that_cannot_be_used_are_asked_for_again_and_then_quarantined(
    scores: dict[str, Any], problem: str
) -> None:
    sloppy = Asked(says=lambda result: Scored(result.id, **scores))
    how = "reference" if "kept" in problem else "inline"
    bench = Bench({"t": sloppy}, Want(hidden=how == "reference" or "hidden" in problem), scores=how)
    await bench.score(completed(0))
    assert problem in bench.refused["p0"].detail
    assert bench.reasons == ["unusable"]


@pytest.mark.parametrize(("processes", "begun"), [(1, [1, 4]), (2, [1, 1, 4])])
async def test_a_busy_teacher_gets_full_requests_only(processes: int, begun: list[int]) -> None:
    """Rollouts come one at a time: one starts a request at each idle process, four wait for a full one."""
    go_on = asyncio.Event()
    teacher = Asked(first=lambda _: go_on.wait())
    teacher.processes = processes
    bench = Bench({"t": teacher})
    bench.scoring.linger = 0.0
    async with bench.running():
        tasks = list[asyncio.Task[None]]()
        for i in range(processes + 5):
            tasks.append(asyncio.create_task(bench.ask(completed(i))))
            await asyncio.sleep(0.01)
        assert [*map(len, teacher.asked)] == begun, "the last one waits"
        go_on.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 600)


async def test_a_teacher_that_does_not_say_what_it_is_costs_its_rollouts_and_not_the_run() -> None:
    class Odd(MemoryTeacher):
        async def first_info(self) -> Any:
            raise RemoteError("answered 404: no such path")

    bench = Bench({"t": Odd()}, Want(hidden=True))
    await bench.score(completed(0), completed(1))
    assert {end.detail for end in bench.refused.values()} == {"teacher t: answered 404: no such path"}
    assert bench.reasons == ["teacher_refused"] * 2
