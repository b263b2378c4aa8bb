"""`distill sql`: what people ask of a run, live or finished, and that nothing is changed by it."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import left
from small_record import ledgers, record

from distill.metrics.samples import SAMPLES, Sample
from distill.metrics.timeline import Span
from distill.metrics.trackers import MetricsFile
from distill.record.reader import ask, lines
from sync.base.errors import DataError
from sync.base.jsonl import JsonLines


@pytest.fixture
def run(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """The writer of a live run: its commits are in the log beside the file."""
    writer = record(tmp_path)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.executescript("""
        INSERT INTO name VALUES (1, 'x'), (2, 'y');
        UPDATE rollout_row SET source = iif(id IN ('a', 'c'), 1, 2), reverse_kl = row / 2.0;
        INSERT INTO requeue VALUES (9, 'c', 'replica_lost');
    """)
    ledgers(tmp_path)
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step, kl in ((1, 0.5), (2, 9.0)):
        metrics.log(step, {"lineage": 0, "train/reverse_kl": kl, "buffer/age_max": 3.0 * step})
    spans, samples = JsonLines(tmp_path / "timeline.jsonl"), JsonLines(tmp_path / SAMPLES)
    for span in (Span("trainer", "wait for replicas", 5.0, 7.5), Span("trainer", "train", 7.5, 9.0)):
        spans.write(span)
    samples.write(Sample("L000-v00000000", "b", 0, "t", [1], [2], [0.0], [-4.0], None, False, False))
    yield writer
    writer.close()


QUESTIONS = {
    "SELECT source, max(reverse_kl) FROM rollout GROUP BY source ORDER BY 2 DESC": [("y", 3.5), ("x", 1.0)],
    "SELECT step, figures ->> 'buffer/age_max' FROM metrics WHERE figures ->> 'train/reverse_kl' > 2": [
        (2, 6.0)
    ],
    "SELECT role, what, sum(past - start) FROM span WHERE what LIKE 'wait for %'": [
        ("trainer", "wait for replicas", 2.5)
    ],
    "SELECT status, reason, count(*) FROM rollout GROUP BY 1, 2 ORDER BY 1": [
        ("batched", None, 6),
        ("dropped", "too_old", 1),
        ("pending", None, 1),
    ],
    "SELECT reason, count(*) FROM requeue GROUP BY reason": [("replica_lost", 1)],
    "SELECT count(*), count(kept) FROM rollout WHERE status = 'batched'": [(6, 0)],
    "SELECT rollout, reverse_kl FROM sample": [("b", 4.0)],
}


def test_the_questions_in_the_documents_have_answers(run: sqlite3.Connection, tmp_path: Path) -> None:
    run.execute("INSERT INTO applied VALUES (90, 'r0', 0, 1, 1, 0.1, 0.2, 0.3, 0.6)")
    page = Path(__file__).parents[3] / "docs/running.md"
    questions = re.findall(r"\| `(SELECT [^`]+)` \|", page.read_text())
    assert len(questions) == 6
    assert all(ask(tmp_path, question)[1] for question in questions)


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_people_ask_has_an_answer(question: str, run: sqlite3.Connection, tmp_path: Path) -> None:
    assert ask(tmp_path, question)[1] == QUESTIONS[question]


def test_a_live_run_shows_what_it_has_committed_as_a_table(run: sqlite3.Connection, tmp_path, capsys) -> None:
    run.execute("UPDATE rollout_row SET reason = 'over_long' WHERE id = 'h'")
    question = "SELECT id, own_tokens, reverse_kl, reason FROM rollout WHERE number > 4"
    assert left("sql", str(tmp_path), question) == 0
    assert capsys.readouterr().out.splitlines() == [
        "id  own_tokens  reverse_kl  reason",
        "f            2         2.5  –",
        "g            2           3  too_old",
        "h            –         3.5  over_long",
    ]


def test_without_a_question_tables_and_columns_are_listed(run: sqlite3.Connection, tmp_path: Path) -> None:
    columns, rows = ask(tmp_path)
    assert columns == ["kind", "name", "columns"]
    assert ("view", "path", "lineage, step") in rows
    assert [*lines(["a", "bb"], [])] == ["a  bb"]


@pytest.mark.parametrize(
    "question",
    [
        "DELETE FROM rollout",
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
    question: str, run: sqlite3.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(DataError) as refusal:
        ask(tmp_path, question)
    assert "\n" not in str(refusal.value)
    assert repr(question) in str(refusal.value)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_question_that_cannot_be_answered_says_why(run: sqlite3.Connection, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such column: kl; `distill sql RUN_DIR` lists"):
        ask(tmp_path, "SELECT kl FROM rollout")
    with pytest.raises(DataError, match=r"run\.db is missing"):
        ask(tmp_path / "none", "SELECT 1")
