"""`distill sql`: what people ask of a run, live or finished, and that nothing is changed by it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from distill.cli.main import main
from distill.metrics.samples import SAMPLES, Sample
from distill.metrics.timeline import Span
from distill.metrics.trackers import MetricsFile
from distill.prompts.stream import Prompt
from distill.record.reader import ask, lines
from distill.run_log.journal import Journal
from distill.run_log.records import BatchFormed, Dropped, Issued, LineageOpened, Opened, Requeued, Rollout
from student_trainer.ledger import Ledger
from sync.base.errors import DataError
from sync.base.jsonl import JsonLines
from sync.wire import Scored, Version, VersionSpan, pack

START = Version(0, 0)


def rollout(id: str, *excess: float) -> Rollout:
    """One whose tokens the teacher finds unlikely by so many nats."""
    ids, logprob = pack(np.array(excess, "i4")), pack(np.array(excess, "f4"))
    scores = pack(np.zeros(len(excess), "f4"))
    spans = (VersionSpan(START, 0, len(excess)),)
    return Rollout(id, 0, ids, ids, logprob, spans, False, "t", Scored(id, scores), reward=0.5)


@pytest.fixture
async def journal(tmp_path: Path) -> Iterator[Journal]:
    """Of a live run: what is committed can be asked."""
    journal = Journal(tmp_path / "journal", "never")
    list(journal.replay())
    for record in (
        Opened("r", 0, 2, 1),
        LineageOpened(0, None, 0, None, 0, "m"),
        Issued(
            [Prompt(id, [1], source) for id, source in zip("abcd", ("x", "y", "x", "y"), strict=True)], 0, 4
        ),
        Requeued(["c"], "replica_lost"),
        rollout("a", 0.5, 1.5),
        rollout("b", 4.0),
        BatchFormed(START, ["a", "b"]),
        Dropped(["d"], "too_old", 3, "nobody waited"),
    ):
        journal.append(record)
    await journal.commit()
    Ledger(tmp_path / "ledger", START, None, rank=0).record(1, ["b", "a"], "bits", 3)
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step, kl in ((1, 0.5), (2, 9.0)):
        metrics.log(step, {"lineage": 0, "train/reverse_kl": kl, "buffer/age_max": 3.0 * step})
    spans, samples = JsonLines(tmp_path / "timeline.jsonl"), JsonLines(tmp_path / SAMPLES)
    for span in (Span("trainer", "wait for replicas", 5.0, 7.5), Span("trainer", "train", 7.5, 9.0)):
        spans.write(span)
    samples.write(Sample("L000-v00000000", "b", 0, "t", [1], [2], [0.0], [-4.0], None, False, False))
    yield journal
    journal.close()


QUESTIONS = {
    "SELECT source, max(reverse_kl) FROM rollout GROUP BY source ORDER BY 2 DESC": [("y", 4.0), ("x", 1.0)],
    "SELECT step, figures ->> 'buffer/age_max' FROM metrics WHERE figures ->> 'train/reverse_kl' > 2": [
        (2, 6.0)
    ],
    "SELECT role, what, sum(past - start) FROM span WHERE what LIKE 'wait for %'": [
        ("trainer", "wait for replicas", 2.5)
    ],
    "SELECT status, reason, count(*) FROM rollout GROUP BY 1, 2 ORDER BY 1": [
        ("batched", None, 2),
        ("dropped", "too_old", 1),
        ("pending", None, 1),
    ],
    "SELECT reason, count(*) FROM requeue GROUP BY reason": [("replica_lost", 1)],
    "SELECT rollout, age, bound FROM trained_age ORDER BY rollout": [("a", 0, 1), ("b", 0, 1)],
    "SELECT rollout, reverse_kl FROM sample": [("b", 4.0)],
    "SELECT step, group_concat(rollout, ' ') FROM member JOIN path USING (lineage, step)": [(0, "a b")],
    "SELECT version_name(lineage, step) FROM batch": [("L000-v00000000",)],
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_people_ask_has_an_answer(question: str, journal: Journal, tmp_path: Path) -> None:
    assert ask(tmp_path, question)[1] == QUESTIONS[question]


async def test_a_live_run_shows_what_it_has_committed_as_a_table(
    journal: Journal, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal.append(Dropped(["c"], "over_long", 0))
    await journal.commit()
    with pytest.raises(SystemExit) as leaving:
        main(["sql", str(tmp_path), "SELECT id, tokens, reverse_kl, reason FROM rollout ORDER BY number, id"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out.splitlines() == [
        "id  tokens  reverse_kl  reason",
        "a        2           1  –",
        "b        1           4  –",
        "c        –           –  over_long",
        "d        –           –  too_old",
    ]


def test_without_a_question_tables_and_columns_are_listed(journal: Journal, tmp_path: Path) -> None:
    columns, rows = ask(tmp_path)
    assert columns == ["kind", "name", "columns"]
    assert ("view", "path", "lineage, step") in rows
    assert [*lines(["a", "bb"], [])] == ["a  bb"]


@pytest.mark.parametrize(
    "question",
    [
        "DELETE FROM rollout",
        "INSERT INTO step VALUES (0, 1)",
        "UPDATE rollout SET tokens = 0",
        "DROP TABLE rollout",
        "CREATE TEMP TABLE x AS SELECT 1",
        "PRAGMA user_version = 9",
        "ATTACH 'other.db' AS other",
        "VACUUM INTO 'copy.db'",
        "SELECT 1; DELETE FROM rollout",
        "SELECT load_extension('x')",
        "BEGIN IMMEDIATE",
    ],
)
def test_what_does_more_than_read_is_refused_in_one_message(
    question: str, journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(DataError) as refusal:
        ask(tmp_path, question)
    assert "\n" not in str(refusal.value)
    assert repr(question) in str(refusal.value)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_question_that_cannot_be_answered_says_why(journal: Journal, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such column: kl; `distill sql RUN_DIR` lists"):
        ask(tmp_path, "SELECT kl FROM rollout")
    with pytest.raises(DataError, match=r"holds no journal"):
        ask(tmp_path / "none", "SELECT 1")
    (segment,) = (tmp_path / "journal").glob("journal-*.log")
    segment.write_bytes(segment.read_bytes()[:-9] + bytes(9))
    (tmp_path / "journal" / "journal-00000001.log").write_bytes(b"")
    with pytest.raises(DataError, match=r"journal-00000000\.log is damaged"):
        ask(tmp_path, "SELECT 1")
