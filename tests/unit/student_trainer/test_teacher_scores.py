"""Kept scores: fetched, checked, and scored again when they are gone."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from msgspec.structs import replace
from plain_step import flat_rows

from student_trainer.step import collate
from student_trainer.teacher_scores import TeacherScores
from sync import wire
from sync.base.errors import DataError, Interrupted, Overloaded, RemoteError, Unreachable
from sync.wire import Array, Kept, Rows, Scored, ScoreReply, ScoreSequence, Version, Want, pack, unpack

HERE, THERE = "http://here:1", "http://there:2"
SERVERS = wire.TeacherServers(urls=[HERE, THERE], fingerprint="model")
WANT = Want(topk=2, entropy=True, hidden=True)


def scores(sequence: ScoreSequence, marker: float = 0.0, at: slice = slice(None)) -> Scored:
    """Log-probabilities that name the token and the server that gave them; `at`: of some positions alone."""
    every = unpack(sequence.token_ids)[sequence.start :]
    tokens, entropy = every[at], np.arange(len(every), dtype="f4")[at]
    count = len(tokens)
    return Scored(
        sequence.id,
        pack((-tokens - marker).astype("f4")),
        topk_ids=pack(np.tile(np.arange(2, dtype="i4"), (count, 1))),
        topk_logprob=pack(np.full((count, 2), -9.0, "f2")),
        entropy=pack(entropy),
        hidden=Array("bf16", (count, 3), np.repeat(tokens.astype("<u2"), 3).tobytes()),
    )


class Teacher:
    """Processes by URL: what each keeps, and what it answers instead."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], bytes] = {}
        self.answers: list[Any] = []
        """Of /v1/score, before it scores as it should: bodies or errors."""
        self.requests: list[ScoreSequence] = []
        self.models: list[str | None] = []
        self.make = scores

    def keep(self, *parts: Scored, url: str = HERE) -> Kept:
        """A frame of each."""
        key, body = f"b0-{len(self.kept)}", b"".join(wire.frame(ScoreReply(results=[part])) for part in parts)
        self.kept[url, key] = body
        return Kept(url, key, len(body), blake3(body).digest(wire.DIGEST_BYTES))

    def connect(self, url: str) -> Any:
        return SimpleNamespace(url=url, once=partial(self._once, url))

    def _once(
        self, url: str, path: str, body: bytes | None, timeout: float, model: str | None = None
    ) -> bytes:
        if body is None:
            found = self.kept.get((url, path.removeprefix("/v1/scores/")))
            if found is None:
                raise RemoteError("404")
            return found
        self.models.append(model)
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        (sequence,) = wire.decode(body, wire.ScoreRequest).sequences
        self.requests.append(sequence)
        return wire.encode(ScoreReply(results=[self.make(sequence, 100.0)]))


@pytest.fixture
def teacher() -> Teacher:
    return Teacher()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits before another try."""
    monkeypatch.setattr("student_trainer.teacher_scores.Backoff.next", lambda self, least=0.0: 0.0)


def batch(teacher: Teacher, *lengths: int, seen: list[int] | None = None, most: int = 99) -> wire.TrainBatch:
    """Rows whose prompts are one token, and whose completions are numbered on; `most` tokens are trained.

    The scores of each are kept in frames of the first two positions and of the others.
    """
    kept, prompts, completions, start = [], [], [], 1
    for row, length in enumerate(lengths):
        prompt, completion = [start], list(range(start + 1, start + 1 + length))
        given = ScoreSequence.of(f"r{row}", ids(seen or prompt), ids(completion))
        parts = [scores(given, at=at) for at in (slice(2), slice(2, None))]
        kept.append(teacher.keep(*(part for part in parts if part.logprob.data)))
        prompts.append(prompt)
        completions.append(completion[:most])
        start += length + 1
    names = [f"r{row}" for row in range(len(lengths))]
    given_prompts = [ids(seen) if seen else None] * len(lengths)
    rows = flat_rows(names, prompts, completions, kept=kept, teacher_prompts=given_prompts)
    return wire.TrainBatch(version=Version(0, 0), denominator=99, micro_batches=[rows])


def ids(values: list[int]) -> Array:
    return pack(np.array(values, "i4"))


def rank(
    teacher: Teacher,
    want: Want = WANT,
    student_topk: int = 0,
    servers: Any = lambda name: SERVERS,
    stopping: threading.Event = threading.Event(),
) -> TeacherScores:
    return TeacherScores(["t"], want, student_topk, 50, servers, teacher.connect, stopping)


def with_rows(given: wire.TrainBatch, **change: Any) -> wire.TrainBatch:
    """The same batch with other arrays in its rows."""
    return replace(given, micro_batches=[replace(given.micro_batches[0], **change)])


def filled(teacher: Teacher, given: wire.TrainBatch) -> Rows:
    return rank(teacher).filled(given).micro_batches[0]


def test_the_scores_of_every_row_fill_its_arrays_in_order(teacher: Teacher) -> None:
    given = batch(teacher, 3, 1, 2)
    rows = filled(teacher, given)
    assert unpack(rows.teacher_logprob).tolist() == [-2, -3, -4, -6, -8, -9]
    assert unpack(rows.teacher_hidden)[:, 0].tolist() == [2, 3, 4, 6, 8, 9]
    assert unpack(rows.teacher_entropy).tolist() == [0, 1, 2, 0, 0, 1]
    assert rows.teacher_topk_ids.shape == rows.teacher_topk_logprob.shape == (6, 2)
    assert rows.kept == given.micro_batches[0].kept
    assert teacher.requests == []


def test_a_cut_completion_takes_the_scores_of_its_first_tokens(teacher: Teacher) -> None:
    rows = filled(teacher, batch(teacher, 5, 1, most=3))
    assert unpack(rows.teacher_logprob).tolist() == [-2, -3, -4, -8]
    assert rows.teacher_hidden.shape == (4, 3)


def test_an_environments_tokens_are_fetched_with_the_others_and_are_not_trained_on(teacher: Teacher) -> None:
    own = pack(np.array([1, 0, 0, 1, 1, 1, 1], np.uint8))
    rows = filled(teacher, with_rows(batch(teacher, 5, 2), own=own))
    assert unpack(rows.teacher_logprob).tolist() == [-2, -3, -4, -5, -6, -8, -9]
    targets = collate(rows, 0, 50).targets
    assert targets.teacher_logp_N.tolist() == [-2, -5, -6, -8, -9]
    assert targets.token_N.tolist() == [2, 5, 6, 8, 9]
    assert targets.teacher_hidden_NG.shape == (5, 3)


@pytest.mark.parametrize("fault", ["gone", "changed", "another", "short", "elsewhere"])
def test_what_is_gone_or_changed_is_scored_again_with_the_tokens(teacher: Teacher, fault: str) -> None:
    given = batch(teacher, 2, 2, seen=[7, 8])
    (first, second) = teacher.kept
    if fault == "gone":
        del teacher.kept[second]
    elif fault == "changed":
        five, four = (np.float32(number).tobytes() for number in (-5, -4))
        teacher.kept[second] = teacher.kept[second].replace(five, four)
    elif fault == "another":
        teacher.kept[second] = teacher.kept[first]
    else:
        count, url = (1, HERE) if fault == "short" else (2, "http://once:3")
        part = scores(ScoreSequence.of("r1", ids([7, 8]), ids([5, 6])), at=slice(count))
        given = with_rows(given, kept=[given.micro_batches[0].kept[0], teacher.keep(part, url=url)])
    rows = filled(teacher, given)
    assert unpack(rows.teacher_logprob).tolist() == [-2, -3, -105, -106]
    assert [one is None for one in rows.kept] == [False, True]
    (asked,) = teacher.requests
    assert unpack(asked.token_ids).tolist() == [7, 8, 5, 6]
    assert (asked.start, teacher.models) == (2, ["model"])


@pytest.mark.parametrize(
    "answers",
    [
        [Unreachable("gone"), Overloaded("full", 0.0), *[Unreachable("gone")] * 5],
        [wire.encode(ScoreReply(results=[]))],
    ],
    ids=["away or full", "one bad reply"],
)
@pytest.mark.usefixtures("at_once")
def test_a_teacher_is_asked_until_it_answers(teacher: Teacher, answers: list[Any]) -> None:
    given = batch(teacher, 2)
    teacher.kept.clear()
    teacher.answers = [*answers]
    assert unpack(filled(teacher, given).teacher_logprob).tolist() == [-102, -103]


@pytest.mark.usefixtures("at_once")
def test_a_teacher_that_registers_elsewhere_is_looked_up(
    teacher: Teacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While none of its processes has registered, its rows wait; scores kept at the new place are fetched."""
    monkeypatch.setattr("student_trainer.teacher_scores.ASK_SECONDS", 0.0)
    given, old = batch(teacher, 2), wire.TeacherServers(urls=["http://old:1"], fingerprint="model")
    told = [old, None, None]

    def servers(_: str) -> wire.TeacherServers:
        found = told.pop() if told else SERVERS
        if found is None:
            raise Unreachable("none has registered")
        return found

    one = rank(teacher, servers=servers)
    (first,) = one.filled(given).micro_batches
    assert first.kept == [None], "the old place had nothing: computed from the tokens"
    (second,) = one.filled(given).micro_batches
    assert second.kept != [None], "fetched where the teacher is now"
    assert len(teacher.requests) == 1


def test_two_replies_that_cannot_be_used_name_server_field_value_and_rule(teacher: Teacher) -> None:
    given = batch(teacher, 2)
    teacher.kept.clear()
    bad = replace(scores(ScoreSequence.of("r0", ids([1]), ids([2, 3]))), hidden=None)
    teacher.answers = [wire.encode(ScoreReply(results=[bad]))] * 2
    with pytest.raises(DataError, match=f"teacher t at {THERE}: scores of r0: hidden is missing"):
        rank(teacher).filled(given)


@pytest.mark.parametrize("gone", [False, True])
def test_the_students_ids_come_with_their_scores_and_the_teachers_when_they_are_gone(
    teacher: Teacher, gone: bool
) -> None:
    teacher.make = lambda *asked: replace(scores(*asked), hidden=None)
    gathered = {"gather_ids": pack(np.array([[8, -1], [24, 32]], "i4")), "gathered": pack(OWN)}
    whole = teacher.make(ScoreSequence.of("r0", ids([1]), ids([2, 3])))
    whole = replace(whole, topk_ids=None, topk_logprob=None, **gathered)
    given = with_rows(batch(teacher, 2), kept=[teacher.keep(whole)])
    if gone:
        teacher.kept.clear()
    (rows,) = rank(teacher, Want(entropy=True), student_topk=2).filled(given).micro_batches
    assert rows.teacher_topk_ids is rows.teacher_topk_logprob is None
    assert unpack(rows.student_topk_ids).tolist() == ([[0, 1]] * 2 if gone else [[8, -1], [24, 32]])
    expected = np.full((2, 2), -9.0) if gone else OWN
    assert unpack(rows.student_topk_teacher_logprob).tolist() == expected.tolist()


OWN = np.array([[-1, 0], [-3, -4]], "f2")


def test_a_rank_without_rows_has_nothing_to_fetch(teacher: Teacher) -> None:
    assert filled(teacher, batch(teacher)).ids == []


def test_a_stop_ends_the_wait_for_a_teacher(teacher: Teacher) -> None:
    given = batch(teacher, 1)
    teacher.kept.clear()
    teacher.answers = [Unreachable("gone")] * 9
    stopping = threading.Event()
    threading.Timer(0.1, stopping.set).start()
    with pytest.raises(Interrupted):
        rank(teacher, stopping=stopping).filled(given)
